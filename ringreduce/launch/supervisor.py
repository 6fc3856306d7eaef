"""Run a job that goes on after ranks are lost.

The supervisor starts generations of ranks with mpiexec, and holds the memory files with the state
that the ranks have committed.  It watches the ranks' processes.  After a loss the ranks that are
left make a communicator of their own, under an MPI that lets them; or the supervisor kills them,
and starts the next generation, which continues from the state.  `Membership` decides what follows;
this module carries it out.  The supervisor loads no MPI.

All ranks of a generation ask the supervisor before they leave `elastic`, and before and after they
make a communicator.  It answers when all that are alive have asked, so that all do the same.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ringreduce.config import DEFAULT_TIMEOUT_S
from ringreduce.launch.cleanup import DYING_S
from ringreduce.launch.ends import end_of
from ringreduce.launch.generation import Generation
from ringreduce.launch.launcher import ENDING, PASSED_ON, Job, exit_code, job_environment
from ringreduce.launch.mpiexec import find_mpiexec
from ringreduce.launch.ranks import Gone, Rank, Ranks, Said
from ringreduce.recovery import socket_folder
from ringreduce.recovery.events import Events
from ringreduce.recovery.held import Held
from ringreduce.recovery.membership import (
    Action,
    Fence,
    Lost,
    Membership,
    Phase,
    Resize,
    Rules,
    Shrink,
    Start,
    Stop,
)
from ringreduce.recovery.saving import Saving
from ringreduce.recovery.wire import Message

_OVER = (Phase.FENCING, Phase.WAITING, Phase.ENDED)
"""Phases in which ranks have nothing more to say."""
_ANSWER_S = 2.0
"""Seconds in which the end of a process must be seen whose loss another rank reports."""
_BLAME_S = 0.05
"""Seconds to wait for further reports of ranks that do not answer: a rank that reports is alive."""
_UNABLE, _FINISHED, _NONE = -2, -1, 0


class Supervisor:
    """Runs a job.

    Raises LaunchError if no mpiexec belongs to this environment's MPI, OSError if there can be no
    socket, and ValueError if the rules want a live recovery that this MPI does not have.
    """

    def __init__(self, job: Job, rules: Rules, events: Events, held: Held) -> None:
        self._job, self._given = job, job_environment()
        self._mpiexec = find_mpiexec(Path(sys.prefix), self._given.get("PATH", os.defpath))
        live = rules.recovery != "relaunch" and self._mpiexec.goes_on and not rules.replace
        if rules.recovery == "live" and not live:
            raise ValueError(
                f"--recovery live: {self._mpiexec.flavour} ends the whole job if a rank is lost; "
                "Open MPI 5 does not"
            )
        self._job = replace(self._job, goes_on=live)
        self._membership = Membership(rules, live)
        self._events = events
        self._held = held
        self._ranks = Ranks(socket_folder.bound(os.getpid()), "")
        self._generations: list[Generation] = []
        """Those whose processes are not all gone."""
        self._ended: list[Generation] = []
        """Those that may have left files behind."""
        self._present: Generation
        """The last one that was started."""
        self._suspicions: list[_Suspicion] = []
        """What ranks of the present generation suspect; they wait for an answer."""
        self._asking: dict[Rank, int] = {}
        """Ranks that wait for the others.  The value is the size of the communicator that a rank
        has made; or it has made `_NONE`, is `_UNABLE` to, or has `_FINISHED` its call of
        `elastic`."""
        self._asks_until: float | None = None
        """When ranks count as stopped that have not asked by then; None: no rank waits."""
        self._timeout_s = job.timeout_s or _timeout_of(self._given)
        self._lost: list[Rank] = []
        """The ranks that the present generation has lost while it goes on."""
        self._unwritten: Resize | None = None
        """The step to the present generation, until that has committed a step of training."""
        self._stop: Stop | None = None
        """How the job ends; None: it goes on."""
        self._has_complained = False
        """Whether a checkpoint could not be written."""

    def run(self) -> int:
        """Run the job to its end.  Returns the exit code; 128 + n after signal n."""
        with _Signals() as signals:
            try:
                self._do(self._membership.begin())
                while self._stop is None or self._generations:
                    self._turn(signals)
                self._clean_up(DYING_S)
                self._report(self._stop)
            finally:
                self._close()
        return self._stop.code or int(self._has_complained)

    def _report(self, stop: Stop) -> None:
        """Save the state if the job has ended too early, and say how it has ended."""
        text = stop.text
        if stop.saves:
            text = f"{text}; {self._held.save(self._membership.generation)}"
        if text:
            print(f"ringreduce: {text}", file=sys.stderr)

    # --- what happens ---

    def _turn(self, signals: _Signals) -> None:
        """Wait until something happens, and handle it."""
        wakes = [self._membership.wakes_at, *(each.wakes_at for each in self._generations)]
        wakes += [self._asks_until, *(each.until for each in self._suspicions)]
        at = min((each for each in wakes if each is not None), default=None)
        left = None if at is None else max(0.0, at - time.monotonic())
        select.select([self._ranks.fileno(), signals.woken], [], [], left)
        for number in signals.taken():
            self._handle_signal(number)
        self._handle_ranks()
        self._answer_all()
        self._handle_mpiexecs()
        now = time.monotonic()
        for generation in self._generations:
            generation.tick(now)
        self._judge(now)
        if self._asks_until is not None and now >= self._asks_until:
            self._blame_silent()
        if self._membership.phase is Phase.FENCING and self._present.is_gone:
            self._fenced(now)
        self._do(self._membership.tick(now))

    def _fenced(self, now: float) -> None:
        """Start the next generation, unless a bug has ended the one that is gone."""
        if self._present.bug is not None:
            text = self._present.bug.text(0, self._mpiexec.flavour)
            self._end(Stop(self._present.code, text))
            return
        self._held.next_generation()
        self._do(self._membership.fenced(now))

    def _handle_signal(self, number: int) -> None:
        if number in ENDING and self._stop is None:
            self._end(Stop(128 + number, f"signal {number} came", saves=True))
        elif number in PASSED_ON:
            for rank in self._present.ranks:
                rank.send(number)

    def _handle_ranks(self) -> None:
        for event in self._ranks.happened():
            if isinstance(event, Said):
                self._handle_message(event.rank, event.message)
            if event.rank in self._living and self._stop is None:
                self._handle_end(event)

    def _handle_end(self, event: Said | Gone) -> None:
        """Decide what follows if a rank of the present generation has ended."""
        end, present = end_of(event), self._present
        if end is None or present.bug is not None:
            return
        if self._membership.phase is Phase.FENCING:
            # MPI kills the other ranks after an exit code, too, and one of them may be gone first.
            if event.rank in present.exiting and _code_of(event):
                present.bug, present.code = end, _code_of(event)
            return
        if isinstance(event, Gone) and (number := _signal_of(event)):
            self._lose([Lost(int(event.rank.number), number)], "killed")
        else:
            present.bug, present.code = end, _code_of(event)
            present.expect_end()

    def _handle_mpiexecs(self) -> None:
        """Look which mpiexecs have ended."""
        for generation in list(self._generations):
            code = generation.process.poll()
            if code is None:
                continue
            if generation is self._present and self._stop is None:
                self._handle_ranks()  # the ends of ranks came before, and tell more than the code
                if self._membership.phase in (Phase.STARTING, Phase.RUNNING, Phase.SHRINKING):
                    self._handle_mpiexec(code)
            if generation.is_gone:
                self._generations.remove(generation)
                for rank in generation.ranks:
                    self._ranks.forget(rank)
                self._ended.append(generation)

    def _handle_mpiexec(self, code: int) -> None:
        """Decide what follows the end of the present generation's mpiexec."""
        present, flavour = self._present, self._mpiexec.flavour
        if present.bug is not None:
            self._end(Stop(present.code or exit_code(code, 0), present.bug.text(code, flavour)))
        elif code == 0 or (present.is_complete and present.done.issuperset(self._living)):
            self._end(Stop(0, ""))
        elif code < 0 and not present.is_killed:
            self._lose([], "killed")
        else:
            self._end(Stop(exit_code(code, 0), ""))

    def _handle_message(self, rank: Rank, message: Message) -> None:
        """Handle a message of a rank.  Those of ranks of earlier generations have no effect."""
        fields, present = message.fields, self._present
        if message.kind == "hello" and self._stop is None:
            if self._membership.phase in (Phase.STARTING, Phase.RUNNING):
                present.ranks.append(rank)
            else:
                rank.kill()
        elif rank not in self._living or self._membership.phase in _OVER:
            message.close()
        elif message.kind == "end" and not fields.get("code"):
            present.done.add(rank)
        elif message.kind == "join":
            self._answer_join(rank, int(fields["call"]))
        elif message.kind == "state":
            (file,) = message.files
            self._held.take(int(fields["call"]), file, present.size, rank)
        elif message.kind == "saving":
            call, facts = int(fields["call"]), dict(fields["facts"])
            self._held.saving[call] = Saving(str(fields["folder"]), facts)
        elif message.kind == "started":
            self._started()
        elif message.kind == "stepped":
            self._stepped(int(fields["step"]))
        elif message.kind == "unsaved":
            self._complain(str(fields["text"]))
        elif message.kind == "finished":
            self._ask(rank, _FINISHED)
        elif message.kind == "shrunk":
            self._ask(rank, int(fields["size"]))
        elif message.kind == "unable":
            print(f"ringreduce: no live recovery: {fields['text']}", file=sys.stderr, flush=True)
            self._ask(rank, _UNABLE)
        elif message.kind == "suspect" and self._membership.phase is Phase.SHRINKING:
            self._ask(rank, _NONE)
        elif message.kind == "suspect":
            ranks, stopped = frozenset(fields["ranks"]), bool(fields["stopped"])
            until = time.monotonic() + (_BLAME_S if stopped else _ANSWER_S)
            self._suspicions.append(_Suspicion(rank, ranks, stopped, until))

    def _complain(self, text: str) -> None:
        """Say once that a checkpoint could not be written; the job goes on."""
        if not self._has_complained:
            self._has_complained = True
            print(f"ringreduce: {text}", file=sys.stderr, flush=True)

    def _answer_join(self, rank: Rank, call: int) -> None:
        """Tell a rank its generation, and send it the state to begin with, if there is one."""
        source = self._held.source(call)
        files = () if source is None else (source.file,)
        rank.connection.send("member", files, **self._member(), **self._held.regular(call))

    def _member(self) -> dict[str, Any]:
        """Return the number of the present generation, and the change that began it."""
        resize = self._membership.resize
        change = None if resize is None else asdict(resize.change)
        return {"generation": self._present.number, "change": change}

    def _started(self) -> None:
        """The present generation has its communicator and the state."""
        self._membership.started()
        self._held.drop(self._lost)
        self._lost.clear()
        present = self._present
        self._events.write(
            "started", generation=present.number, size=present.size, pids=present.pids
        )

    # --- what all ranks do together ---

    @property
    def _living(self) -> list[Rank]:
        """The ranks of the present generation that are not lost."""
        return [rank for rank in self._present.ranks if rank not in self._lost]

    def _ask(self, rank: Rank, what: int) -> None:
        """Let a rank wait for the others."""
        if self._asks_until is None:
            self._asks_until = time.monotonic() + self._timeout_s
        self._asking[rank] = what
        self._answer_all()

    def _blame_silent(self) -> None:
        """Give up the ranks that others wait for: they are stopped, or hang."""
        self._asks_until = None
        silent = [rank for rank in self._living if rank not in self._asking]
        if self._asking and silent:
            self._lose([Lost(int(rank.number), 0) for rank in silent], "stopped")

    def _answer_all(self) -> None:
        """Answer the ranks that wait for each other, if all that are alive do."""
        living, asking = self._living, self._asking
        if not asking:
            return
        ended = [rank.number for rank in living if rank.gone or rank in self._present.done]
        if ended and self._present.bug is not None:
            return  # MPI, or this process, ends them
        if ended:  # they never ask
            text = f"rank(s) {', '.join(sorted(ended))} ended inside the call of elastic"
            self._answer(list(asking), "raise", text=text)
            return
        if not asking.keys() >= set(living) or not all(rank.gone for rank in self._lost):
            return
        made = {asking[rank] for rank in living}
        if _UNABLE in made:
            self._do(self._membership.give_up(time.monotonic()))
        elif self._membership.phase is not Phase.SHRINKING:
            assert made == {_FINISHED}, made
            self._membership.finished()
            self._answer(living, "done")
        elif made == {len(living)}:
            self._membership.shrunk()
            self._unwritten = self._membership.resize
            self._present.shrink(self._membership.generation, self._lost)
            for rank in self._lost:
                self._ranks.forget(rank)
            ahead = self._held.ahead(self._lost)
            files = () if ahead is None else (ahead.file,)
            self._answer(living, "member", files, **self._member())
        else:
            self._membership.all_take_part(time.monotonic())
            self._answer(living, "shrink")

    def _answer(
        self, ranks: Sequence[Rank], kind: str, files: Sequence[int] = (), **fields: Any
    ) -> None:
        """Answer ranks that wait for the others."""
        self._stop_asking()
        for rank in ranks:
            rank.connection.send(kind, files, **fields)

    def _stop_asking(self) -> None:
        self._asking.clear()
        self._asks_until = None

    def _stepped(self, step: int) -> None:
        self._membership.stepped(step)
        self._write_resize(step)
        self._clean_up(0)  # now, for it takes some ms

    def _clean_up(self, dying_s: float) -> None:
        """Remove what generations have left behind whose ranks end within so many seconds."""
        for generation in self._ended:
            generation.clean_up(dying_s)
        self._ended.clear()

    def _write_resize(self, step: int | None) -> None:
        """Write the event that began the present generation, unless it is written.

        `step` was committed just now; None: the generation has committed none, and is over.
        """
        if (resize := self._unwritten) is not None:
            self._unwritten = None
            since = None if step is None else time.monotonic() - resize.detected_at
            self._events.resized(resize, since, self._held.step if step is None else step)

    def _judge(self, now: float) -> None:
        """Decide about suspected ranks, once all others have had time to report."""
        due = [each for each in self._suspicions if each.until <= now]
        if not due:
            return
        alive = {int(each.by.number) for each in self._suspicions}
        stopped = frozenset().union(*(s.ranks for s in self._suspicions if s.stopped)) - alive
        blamed = [rank for rank in self._present.ranks if int(rank.number) in stopped]
        if blamed:
            self._lose([Lost(int(rank.number), 0) for rank in blamed], "stopped")
            return
        for each in due:
            self._suspicions.remove(each)
            each.by.connection.send("raise", text="")

    # --- what follows ---

    def _lose(self, lost: Sequence[Lost], cause: str) -> None:
        present, now, seen = self._present, time.monotonic(), self._held.committed_at
        present.exiting = [rank for rank in self._living if rank.is_exiting]
        numbers = {each.rank for each in lost}
        self._lost += [rank for rank in self._living if int(rank.number) in numbers]
        for rank in self._lost:
            rank.kill()  # one that was stopped must not go on beside the others
        self._do(
            self._membership.lost(
                lost,
                now,
                cause=cause,
                step=self._held.step,
                detected_s=now - seen if seen else 0.0,
            )
        )

    def _do(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
        elif isinstance(action, Fence):
            self._write_resize(None)
            self._fence()
        elif isinstance(action, Shrink):
            self._write_resize(None)
            self._shrink()
        elif isinstance(action, Stop):
            self._end(action)

    def _start(self, start: Start) -> None:
        self._unwritten = self._membership.resize
        self._ranks.token = os.urandom(16).hex()
        self._present = Generation(
            start.generation,
            replace(self._job, ranks=start.size),
            self._mpiexec,
            self._given,
            str(socket_folder.socket_of(os.getpid())),
            self._ranks.token,
        )
        self._generations.append(self._present)

    def _shrink(self) -> None:
        """Have the ranks that are left make a communicator of their own, once all have asked."""
        suspicions, self._suspicions = self._suspicions, []
        for each in suspicions:
            self._ask(each.by, _NONE)
        self._answer_all()

    def _fence(self) -> None:
        """Kill the ranks of the present generation, and let none write."""
        self._suspicions.clear()
        self._stop_asking()
        self._lost.clear()
        self._held.revoke()
        self._present.kill()

    def _end(self, stop: Stop) -> None:
        self._stop = stop
        self._membership.end()
        self._write_resize(None)
        self._fence()

    def _close(self) -> None:
        for generation in self._generations:  # after an error in this process
            generation.process.kill()
            generation.process.wait()
        self._ranks.close()
        self._held.close()
        self._events.close()
        socket_folder.remove(os.getpid())


@dataclass(frozen=True)
class _Suspicion:
    """A rank suspects that others are lost."""

    by: Rank
    ranks: frozenset[int]
    stopped: bool
    """Whether they do not answer; otherwise they are gone."""
    until: float
    """When it is judged, by the monotonic clock."""


class _Signals:
    """Signals to this process wake it up, and are kept until they are taken."""

    def __enter__(self) -> _Signals:
        self.woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._came: list[int] = []
        # An ignored signal stays ignored, so that `nohup` works.
        heeded = [n for n in PASSED_ON if signal.getsignal(n) != signal.SIG_IGN]
        self._before = {
            number: signal.signal(number, lambda came, _: self._came.append(came))
            for number in (*heeded, signal.SIGCHLD)
        }
        self._waker_before = signal.set_wakeup_fd(self._waker)
        return self

    def taken(self) -> list[int]:
        """Return the signals that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)
        came, self._came = self._came, []
        return came

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._waker_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self.woken)
        os.close(self._waker)


def _timeout_of(given: Mapping[str, str]) -> float:
    """Return the timeout of communicators that the user's environment sets, in seconds."""
    with contextlib.suppress(ValueError):  # the ranks refuse it
        return float(given.get("RINGREDUCE_TIMEOUT_S", DEFAULT_TIMEOUT_S))
    return DEFAULT_TIMEOUT_S


def _code_of(event: Said | Gone) -> int:
    """Return the exit code of a rank that has ended without a signal; 0 if it is not known."""
    if isinstance(event, Said):
        return int(event.message.fields.get("code", 0))
    return 0 if event.status is None else os.WEXITSTATUS(event.status)


def _signal_of(event: Gone) -> int:
    """Return the signal that killed a rank; 0 if it has ended with an exit code."""
    if event.status is None:
        return int(signal.SIGKILL)
    return os.WTERMSIG(event.status) if os.WIFSIGNALED(event.status) else 0
