"""Several hosts on one machine: network namespaces, joined by links of a given rate.

    python -m benchmarks.hosts --ranks 1,1 --rate 1gbit -- python -m benchmarks.overlap

Needs root, ``ip`` and ``tc``.  Each host has its own network, process ids, shared memory and name,
so that an MPI takes it for another machine; the cores are shared by all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rows import HOSTS

_NETWORK = "10.99.0"
_BRIDGE, HUB_ADDRESS = "bridge", f"{_NETWORK}.254"
"""The bridge between the hosts, where mpiexec runs, and its address."""
_BURST, _LATENCY = "256kb", "100ms"
_LAUNCHER = """#!/bin/sh
# Called with options, an address and a command, as ssh is.
while case $1 in -*) true;; *) false;; esac; do shift; done
host=$1; shift
export TMPDIR=$(mktemp -d {folder}/$host-XXXXXX)  # a killed job of Open MPI leaves files
exec ip netns exec {prefix}-${{host##*.}} unshare --uts --ipc --mount --pid --fork --mount-proc \\
    sh -c 'hostname "host-${{1##*.}}"; mount -t tmpfs tmpfs /dev/shm; shift; eval "$*"' \\
    sh "$host" "$@"
"""


def _do(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[tuple[str, list[str], Path]]:
    """The hub's namespace, the hosts' addresses, and what mpiexec starts commands on them with.

    `rate`: of each host's link, as tc writes it; or of the hosts in turn, "1gbit,500mbit".
    """
    prefix = f"rr{os.getpid()}"
    hub = f"{prefix}-hub"
    made: list[str] = []
    rates = rate.split(",")
    with tempfile.TemporaryDirectory(prefix="rr-hosts-") as folder:
        try:
            for name in (hub, *(f"{prefix}-{i}" for i in range(1, count + 1))):
                _do(f"ip netns add {name}")
                made.append(name)
                _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {hub} link add {_BRIDGE} type bridge")
            _do(f"ip -n {hub} addr add {HUB_ADDRESS}/24 dev {_BRIDGE}")
            _do(f"ip -n {hub} link set {_BRIDGE} up")
            for i in range(1, count + 1):
                host, port = f"{prefix}-{i}", f"port{i}"
                _do(f"ip -n {hub} link add {port} type veth peer name eth0 netns {host}")
                _do(f"ip -n {hub} link set {port} master {_BRIDGE} up")
                _do(f"ip -n {host} addr add {_NETWORK}.{i}/24 dev eth0")
                _do(f"ip -n {host} link set eth0 up")
                for end in (f"-n {hub} qdisc add dev {port}", f"-n {host} qdisc add dev eth0"):
                    own = rates[(i - 1) % len(rates)]
                    _do(f"tc {end} root tbf rate {own} burst {_BURST} latency {_LATENCY}")
            launcher = Path(folder) / "launch"
            launcher.write_text(_LAUNCHER.format(prefix=prefix, folder=folder))
            launcher.chmod(0o755)
            yield hub, [f"{_NETWORK}.{i}" for i in range(1, count + 1)], launcher
        finally:
            for name in made:
                _do(f"ip netns del {name}")


def command_line(
    mpiexec: Path, ranks: Sequence[int], addresses: Sequence[str], launcher: Path
) -> tuple[list[str], dict[str, str]]:
    """mpiexec's, up to the program, and variables for it: Open MPI's, MPICH's or Intel MPI's."""
    placed = ",".join(f"{a}:{n}" for a, n in zip(addresses, ranks, strict=True))
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    start = [str(mpiexec), "-n", str(sum(ranks))]
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        network = f"{_NETWORK}.0/24"
        settings = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": network,
            "OMPI_MCA_mpi_yield_when_idle": "true",
            "PRTE_MCA_plm_ssh_agent": str(launcher),
            "PRTE_MCA_prte_if_include": network,
        }
        exported = [word for name in settings for word in ("-x", name) if name.startswith("OMPI")]
        options = ["--prtemca", "plm_ssh_agent", str(launcher), "--bind-to", "none"]
        return [*start, "--host", placed, *options, *exported], settings
    settings = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "I_MPI_HYDRA_IFACE": _BRIDGE}
    options = ["-launcher", "ssh", "-launcher-exec", str(launcher)]
    return [*start, "-hosts", placed, *options, "-localhost", HUB_ADDRESS], settings


def main() -> int:
    """Run a program on such hosts."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", default="1,1", help="ranks of each host")
    parser.add_argument(
        "--rate", default="1gbit", help="of each host's link, or of the hosts in turn"
    )
    parser.add_argument("program", nargs="+", help="after --")
    arguments = parser.parse_args()
    ranks = [int(count) for count in arguments.ranks.split(",")]
    mpiexec = Path(sys.executable).parent / "mpiexec"
    with hosts(len(ranks), arguments.rate) as (hub, addresses, launcher):
        start, settings = command_line(mpiexec, ranks, addresses, launcher)
        told = f"--ranks {arguments.ranks} --rate {arguments.rate}"
        environment = {**os.environ, **settings, HOSTS: told}
        return subprocess.call(
            ["ip", "netns", "exec", hub, *start, *arguments.program], env=environment
        )


if __name__ == "__main__":
    sys.exit(main())
