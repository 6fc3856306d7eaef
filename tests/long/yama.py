"""Ranks under a kernel whose module Yama forbids a process to read another one's memory.

    .venv-torch/bin/python -m tests.long.yama --out bench_results/yama.json

Starts a second Linux as a program, over the files of this machine: the kernel of Debian's package
user-mode-linux, which contains Yama.  CPUs with AMX need a kernel from 6.13 on.  Root starts it.
Its ranks lack the capability with which root could read any memory.  Under each setting of Yama:

- Three ranks sum arrays, over MPI and without MPI.  Each reports whether the ranks read large
  arrays directly.  They must do so exactly where the kernel lets them.
- Three ranks without MPI do the same, but allow no reads to each other.  MPICH allows them, too.
- `ringreduce doctor` says what it finds.

Under setting 1, which is Ubuntu's, all checks of torch's backend run, too.  Prints one row for
each.  Exits with 1 if a row has a wrong result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.long.faults import record
from tests.long.torch import failed_checks
from tests.support.mpi import ROOT, MpiJobs, mpiexec

KERNEL = "linux.uml"
MEMORY = "6G"
LIMIT_S = 1800
"""The memory of the second Linux, and the seconds that it may run."""
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
"""The setting of Yama."""
FREE, BY_PERMISSION, FORBIDDEN = SCOPES = 0, 1, 2
RANKS = 3
SIZES = (8, 64 << 10, 4 << 20, 16 << 20)
"""Bytes of the arrays that ranks sum."""
ORDINARY = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
"""This command runs another one without the capability to read any memory."""
START = """\
#!/bin/sh
export PATH={path} HOME={home}
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
ip link set lo up
cd {root}
{python} -m tests.long.yama --inside {folder} >{folder}/rows 2>{folder}/errors
echo $? >{folder}/status
{python} -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'
"""
"""The first program of the second Linux.  Its last line turns that Linux off."""


# --- what ranks run -------------------------------------------------------------------------------


def sums(allows: str) -> tuple[bool, int]:
    """Sum arrays; return whether ranks read large ones directly, and how many sums are wrong.

    Unless `allows` is ``"True"``, this rank does not allow the reads to others.
    """
    import ringreduce as rr
    from ringreduce.shm import segments

    if allows != "True":
        segments.allow_reads = lambda: None
    wrong = 0
    with rr.init() as comm:
        for nbytes in SIZES:
            numbers = np.arange(nbytes // 8)
            of_all = numbers * sum(range(1, comm.size + 1))
            wrong += not np.array_equal(comm.all_reduce(numbers * (comm.rank + 1)), of_all)
        return comm.config.single_copy_from is not None, wrong


# --- inside the second Linux ----------------------------------------------------------------------


def inside(folder: Path) -> Iterator[dict[str, Any]]:
    """Run all jobs; yield a row for each."""
    for scope in SCOPES:
        SCOPE.write_text(f"{scope}\n")
        for transport, allows in ("mpi", True), ("sockets", True), ("sockets", False):
            jobs = _jobs(folder, f"{scope}-{transport}-{allows}", transport)
            found = jobs.run_ok("call", RANKS, "tests.long.yama:sums", str(allows), timeout_s=300)
            direct = scope == FREE or (scope == BY_PERMISSION and allows)
            wrong = sum(each != [direct, 0] for each in found)
            row = {"job": "sums", "ptrace_scope": scope, "transport": transport, "ranks": RANKS}
            yield row | {"allowed": allows, "direct": found[0][0], "wrong": wrong}
        says = _doctor()
        wrong = int(("works" in says) != (scope != FORBIDDEN))
        yield {"job": "doctor", "ptrace_scope": scope, "says": says, "wrong": wrong}
    SCOPE.write_text(f"{BY_PERMISSION}\n")
    for transport in ("mpi", "sockets"):
        jobs = _jobs(folder, f"checks-{transport}", transport)
        found = jobs.run_ok("call", RANKS, "tests.torch.checks:over_torch", timeout_s=900)
        row = {"job": "torch", "ptrace_scope": BY_PERMISSION, "transport": transport}
        yield row | {"ranks": RANKS, "checks": len(found[0]), "wrong": len(failed_checks(found))}


def _jobs(folder: Path, name: str, transport: str) -> MpiJobs:
    """Return what starts ranks that may not read any memory."""
    (folder / name).mkdir()
    jobs = MpiJobs(folder / name, without_mpi=transport == "sockets")
    jobs.launcher = [*ORDINARY, *(jobs.launcher or [mpiexec()])]
    return jobs


def _doctor() -> str:
    command = [*ORDINARY, sys.executable, "-m", "ringreduce", "doctor"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return next((" ".join(line.split()) for line in lines if "single copy" in line), "")


# --- outside of it --------------------------------------------------------------------------------


def run(folder: Path) -> list[dict[str, Any]]:
    """Start the second Linux, wait until it ends, and return the rows of its jobs."""
    first = folder / "start"
    values = {"path": os.environ["PATH"], "home": os.environ["HOME"]}
    first.write_text(START.format(root=ROOT, python=sys.executable, folder=folder, **values))
    first.chmod(0o755)
    command = [KERNEL, "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw"]
    command += [f"mem={MEMORY}", f"init={first}", "con=null", "con0=null,fd:2", "quiet"]
    subprocess.run(command, stdout=sys.stderr, timeout=LIMIT_S, check=True)
    print((folder / "errors").read_text(), end="", file=sys.stderr)
    if (folder / "status").read_text() != "0\n":
        raise RuntimeError("the jobs inside the second Linux did not end well")
    return [json.loads(line) for line in (folder / "rows").read_text().splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.yama")
    parser.add_argument("--out", type=Path, help="where to record the runs, as JSON")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside:
        for row in inside(options.inside):
            print(json.dumps({"kernel": platform.release(), **row}), flush=True)
        return 0
    command = f"python -m tests.long.yama {' '.join(sys.argv[1:] if argv is None else argv)}"
    with tempfile.TemporaryDirectory() as name:
        (origin,) = MpiJobs(Path(name)).run_ok(
            "call", 1, "benchmarks.rows:environment", command.strip()
        )
        rows = [origin | row for row in run(Path(name))]
    for row in rows:
        print(json.dumps(row))
    if options.out:
        record(options.out, rows, ("job", "ptrace_scope", "transport", "allowed"))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
