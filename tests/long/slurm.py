"""Jobs that Slurm's srun starts: the checks of torch's backend, and calls over MPI and without it.

    .venv-torch/bin/python -m tests.long.slurm --out bench_results/slurm.json

Makes a Slurm of one host, which is this one: root starts its two daemons, installed from the
packages slurmctld, slurmd and slurm-client.  Two ranks run with ``--mpi=none`` and ``--mpi=pmi2``.
Prints one row for each.  Exits with 1 if a check fails, or a rank finds another place than srun's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.long.faults import record
from tests.support.mpi import MpiJobs

RANKS = 2
KINDS = ("none", "pmi2")
READY_S = 30
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """Run Slurm's daemons, with their files in `folder`, until the context ends."""
    host = socket.gethostname()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    values = {"host": host, "folder": folder, "cpus": os.cpu_count()}
    configuration.write_text(CONFIGURATION.format(**values))
    os.environ["SLURM_CONF"] = str(configuration)
    daemons = []
    try:
        for name in ("slurmctld", "slurmd"):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            daemons.append(subprocess.Popen([name, "-D"], **quiet))
        end = time.monotonic() + READY_S
        while "idle" not in subprocess.run(["sinfo", "-h"], capture_output=True, text=True).stdout:
            if time.monotonic() > end:
                raise TimeoutError(f"Slurm is not ready after {READY_S} s")
            time.sleep(0.2)
        yield
    finally:
        subprocess.run(["scancel", "--user", "root"], check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def where() -> list[Any]:
    """On each rank: its place in torch's variables, in a communicator, and as srun says; a sum."""
    import torch  # noqa: F401 - its import sets the variables

    import ringreduce as rr

    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"
    variables = [os.environ.get(name) for name in names]
    with rr.init() as comm:
        found = [comm.rank, comm.size, comm.all_reduce(1).item()]
    return [variables, found, int(os.environ["SLURM_PROCID"])]


def places_are_right(found: Sequence[Any]) -> bool:
    """Whether each rank has the same number in torch's variables, the communicator and srun's."""
    return all(
        place == [[str(rank), str(RANKS), str(rank), "localhost"], [rank, RANKS, RANKS], rank]
        for rank, place in enumerate(found)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.slurm")
    parser.add_argument("--out", type=Path, help="where to record the runs, as JSON")
    options = parser.parse_args(argv)
    command = f"python -m tests.long.slurm {' '.join(sys.argv[1:] if argv is None else argv)}"

    rows = []
    with tempfile.TemporaryDirectory() as name, slurm(Path(name)):
        (origin,) = MpiJobs(Path(name)).run_ok(
            "call", 1, "benchmarks.rows:environment", command.strip()
        )
        version = subprocess.run(["srun", "--version"], capture_output=True, text=True).stdout
        for kind in KINDS:
            folder = Path(name) / kind
            folder.mkdir()
            jobs = MpiJobs(folder)
            jobs.launcher = ["srun", f"--mpi={kind}"]
            places = jobs.run_ok("call", RANKS, "tests.long.slurm:where")
            checks = jobs.run_ok("call", RANKS, "tests.torch.checks:over_torch", timeout_s=300)
            failed = sorted({name for each in checks for name in each if each[name] != "ok"})
            for each in checks:
                print(*(text for text in each.values() if text != "ok"), sep="\n", file=sys.stderr)
            row = {**origin, "ranks": RANKS, "slurm": version.strip(), "srun": f"--mpi={kind}"}
            row |= {"places": places_are_right(places), "checks": len(checks[0]), "failed": failed}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        record(options.out, rows, ("srun",))
    return int(any(row["failed"] or not row["places"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
