"""What only MPI can show of the public API; every rank of the job runs each check."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.transports import mpi
from tests.support.cases import CONFIG

RANKS = 4
SYNCHRONOUS = replace(CONFIG, synchronous_sends=True)


def sums_right(comm: rr.Communicator, count: int = 30_000) -> None:
    total = comm.all_reduce(np.arange(count) * (comm.rank + 1))
    assert np.array_equal(total, np.arange(count) * (comm.size * (comm.size + 1) // 2))


def init_takes_the_whole_job(world: MPI.Intracomm) -> None:
    with rr.init() as comm:
        assert (comm.rank, comm.size) == (world.rank, world.size)
        sums_right(comm)


def ranks_of_one_machine_share_a_node(world: MPI.Intracomm) -> None:
    with rr.init(world) as comm:
        assert comm.nodes == (tuple(range(world.size)),)
        assert (comm.local_rank, comm.local_size) == (world.rank, world.size)
        assert (comm.cross_rank, comm.cross_size) == (0, 1)


def nodes_can_be_stated(world: MPI.Intracomm) -> None:
    with rr.init(world, nodes=(1, world.size - 1)) as comm:
        sizes = {0: (0, 1, 0, 2), 1: (0, world.size - 1, 1, 2)}
        wanted = sizes.get(world.rank, (world.rank - 1, world.size - 1, 0, 1))
        found = comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size
        assert found == wanted
        sums_right(comm)


def messages_of_the_caller_are_not_disturbed(world: MPI.Intracomm) -> None:
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    buffer = bytearray(8)
    pending = world.Irecv([buffer, MPI.BYTE], MPI.ANY_SOURCE, MPI.ANY_TAG)
    with rr.init(world, config=CONFIG) as comm:
        for count in (0, 1, 2000, 30_000):
            sums_right(comm, count)
        assert not pending.Test()
        comm.barrier()
        early = world.Isend([b"theirs!!", MPI.BYTE], right, 0)
        sums_right(comm)
    status = MPI.Status()
    pending.Wait(status)
    early.Wait()
    assert bytes(buffer) == b"theirs!!"
    assert status.Get_source() == left


def the_callers_communicator_may_go_before_ours(world: MPI.Intracomm) -> None:
    theirs = world.Dup()
    with rr.init(theirs, config=CONFIG) as comm:
        theirs.Free()
        sums_right(comm)


def several_communicators_work_side_by_side(world: MPI.Intracomm) -> None:
    with (
        rr.init(world, config=CONFIG) as first,
        rr.init(world, config=SYNCHRONOUS, nodes=(2, 2)) as second,
    ):
        for turn in range(20):
            x = np.full(turn * 500, world.rank + turn, np.int64)
            assert first.all_reduce(x)[:1].tolist() == [6 + 4 * turn][: x.size]
            assert second.all_reduce(x, "max")[:1].tolist() == [3 + turn][: x.size]
        first.close()
        sums_right(second)


def halves_of_the_job_go_their_own_ways(world: MPI.Intracomm) -> None:
    half = world.Split(world.rank % 2, key=-world.rank)
    with rr.init(world) as everybody, rr.init(half, config=CONFIG) as comm:
        assert comm.size == 2
        assert comm.rank == (0 if world.rank >= 2 else 1)
        for turn in range(5 + 5 * (world.rank % 2)):
            gathered = comm.all_gather(np.array([world.rank, turn]))
            assert gathered.tolist() == [2 + world.rank % 2, turn, world.rank % 2, turn]
        sums_right(comm)
        sums_right(everybody)
    half.Free()


def a_single_rank_is_a_job(world: MPI.Intracomm) -> None:
    with rr.init(MPI.COMM_SELF) as comm:
        x = np.array([1.5, 2.5])
        assert comm.all_reduce(x, "mean").tolist() == [1.5, 2.5]
        assert comm.all_gather(x).tolist() == [1.5, 2.5]
        assert comm.reduce_scatter(x).tolist() == [1.5, 2.5]
        assert comm.broadcast(x).tolist() == [1.5, 2.5]
        comm.barrier()


def communicators_can_be_made_and_closed_many_times(world: MPI.Intracomm) -> None:
    for _ in range(100):
        with rr.init(world) as comm:
            comm.barrier()


def a_mismatch_leaves_the_communicator_usable(world: MPI.Intracomm) -> None:
    for config in (CONFIG, SYNCHRONOUS):
        with rr.init(world, config=config) as comm:
            for count in (3, 3000, 30_000):
                x = np.zeros(count, np.float32 if world.rank == 1 else np.float64)
                with pytest.raises(rr.MismatchError, match=rf"rank 1 passes float32\[{count}\]"):
                    comm.all_reduce(x)
                sums_right(comm, count)


def a_mismatch_between_hosts_is_the_same_error_on_all_and_the_next_call_is_right(
    world: MPI.Intracomm,
) -> None:
    """Each host runs a compiled program, of which fast calls have repeated some before."""
    for nodes in ((2, 2), (1, 3), (1, 1, 2)):
        with rr.init(world, nodes=nodes, transport="auto") as comm:
            for count in (3, 3000, 30_000):
                for _ in range(3):
                    sums_right(comm, count)
                x = np.zeros(count, np.float32 if world.rank == 1 else np.float64)
                with pytest.raises(rr.MismatchError, match=rf"rank 1 passes float32\[{count}\]"):
                    comm.all_reduce(x)
                sums_right(comm, count)
                with pytest.raises(rr.MismatchError, match="barrier"):
                    comm.barrier() if world.rank == 3 else comm.all_reduce(x, "max")
                with pytest.raises(rr.MismatchError, match="op='min'"):
                    comm.all_reduce(np.zeros(count), "max" if world.rank else "min")
                sums_right(comm, count)


def messages_of_calls_that_are_dropped_stay_counted(world: MPI.Intracomm) -> None:
    """Rank 0 takes the general path, so its calls stay; the others' are repeated and dropped."""
    config = rr.Config(kept_plans=2)
    with rr.init(world, nodes=(2, 2), transport="auto", config=config) as comm:
        for count in (5, 6, 7, 8, 5, 6):
            x = np.ones(2 * count)[::2] if world.rank == 0 else np.ones(count)
            for _ in range(4):
                assert np.array_equal(comm.all_reduce(x), np.full(count, 4.0))
        with pytest.raises(rr.MismatchError):
            comm.all_reduce(np.zeros(3 + world.rank // 3))
        sums_right(comm)


def an_error_of_mpi_in_a_program_ends_the_communicator_on_all_ranks(world: MPI.Intracomm) -> None:
    comm = rr.init(world, nodes=(2, 2), transport="auto")
    sums_right(comm, 10)
    if world.rank == 0:
        for executable in comm._engine.executables._of_hosts:
            for message in executable.program.messages:
                message.peer = 1000
    with pytest.raises(rr.PeerLostError):  # noqa: PT012
        for _ in range(2):  # a rank may get all sums of the first call
            sums_right(comm, 10)
    with pytest.raises(rr.PeerLostError):
        comm.barrier()


CHECKS: list[Callable[[MPI.Intracomm], None]] = [
    init_takes_the_whole_job,
    ranks_of_one_machine_share_a_node,
    nodes_can_be_stated,
    messages_of_the_caller_are_not_disturbed,
    the_callers_communicator_may_go_before_ours,
    several_communicators_work_side_by_side,
    halves_of_the_job_go_their_own_ways,
    a_single_rank_is_a_job,
    communicators_can_be_made_and_closed_many_times,
    a_mismatch_leaves_the_communicator_usable,
    a_mismatch_between_hosts_is_the_same_error_on_all_and_the_next_call_is_right,
    messages_of_calls_that_are_dropped_stay_counted,
    an_error_of_mpi_in_a_program_ends_the_communicator_on_all_ranks,
]


def over_mpi() -> dict[str, str]:
    """Return the outcomes of all checks, on each rank of an MPI job."""
    return outcomes(CHECKS, MPI.COMM_WORLD)


def outcomes(checks: Iterable[Callable[[Any], None]], world: Any) -> dict[str, str]:
    """Make checks on a communicator; return ``"ok"`` or a traceback of each, by its name."""
    found = {}
    for check in checks:
        try:
            check(world)
            found[check.__name__] = "ok"
        except Exception:
            found[check.__name__] = traceback.format_exc()
        world.Barrier()
    return found


def without_free_communicators() -> list[Any]:
    """Return what `split` and `init` raise where MPI has no group left, and a sum after a `close`.

    Also returns whether MPI must run out of groups: MPICH has 2,048, Open MPI tens of thousands.
    """
    comm, spare, every = rr.init(timeout_s=60), rr.init(timeout_s=60), MPI.COMM_WORLD.Get_group()
    other = mpi._not_made("init", MPI.Exception(MPI.ERR_INFO), MPI.COMM_WORLD)
    assert str(other).startswith("init: MPI reports: ")
    assert "more communicators" not in str(other)
    errors: list[Any] = []
    try:
        for _ in range(3000):
            MPI.COMM_WORLD.Create_group(every)
    except MPI.Exception:
        for make in (lambda: comm.split(0), lambda: rr.init(timeout_s=60)):
            try:
                make()
            except RuntimeError as error:
                errors.append(str(error))
    spare.close()
    return [errors, int(comm.split(0).all_reduce(1)), "MPICH" in MPI.Get_library_version()]
