"""The processes of a generation: an mpiexec and its ranks, and what the ranks ask and suspect.

After a live recovery the ranks that are left are the next generation.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ringreduce.config import LONGEST_S
from ringreduce.recovery.wire import WireMessage
from ringreduce.supervisor.cleanup import clean_up_job
from ringreduce.supervisor.ends import End
from ringreduce.supervisor.launcher import start_mpiexec
from ringreduce.supervisor.ranks import ENDING_S, Rank
from ringreduce.supervisor.signals import GRACE_S
from ringreduce.system.proc import is_exiting

_CONNECTING_S = 30.0
"""Seconds from the first rank that connects to the last; an MPI may not notice that one is gone."""
_READY_S = 120.0
"""Seconds in which a generation must be ready that starts beside the present one."""
_DRAIN_S = 0.1
"""Seconds that mpiexec has to pass on the last output of killed ranks."""
_GONE_S = 2.0
"""A reported loss is wrong if the end of the process is not seen within these seconds."""
_BLAME_S = 0.05
"""Seconds to wait for further reports of ranks that do not answer: a rank that reports is alive."""


@dataclass(frozen=True)
class _Suspicion:
    """A rank suspects that others are lost."""

    by: Rank
    ranks: frozenset[int]
    stopped: bool
    """Whether they do not answer; otherwise they are gone."""
    until: float
    """When it is judged, by the monotonic clock."""


class Generation:
    """A started generation, or what is left of it.

    `command` and `settings` are for `start_mpiexec`.  Raises LaunchError without an mpiexec.
    """

    def __init__(
        self, number: int, size: int, command: tuple[list[str], dict[str, str]], **settings: Any
    ) -> None:
        self.number, self.size = number, size
        self.ranks: list[Rank] = []
        """Ranks that have connected."""
        self.lost: list[Rank] = []
        """Ranks that were lost while the generation goes on."""
        self.done: set[Rank] = set()
        """The ranks whose program has ended without an error."""
        self.ready: list[Rank] = []
        """The ranks that are ready to take over, if the generation starts beside another one."""
        self.bug: End | None = None
        """The first end of a rank by an exception or an exit code."""
        self.code = 0
        """The exit code of that rank, or of all ranks that end in order; 0: not known."""
        self.exiting: list[Rank] = []
        """When a rank was lost: those that were about to end as well."""
        self.asking: dict[Rank, WireMessage] = {}
        """The question of each rank that waits for all others to ask."""
        self.asked_until: float | None = None
        """When ranks that have not asked count as stopped; None: no rank waits."""
        self._suspicions: list[_Suspicion] = []
        """Suspicions that are not judged yet."""
        self._leaving: dict[Rank, tuple[str, float]] = {}
        """Why a rank is to leave, and when it counts as lost if it has not left by then."""
        self._since = time.time()
        self._ready_until = time.monotonic() + _READY_S
        self._connect_until: float | None = None
        """When all ranks must have connected; None: none has."""
        self.kill_at: float | None = None
        """When `tick` kills mpiexec unless it has ended; None: it may run."""
        self.is_killed = False
        self.process = start_mpiexec(*command, **settings)

    # --- its ranks ---

    def connect(self, rank: Rank) -> None:
        if self._connect_until is None:
            self._connect_until = time.monotonic() + _CONNECTING_S
        self.ranks.append(rank)

    @property
    def living(self) -> list[Rank]:
        """The ranks that have connected and are not lost."""
        return [rank for rank in self.ranks if rank not in self.lost]

    @property
    def missing(self) -> list[int]:
        """The numbers of the ranks that have not connected in time."""
        if self.is_complete or self._connect_until is None:
            return []
        late = time.monotonic() >= self._connect_until
        return sorted(set(range(self.size)) - {int(rank.number) for rank in self.ranks}) * late

    @property
    def is_complete(self) -> bool:
        return len(self.ranks) == self.size

    @property
    def is_gone(self) -> bool:
        return all(rank.gone for rank in self.ranks)

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in sorted(self.ranks, key=lambda rank: int(rank.number))]

    def shrink(self, number: int) -> None:
        """Become generation `number`, without the lost ranks; the others are numbered from 0."""
        self.number = number
        self.ranks = sorted(self.living, key=lambda rank: int(rank.number))
        self.size = len(self.ranks)
        for place, rank in enumerate(self.ranks):
            rank.number = str(place)

    # --- what its ranks ask together ---

    def ask(self, rank: Rank, message: WireMessage, timeout_s: float) -> None:
        """Let a rank wait until all ask; the others have `timeout_s` from the first question."""
        if self.asked_until is None:
            self.asked_until = time.monotonic() + min(timeout_s, LONGEST_S)
        self.asking[rank] = message

    @property
    def have_all_asked(self) -> bool:
        return self.asking.keys() >= set(self.living)

    @property
    def silent(self) -> list[Rank]:
        """The living ranks that do not wait, though others do."""
        return [rank for rank in self.living if rank not in self.asking] if self.asking else []

    @property
    def asked(self) -> list[tuple[str, int]]:
        """The kind of each living rank's question, and its new communicator's size; 0: none."""
        asked = (self.asking[rank] for rank in self.living)
        return [(message.kind, int(message.fields.get("size", 0))) for message in asked]

    def who_asked(self, kind: str) -> list[Rank]:
        return [rank for rank, message in self.asking.items() if message.kind == kind]

    def answer(
        self, ranks: Iterable[Rank], kind: str, files: Sequence[int] = (), **fields: Any
    ) -> None:
        ranks = list(ranks)
        self.forget(ranks)
        for rank in ranks:
            rank.connection.send(kind, files, **fields)

    def forget(self, ranks: Iterable[Rank]) -> None:
        for rank in list(ranks):
            self.asking.pop(rank, None)
        if not self.asking:
            self.asked_until = None

    # --- what its ranks suspect: they wait for an answer ---

    def suspect(self, by: Rank, ranks: Collection[int], *, stopped: bool) -> None:
        """Note that a rank suspects others; `stopped`: they do not answer."""
        until = time.monotonic() + (_BLAME_S if stopped else _GONE_S)
        self._suspicions.append(_Suspicion(by, frozenset(ranks), stopped, until))

    @property
    def blamed(self) -> list[Rank]:
        """The ranks that do not answer, once all others have had time to report."""
        now = time.monotonic()
        if all(each.until > now for each in self._suspicions):
            return []
        alive = {int(each.by.number) for each in self._suspicions}
        stopped = frozenset().union(*(e.ranks for e in self._suspicions if e.stopped)) - alive
        return [rank for rank in self.ranks if int(rank.number) in stopped]

    def take_suspecting(self, by: float = float("inf")) -> list[Rank]:
        """Return the ranks whose suspicions are due `by` a time; forget what they suspect."""
        due = [each for each in self._suspicions if each.until <= by]
        self._suspicions = [each for each in self._suspicions if each.until > by]
        return [each.by for each in due]

    # --- its ranks that are to leave ---

    def leaves(self, rank: Rank, cause: str, grace_s: float) -> None:
        """Note that `rank` has to leave within `grace_s`, and why."""
        self._leaving.setdefault(rank, (cause, time.monotonic() + grace_s))

    @property
    def leaving(self) -> dict[int, str]:
        """The number of each living rank that has to leave, with the cause."""
        living = self.living
        return {int(r.number): cause for r, (cause, _) in self._leaving.items() if r in living}

    def take_overdue(self) -> dict[Rank, str]:
        """Return the living ranks whose time to leave is over, each once, with the cause."""
        now = time.monotonic()
        found = {rank: cause for rank, (cause, until) in self._leaving.items() if now >= until}
        for rank in found:
            del self._leaving[rank]
        living = self.living
        return {rank: cause for rank, cause in found.items() if rank in living}

    @property
    def owes_at(self) -> float | None:
        """When ranks that ask, suspect or leave have to be looked at; None: none does."""
        times = [each.until for each in self._suspicions]
        times += [until for _, until in self._leaving.values()]
        if self.asked_until is not None:
            times.append(self.asked_until)
        return min(times, default=None)

    # --- a generation that starts beside the present one ---

    @property
    def is_ready(self) -> bool:
        return len(self.ready) == self.size

    @property
    def ready_until(self) -> float | None:
        """Deadline for `is_ready`; None once it is."""
        return None if self.is_ready else self._ready_until

    # --- its end ---

    def kill(self) -> None:
        """Kill all ranks; mpiexec may still pass on their last output."""
        self.lost.clear()
        self.forget(self.asking)
        self._suspicions.clear()
        self._leaving.clear()
        for rank in self.ranks:
            rank.kill()
        self.expect_end(_DRAIN_S)

    def expect_end(self, within_s: float = GRACE_S) -> None:
        """Kill mpiexec after `within_s` unless it has ended by then."""
        at = time.monotonic() + within_s
        if not self.is_killed:
            self.kill_at = at if self.kill_at is None else min(at, self.kill_at)

    @property
    def wakes_at(self) -> float | None:
        """When mpiexec is killed, or a rank is missing; None: never."""
        if self.kill_at is None and not self.is_killed and not self.is_complete:
            return self._connect_until
        return self.kill_at

    def tick(self, now: float) -> None:
        if self.kill_at is not None and now >= self.kill_at:
            self.is_killed, self.kill_at = True, None
            self.process.kill()

    @property
    def lost_mpiexec(self) -> bool:
        """Whether a signal that `tick` has not sent has ended mpiexec."""
        return not self.is_killed and end_of_mpiexec(self.process) < 0

    def clean_up(self, dying_s: float) -> None:
        """Remove the files of the ended generation; its ranks have `dying_s` seconds to end."""
        dying_s = 0 if self.is_complete and self.is_gone else dying_s
        clean_up_job(self.process.pid, since=self._since, dying_s=dying_s)


def end_of_mpiexec(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of an mpiexec that has ended, negative for a signal; 0 if it runs.

    Waits for an end that has begun: mpiexec closes its files first, and its ranks may be gone
    before the kernel reports its end.
    """
    if process.poll() is None and is_exiting(process.pid):
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    return process.returncode or 0
