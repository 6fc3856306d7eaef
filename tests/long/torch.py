"""Proofs of the backend of torch that take minutes, in an environment with torch.

    .venv-torch/bin/python -m tests.long.torch --out bench_results/torch_proofs.json
    .venv-torch/bin/python -m tests.long.torch --only kills --times 10

- ``programs``: random programs of collectives, on 2, 3 and 4 ranks, against torch on one process.
- ``steps``: steps of DistributedDataParallel whose ranks pause at random, against one process.
- ``calls``: asynchronous calls, after which a rank has as many threads, files and mappings as
  before, and as much memory.
- ``kills``: a rank is killed, stops or raises in the middle of a backward pass, under torchrun and
  under mpirun.  Every other rank raises an error that names this rank, within 2 s or its timeout.
  The launcher ends with an error.  No process, socket or memory file is left.
- ``hosts``: the checks of the tests on two hosts, which are network namespaces (needs root).  Ranks
  run without MPI, and with it in the environments of the ``--pythons``, which may have other MPIs.
- ``versions``: the checks of the tests on two and three ranks.  With ``--torches`` in the
  environments of these interpreters, which may have other versions of torch.
- ``restarts``: a rank dies once under ``torchrun --max-restarts 3``, and the job ends well.

Prints one row for each, and exits with 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.long.faults import record
from tests.support.hosts import jobs_on_hosts
from tests.support.mpi import ROOT, MpiJobs, environment, mpiexec, with_environment
from tests.torch.test_launchers import TORCHRUN

MORE_MIB = 2.0
"""The most by which the memory of a rank may grow in all its asynchronous calls."""
TIMEOUT_S = 3.0
"""The timeout of the group in which a rank stops."""
LATE_S = 2.0
"""Seconds within which ranks raise after a rank was lost, or after the timeout."""
LINGERING_S = 3.0
OF_OTHERS_S = 60.0
"""Seconds after which a socket or a file of another job is gone."""
FAULTS = ("kill", "stop", "raise")
LAUNCHERS = ("torchrun", "mpirun")
HOSTS = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "eth0"}
"""Variables for the two hosts; one check makes a group of Gloo, too."""
COUNTED = (
    *("hangs", "silent_ranks", "wrong_ranks", "late_ranks", "wrong_status"),
    *("processes_left", "sockets_left", "files_left"),
)


# --- what ranks run -------------------------------------------------------------------------------


def version() -> str:
    import torch

    return torch.__version__


def train(steps: str) -> float:
    """Train with random pauses; return the largest difference to one process at the end."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("ringreduce")
    rank, size, drawn = dist.get_rank(), dist.get_world_size(), random.Random(os.getpid())
    torch.set_num_threads(1)

    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    alone, wrapped = model(), DistributedDataParallel(model())
    rates = [torch.optim.SGD(each.parameters(), 0.05) for each in (alone, wrapped)]
    for step in range(int(steps)):
        torch.manual_seed(step)
        batches = torch.randn(size, 6, 8)
        for rate in rates:
            rate.zero_grad()
        if drawn.random() < 0.1:
            time.sleep(drawn.random() * 5e-3)
        wrapped(batches[rank]).square().mean().backward()
        alone(batches.reshape(-1, 8)).square().mean().backward()
        for rate in rates:
            rate.step()
    worst = 0.0
    for ours, theirs in zip(wrapped.parameters(), alone.parameters(), strict=True):
        worst = max(worst, float((ours - theirs).abs().max()))
        everybodys = [torch.empty_like(ours) for _ in range(size)]
        dist.all_gather(everybodys, ours.detach())
        assert all(torch.equal(each, ours) for each in everybodys)
    dist.destroy_process_group()
    return worst


def call(count: str) -> dict[str, tuple[float, float]]:
    """Make asynchronous calls; return what this process holds before and after them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("ringreduce")
    x = torch.ones(100)

    def calls(number: int) -> None:
        for _ in range(number):
            works = [dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True) for _ in range(2)]
            works[1].get_future().wait()
            works[0].wait()

    calls(2000)
    held()  # the first one may make Python map memory for its lists
    before = held()
    calls(int(count) // 2)
    after = held()
    dist.destroy_process_group()
    return {name: (before[name], after[name]) for name in before}


def held() -> dict[str, float]:
    """Return how much memory, and how many threads, files and mappings this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


VICTIM = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, how, victim, when, timeout_s = Path(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("ringreduce", timeout=timedelta(seconds=float(timeout_s)))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(4))))
step = 0
dies = rank == int(victim) and not (folder / "failed").exists()

def fail(gradient):
    if dies and step == int(when):
        (folder / "failing").write_text(str(time.time()))
        (folder / "failing").rename(folder / "failed")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise ValueError("the victim's own error")

