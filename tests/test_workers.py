"""Worker processes of ranks: they are no ranks, and leave the job of their ranks alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ringreduce import place
from tests.support.mpi import MpiJobs
from tests.support.programs.workers import ENDS


@pytest.mark.mpi
@pytest.mark.parametrize("without_mpi", [False, True], ids=["mpi", "env"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_workers_are_refused_and_ranks_go_on(tmp_path, without_mpi, when):
    jobs = MpiJobs(tmp_path, without_mpi)
    first, second = jobs.run_ok("workers", 2, when)
    jobs.sweep()
    assert len(first["refused"]) == (3 if when == "before" else 4)
    assert all(text.startswith("init: this process is a worker") for text in first["refused"])
    assert first["sums"] == second["sums"] == [2, 2, 2]
    if when == "after":  # ranks that a rank starts, and a job of the worker alone, are allowed
        assert first["own"] == ["2", "1"]
        assert first["codes"] == [[code, code] for code in ENDS]


@pytest.mark.slow
def test_a_worker_of_a_process_that_is_no_rank_may_call_init():
    names = {*place.RANK_VARIABLES, place.TORCHRUN, place.RANK_PROCESS, "RANK", "WORLD_SIZE"}
    script = "import multiprocessing as m; from tests.support.programs.workers import ask\n"
    script += "print(m.get_context('fork').Pool(1).map(ask, [0]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={name: text for name, text in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "rank 0 of 1" in done.stdout, done.stderr
