"""Jobs on two hosts, which are network namespaces: a launcher in the place of torchrun's two.

    python -m tests.support.hosts 2,1 LAUNCHER ADDRESS ADDRESS -n 3 COMMAND...

Starts the ranks with torchrun's variables.  As on Debian, the names of the hosts resolve to
127.0.1.1.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import hosts
from tests.support.mpi import ROOT, MpiJobs

LAYOUT = "2,1"
NAMES = "127.0.0.1 localhost\n127.0.1.1 host-1 host-2\n"


class JobsOnHosts(MpiJobs):
    """Starts jobs on two hosts, and kills, stops or disconnects a host."""

    def __init__(self, folder: Path, hub: str, addresses: list[str], launcher: Path) -> None:
        super().__init__(folder, without_mpi=True)
        module = [sys.executable, "-m", "tests.support.hosts"]
        self.launcher = [*module, LAYOUT, str(launcher), *addresses]
        self._hub, self._prefix = hub, hub.removesuffix("hub")

    def signal(self, host: int, number: signal.Signals) -> None:
        """Send a signal to all processes of a host, which counts from 1."""
        words = ["ip", "netns", "pids", f"{self._prefix}{host}"]
        for process in subprocess.check_output(words, text=True).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), number)

    def connect(self, host: int, state: str) -> None:
        """Set the link of a host "up" or "down"."""
        words = ["ip", "-n", self._hub, "link", "set", f"port{host}", state]
        subprocess.run(words, check=True)


@contextlib.contextmanager
def jobs_on_hosts(folder: Path) -> Iterator[JobsOnHosts]:
    """Make two hosts.  Skip the test where namespaces are not permitted; fail there in CI."""
    with contextlib.ExitStack() as closing:
        try:
            made = closing.enter_context(hosts(2, "1gbit"))
        except OSError as error:  # also without `ip`
            complain = pytest.fail if os.environ.get("CI") else pytest.skip
            complain(f"no network namespaces here: {error}")
        jobs = JobsOnHosts(folder, *made)
        closing.callback(jobs.sweep)
        yield jobs


def main() -> int:
    layout, launcher, *rest = sys.argv[1:]
    ranks_of = [int(count) for count in layout.split(",")]
    addresses, command = rest[: len(ranks_of)], shlex.join(rest[len(ranks_of) + 2 :])
    ranks, started = iter(range(sum(ranks_of))), []
    with tempfile.NamedTemporaryFile("w") as names:
        names.write(NAMES)
        names.flush()
        job = {"WORLD_SIZE": str(sum(ranks_of)), "MASTER_ADDR": addresses[0]}
        job |= {"MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "eth0"}
        for address, count in zip(addresses, ranks_of, strict=True):
            here = [f"RANK={next(ranks)} LOCAL_RANK={local} {command}" for local in range(count)]
            lines = [f"mount --bind {names.name} /etc/hosts", f"cd {shlex.quote(str(ROOT))}"]
            lines += [f'{words} & processes="$processes $!"' for words in here]
            lines += ["for each in $processes; do wait $each || code=$?; done", "exit ${code:-0}"]
            variables = os.environ | job | {"LOCAL_WORLD_SIZE": str(count)}
            words = [launcher, address, "\n".join(lines)]
            started.append(subprocess.Popen(words, env=variables))
        codes = [each.wait() for each in started]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
