"""The ranks that this host has room for: a command of the user prints them, every 5 seconds.

The command prints a line ``host:slots`` for each host, as the scripts for Horovod's
``--host-discovery-script`` and those of the MPI operator do; a host without slots counts one.  Only
this host has ranks.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO

from ringreduce.supervisor.membership import Rules
from ringreduce.supervisor.signals import heed_again

_EVERY_S = 5.0
"""Seconds between two questions."""
_ANSWER_S = 30.0
"""Seconds in which the command must end."""
_AGAIN_S = 60.0
"""Seconds until the same number of slots is news again, after ranks could not start."""


class DiscoveryError(ValueError):
    """The command has failed; the text says how."""


class Discovery:
    def __init__(self, command: str) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        """The command while it runs; `_output` is the file that it writes."""
        self._output: IO[bytes]
        self._has_failed = False
        self._found = -1
        """The slots that it has found last; -1: none yet."""
        self._news_at = 0.0
        """When the same slots are news again."""
        self.wakes_at = 0.0
        """When `tick` has something to do: when the command is to run, or must have ended."""

    def first(self, rules: Rules) -> int:
        """Run the command, and return the number of ranks to begin with.

        Raises DiscoveryError if the command fails, or has room for too few ranks.
        """
        process = self._begin()
        try:
            process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            raise self._end(process, f"did not end within {_ANSWER_S:g} s") from None
        except BaseException:  # the user does not want to wait
            self.close()
            raise
        slots = self._slots(process)
        if slots < rules.least:
            raise DiscoveryError(
                f"--discover has room for ranks: {slots}; --elastic wants at least {rules.least}"
            )
        return min(slots, rules.ranks)

    def tick(self, now: float) -> int | None:
        """Run the command if it is time.  Returns the slots of this host, once for each run.

        Raises DiscoveryError if the command has failed.
        """
        process = self._process
        if process is None:
            if now >= self.wakes_at:
                self._begin()
        elif process.poll() is not None:
            return self._slots(process)
        elif now >= self.wakes_at:
            raise self._end(process, f"did not end within {_ANSWER_S:g} s")
        return None

    def news(self, now: float, complain: Callable[[str], None]) -> int | None:
        """Run the command if it is time, and return the slots that ranks are to follow.

        Calls `complain` with the text of the first of several failures in a row.
        """
        try:
            slots = self.tick(now)
        except DiscoveryError as error:
            if not self._has_failed:
                complain(str(error))
            self._has_failed = True
            return None
        if slots is None:
            return None
        self._has_failed = False
        is_known, self._found = slots == self._found, slots
        return None if is_known and now < self._news_at else slots

    def put_off(self) -> None:
        """Ignore the same number of slots for a minute: ranks could not start."""
        self._news_at = time.monotonic() + _AGAIN_S

    def close(self) -> None:
        if self._process is not None:
            self._end(self._process, "")

    def _begin(self) -> subprocess.Popen[bytes]:
        self.wakes_at = time.monotonic() + _ANSWER_S
        output = None
        try:
            output = tempfile.TemporaryFile()  # noqa: SIM115  # read when the command has ended
            self._process = subprocess.Popen(
                shlex.split(self._command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                start_new_session=True,
                preexec_fn=heed_again,
            )
        except (OSError, ValueError, IndexError) as error:
            if output is not None:
                output.close()
            self.wakes_at = time.monotonic() + _EVERY_S
            raise DiscoveryError(f"--discover {self._command!r} cannot run: {error}") from None
        self._output = output
        return self._process

    def _end(self, process: subprocess.Popen[bytes], why: str) -> DiscoveryError:
        if process.poll() is None:
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user now
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._output.close()
        self._process = None
        self.wakes_at = time.monotonic() + _EVERY_S
        return DiscoveryError(f"--discover {self._command!r} {why}")

    def _slots(self, process: subprocess.Popen[bytes]) -> int:
        self._output.seek(0)
        text, code = self._output.read().decode(errors="replace"), process.returncode
        error = self._end(process, f"ended with exit code {code}")
        if code:
            raise error
        return slots_of(text)


def slots_of(text: str) -> int:
    """Return the slots of this host in the output of the command.

    Raises DiscoveryError for a line that is none, or that names another host.

    >>> slots_of("localhost:4")
    4
    """
    total = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        host, colon, count = line.partition(":")
        if not host or (colon and not count.isdecimal()):
            raise DiscoveryError(f"--discover printed {line!r}; wanted host:slots")
        if host not in ("localhost", "127.0.0.1", platform.node()):
            raise DiscoveryError(
                f"--discover printed {line!r}; all ranks run on this host, {platform.node()}"
            )
        total += int(count) if colon else 1
    return total
