"""Jobs on two hosts, which are network namespaces: by mpiexec, or in the place of torchrun's two.

    python -m tests.support.hosts HUB 2,1 LAUNCHER ADDRESS ADDRESS -n 3 COMMAND...

Starts the ranks by mpiexec in the namespace HUB.  If HUB is empty, it starts them with torchrun's
variables; as on Debian, the names of the hosts then resolve to 127.0.1.1.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import command_line, hosts
from tests.support.mpi import DEADLINE_S, ROOT, MpiJobs, mpiexec

LAYOUT = "2,1"
NAMES = "127.0.0.1 localhost\n127.0.1.1 host-1 host-2\n"


class JobsOnHosts(MpiJobs):
    """Starts jobs on two hosts, and kills, stops or disconnects a host."""

    def __init__(
        self, folder: Path, hub: str, addresses: list[str], launcher: Path, by_mpi: bool = False
    ) -> None:
        super().__init__(folder, without_mpi=True)
        module = [sys.executable, "-m", "tests.support.hosts", hub if by_mpi else ""]
        self.launcher = [*module, LAYOUT, str(launcher), *addresses]
        self._made = hub, addresses, launcher
        self._hub, self._prefix = hub, hub.removesuffix("hub")

    def by_mpi(self, folder: Path) -> JobsOnHosts:
        """Return what starts jobs on the same hosts by mpiexec."""
        return JobsOnHosts(folder, *self._made, by_mpi=True)

    def signal(self, host: int, number: signal.Signals) -> None:
        """Send a signal to all processes of a host, which counts from 1."""
        for process in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def processes(self, host: int) -> list[int]:
        words = ["ip", "netns", "pids", f"{self._prefix}{host}"]
        return [*map(int, subprocess.check_output(words, text=True).split())]

    def let_fail(self, fault: str, timeout_s: float, count: int, after_s: float = 0.0) -> list[Any]:
        """Let the second host fail in the middle of calls; return what ranks 0 and 1 report.

        `fault`: "kill", "stop" or "disconnect", `after_s` seconds after the first call.  The calls
        reduce `count` elements.  If a host is killed, an MPI ends the job: the ranks report None.
        """
        program = "tests.support.over_hosts:interrupted"
        job = self.start("call", 3, program, str(timeout_s), str(count))
        try:
            self._wait_for(job, "began*", 3)
            time.sleep(after_s)
            if fault == "disconnect":
                self.connect(2, "down")
            else:
                self.signal(2, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            self._wait_for(job, "[01].json", 2)
        except BaseException:
            self.signal(1, signal.SIGKILL)
            self.kill(job)
            raise
        finally:
            self.connect(2, "up")
            self.signal(2, signal.SIGKILL)
        return self.finish(job).results[:2]

    def _wait_for(self, job: subprocess.Popen[str], names: str, count: int) -> None:
        """Wait until a job has written `count` files of these names, or has ended."""
        end = time.monotonic() + DEADLINE_S
        while job.poll() is None and len([*job.results.glob(names)]) < count:  # type: ignore[attr-defined]
            assert time.monotonic() < end
            time.sleep(0.02)

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
    hub, layout, launcher, *rest = sys.argv[1:]
    ranks_of = [int(count) for count in layout.split(",")]
    addresses, words = rest[: len(ranks_of)], rest[len(ranks_of) + 2 :]
    if hub:
        start, settings = command_line(Path(mpiexec()), ranks_of, addresses, Path(launcher))
        os.environ.update(settings)
        os.execvp("ip", ["ip", "netns", "exec", hub, *start, *words])
    command = shlex.join(words)
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
