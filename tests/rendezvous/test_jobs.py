"""Jobs of processes that a launcher without MPI has started: their results, faults and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.mpi import DEADLINE_S, STAND_IN, MpiJobs, environment, with_environment
from tests.support.point_to_point import CHECKS, RANKS

pytestmark = pytest.mark.slow


@pytest.fixture
def jobs(tmp_path):
    found = MpiJobs(tmp_path, without_mpi=True)
    yield found
    found.sweep()


def run_to_its_end(jobs, *words, **variables):
    """Run a job; nothing of it is left in the end."""
    done = jobs.run(*words, **variables)
    end = time.monotonic() + DEADLINE_S
    while left := with_environment(str(jobs.folder / f"job{jobs._count}")):
        assert time.monotonic() < end, left
        time.sleep(0.02)
    return done


def run_program(tmp_path, text, *variables, ranks=2):
    """Run a program as a script of so many ranks."""
    program = tmp_path / "program.py"
    program.write_text("import ringreduce as rr\n" + textwrap.dedent(text))
    return subprocess.run(
        [*STAND_IN, "-n", str(ranks), sys.executable, str(program)],
        env=environment(**dict(variables)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.long), "sockets"])
def test_all_facts_of_messages(jobs, transport):
    passed = jobs.run_ok("call", RANKS, "tests.support.point_to_point:over_mpi", transport)
    assert passed == [list(CHECKS)] * RANKS


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["kill", "vanish"])
def test_a_rank_that_ends_is_named_by_all_others(jobs, how):
    done = run_to_its_end(jobs, "fault", 3, how, "1", "caught")
    for rank in (0, 2):
        found = done.results[rank]
        if found is not None:  # the launcher may have ended it by then
            assert found["error"] == "PeerLostError"
            assert found["ranks"] == [1]
    assert how == "vanish" or done.returncode == 128 + signal.SIGKILL


def test_a_rank_that_stops_is_named_by_all_others(jobs):
    done = run_to_its_end(jobs, "fault", 3, "never", "1", "caught")
    assert [found["ranks"] for rank, found in enumerate(done.results) if rank != 1] == [[1], [1]]


@pytest.mark.few(1)
@pytest.mark.parametrize("ending", ["uncaught", "with", "asleep"])
def test_an_exception_ends_the_job_with_its_traceback(jobs, ending):
    done = run_to_its_end(jobs, "fault", 2, "raise", "1", ending)
    assert done.output.count("ValueError: the victim's own error\n") == 1
    assert done.returncode == 1


def test_others_are_told_of_the_exception(tmp_path):
    done = run_program(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when rank 1 has ended
        comm = rr.init(timeout_s=3600)
        if comm.rank == 1:
            raise KeyError("mine")
        try:
            comm.barrier()
        except rr.PeerLostError as error:
            print(error, error.ranks, flush=True)
        """,
    )
    assert done.returncode == 1
    text = "rank 1 has left the communicator: KeyError: 'mine'; the communicator is broken"
    assert text in done.stdout
    assert "(1,)" in done.stdout


def test_a_killed_rank_is_lost_although_its_child_lives(tmp_path):
    done = run_program(
        tmp_path,
        """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when rank 1 has ended
        folder = pathlib.Path(__file__).parent
        comm = rr.init(timeout_s=3600)
        comm.barrier()
        if comm.rank == 1:
            if os.fork() == 0:
                while len([*folder.glob("told*")]) < 2:
                    time.sleep(0.01)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.barrier()
        except rr.PeerLostError as error:
            print(f"{error.ranks}\\n", end="", flush=True)
            (folder / f"told{comm.rank}").touch()
        """,
        ranks=3,
    )
    assert "(1,)\n" in done.stdout, done.stderr


def test_a_program_need_not_close_and_the_variable_for_messages_means_sockets(tmp_path):
    program = """
    comm = rr.init(timeout_s=120)
    assert "over Unix sockets" in repr(comm)
    print(f"{comm.all_reduce(1)}\\n", end="", flush=True)
    """
    done = run_program(tmp_path, program, ("RINGREDUCE_TRANSPORT", "mpi"))
    assert (done.stdout, done.stderr, done.returncode) == ("2\n2\n", "", 0)


def test_init_again_and_again_and_with_others_without_mpi(tmp_path):
    done = run_program(
        tmp_path,
        """
        import sys
        for turn in range(5):
            with rr.init(timeout_s=120) as comm, comm.split(comm.rank % 2) as part:
                assert comm.all_reduce(part.all_reduce(1)) == 5
        assert not any(name.startswith("mpi4py") for name in sys.modules), "MPI is imported"
        """,
        ranks=3,
    )
    assert (done.stderr, done.returncode) == ("", 0)
