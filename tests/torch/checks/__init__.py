"""What every rank of a job checks about the backend of torch, one function a fact.

A check is a public function in one of the `MODULES`, called without arguments.  `over_torch` runs
all of them in one job, and reports what each came to.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from ringreduce.supervisor.mpiexec import identify
from ringreduce.transports import mesh
from tests.torch.checks import (
    copies,
    groups,
    memory,
    reductions,
    tensors,
    training,
    works,
)

MODULES = tensors, reductions, copies, works, memory, groups, training
CHECKS = [
    found
    for module in MODULES
    for name, found in vars(module).items()
    if inspect.isfunction(found)
    and found.__module__ == module.__name__
    and not name.startswith("_")
]
IN_SHARED_MEMORY = (
    memory.storages_move_to_registered_memory,
    memory.a_moved_storage_outlives_its_group,
    memory.a_process_that_starts_gets_files_that_are_open,
    memory.a_forked_process_takes_no_registered_memory,
    memory.storages_that_others_use_stay_where_they_are,
    memory.ddp_reduces_its_buckets_in_registered_memory,
    memory.a_variable_keeps_buckets_where_they_are,
    memory.other_processes_get_copies_of_moved_storages,
    memory.tensors_stay_while_calls_are_under_way,
)
IN_ONE_PROCESS = (
    tensors.compiled_code_views_the_tensors_of_repeated_calls,
    tensors.a_communicator_takes_tensors,
    training.code_that_is_compiled_leaves_collectives_out,
    works.the_profiler_shows_calls_and_their_bytes,
    works.a_call_may_end_after_the_profiler,
    works.a_call_may_end_in_the_next_profiler,
    groups.groups_leave_nothing_behind,
)
"""Checks that take seconds, and look at the code in front of the transport."""
WITHOUT_MPI = (
    groups.a_broken_group_can_be_destroyed,
    groups.a_group_ends_although_a_message_never_comes,
    groups.a_group_that_another_thread_aborts_ends_the_call_under_way,
    groups.a_call_of_a_group_that_a_rank_has_destroyed_is_an_error,
    groups.groups_end_in_any_order,
    works.a_failed_work_stays_failed,
)
"""Checks that break groups: a process with a broken group of MPI ends with status 1."""


def over_torch(backend: str = "ringreduce", programs: str = "0") -> dict[str, str]:
    """Return the outcome of every check and of so many random programs, "ok" or a traceback."""
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    outcomes = {}
    checks = {check.__name__: check for check in CHECKS}
    if int(programs):
        from tests.torch.programs import draw

        checks["random programs"] = lambda: draw(1, int(programs))
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check()
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
            break  # the ranks may be in different calls
    dist.destroy_process_group()
    return outcomes


def over_mpi() -> dict[str, str]:
    """Do as `over_torch`, on ranks of MPI of which each seems to have a host of its own."""
    mesh.network = lambda: f"host {os.getpid()}"
    for check in WITHOUT_MPI:
        CHECKS.remove(check)
    return over_torch()


def over_hosts() -> dict[str, str]:
    """Do as `over_torch`, on ranks of several hosts, without the checks of what one host has."""
    for check in (*IN_SHARED_MEMORY, *WITHOUT_MPI):
        CHECKS.remove(check)
    return over_torch()


def over_tcp() -> dict[str, str]:
    """Do as `over_torch`, on ranks of several hosts without MPI, with the checks that send data."""
    for check in (*IN_SHARED_MEMORY, *IN_ONE_PROCESS):
        CHECKS.remove(check)
    return over_torch()


def print_over_hosts() -> None:
    """Do as `over_hosts`; rank 0 prints which MPI connects the ranks, and the result, as JSON.

    A rank on which a check fails ends with status 1.
    """
    outcomes = over_hosts()
    if os.environ["RANK"] == "0":
        from mpi4py import MPI

        mpi = identify(MPI.Get_library_version())
        print(json.dumps({"mpi": " ".join(mpi or ()), "outcomes": outcomes}), flush=True)
    sys.exit(any(came != "ok" for came in outcomes.values()))
