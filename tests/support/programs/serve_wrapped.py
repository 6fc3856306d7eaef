"""The ranks of a persistent job, which make random programs of mpi4py on wrapped communicators."""

from typing import Any

from mpi4py import MPI

from tests.support.case_job import serve
from tests.support.wrapped import Program, run

WORLD = MPI.COMM_WORLD
COMMS = [WORLD.Split(int(size > WORLD.rank)) for size in range(WORLD.size + 1)]
"""Of the first ranks, by their number."""


def run_program(values: Any) -> None:
    program = Program.from_json(values)
    if program.ranks > WORLD.rank:
        run(COMMS[program.ranks], program)


serve(WORLD.rank, run_program)
