"""Decide which ranks belong to a job after a loss or a wish: decisions alone, without a process.

The supervisor reports events to a `Membership`, and carries out the `Decision` that it returns.
A *generation* is one membership.  It starts (its processes begin), runs (it has a communicator),
and ends.  Another follows it at one of three levels.

- Level 1, live: the ranks that are left make a communicator of their own, which is the next
  generation.  The MPI must go on after losses.
- Level 2, relaunch: all ranks of the generation are killed, and none may write any more, before the
  processes of the next generation start.  It also follows a level 1 that is not over in time.
- Level 3, handover: a number of ranks is wanted, or ranks are to leave.  The processes of the next
  generation start beside the present ones.  When they are ready, the present ranks pause after the
  same step, and end; the next generation begins with that step.  If the MPI goes on after losses,
  and no rank joins, nothing starts: the ranks that leave end, and the others go on as at level 1.

If a rank is lost while the next generation starts, the present one recovers as usual.  If it has to
be killed, the next one takes over.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ringreduce.errors import counted
from ringreduce.recovery.change import Change

TOO_FEW = 75
"""Exit code where too few ranks are left (``EX_TEMPFAIL`` of sysexits.h: try again later)."""
_HOUR_S = 3600.0
_AT_ONCE_S = 0.1
"""Seconds in which two losses are one fault, and do not show that the step itself is at fault."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which a process ends itself: while ranks shrink, the MPI has failed."""
_LIVE_S = 3.0
"""Seconds in which ranks make a communicator of their own, once all that are left take part."""
_CATCHING_UP_S = 10.0
"""Seconds in which ranks then get the arrays of the last step."""
_SAVING_S = 5.0
"""Seconds of the grace in which the state is saved; half the grace, if that is less."""


@dataclass(frozen=True)
class Rules:
    """The limits of a job.  Raises ValueError where they contradict each other."""

    ranks: int
    """Ranks of the first generation."""
    least: int
    """The fewest ranks that go on."""
    most: int
    """The most ranks."""
    max_failures: int | None = None
    """The most ranks that may be lost within an hour; None: 3 for each of the most ranks."""
    wait_s: float = 60.0
    """Seconds to wait for more ranks where too few are left."""
    grace_s: float = 30.0
    """Seconds in which ranks must end that were told to end."""
    replace: bool = False
    """Whether the next generation has as many ranks as the one before, not those that are left."""
    recovery: str = "auto"
    """``"live"``: level 1 first; ``"relaunch"``: level 2; ``"auto"``: level 1 if there is one."""

    slow: str = "report"
    """``"report"``: an event names a slow rank; ``"drop"``: it leaves."""

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ValueError(f"--elastic: MIN is {self.least}; wanted at least 1 rank")
        if self.least > self.most:
            raise ValueError(f"--elastic: MIN is {self.least}, more than MAX, {self.most}")
        if not self.least <= self.ranks <= self.most:
            raise ValueError(
                f"-n is {self.ranks}; --elastic allows {self.least} to {self.most} ranks"
            )
        if self.replace and self.recovery == "live":
            raise ValueError("--recovery live cannot replace a rank; leave --replace out")
        if self.max_failures is not None and self.max_failures < 0:
            raise ValueError(f"--max-failures is {self.max_failures}; wanted at least 0")
        for option, seconds in (("--wait-s", self.wait_s), ("--grace-s", self.grace_s)):
            if not 0 <= seconds < math.inf:
                raise ValueError(
                    f"{option} is {seconds:g}; wanted a finite number of at least 0 seconds"
                )

    def check_size(self, size: int) -> None:
        if not self.least <= size <= self.most:
            raise ValueError(f"wanted ranks: {size}; --elastic allows {self.least} to {self.most}")

    def clamped(self, size: int) -> int:
        return min(max(size, self.least), self.most)

    @property
    def budget(self) -> int:
        """The most ranks that may be lost within an hour."""
        return 3 * self.most if self.max_failures is None else self.max_failures


