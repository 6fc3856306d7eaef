"""Ranks that reach the end of the program while others are in a call: one error, printed once."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import ringreduce as rr
from ringreduce.control.diagnostics import describe_mismatch
from tests.support.mpi import environment, mpiexec

LIMIT_S = 300.0
STARTS = {
    "ringreduce run": [sys.executable, "-m", "ringreduce.launch.cli", "run", "-n", "3"],
    "mpiexec": [mpiexec(), "-n", "3", sys.executable],
}
BY_MPIEXEC = pytest.mark.parametrize("job", ["mpiexec"], indirect=True)
"""For what depends on the ranks alone, not on what starts them."""


@pytest.fixture(params=STARTS)
def job(request, tmp_path):
    """Runs a script on three ranks: its exit code and what all ranks printed."""

    def run(text: str) -> tuple[int, str]:
        path = tmp_path / "script.py"
        path.write_text("import ringreduce as rr\ncomm = rr.init(timeout_s=120)\n")
        with path.open("a") as script:
            script.write(textwrap.dedent(text))
        ended = subprocess.run(
            [*STARTS[request.param], str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            timeout=LIMIT_S,
        )
        return ended.returncode, ended.stdout

    return run


SAID = "MismatchError: rank 0 reached the end of the program while ranks 1 and 2 are in "


@pytest.mark.mpi
def test_the_traceback_of_a_rank_in_a_call_is_printed_once(job):
    code, output = job("""
        if comm.rank:
            comm.barrier()  # of two ranks alone
    """)
    assert output.count("Traceback") == 1
    assert output.count(f"{SAID}barrier(); every rank must make the same calls") == 1
    assert "comm.barrier()  # of two ranks alone" in output
    assert "close" not in output.replace("closed", "")
    assert code != 0


@pytest.mark.few(1)
@pytest.mark.mpi
def test_where_the_ranks_in_a_call_catch_the_error_another_rank_prints_it_once(job):
    code, output = job("""
        if comm.rank:
            try:
                comm.all_reduce(1)
            except rr.MismatchError:
                pass
    """)
    assert output.count(f"{SAID}all_reduce(int64[], op='sum', algorithm='auto')") == 1
    assert "Traceback" not in output
    assert code != 0


@BY_MPIEXEC
@pytest.mark.mpi
def test_an_explicit_close_is_named(job):
    code, output = job("""
        if comm.rank == 0:
            comm.close()
        comm.barrier()
    """)
    assert "rank 0 calls close(), ranks 1 and 2 call barrier()" in output
    assert "the end of" not in output
    assert code != 0


@BY_MPIEXEC
@pytest.mark.mpi
def test_a_close_and_the_end_of_the_program_go_together(job):
    assert job("""
        if comm.rank:
            comm.close()
    """) == (0, "")


@BY_MPIEXEC
@pytest.mark.mpi
def test_of_each_call_in_a_disagreement_one_traceback_is_printed_at_most(job):
    code, output = job("""
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.all_reduce(1)
    """)
    assert output.count("comm.barrier()\n") <= 1
    assert output.count("comm.all_reduce(1)\n") <= 1
    assert "rank 0 calls barrier(), ranks 1 and 2 call all_reduce" in output
    assert code != 0


# --- among threads --------------------------------------------------------------------------------


def errors_of(program, ranks=3):
    """The texts that the ranks get which are in a barrier; the others are at an end by then."""
    texts = {}

    def caught(comm):
        comm.barrier()
        if not program(comm):
            try:
                comm.barrier()
            except rr.MismatchError as error:
                texts[comm.rank] = str(error), error.speaks
                raise

    with pytest.raises(rr.MismatchError):
        rr.spawn(caught, ranks, timeout_s=5)
    return texts


def test_the_end_of_a_function_of_spawn_is_named():
    texts = errors_of(lambda comm: comm.rank == 2)
    assert texts[0][0] == (
        "rank 2 reached the end of its function while ranks 0 and 1 are in barrier(); "
        "every rank must make the same calls in the same order (call 2)"
    )


def test_the_lowest_rank_of_each_call_speaks():
    texts = errors_of(lambda comm: comm.rank == 0)
    assert {rank: speaks for rank, (_, speaks) in texts.items()} == {1: True, 2: False}


def test_the_end_of_a_with_block_is_named():
    def program(comm):
        if comm.rank == 1:
            with comm:
                return True
        return False

    text, _ = errors_of(program)[0]
    assert text.startswith(
        "rank 1 reached the end of its with block while ranks 0 and 2 are in barrier(); "
    )


CLOSE, BARRIER = ["close", []], ["barrier", []]


def test_an_end_and_a_close_are_told_apart():
    reports = {
        0: {"first": 7, "calls": [0], "signatures": [CLOSE], "end_of": "the program"},
        1: {"first": 7, "calls": [0], "signatures": [CLOSE], "end_of": ""},
        2: {"first": 7, "calls": [0], "signatures": [BARRIER], "end_of": ""},
    }
    text, alike = describe_mismatch(reports)
    assert text == (
        "rank 0 reached the end of the program while rank 1 is in close(), rank 2 is in barrier(); "
        "every rank must make the same calls in the same order (call 7)"
    )
    assert alike == [[0], [1], [2]]
