"""The ranks of a job on this host without MPI: children of the launcher, which meet by `env://`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO

from ringreduce.launch.job import die_with_parent
from ringreduce.place import HYDRA, OPEN_MPI, RANK_VARIABLES, SET_BY, SRUN, port_of

_OF_MPIS = {"PMI_FD", *RANK_VARIABLES, *HYDRA, *OPEN_MPI, *SRUN}
"""Variables of a launcher in whose job this one runs: no rank may take itself for one of that."""
_GRACE_S = 5.0
"""Seconds that ranks may take to end after a signal that should end them."""
_DRAIN_S = 1.0
"""Seconds to wait for the end of the output, which a process that a rank left may hold open."""


class Processes:
    """Start ranks.  They stand in for an mpiexec: this has the parts of `Popen` that count then.

    The first rank that fails ends the others.  Each rank has a session of its own: the terminal
    sends its signals to the launcher alone.
    """

    def __init__(
        self,
        argv: list[str],
        environment: Mapping[str, str],
        ranks: int,
        mask: set[int | signal.Signals],
        *,
        tags: bool,
    ) -> None:
        """Start `ranks` ranks, with the signals of `mask` blocked; `tags`: tag their output."""
        self.pid = launcher = os.getpid()
        self.returncode: int | None = None
        self.killed: int | None = None
        """The rank that ended the job because a signal killed it; None: no signal did."""
        self._code, self._kill_at = 0, float("inf")
        self._left: dict[subprocess.Popen[bytes], int] = {}
        """The ranks that run."""
        self._tagging: list[threading.Thread] = []
        others = {name: value for name, value in environment.items() if name not in _OF_MPIS}
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port_of(str(launcher)))} | others
        place |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), SET_BY: str(launcher)}

        def tie() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent(signal.SIGKILL, launcher)

        output = subprocess.PIPE if tags else None
        try:
            for rank in range(ranks):
                process = subprocess.Popen(
                    argv,
                    env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL if rank or sys.stdin is None else None,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=tie,
                )
                self._left[process] = rank
        except BaseException:
            self.kill()
            raise
        for process, rank in self._left.items():
            for target, source in ((1, process.stdout), (2, process.stderr)):
                if source is not None:
                    arguments = (source, target, b"[%d] " % rank)
                    thread = threading.Thread(target=_tag, args=arguments, daemon=True)
                    thread.start()
                    self._tagging.append(thread)

    def poll(self) -> int | None:
        """Return the exit code of the job, 128 + n after signal n; None: ranks run."""
        ended = [each for each in self._left if each.poll() is not None]
        rank_of = {each: self._left.pop(each) for each in ended}
        failed = [each for each in ended if each.returncode]
        if failed and not self._code:
            # A signal, which is negative, goes first.  Ranks that lost another rank end with 1.
            first = min(failed, key=lambda each: (each.returncode > 0, -each.returncode))
            self._code = first.returncode
            self.killed = rank_of[first] if self._code < 0 else None
            self.send_signal(signal.SIGTERM)
        if time.monotonic() >= self._kill_at:
            self.kill()
        if not self._left and self.returncode is None:
            for thread in self._tagging:
                thread.join(_DRAIN_S)
            self.returncode = self._code if self._code >= 0 else 128 - self._code
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to all ranks; one that ends jobs ends them as SIGTERM does."""
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            number = signal.SIGTERM
            self._kill_at = min(self._kill_at, time.monotonic() + _GRACE_S)
        self._send(number)

    def kill(self) -> None:
        """Kill all ranks, and the processes that they have started."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for process in self._left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _tag(source: IO[bytes], target: int, tag: bytes) -> None:
    """Write the lines of `source` to a descriptor, each after a tag and in one piece."""
    with source:
        for line in source:
            with contextlib.suppress(OSError):  # a rank must not wait because nobody reads
                os.write(target, tag + line.removesuffix(b"\n") + b"\n")