class Phase(StrEnum):
    STARTING = "starting"
    """The processes of a generation begin; they have no communicator yet."""
    RUNNING = "running"
    """A generation trains."""
    SHRINKING = "shrinking"
    """Ranks were lost; the others make a communicator of their own."""
    FENCING = "fencing"
    """The processes of the generation end: they are being killed, or leave."""
    WAITING = "waiting"
    """Too few ranks are left."""
    ENDED = "ended"
    """No generation follows."""


@dataclass(frozen=True)
class Lost:
    """A rank that a generation lost."""

    rank: int
    signal: int
    """The signal that killed it; 0 if it is not known, or if it did not answer."""

    def __str__(self) -> str:
        if not self.signal:
            return f"rank {self.rank} did not answer"
        name = signal.Signals(self.signal).name
        return f"rank {self.rank} was killed by signal {self.signal} ({name})"


class Next(StrEnum):
    START = "start"
    FENCE = "fence"
    """Kill all ranks of the generation, and let none write."""
    SHRINK = "shrink"
    """Have the ranks that are left make a communicator of their own, once all have asked."""
    MEET = "meet"
    """Have them make it now."""
    GO_ON = "go on"
    """Begin the generation of the ranks that are left; all have its communicator."""
    PREPARE = "prepare"
    """Start the processes of the next generation beside the present one.  Others that were started
    for it before are not wanted any more."""
    DROP = "drop"
    """Kill the processes that have started for the next generation."""
    PAUSE = "pause"
    """Have all ranks pause after the same step."""
    RESUME = "resume"
    """Have no rank pause, for some have finished."""
    RETURN = "return"
    """Have all ranks return from `elastic`; all have finished."""
    LEAVE = "leave"
    """Have all ranks end; all have paused after the same step."""
    PART = "part"
    """Have some ranks end, and the others make a communicator; all have paused."""
    TAKE_OVER = "take over"
    """Begin a generation whose processes have started beside the one before."""
    STOP = "stop"
    """Say why the job ends, and end with an exit code."""


@dataclass(frozen=True)
class Decision:
    """The next thing that the supervisor does, and its values."""

    kind: Next
    size: int = 0
    """Ranks of the generation that starts."""
    generation: int = 0
    """Its number; 0: not known yet."""
    leaving: tuple[int, ...] = ()
    """The ranks that end at `Next.PART`."""
    code: int = 0
    """The exit code of the job."""
    text: str = ""
    """Why the job ends."""
    saves: bool = False
    """Whether the state is worth saving: the job could not go on, or was told to end."""


@dataclass(frozen=True)
class Wanted:
    """A generation that is to follow without a loss."""

    size: int
    """Its ranks; 0: all ranks leave, and none follows at once."""
    cause: str
    leaving: tuple[int, ...] = ()
    """Ranks of the present generation that leave."""
    starts: bool = True
    """Whether new processes start; otherwise the other ranks go on in theirs."""


@dataclass(frozen=True)
class Resize:
    """The step from one generation to the next."""

    change: Change
    redone: int
    """Steps that the next generation makes once more: the one that was under way."""
    detected_at: float
    """When the supervisor knew of the loss, in seconds of its clock."""
    detected_s: float
    """Seconds from the last commit of any rank until then; 0 if there was none."""


