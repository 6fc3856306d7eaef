"""Jobs that Slurm's srun starts: the checks of torch's backend, and calls over MPI and without it.

    .venv-torch/bin/python -m tests.long.slurm --out bench_results/slurm.json

Root starts the daemons of Slurm, installed from the packages slurmctld, slurmd and slurm-client.
First Slurm has one host, this one, and two ranks; then two hosts, which are network namespaces, and
three ranks.  Both run with ``--mpi=none`` and ``--mpi=pmi2``.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hosts import HUB_ADDRESS, hosts
from tests.long.faults import record
from tests.long.torch import HOSTS, failed_checks
from tests.support.mpi import MpiJobs

KINDS = ("none", "pmi2")
MPI = "--mpi=pmi2"
READY_S, ENDED_S = 30, 3
"""Seconds that Slurm's daemons may take to start, and to end after a signal."""
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={control}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PartitionName=all Nodes=ALL Default=YES State=UP
"""
APART = (
    *("unshare", "--uts", "--ipc", "--mount", "--pid", "--mount-proc", "--kill-child"),
    *("sh", "-c"),
    'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; mount --bind "$1" /etc/hosts; shift; exec "$@"',
)
"""This command runs another one with a host name, shared memory and process ids of its own, and
with a file of names.

The launcher of `benchmarks.hosts` hides the folder of control groups, which slurmd reads.
"""
NODE = "NodeName={name} NodeAddr={address} CPUs={cpus} State=UNKNOWN\n"


@dataclass(frozen=True)
class Host:
    """A host of Slurm: its name and address, and the command that starts programs there."""

    name: str
    address: str
    start: Sequence[str] = ()


@contextmanager
def slurm(folder: Path, control: Host, nodes: Sequence[Host]) -> Iterator[None]:
    """Run Slurm's daemons, with their files in `folder`, until the context ends.

    `control` is where slurmctld runs, and ranks run on the `nodes`.
    """
    (folder / "state").mkdir()
    text = CONFIGURATION.format(control=f"{control.name}({control.address})", folder=folder)
    for node in nodes:
        (folder / f"spool.{node.name}").mkdir()
        text += NODE.format(name=node.name, address=node.address, cpus=os.cpu_count())
    configuration = folder / "slurm.conf"
    configuration.write_text(text)
    os.environ["SLURM_CONF"] = str(configuration)
    daemons = []
    try:
        commands = [[*control.start, "slurmctld", "-D"]]
        commands += [[*node.start, "slurmd", "-D", "-N", node.name] for node in nodes]
        for command in commands:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            daemons.append(subprocess.Popen(command, **quiet))
        end = time.monotonic() + READY_S
        states = [*control.start, "sinfo", "--noheader", "--Node", "--format=%T"]
        while _words_of(states) != ["idle"] * len(nodes):
            if time.monotonic() > end:
                raise TimeoutError(f"Slurm is not ready after {READY_S} s")
            time.sleep(0.2)
        yield
    finally:
        subprocess.run([*control.start, "scancel", "--user", "root"], check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _words_of(command: Sequence[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def where() -> list[Any]:
    """On each rank: its place in torch's variables, in a communicator, and as srun says; a sum."""
    import torch  # noqa: F401 - its import sets the variables

    import ringreduce as rr

    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"
    variables = [os.environ.get(name) for name in names]
    with rr.init() as comm:
        found = [comm.rank, comm.size, comm.all_reduce(1).item()]
    return [variables, found, int(os.environ["SLURM_PROCID"])]


def run(folder: Path, launcher: Sequence[str], ranks_of_hosts: Sequence[int]) -> dict[str, Any]:
    """Run ranks under srun; return what they found of their places, and the failed checks."""
    folder.mkdir()
    jobs, ranks = MpiJobs(folder), sum(ranks_of_hosts)
    jobs.launcher = list(launcher)
    several, by_mpi = len(ranks_of_hosts) > 1, MPI in launcher
    variables = HOSTS if several else {}
    if not by_mpi:  # all but the interface of Gloo is known from Slurm
        variables = {name: text for name, text in variables.items() if "MASTER" not in name}
    checks = "over_torch" if not several else "over_hosts" if by_mpi else "over_tcp"
    program = f"tests.torch.checks:{checks}"
    places = jobs.run_ok("call", ranks, "tests.long.slurm:where", **variables)
    outcomes = jobs.run_ok("call", ranks, program, timeout_s=300, **variables)
    address = variables.get("MASTER_ADDR", "host-1" if several else "localhost")
    wanted = [
        [[str(rank), str(ranks), str(local), address], [rank, ranks, ranks], rank]
        for rank, local in enumerate(local for count in ranks_of_hosts for local in range(count))
    ]
    row = {"ranks": ranks, "hosts": ",".join(map(str, ranks_of_hosts)), "checks": len(outcomes[0])}
    return row | {"places": places == wanted, "failed": failed_checks(outcomes)}


def on_one_host(folder: Path) -> Iterator[dict[str, Any]]:
    here = Host(socket.gethostname(), "localhost")
    with slurm(folder, here, [here]):
        for kind in KINDS:
            srun = ["srun", f"--mpi={kind}"]
            yield {"srun": srun[-1]} | run(folder / kind, srun, [2])


def on_two_hosts(folder: Path) -> Iterator[dict[str, Any]]:
    with hosts(2, "1gbit") as (hub, addresses, _):
        start = ["ip", "netns", "exec", hub]
        control = Host(socket.gethostname(), HUB_ADDRESS, start)
        nodes, names = [], folder / "hosts"
        lines = [f"{address} host-{number}" for number, address in enumerate(addresses, 1)]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for number, address in enumerate(addresses, 1):
            name, network = f"host-{number}", f"/run/netns/{hub.removesuffix('hub')}{number}"
            nodes.append(
                Host(name, address, ["nsenter", f"--net={network}", *APART, name, str(names)])
            )
        with slurm(folder, control, nodes):
            for kind in KINDS:
                srun = [*start, "srun", "--nodes=2", f"--mpi={kind}"]
                yield {"srun": srun[-1]} | run(folder / kind, srun, [2, 1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.slurm")
    parser.add_argument("--out", type=Path, help="where to record the runs, as JSON")
    options = parser.parse_args(argv)
    command = f"python -m tests.long.slurm {' '.join(sys.argv[1:] if argv is None else argv)}"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        (origin,) = MpiJobs(Path(name)).run_ok(
            "call", 1, "benchmarks.rows:environment", command.strip()
        )
        origin["slurm"] = subprocess.check_output(["slurmd", "-V"], text=True).strip()
        for campaign in on_one_host, on_two_hosts:
            folder = Path(name) / campaign.__name__
            folder.mkdir()
            for row in campaign(folder):
                rows.append(origin | row)
                print(json.dumps(row), flush=True)
    if options.out:
        record(options.out, rows, ("hosts", "srun"))
    return int(any(row["failed"] or not row["places"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