model.module[1].weight.register_hook(fail)
if how == "stop":
    (folder / f"pid{rank}").write_text(str(os.getpid()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others before they can report
try:
    for step in range(int(when) + 50):
        model(torch.ones(3, 50)).sum().backward()
except Exception as error:
    text = {"at": time.time(), "error": type(error).__name__, "text": str(error)}
    if type(error) is RuntimeError and "Error: rank " in str(error):  # torch's, of a future
        try:
            dist.barrier()
        except Exception as again:
            error = again
    text["ranks"] = getattr(error, "ranks", None)
    (folder / f"failing{rank}").write_text(json.dumps(text))  # mpirun may end this rank meanwhile
    (folder / f"failing{rank}").rename(folder / f"error{rank}")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise
(folder / f"done{rank}").write_text("")
"""


# --- campaigns ------------------------------------------------------------------------------------


def programs(jobs: MpiJobs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for ranks in (2, 3, 4):
        drawn = str(options.seed), str(options.programs)
        found = jobs.run_ok(
            "call", ranks, "tests.torch.programs:run_programs", *drawn, timeout_s=1800
        )
        yield {"proof": "programs", "ranks": ranks, "programs": options.programs, "calls": found[0]}


def steps(jobs: MpiJobs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for ranks in (2, 3):
        program = "tests.long.torch:train"
        found = jobs.run_ok("call", ranks, program, str(options.steps), timeout_s=1800)
        row = {"proof": "steps", "ranks": ranks, "steps": options.steps}
        yield row | {"largest_difference": max(found), "wrong": int(max(found) > 1e-4)}


def calls(jobs: MpiJobs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    program = "tests.long.torch:call"
    for of_a_rank in jobs.run_ok("call", 2, program, str(options.calls), timeout_s=1800):
        wrong = [
            name
            for name, (before, after) in of_a_rank.items()
            if after - before > (MORE_MIB if name == "mib" else 0)
        ]
        row = {"proof": "calls", "calls": options.calls, "wrong": len(wrong)}
        yield row | {f"{name}_before_and_after": values for name, values in of_a_rank.items()}


def kills(jobs: MpiJobs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for launcher in LAUNCHERS:
        for how in FAULTS:
            wrong: Counter[str] = Counter()
            worst_s = 0.0
            for index in range(options.times):
                drawn = random.Random(f"{options.seed}-{launcher}-{how}-{index}")
                folder = jobs.folder / f"{launcher}{how}{index}"
                seconds, found = _fault(folder, launcher, how, drawn)
                wrong.update(set(found))
                worst_s = max(worst_s, seconds)
                if found:
                    print(f"{launcher}, {how}, {index}: {found}", file=sys.stderr, flush=True)
            row = {"proof": "kills", "launcher": launcher, "fault": how, "runs": options.times}
            row |= {"wrong": sum(wrong.values()), "slowest_error_s": round(worst_s, 2)}
            yield row | {name: wrong[name] for name in COUNTED}


def hosts(jobs: MpiJobs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    checks = "from tests.torch import checks; checks.print_over_hosts()"
    for python in options.pythons:
        program = ["-m", "benchmarks.hosts", "--ranks", "2,1", "--", python, "-c", checks]
        done = subprocess.run(
            [python, *program],
            env=environment(**HOSTS, PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=300,
        )
        found = json.loads(done.stdout or '{"mpi": "", "outcomes": {}}')
        wrong = failed_checks([found["outcomes"]])
        row = {"proof": "hosts", "mpi": found["mpi"], "hosts": "2,1", "ranks": 3}
        row |= {"checks": len(found["outcomes"])}
        yield row | {"wrong": len(wrong) + (done.returncode != 0)}
    with jobs_on_hosts(jobs.folder) as on_hosts:
        each = on_hosts.run_ok("call", 3, "tests.torch.checks:over_tcp", timeout_s=300)
    row = {"proof": "hosts", "mpi": "none", "hosts": "2,1", "ranks": 3, "checks": len(each[0])}
    yield row | {"wrong": len(failed_checks(each))}


def versions(jobs: MpiJobs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    try:
        for jobs.python in options.torches:
            (version,) = jobs.run_ok("call", 1, "tests.long.torch:version")
            for ranks in (2, 3):
                each = jobs.run_ok("call", ranks, "tests.torch.checks:over_torch", timeout_s=300)
                row = {"proof": "versions", "torch": version, "ranks": ranks}
                yield row | {"checks": len(each[0]), "wrong": len(failed_checks(each))}
    finally:
        jobs.python = sys.executable


def failed_checks(outcomes: Sequence[dict[str, str]]) -> list[str]:
    """Return the names of the checks that failed on some rank, and print their tracebacks.

    `outcomes` are the results of `tests.torch.checks.over_torch`, one for each rank.
    """
    failed = {name: came for each in outcomes for name, came in each.items() if came != "ok"}
    for name, came in failed.items():
        print(f"{name}: {came}", file=sys.stderr, flush=True)
    return sorted(failed)


def restarts(jobs: MpiJobs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    wrong = 0
    for index in range(options.times):
        folder = jobs.folder / f"restart{index}"
        drawn = random.Random(f"{options.seed}-restart-{index}")
        victim, when = drawn.randrange(3), drawn.randrange(2, 40)
        job = _start(folder, "torchrun", "kill", victim, when, "--max-restarts", "3")
        try:
            status = job.wait(90)
        except subprocess.TimeoutExpired:
            _end(job)
            status = -1
        ended_well = all((folder / f"done{rank}").exists() for rank in range(3))
        wrong += not (status == 0 and ended_well and (folder / "failed").exists())
    yield {"proof": "restarts", "runs": options.times, "wrong": wrong}


def _start(
    folder: Path, launcher: str, how: str, victim: int, when: int, *words: str
) -> subprocess.Popen[bytes]:
    """Start three ranks, of which one fails."""
    folder.mkdir()
    (folder / "program.py").write_text(VICTIM)
    timeout_s = TIMEOUT_S if how == "stop" else 30.0
    given = [str(folder), how, str(victim), str(when), str(timeout_s)]
    program = [str(folder / "program.py"), *given]
    command = [mpiexec(), "-n", "3", sys.executable, *program]
    if launcher == "torchrun":
        command = [*TORCHRUN, "--nproc-per-node", "3", *words, *program]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment(JOB_OF_PROOF=str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            start_new_session=True,
        )


def _end(job: subprocess.Popen[bytes]) -> None:
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _fault(folder: Path, launcher: str, how: str, drawn: random.Random) -> tuple[float, list[str]]:
    """Run a job in which a rank fails.

    Returns the seconds until the last other rank raised, and what was wrong of `COUNTED`.
    """
    files, sockets = _files(), _sockets()
    victim = drawn.randrange(3)
    job = _start(folder, launcher, how, victim, drawn.randrange(2, 40))
    others = [rank for rank in range(3) if rank != victim]
    wrong: list[str] = []
    if how == "stop":
        _wait_until(lambda: all((folder / f"error{rank}").exists() for rank in others), 60)
        stopped = folder / f"pid{victim}"
        # torchrun would wait 30 s before it kills a stopped process; mpirun kills it at once.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(stopped.read_text()), signal.SIGKILL)
    try:
        status = job.wait(60)
    except subprocess.TimeoutExpired:
        _end(job)
        return 60.0, ["hangs"]
    # MPICH kills all ranks once one of them has ended: the others cannot report anything any more.
    reports = sum((folder / f"error{rank}").exists() for rank in others)
    killed_by_mpi = launcher == "mpirun" and (how != "stop" or reports > 0)
    failed_at, limit_s = float((folder / "failed").read_text()), LATE_S
    limit_s += TIMEOUT_S if how == "stop" else 0
    slowest_s = 0.0
    for rank in others:
        path = folder / f"error{rank}"
        if not path.exists():
            wrong += [] if killed_by_mpi else ["silent_ranks"]
            continue
        said = json.loads(path.read_text())
        slowest_s = max(slowest_s, said["at"] - failed_at)
        names_it = said["ranks"] == [victim] and f"rank {victim} " in said["text"]
        wrong += ["wrong_ranks"] * (not names_it)
        wrong += ["late_ranks"] * (said["at"] - failed_at > limit_s)
    if launcher == "torchrun":
        wrong += ["wrong_status"] * (status != 1)
    wrong += ["wrong_status"] * (status == 0)
    if not _wait_until(lambda: not with_environment(str(folder)), LINGERING_S):
        wrong.append("processes_left")
    wrong += ["sockets_left"] * (not _go_away(_sockets, sockets))
    wrong += ["files_left"] * (not _go_away(_files, files))
    if wrong:
        print((folder / "output").read_text()[-4000:], file=sys.stderr, flush=True)
    return slowest_s, wrong


def _go_away(present: Callable[[], set[str]], before: set[str]) -> bool:
    """Wait until nothing is left of what is there now and was not before; whether that came."""
    left = present() - before

    def are_gone() -> bool:
        left.intersection_update(present())
        return not left

    return _wait_until(are_gone, OF_OTHERS_S)


def _files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _sockets() -> set[str]:
    """Return the names of this library's Unix sockets on this host."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "ringreduce" in line}


def _wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


CAMPAIGNS = {
    each.__name__: each for each in (programs, steps, calls, hosts, versions, kills, restarts)
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.torch")
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=tuple(CAMPAIGNS))
    parser.add_argument("--programs", type=int, default=1000, help="for each number of ranks")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=34, help="runs of each fault and launcher")
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--torches", nargs="+", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to record the rows, as JSON")
    options = parser.parse_args(argv)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.long.torch {arguments}".strip()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder), without_mpi=True)
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        del where["ranks"]
        for name in options.only:
            for row in CAMPAIGNS[name](jobs, options):
                rows.append({**where, **row, "seed": options.seed})
                print(json.dumps(row), flush=True)
                if options.out:
                    what = "cpu", "mpi", "proof", "torch", "ranks", "launcher", "fault"
                    record(options.out, rows, what)
        jobs.sweep()
    return int(any(row.get("wrong", 0) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
