"""The processes of a generation: an mpiexec and its ranks.

After a live recovery the ranks that are left are the next generation.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ringreduce.supervisor.cleanup import clean_up_job
from ringreduce.supervisor.ends import End
from ringreduce.supervisor.launcher import GRACE_S, Job, prepared, start_mpiexec
from ringreduce.supervisor.mpiexec import Mpiexec
from ringreduce.supervisor.ranks import ENDING_S, Rank, is_exiting

_CONNECTING_S = 30.0
"""Seconds from the first rank that connects to the last; an MPI may not notice that one is gone."""
_DRAIN_S = 0.1
"""Seconds that mpiexec has to pass on the last output of killed ranks."""


class Generation:
    """A started generation, or what is left of it.  Raises OSError without an mpiexec."""

    def __init__(
        self,
        number: int,
        job: Job,
        mpiexec: Mpiexec,
        given: Mapping[str, str],
        address: str,
        token: str,
    ) -> None:
        self.number, self.size = number, job.ranks
        self.ranks: list[Rank] = []
        """Those that have connected."""
        self.done: set[Rank] = set()
        """The ranks whose program has ended without an error."""
        self.bug: End | None = None
        """The first end of a rank by an exception or an exit code."""
        self.code = 0
        """The exit code of that rank, or of all ranks that end in order; 0: not known."""
        self.exiting: list[Rank] = []
        """When a rank was lost: those that were about to end as well."""
        self._since = time.time()
        self._connect_until: float | None = None
        """When all ranks must have connected; None: none has."""
        self._kill_at: float | None = None
        """When mpiexec is killed unless it has ended; None: it may run."""
        self.is_killed = False
        """Whether `tick` has killed mpiexec."""
        argv, environment = prepared(job, mpiexec, given, address, token, elastic=True)
        # The terminal must not signal mpiexec: the supervisor decides what follows.
        self.process = start_mpiexec(
            argv, environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def connect(self, rank: Rank) -> None:
        """A rank has connected."""
        if self._connect_until is None:
            self._connect_until = time.monotonic() + _CONNECTING_S
        self.ranks.append(rank)

    @property
    def missing(self) -> list[int]:
        """The numbers of the ranks that have not connected in time."""
        if self.is_complete or self._connect_until is None:
            return []
        late = time.monotonic() >= self._connect_until
        return sorted(set(range(self.size)) - {int(rank.number) for rank in self.ranks}) * late

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have connected."""
        return len(self.ranks) == self.size

    @property
    def is_gone(self) -> bool:
        """Whether all ranks that have connected are gone."""
        return all(rank.gone for rank in self.ranks)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, from rank 0 on."""
        return [rank.pid for rank in sorted(self.ranks, key=lambda rank: int(rank.number))]

    def shrink(self, number: int, lost: Iterable[Rank]) -> None:
        """Be generation `number`, without the lost ranks; the others are numbered from 0."""
        self.number = number
        left = set(self.ranks) - set(lost)
        self.ranks = sorted(left, key=lambda rank: int(rank.number))
        self.size = len(self.ranks)
        for place, rank in enumerate(self.ranks):
            rank.number = str(place)

    def kill(self) -> None:
        """Kill all ranks; mpiexec may pass on their last output."""
        for rank in self.ranks:
            rank.kill()
        self.expect_end(_DRAIN_S)

    def expect_end(self, within_s: float = GRACE_S) -> None:
        """Kill mpiexec after so many seconds unless it has ended by then."""
        at = time.monotonic() + within_s
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    @property
    def wakes_at(self) -> float | None:
        """When `tick` has something to do; None: never."""
        if self.is_killed:
            return None
        return (
            self._connect_until if self._kill_at is None and not self.is_complete else self._kill_at
        )

    def tick(self, now: float) -> None:
        """Kill mpiexec if its time is over; its ranks go with it."""
        if self._kill_at is not None and now >= self._kill_at and not self.is_killed:
            self.is_killed = True
            self.process.kill()

    @property
    def lost_mpiexec(self) -> bool:
        """Whether a signal has ended mpiexec that `tick` has not sent."""
        return not self.is_killed and end_of_mpiexec(self.process) < 0

    def clean_up(self, dying_s: float) -> None:
        """Remove the files that the ended generation has left behind.

        Ranks that have not connected get at most `dying_s` seconds to end; the others have ended.
        """
        dying_s = 0 if self.is_complete else dying_s
        clean_up_job(self.process.pid, since=self._since, dying_s=dying_s)


def end_of_mpiexec(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of an mpiexec that has ended, negative for a signal; 0 if it runs.

    If the end has begun, wait for it: mpiexec closes its files first.  Its ranks are killed then,
    and may be gone before the kernel reports the end of mpiexec.
    """
    if process.poll() is None and is_exiting(process.pid):
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    return process.returncode or 0
