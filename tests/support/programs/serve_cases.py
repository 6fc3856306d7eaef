"""The ranks of a persistent job: each takes batches of cases from its own socket and runs them."""

import json
import os
import socket
import traceback

from mpi4py import MPI

import ringreduce as rr
from tests.support.cases import CONFIG, SYNCHRONOUS_CONFIG, Case, nodes_of, run_case

world = MPI.COMM_WORLD
comms: dict[tuple[int, str, bool], rr.Communicator] = {}


def communicator(case: Case) -> rr.Communicator:
    """One for each number of ranks, layout and way of sending, made when first needed."""
    key = (case.ranks, case.layout, case.synchronous)
    if key not in comms:
        group = world.Get_group().Incl(range(case.ranks))
        comms[key] = rr.init(
            world.Create_group(group, tag=case.ranks),
            nodes=nodes_of(case.layout, case.ranks),
            timeout_s=20,
            config=SYNCHRONOUS_CONFIG if case.synchronous else CONFIG,
        )
    return comms[key]


def run_batch(cases: list[Case]) -> tuple[int, str | None]:
    """Run those cases that this rank takes part in, up to the first that fails."""
    for index, case in enumerate(cases):
        try:
            if world.rank < case.ranks:
                run_case(communicator(case), case)
        except Exception:
            return index, traceback.format_exc()
    return len(cases), None


def main() -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["CASE_SOCKET"])
    lines = connection.makefile("rw")
    lines.write(f"{world.rank}\n")
    lines.flush()
    for line in lines:
        answer = run_batch([Case.from_json(values) for values in json.loads(line)])
        lines.write(json.dumps(answer) + "\n")
        lines.flush()
    for comm in comms.values():
        comm.close()


main()