@dataclass
class Membership:
    rules: Rules
    live: bool = False
    """Whether there is level 1: the MPI goes on after losses."""
    phase: Phase = Phase.STARTING
    generation: int = 0
    size: int = 0
    step: int = 0
    """Committed steps, as far as the supervisor knows."""
    resize: Resize | None = None
    """The step to this generation; None for the first."""
    wanted: Wanted | None = None
    """The generation that is to follow; its processes start, or all ranks are to pause."""
    _wish: tuple[int, str] | None = None
    """``(size, cause)``: a number of ranks that is wanted."""
    _last: Decision | None = None
    """How the job ends when all ranks have paused; None: it goes on."""
    _last_until: float = 0.0
    """When the job ends though they have not."""
    _lost: list[Lost] = field(default_factory=list)
    _cause: str = ""
    _failures: deque[float] = field(default_factory=deque)
    """When a rank was lost, in seconds."""
    _losses: list[float] = field(default_factory=list)
    """When generations were lost that ran and made no step since the first of them, in seconds."""
    _waits_until: float | None = None
    _level: int = 2
    """The level that the present generation came from."""
    _has_left: bool = False
    """Whether the ranks of the present generation leave by plan."""
    _live_until: float | None = None
    """When level 1 has to be over; None: not all ranks take part yet, or it is over."""
    _under_way: bool = False
    """Whether a step was under way when the generation was lost."""
    _detected: tuple[float, float] = (0.0, 0.0)
    """``(detected_at, detected_s)`` of the next `Resize`."""

    def begin(self) -> Decision | None:
        return self._start(self.rules.ranks)

    def started(self) -> None:
        """Note that the generation has its communicator and the state."""
        if self.phase is Phase.STARTING:
            self.phase, self._live_until = Phase.RUNNING, None

    def finished(self) -> None:
        """Note that the elastic call is over: a later loss relaunches all ranks."""
        self.phase, self._level = Phase.STARTING, 2

    def stepped(self, step: int) -> None:
        """Note that the generation has committed `step` steps."""
        self.step = step
        self._losses.clear()

    def lost(
        self,
        lost: Sequence[Lost],
        now: float,
        *,
        cause: str = "killed",
        step: int = 0,
        detected_s: float = 0.0,
    ) -> Decision | None:
        """Return what follows a loss after `step` committed steps.  No rank: mpiexec was killed.

        Later losses of the same generation belong to the first: MPI kills the other ranks,
        too.
        """
        if self.phase not in (Phase.STARTING, Phase.RUNNING, Phase.SHRINKING):
            return None
        self._failures.extend([now] * max(1, len(lost)))
        is_live = self.phase is not Phase.STARTING or self._level == 1
        shrinks = is_live and self.phase is not Phase.RUNNING
        if shrinks and any(each.signal in _CRASHES for each in lost):
            return self.give_up(now)  # these ranks have a place in the next generation
        if self.phase is Phase.SHRINKING:
            self._lost += lost
        else:
            self._lost, self._cause = list(lost), cause
            self._detected = now, detected_s
            self._under_way = self.phase is Phase.RUNNING
            if self._under_way:
                self._lose_step(now, step)
        if self._live_until is not None:  # all take part, and may hang because of this loss
            self._live_until = now + _LIVE_S
        goes_on = self.left >= self.rules.least and self._refusal(now) is None
        goes_on &= self._last is None
        if self.live and is_live and lost and goes_on and not self.rules.replace:
            self.phase = Phase.SHRINKING
            return Decision(Next.SHRINK)
        self.phase = Phase.FENCING
        return Decision(Next.FENCE)

    def give_up(self, now: float) -> Decision:
        """Return what follows if the ranks that are left can make no communicator: level 2."""
        if self.phase is Phase.STARTING:
            self._detected = now, 0.0
        self.phase = Phase.FENCING
        return Decision(Next.FENCE)

    def all_take_part(self, now: float) -> None:
        """Note that all ranks that are left begin to make a communicator."""
        if self.phase is Phase.SHRINKING and (self._live_until is None or self._has_left):
            self._live_until = now + _LIVE_S

    def shrunk(self, now: float) -> None:
        """Begin the next generation: all ranks that are left have its communicator."""
        self._live_until = now + _CATCHING_UP_S
        self._next(self.left, level=3 if self._has_left else 1)
        self._level = 1

    def asked(
        self, asked: Collection[tuple[str, int]], now: float, committed_at: float
    ) -> Decision:
        """Return what follows when all ranks that are left have asked.

        `asked`: the kind of each question, and the size of the asker's new communicator; 0:
        none.  `committed_at`: time of the latest commit of a rank.
        """
        kinds = {kind for kind, _ in asked}
        if "unable" in kinds:
            return self.give_up(now)
        if self.phase is Phase.SHRINKING:
            if set(asked) == {("shrunk", self.left)}:
                self.shrunk(now)
                return Decision(Next.GO_ON, self.size, self.generation)
            self.all_take_part(now)
            return Decision(Next.MEET)
        if kinds == {"paused"}:
            return self.paused(now, committed_at)
        if kinds == {"finished"}:
            self.finished()
            return Decision(Next.RETURN)
        return Decision(Next.RESUME)

    # --- without a loss ---

    def wish(self, size: int, cause: str) -> None:
        """Want `size` ranks.  Raises ValueError if the job may not have them."""
        self.rules.check_size(size)
        self._wish = (size, cause)

    def pursue(self, leaving: Mapping[int, str]) -> Decision | None:
        """Return the next action towards the wanted ranks; None: nothing to do.

        `leaving`: ranks that have to leave, with the cause.  Call it when the wish or
        `leaving` has changed, and when a generation has started.
        """
        if self._last is not None:
            return None
        if self.phase is Phase.WAITING and self._wish is not None:
            (size, _), self._wish = self._wish, None
            return self._start(size)
        if self.phase is not Phase.RUNNING:
            return None
        before, self.wanted = self.wanted, self._planned(leaving)
        if self.wanted is None:
            return None if before is None else Decision(Next.DROP)
        if not self.wanted.starts:
            return Decision(Next.PAUSE)
        is_same = before is not None and before.starts and before.size == self.wanted.size
        return None if is_same else Decision(Next.PREPARE, self.wanted.size)

    def _planned(self, leaving: Mapping[int, str]) -> Wanted | None:
        if self._wish is not None:
            size, cause = self._wish
            if size == self.size and not leaving:
                self._wish = None
                return None
        elif leaving:
            cause = next(iter(leaving.values()))
            size = self.size if self.rules.replace else self.size - len(leaving)
            if size < self.rules.least:
                size = 0
        else:
            return None
        # Of the others the last ones leave, if there are too many.
        others = [rank for rank in range(self.size) if rank not in leaving]
        gone = (*sorted(leaving), *(others[size:] if size else ()))
        starts = size > 0 and not (self.live and size == self.size - len(gone))
        return Wanted(size, cause, gone, starts)

    @property
    def wants_ranks(self) -> bool:
        """Whether the wanted number of ranks differs from the present one."""
        return self._wish is not None

    def wants_ranks_by_command(self, size: int) -> bool:
        """Whether a command of the user wants a number of ranks other than `size`."""
        return self._wish is not None and self._wish[1] == "command" and self._wish[0] != size

    def prepared(self) -> Decision | None:
        """Return what follows if the processes of the next generation are ready."""
        pauses = self.phase is Phase.RUNNING and self.wanted is not None
        return Decision(Next.PAUSE) if pauses else None

    def unprepared(self) -> None:
        """Drop the wanted generation: its processes cannot start."""
        self.wanted = self._wish = None

    def end_after_step(self, stop: Decision, now: float) -> Decision | None:
        """End the job when all ranks have paused after the same step; at once if none trains."""
        if self.phase is not Phase.RUNNING or self._last is not None:
            return stop
        grace_s = self.rules.grace_s
        self._last, self._last_until = stop, now + max(grace_s - _SAVING_S, grace_s / 2)
        self.wanted = Wanted(0, "", starts=False)
        return Decision(Next.PAUSE)

    def paused(self, now: float, committed_at: float) -> Decision:
        """Return what follows if all ranks have paused after the step committed at that time."""
        assert self.wanted is not None
        self._has_left = True
        self._cause, self._lost = self.wanted.cause, [Lost(rank, 0) for rank in self.wanted.leaving]
        self._detected = committed_at or now, 0.0
        if self.wanted.size and not self.wanted.starts:
            self.phase, self._live_until = Phase.SHRINKING, now + self.rules.grace_s
            return Decision(Next.PART, leaving=self.wanted.leaving)
        self.phase = Phase.FENCING
        return Decision(Next.LEAVE)

    # --- what follows a generation ---

    @property
    def left(self) -> int:
        """Number of ranks of the generation that are not lost."""
        return self.size - len(self._lost)

    def fenced(self, now: float) -> Decision | None:
        """Return what follows if all ranks of the generation are gone, and none can write."""
        if self.phase is not Phase.FENCING:
            return None
        if self._last is not None:
            self.phase = Phase.ENDED
            return self._last
        if (refusal := self._refusal(now)) is not None:
            return self._stop(refusal)
        if self.wanted is not None and self.wanted.starts:
            size, level = self.wanted.size, 3 if self._has_left else 2
            self._next(size, level)
            return Decision(Next.TAKE_OVER, size, self.generation)
        if self.wanted is not None and len(self.wanted.leaving) == self.size:
            return self._stop("all ranks were told to end", TOO_FEW)
        if self.rules.replace:
            return self._start(self.size)
        if self.left >= self.rules.least:
            return self._start(self.left)
        self.phase, self._waits_until = Phase.WAITING, now + self.rules.wait_s
        return self.pursue({}) or self.tick(now)  # ranks may be wanted already

    def tick(self, now: float) -> Decision | None:
        """Return the action that is due at `now`, if any."""
        if self.wakes_at is None or now < self.wakes_at:
            return None
        if self._last is not None:
            return self._last
        if self.phase is not Phase.WAITING:
            return self.give_up(now)  # it takes too long
        text = f"ranks left: {self.left}; --elastic wants at least {self.rules.least}"
        return self._stop(text, TOO_FEW)

    @property
    def wakes_at(self) -> float | None:
        if self.phase is Phase.ENDED:
            return None
        if self._last is not None:
            return self._last_until
        if self.phase is Phase.WAITING:
            return self._waits_until
        return self._live_until if self.phase in (Phase.SHRINKING, Phase.STARTING) else None

    def end(self) -> None:
        self.phase = Phase.ENDED

    def _lose_step(self, now: float, step: int) -> None:
        """Note that a generation that ran was lost after `step` steps."""
        if step > self.step:  # which no rank has reported
            self.step = step
            self._losses.clear()
        self._losses.append(now)

    def _refusal(self, now: float) -> str | None:
        """Return why the job cannot go on, however many ranks are left; None if it can."""
        while self._failures and now - self._failures[0] > _HOUR_S:
            self._failures.popleft()
        losses = self._losses
        if len(losses) > 2 or (len(losses) == 2 and losses[1] - losses[0] > _AT_ONCE_S):
            times = "twice" if len(losses) == 2 else f"{len(losses)} times"
            return f"step {self.step + 1} was lost {times} running"
        if len(self._failures) > self.rules.budget:
            count, most = len(self._failures), self.rules.budget
            return f"{counted(count, 'loss')} within an hour; --max-failures is {most}"
        return None

    def _start(self, size: int) -> Decision:
        self._live_until = None
        self._next(size, level=2)
        return Decision(Next.START, size, self.generation)

    def _next(self, size: int, level: int) -> None:
        if self.generation:
            change = Change(
                before=self.size,
                after=size,
                lost=tuple(sorted(each.rank for each in self._lost)),
                joined=size - self.left,
                cause=self._cause,
                level=level,
                generation=self.generation + 1,
            )
            self.resize = Resize(change, int(self._under_way), *self._detected)
        self.generation, self.size, self.phase = self.generation + 1, size, Phase.STARTING
        self._lost, self._level, self._under_way = [], level, False
        if self.wanted is not None and (level != 1 or not self.wanted.starts):
            self.wanted = None  # it is carried out, or its ranks have other numbers now
        if level != 1:
            self._has_left = False
            if self._wish is not None and self._wish[0] == size:
                self._wish = None

    def _stop(self, why: str, code: int | None = None) -> Decision:
        self.phase = Phase.ENDED
        number = next((each.signal for each in self._lost if each.signal), int(signal.SIGKILL))
        if self._has_left:
            text = f"{why}; {', '.join(f'rank {each.rank}' for each in self._lost)} left"
        else:
            ends = ", ".join(map(str, self._lost)) or "mpiexec was killed"
            text = f"{why}; in step {self.step + 1} {ends}"
        code = 128 + number if code is None else code
        return Decision(Next.STOP, code=code, text=text, saves=True)
