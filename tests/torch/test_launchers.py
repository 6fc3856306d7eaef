"""Torch's launchers, and faults of ranks that use the backend of torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.mpi import DEADLINE_S, environment

pytestmark = pytest.mark.torch
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


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


def torchrun(tmp_path, text, *words, ranks=2):
    """Run a program by torch's own launcher."""
    return run_program(tmp_path, text, *TORCHRUN, "--nproc-per-node", str(ranks), *words)


def test_ranks_that_end_at_different_times_end_well_without_destroying_groups(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import datetime, time
        import torch.distributed as dist
        import ringreduce.start.process_exit
        dist.init_process_group("ringreduce")
        group = dist.new_group(timeout=datetime.timedelta(seconds=2))
        dist.barrier()
        ringreduce.start.process_exit.ENDING_S = 0.5
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
        import ringreduce.start.process_exit
        dist.init_process_group("ringreduce")
        group = dist.new_group()
        ringreduce.start.process_exit.ENDING_S = 2
        if dist.get_rank() != 1:
            dist.barrier()
        """,
        ranks=3,
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
            dist.init_process_group("ringreduce", meeting, rank=rank, world_size=2)
            if rank == 1:
                raise ValueError("its own error")
            dist.barrier()
        if __name__ == "__main__":
            mp.spawn(work, nprocs=2)
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
    assert (done.stdout, done.returncode) == ("2\n2\n", 0), done.stderr


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
    assert done.stdout.count("done") == 2
    assert "error rank 1 is lost" in done.stdout


def test_mpiexec_starts_it_through_a_shell(tmp_path):
    """A parent that is no launcher hides mpiexec."""
    done = run_program(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("ringreduce")
        x = torch.ones(2)
        dist.all_reduce(x)
        print(f"{x.tolist()}\\n", end="", flush=True)
        dist.destroy_process_group()
        """,
        *(str(Path(sys.executable).parent / "mpiexec"), "-n", "3"),
        *("sh", "-c", f"{sys.executable} $0; exit $?"),
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
def test_one_line_changes_under_a_launcher_and_the_traceback_of_a_rank_names_it(
    tmp_path, launcher, words
):
    """Rank 1 raises its own error if all went well before, and without MPI.

    torch's excepthook runs around ours, which ends the job.
    """
    done = run_program(
        tmp_path,
        """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("ringreduce")
        x = torch.ones(3)
        dist.all_reduce(x)
        assert (x.tolist(), dist.get_backend()) == ([3.0, 3.0, 3.0], "ringreduce")
        assert not any(name.startswith("mpi4py") for name in sys.modules)
        dist.barrier()
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
        timeout=DEADLINE_S,
    )
    assert (done.stdout, done.returncode) == ("RingReduceGroup gloo\n" * 2, 0), done.stderr


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
    place = {f"ringreduce.system{name}" for name in ("", ".place", ".proc")}
    assert found == package | place


def test_without_autoloading_an_import_is_enough():
    shown = "print('ringreduce' in torch.distributed.Backend.backend_list)"
    code = f"import torch.distributed; {shown}; import ringreduce.torch; {shown}"
    assert of_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False\nTrue"
