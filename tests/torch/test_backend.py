"""The backend of torch: jobs whose ranks run the same checks; torch's launcher and faults."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from tests.support.mpi import DEADLINE_S, MpiJobs, environment
from tests.torch.checks import CHECKS

pytestmark = pytest.mark.torch
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def outcomes_on(tmp_path_factory):
    """Number of ranks -> what every check came to on each rank of a job, which runs once."""
    jobs = MpiJobs(tmp_path_factory.mktemp("torch"), without_mpi=True)

    @cache
    def of(ranks):
        return jobs.run("call", ranks, "tests.torch.checks:over_torch")

    yield of
    jobs.sweep()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_a_check_holds(outcomes_on, name, ranks):
    done = outcomes_on(ranks)
    assert None not in done.results, done.output
    assert [found.get(name, "not made") for found in done.results] == ["ok"] * ranks


def test_the_debugging_of_torch_changes_nothing(tmp_path):
    jobs = MpiJobs(tmp_path, without_mpi=True)
    checks = "tests.torch.checks:over_torch"
    found = jobs.run_ok("call", 2, checks, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    jobs.sweep()
    wrong = {name: came for each in found for name, came in each.items() if came != "ok"}
    assert wrong == {}


def test_mpi_connects_ranks_of_several_hosts(tmp_path):
    jobs = MpiJobs(tmp_path)
    found = jobs.run_ok("call", 3, "tests.torch.checks:over_mpi")
    jobs.sweep()
    wrong = {name: came for each in found for name, came in each.items() if came != "ok"}
    assert wrong == {}


@pytest.mark.parametrize(("switch", "moved"), [("1", 1), ("0", 0)])
def test_a_variable_keeps_buckets_where_they_are(tmp_path, switch, moved):
    jobs = MpiJobs(tmp_path, without_mpi=True)
    buckets = "tests.torch.checks:moved_buckets"
    found = jobs.run_ok("call", 2, buckets, RINGREDUCE_TORCH_SHARE=switch)
    jobs.sweep()
    assert found == [moved, moved]


def test_fifty_groups_on_four_ranks_leave_nothing_behind(tmp_path):
    jobs = MpiJobs(tmp_path, without_mpi=True)
    found = jobs.run_ok("call", 4, "tests.torch.checks:fifty_groups")
    jobs.sweep()
    assert found == [True] * 4


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_programs_give_what_torch_gives(tmp_path, ranks):
    jobs = MpiJobs(tmp_path, without_mpi=True)
    programs = "tests.torch.programs:run_programs"
    found = jobs.run_ok("call", ranks, programs, "1", "25")
    jobs.sweep()
    assert len(set(found)) == 1
    assert found[0] > 25


def run_program(tmp_path, text, *launcher):
    """Run a program by the words of a launcher."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(text))
    return subprocess.run(
        [*launcher, str(program)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def torchrun(tmp_path, text, *words):
    """Run a program on three ranks, by torch's own launcher."""
    return run_program(tmp_path, text, *TORCHRUN, "--nproc-per-node", "3", *words)


def test_one_line_changes_under_torchrun(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("ringreduce")
        x = torch.ones(3)
        dist.all_reduce(x)
        print(f"{x.tolist()} {dist.get_backend()}\\n", end="", flush=True)
        """,
    )
    assert done.stdout == "[3.0, 3.0, 3.0] ringreduce\n" * 3, done.stderr
    assert done.returncode == 0


def test_ranks_that_end_at_different_times_end_well_without_destroying_groups(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import datetime, time
        import torch.distributed as dist
        import ringreduce.process_exit
        dist.init_process_group("ringreduce")
        group = dist.new_group(timeout=datetime.timedelta(seconds=2))
        dist.barrier()
        ringreduce.process_exit.ENDING_S = 0.5
        if dist.get_rank() == 0:
            time.sleep(3)
            print("saved", flush=True)
        """,
    )
    assert (done.stdout, done.returncode) == ("saved\n", 0), done.stderr
    assert "ended with an error" not in done.stderr


def test_a_rank_that_ends_too_early_is_named_although_there_are_more_groups(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import torch.distributed as dist
        import ringreduce.process_exit
        dist.init_process_group("ringreduce")
        group = dist.new_group()
        ringreduce.process_exit.ENDING_S = 2
        if dist.get_rank() != 1:
            dist.barrier()
        """,
    )
    assert "rank 1 reached the end of the program while ranks 0 and 2 are in barrier" in done.stderr
    assert done.returncode == 1


def test_spawn_of_torch_tells_the_error_that_came_first(tmp_path):
    """torch catches the exception of a rank, which then ends as if it had ended well."""
    done = run_program(
        tmp_path,
        f"""
        import torch.distributed as dist, torch.multiprocessing as mp
        def work(rank):
            meeting = "file://{tmp_path}/meeting"
            dist.init_process_group("ringreduce", meeting, rank=rank, world_size=3)
            if rank == 1:
                raise ValueError("its own error")
            dist.barrier()
        if __name__ == "__main__":
            mp.spawn(work, nprocs=3)
        """,
        sys.executable,
    )
    assert done.stderr.rstrip().endswith("ValueError: its own error"), done.stderr


def test_torchrun_needs_no_torch_in_the_program(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import ringreduce as rr
        total = rr.init(timeout_s=120).all_reduce(1).item()
        print(f"{total}\\n", end="", flush=True)
        """,
    )
    assert (done.stdout, done.returncode) == ("3\n3\n3\n", 0), done.stderr


def test_a_killed_rank_is_named_and_torchrun_starts_again(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import os, signal, time
        import torch
        import torch.distributed as dist
        dist.init_process_group("ringreduce")
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        try:
            for turn in range(1 << 30 if first else 100):
                if first and turn == 50 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(1000))
        except ConnectionError as error:
            print(f"error {error}\\n", end="", flush=True)
            time.sleep(5)  # torchrun ends this process
        print("done\\n", end="", flush=True)
        """,
        *("--max-restarts", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 3
    assert "error rank 1 is lost" in done.stdout


@pytest.mark.few(2)
@pytest.mark.parametrize("words", [["mpiexec", "-n"], ["ringreduce", "run", "-n"]])
@pytest.mark.parametrize("through_a_shell", [False, True])
def test_an_mpi_launcher_starts_it(tmp_path, words, through_a_shell):
    """torch itself reads what the import of torch sets, and MPI is never initialised."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('ringreduce')\n"
        "x = torch.ones(2)\n"
        "dist.all_reduce(x)\n"
        "assert not any(name.startswith('mpi4py') for name in sys.modules)\n"
        "print(f'{x.tolist()}\\n', end='', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    command = [str(Path(sys.executable).parent / words[0]), *words[1:], "3"]
    if words[0] == "ringreduce":
        command += [str(program)]
    elif through_a_shell:
        command += ["sh", "-c", f"{sys.executable} {program}; exit $?"]
    else:
        command += [sys.executable, str(program)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout == "[3.0, 3.0]\n" * 3, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("mpiexec", ["-n", "3", sys.executable]),
        ("ringreduce", ["run", "-n", "3"]),
        ("torchrun", ["--nproc-per-node", "3"]),
    ],
)
def test_the_traceback_of_a_rank_names_it(tmp_path, launcher, words):
    """torch's excepthook runs around ours, which ends the job."""
    done = run_program(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("ringreduce")
        if dist.get_rank() == 1:
            raise ValueError("its own error")
        dist.barrier()
        """,
        *(str(Path(sys.executable).parent / launcher), *words),
    )
    assert done.stderr.count("[rank1]: ValueError: its own error\n") == 1, done.stderr
    assert done.returncode != 0


def test_a_program_that_names_gloo_gets_it_by_an_option(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.monitored_barrier()\n"
        "print(f'{type(dist.group.WORLD).__name__} {dist.get_backend()}\\n', end='', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    launcher = str(Path(sys.executable).parent / "ringreduce")
    done = subprocess.run(
        [launcher, "run", "-n", "2", "--instead-of-gloo", str(program)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "RingReduceGroup gloo\n" * 2, done.stderr


def of_python(code, **variables):
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_registration_imports_nothing_else():
    code = "import sys, torch; print(*(n for n in sys.modules if n.startswith('ringreduce')))"
    found = set(of_python(code).split())
    package = {"ringreduce", "ringreduce.torch", "ringreduce.torch.registration"}
    assert found == {*package, "ringreduce.place", "ringreduce.processes"}


def test_without_autoloading_an_import_is_enough():
    code = "import {}; import torch.distributed as d; print('ringreduce' in d.Backend.backend_list)"
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert of_python(code.format("torch"), **off) == "False"
    assert of_python(code.format("ringreduce.torch"), **off) == "True"
