"""The ranks of a persistent job: each takes batches of cases from its own socket and runs them."""

import os
from pathlib import Path
from typing import Any

import ringreduce as rr
from tests.support.case_job import serve
from tests.support.cases import CONFIG, SYNCHRONOUS_CONFIG, Case, nodes_of, run_case
from tests.support.mpi import place

RANK, _ = place()
comms: dict[tuple[int, str, bool], rr.Communicator] = {}


def communicator(case: Case) -> rr.Communicator:
    """One for each number of ranks, layout and way of sending, made when first needed."""
    key = (case.ranks, case.layout, case.synchronous)
    if key not in comms:
        comms[key] = rr.init(
            **group_of(case),
            nodes=nodes_of(case.layout, case.ranks),
            timeout_s=20,
            config=SYNCHRONOUS_CONFIG if case.synchronous else CONFIG,
        )
    return comms[key]


def group_of(case: Case) -> dict[str, Any]:
    """The arguments with which `init` finds the ranks of the case."""
    if "RANK" in os.environ:
        name = f"meeting of {case.ranks} {case.layout} {case.synchronous}"
        meeting = Path(os.environ["RESULTS"]) / name
        return {"rendezvous": f"file://{meeting}", "rank": RANK, "size": case.ranks}
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Get_group().Incl(range(case.ranks))
    return {"mpi_comm": MPI.COMM_WORLD.Create_group(group, tag=case.ranks)}


def run(values: Any) -> None:
    case = Case.from_json(values)
    if case.ranks > RANK:
        run_case(communicator(case), case)


serve(RANK, run)
for comm in comms.values():
    comm.close()
