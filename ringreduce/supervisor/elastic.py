"""Run a job that goes on after ranks are lost.

The supervisor starts generations of ranks with mpiexec, and holds the memory files with the state
that the ranks have committed.  It watches the ranks' processes.  After a loss the ranks that are
left make a communicator of their own, under an MPI that lets them; or the supervisor kills them,
and starts the next generation, which continues from the state.  If another number of ranks is
wanted, the next generation starts beside the present one and takes over from it.  `Membership`
decides what follows; this module carries it out.  The supervisor loads no MPI.

All ranks of a generation ask the supervisor before they leave `elastic`, before and after they make
a communicator, and after the step at which they pause.  It answers when all that are alive have
asked, so that all do the same.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ringreduce.config import DEFAULT_TIMEOUT_S
from ringreduce.errors import counted
from ringreduce.recovery.saving import Saving
from ringreduce.recovery.wire import WireMessage
from ringreduce.supervisor import socket_folder
from ringreduce.supervisor.commands import Commands, resized_text
from ringreduce.supervisor.discovery import Discovery
from ringreduce.supervisor.ends import end_of
from ringreduce.supervisor.events import EventFile
from ringreduce.supervisor.generation import Generation
from ringreduce.supervisor.held import HeldFiles
from ringreduce.supervisor.launcher import Job, exit_code, job_environment, standard_input
from ringreduce.supervisor.membership import (
    Decision,
    Lost,
    Membership,
    Next,
    Phase,
    Resize,
    Rules,
)
from ringreduce.supervisor.mpiexec import find_mpiexec
from ringreduce.supervisor.paces import Paces
from ringreduce.supervisor.ranks import Gone, Rank, Ranks, Said
from ringreduce.supervisor.signals import ENDING, PASSED_ON
from ringreduce.supervisor.supervisor import Supervisor, tell

_QUESTIONS = ("finished", "paused", "shrunk", "suspect", "unable")
"""Messages whose sender waits for the other ranks."""
_OVER = (Phase.FENCING, Phase.WAITING, Phase.ENDED)
"""Phases in which ranks have nothing more to say."""
_NEVER_CALLED = "warning: --elastic had no effect, for the program has not called rr.elastic"
_GATHER_S = 0.1
"""Seconds in which notices to several ranks are taken for one wish."""
_NO_FACTS: Mapping[str, Any] = MappingProxyType({})


class ElasticSupervisor(Supervisor):
    """Runs a job in as many generations as it takes.

    Raises ValueError if the rules want a live recovery that this MPI does not have.
    """

    def __init__(
        self,
        job: Job,
        rules: Rules,
        events: EventFile,
        held: HeldFiles,
        discovery: Discovery | None = None,
    ) -> None:
        given = job_environment()
        mpiexec = find_mpiexec(Path(sys.prefix), given.get("PATH", os.defpath))
        live = rules.recovery != "relaunch" and mpiexec.goes_on and not rules.replace
        if rules.recovery == "live" and not live:
            raise ValueError(
                f"--recovery live: {mpiexec.flavour} ends the whole job if a rank is lost; "
                "Open MPI 5 does not"
            )
        socket_folder.prepare(os.getpid())
        address = socket_folder.socket_of(os.getpid())
        ranks = Ranks(socket_folder.bound(address), "", standard_input())
        super().__init__(replace(job, goes_on=live), given, mpiexec, str(address), ranks)
        self._membership = Membership(rules, live)
        self._events = events
        self._held = held
        self._rules, self._discovery = rules, discovery
        self._commands = Commands()
        self._waited.append(self._commands.fileno())
        self._generations: list[Generation] = []
        """Generations with a process that is not gone."""
        self._ended: list[Generation] = []
        """Generations that may have left files behind."""
        self._next: Generation | None = None
        """The generation that starts beside the present one."""
        self._pursue_at: float | None = None
        """When to compare the wanted ranks with the present ones; None: nothing to compare."""
        self._timeout_s = job.timeout_s or _timeout_of(given)
        self._paces = Paces()
        self._unwritten: Resize | None = None
        """The step to the present generation, until that has committed a step of training."""
        self._is_reported = False
        """Whether the state is saved and the user knows how the job has ended."""
        self._has_begun = False
        self._losses: list[str] = []
        """The ranks that were lost since a generation has begun, and how each ended."""
        self._has_joined = False
        self._complaints: set[str] = set()
        events.complain = lambda text: self._complain("events", text)

    def run(self) -> int:
        tell(f"job {os.getpid()}; `ringreduce scale {os.getpid()} N` changes the number of ranks")
        return super().run() or int(bool(self._complaints))

    def _begin(self) -> None:
        self._do(self._membership.begin())

    @property
    def _goes_on(self) -> bool:
        return self._stop is None or bool(self._generations)

    @property
    def _wakes(self) -> list[float | None]:
        wakes = [self._membership.wakes_at, *(each.wakes_at for each in self._generations)]
        wakes.append(self._present.owes_at)
        if self._stop is None:
            wakes.append(self._pursue_at)
            wakes += [self._next.ready_until] if self._next is not None else []
            wakes += [self._discovery.wakes_at] if self._discovery is not None else []
        return wakes

    def _report(self, stop: Decision) -> None:
        """Save the state if the job has ended too early, and say how it has ended."""
        text = stop.text
        if stop.saves:
            text = f"{text}; {self._held.save(self._membership.generation)}"
        if text:
            tell(text)
        self._is_reported = True

    # --- what happens ---

    def _handle_time(self, now: float) -> None:
        self._handle_commands()
        for generation in self._generations:
            generation.tick(now)
        self._judge()
        until = self._present.asked_until
        if until is not None and now >= until:
            self._blame_silent()
        if self._membership.phase is Phase.FENCING and self._present.is_gone:
            self._fenced(now)
        if self._membership.phase is Phase.STARTING and (missing := self._present.missing):
            self._lose([Lost(number, 0) for number in missing], "stopped")
        if self._stop is None:
            self._do(self._membership.tick(now))
            self._discover(now)
            self._look_at_handover(now)

    def _fenced(self, now: float) -> None:
        """Start the next generation, unless a bug has ended the one that is gone."""
        if self._present.bug is not None:
            text = self._present.bug.text(0, self._mpiexec.flavour)
            self._end(Decision(Next.STOP, code=self._present.code, text=text))
            return
        self._held.next_generation()
        self._do(self._membership.fenced(now))

    def _handle_signal(self, number: int, *, is_terminals: bool) -> None:
        """End the job, or pass the signal on; mpiexec has no terminal."""
        if number in ENDING and self._stop is None:
            text = f"signal {number} came"
            stop = Decision(Next.STOP, code=128 + number, text=text, saves=True)
            if number == signal.SIGTERM:
                self._do(self._membership.end_after_step(stop, time.monotonic()))
            else:
                self._end(stop)
        elif number in PASSED_ON:
            for rank in self._present.ranks:
                rank.send(number)

    def _handle_ranks(self) -> None:
        super()._handle_ranks()
        self._answer_all()

    def _handle_event(self, event: Said | Gone) -> None:
        if isinstance(event, Said):
            self._handle_message(event.rank, event.message)
        if self._starts(event.rank):
            self._handle_end_of_newcomer(event)
        elif event.rank in self._present.living and self._stop is None:
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
            # The ranks of an mpiexec that is killed end with it, and count as none.
            lost = [] if present.lost_mpiexec else [Lost(int(event.rank.number), number)]
            self._lose(lost, "killed")
        else:
            present.bug, present.code = end, _code_of(event)
            present.expect_end()

    def _handle_mpiexecs(self) -> None:
        super()._handle_mpiexecs()
        for generation in list(self._generations):
            code = generation.process.poll()
            if code is not None and generation is self._next:
                self._give_up_newcomers(f"mpiexec ended with exit code {exit_code(code, 0)}")
            if code is not None and generation.is_gone:
                self._generations.remove(generation)
                for rank in generation.ranks:
                    self._ranks.forget(rank)
                self._ended.append(generation)

    def _handle_mpiexec(self, code: int) -> None:
        if self._membership.phase not in (Phase.STARTING, Phase.RUNNING, Phase.SHRINKING):
            return
        present, flavour = self._present, self._mpiexec.flavour
        if present.bug is not None:
            text = present.bug.text(code, flavour)
            self._end(Decision(Next.STOP, code=present.code or exit_code(code, 0), text=text))
        elif code == 0 or (present.is_complete and present.done.issuperset(present.living)):
            warns = not self._has_joined and not present.code
            text = _NEVER_CALLED if warns else ""
            self._end(Decision(Next.STOP, code=present.code, text=text))
        elif present.lost_mpiexec or (
            present.number > 1 and not present.is_complete  # a rank is gone that had not connected
        ):
            self._lose([], "killed")
        else:
            ended = f"mpiexec ended with exit code {exit_code(code, 0)}"
            text = "" if present.is_complete else f"{ended} before all ranks had connected"
            self._end(Decision(Next.STOP, code=exit_code(code, 0), text=text))

    def _handle_message(self, rank: Rank, message: WireMessage) -> None:
        """Handle a message of a rank.  Those of ranks of earlier generations have no effect."""
        fields, present = message.fields, self._present
        if message.kind == "hello" and rank.connection.token != self._ranks.token:
            rank.kill()  # of a generation that is not wanted any more
            self._ranks.forget(rank)
        elif message.kind == "hello" and self._stop is None:
            if self._next is not None:
                self._next.connect(rank)
            elif self._membership.phase in (Phase.STARTING, Phase.RUNNING):
                present.connect(rank)
            else:
                rank.kill()
        elif self._starts(rank):
            self._handle_newcomer(rank, message)
        elif rank not in present.living or self._membership.phase in _OVER:
            message.close()
        elif message.kind == "end":
            if fields.get("in_order") or not fields.get("code"):
                present.done.add(rank)
                present.code = present.code or int(fields.get("code", 0))
        elif message.kind == "join":
            self._has_joined = True
            rank.connection.send("member")
        elif message.kind == "ready":
            self._begin_generation([rank], int(fields["call"]))
        elif message.kind == "state":
            (file,) = message.files
            self._held.take(int(fields["call"]), file, present.size, rank)
        elif message.kind == "saving":
            call, facts = int(fields["call"]), dict(fields["facts"])
            self._held.saving[call] = Saving(str(fields["folder"]), facts)
        elif message.kind == "started":
            self._started(int(fields["step"]))
        elif message.kind == "stepped":
            self._stepped(int(fields["step"]), dict(fields["facts"]))
        elif message.kind == "unsaved":
            self._complain("output", str(fields["text"]))
        elif message.kind == "notice":
            if present.bug is None:  # after which the MPI ends ranks by this signal
                self._have_leave(rank, "notice")
        elif message.kind == "pace":
            self._compare(rank, int(fields["step"]), float(fields["seconds"]))
        elif message.kind in _QUESTIONS:
            self._handle_question(rank, message)
        else:
            message.close()

    def _handle_question(self, rank: Rank, message: WireMessage) -> None:
        fields, shrinks = message.fields, self._membership.phase is Phase.SHRINKING
        if message.kind == "suspect" and not shrinks:
            self._present.suspect(rank, fields["ranks"], stopped=bool(fields["stopped"]))
            return
        if message.kind == "unable":
            tell(f"no live recovery: {fields['text']}")
        self._present.ask(rank, message, self._timeout_s)
        if message.kind == "paused":
            if shrinks:
                self._present.answer([rank], "raise", text="another rank has left")
            elif self._held.is_early(int(fields["call"]), int(fields["step"])):
                self._present.answer([rank], "go on")
        self._answer_all()

    def _compare(self, rank: Rank, step: int, seconds: float) -> None:
        """Record the seconds that a rank computed in `step`; report or drop ranks that are slow."""
        present = self._present
        slow = self._paces.told(int(rank.number), step, seconds, present.size)
        for number, (took, median) in slow.items():
            times = {"compute_s": round(took, 6), "median_s": round(median, 6), "step": step}
            where = {"rank": number, "host": platform.node(), "generation": present.number}
            self._events.write("slow", **where, **times)
            slow_rank = next((e for e in present.living if int(e.number) == number), None)
            if self._rules.slow == "drop" and self._can_spare_one and slow_rank is not None:
                self._have_leave(slow_rank, "slow")

    @property
    def _can_spare_one(self) -> bool:
        """Whether enough ranks stay if one leaves besides those that already have to."""
        staying = len(self._present.living) - len(self._present.leaving)
        return self._rules.replace or staying > self._rules.least

    def _complain(self, what: str, text: str) -> None:
        """Tell the user once that `what` could not be written; the job will end with 1."""
        if what not in self._complaints:
            self._complaints.add(what)
            tell(text)

    def _begin_generation(self, ranks: Iterable[Rank], call: int) -> None:
        source = self._held.source(call)
        files = () if source is None else (source.file,)
        for rank in ranks:
            rank.connection.send("member", files, **self._member(), **self._held.regular(call))

    def _member(self) -> dict[str, Any]:
        resize = self._membership.resize
        change = None if resize is None else asdict(resize.change)
        return {"generation": self._present.number, "change": change}

    def _started(self, step: int) -> None:
        """Note that the present generation has begun with the state after `step` or later."""
        present = self._present
        self._membership.started()
        self._held.drop(present.lost)
        present.lost.clear()
        self._paces = Paces()
        if not self._has_begun and step:
            self._events.write("resumed", generation=present.number, step=step)
        if self._losses:
            ranks = counted(present.size, "rank")
            tell(f"{', '.join(self._losses)}; goes on at step {step} on {ranks}")
            self._losses.clear()
        self._has_begun = True
        self._events.write(
            "started", generation=present.number, size=present.size, pids=present.pids
        )
        self._pursue()

    # --- what all ranks do together ---

    def _blame_silent(self) -> None:
        """Give up the ranks that have not asked in time: they are stopped, or hang."""
        self._present.asked_until = None
        if silent := self._present.silent:
            self._lose([Lost(int(rank.number), 0) for rank in silent], "stopped")

    def _answer_all(self) -> None:
        """Answer the ranks that wait for each other, if all that are alive do."""
        present, members = self._present, self._membership
        if not present.asking:
            return
        ended = [rank.number for rank in present.living if rank.gone or rank in present.done]
        if ended and present.bug is not None:
            return  # MPI, or this process, ends them
        if ended:  # they never ask
            text = f"ranks that ended inside the call of elastic: {', '.join(sorted(ended))}"
            present.answer(present.asking, "raise", text=text)
            return
        if not present.have_all_asked or not all(rank.gone for rank in present.lost):
            return
        self._do(members.asked(present.asked, time.monotonic(), self._held.committed_at))

    def _shrunk(self, generation: int) -> None:
        """Begin the generation of the ranks that are left; all have its communicator."""
        present = self._present
        self._unwritten = self._membership.resize
        present.shrink(generation)
        self._held.begin_generation(present.number, present.lost)
        for rank in present.lost:
            self._ranks.forget(rank)
        ahead = self._held.ahead(present.lost)
        files = () if ahead is None else (ahead.file,)
        present.answer(present.ranks, "member", files, **self._member())

    # --- another number of ranks ---

    def _handle_commands(self) -> None:
        for sender, size in self._commands.received():
            if self._stop is not None:
                self._commands.refuse(sender, "the job ends", is_wrong=False)
                continue
            try:
                self._membership.wish(size, "command")
            except ValueError as error:
                self._commands.refuse(sender, str(error), is_wrong=True)
                continue
            self._commands.begin(sender)
            self._pursue()

    def _discover(self, now: float) -> None:
        if self._discovery is None:
            return
        slots = self._discovery.news(now, lambda text: tell(f"{text}; the ranks stay"))
        is_waiting = self._membership.phase is Phase.WAITING
        if slots is None or (is_waiting and slots < self._rules.least):
            return
        size = self._rules.clamped(slots)
        if self._membership.wants_ranks_by_command(size):
            self._commands.fail(f"--discover has room for ranks: {slots}")
        self._membership.wish(size, "discover")
        self._pursue()

    def _look_at_handover(self, now: float) -> None:
        """Act on ranks that are overdue, and on the next generation's deadlines."""
        if overdue := self._present.take_overdue():
            lost = [Lost(int(rank.number), int(signal.SIGTERM)) for rank in overdue]
            self._lose(lost, next(iter(overdue.values())))
        if self._pursue_at is not None and now >= self._pursue_at:
            self._pursue()
        if self._next is not None and (missing := self._next.missing):
            self._give_up_newcomers(f"rank {missing[0]} has not connected")
        if self._next is not None and now >= (self._next.ready_until or math.inf):
            self._give_up_newcomers("they are not ready in time")

    def _starts(self, rank: Rank) -> bool:
        return self._next is not None and rank in self._next.ranks

    def _have_leave(self, rank: Rank, cause: str) -> None:
        """Have a rank leave within the grace; notices to several ranks are one wish."""
        self._present.leaves(rank, cause, self._rules.grace_s)
        self._pursue_at = self._pursue_at or time.monotonic() + _GATHER_S

    def _pursue(self) -> None:
        """Ask the membership for the next action towards the wanted ranks."""
        self._pursue_at = None
        self._do(self._membership.pursue(self._present.leaving))
        if self._next is not None and self._next.is_ready:
            self._do(self._membership.prepared())
        if not self._membership.wants_ranks and self._unwritten is None:
            self._commands.done(f"{counted(self._present.size, 'rank')}, as before")

    def _handle_newcomer(self, rank: Rank, message: WireMessage) -> None:
        if message.kind == "join":
            rank.connection.send("member")
        elif message.kind == "ready" and self._next is not None:
            self._next.ready.append(rank)
            if self._next.is_ready:
                self._do(self._membership.prepared())

    def _handle_end_of_newcomer(self, event: Said | Gone) -> None:
        """If `event` is the end of a starting rank, give up the next generation."""
        if isinstance(event, Gone) and not event.rank.reported and (number := _signal_of(event)):
            self._give_up_newcomers(str(Lost(int(event.rank.number), number)))
        elif (end := end_of(event)) is not None:
            self._give_up_newcomers(f"rank {end.rank} {end.how or 'is gone'}")

    def _give_up_newcomers(self, text: str) -> None:
        tell(f"no other ranks take over: {text}")
        self._events.write("not_resized", generation=self._present.number, text=text)
        self._membership.unprepared()
        if self._discovery is not None:
            self._discovery.put_off()
        self._drop()
        self._commands.fail(f"no other ranks can start: {text}")

    def _prepare(self, size: int) -> None:
        self._drop()
        try:
            self._next = self._new_generation(self._present.number + 1, size)
        except OSError as error:
            self._give_up_newcomers(f"mpiexec cannot be started: {error}")

    def _drop(self) -> None:
        """Kill what has started for the next generation; no rank pauses for it."""
        self._kill_newcomers()
        self._ranks.token = os.urandom(16).hex()  # those that it has started are refused
        self._held.go_on()
        self._present.answer(self._present.who_asked("paused"), "go on")

    def _kill_newcomers(self) -> None:
        if self._next is not None:
            self._next.kill()
            self._next = None

    def _pause(self) -> None:
        wanted = self._membership.wanted
        if self._next is not None and wanted is not None and not wanted.starts:
            self._drop()  # what has started is not wanted any more
        if not self._held.pauses:
            self._held.pause()

    def _part(self, leaving: Collection[int]) -> None:
        """Have some ranks end, and the others make a communicator; all have paused."""
        parted = [rank for rank in self._present.living if int(rank.number) in leaving]
        self._present.answer(parted, "leave", alone=True)
        self._present.lost += parted
        self._shrink()

    def _leave(self) -> None:
        self._held.revoke()
        self._present.expect_end(self._rules.grace_s)
        self._present.answer(self._present.living, "leave", alone=False)

    def _take_over(self, generation: int) -> None:
        assert self._next is not None
        self._unwritten = self._membership.resize
        self._present, self._next = self._next, None
        self._present.number = generation
        self._begin_generation(self._present.ready, call=1)

    # --- what a generation has done ---

    def _stepped(self, step: int, facts: Mapping[str, Any]) -> None:
        self._membership.stepped(step)
        self._write_resize(step, facts)
        self._clean_up(0)  # now, for it takes some ms

    def _clean_up(self, dying_s: float) -> None:
        for generation in self._ended:
            generation.clean_up(dying_s)
        self._ended.clear()

    def _write_resize(self, step: int | None, facts: Mapping[str, Any] = _NO_FACTS) -> None:
        """Write the event that began the present generation, unless it is written.

        `step` was committed just now; None: the generation ended without a commit.
        """
        if (resize := self._unwritten) is not None:
            self._unwritten = None
            since = None if step is None else time.monotonic() - resize.detected_at
            step = self._held.step if step is None else step
            self._events.resized(resize, since, step, facts)
            if not self._membership.wants_ranks:
                self._commands.done(resized_text(resize.change, step, since))

    def _judge(self) -> None:
        if blamed := self._present.blamed:
            self._lose([Lost(int(rank.number), 0) for rank in blamed], "stopped")
            return
        for rank in self._present.take_suspecting(time.monotonic()):
            rank.connection.send("raise", text="")

    # --- what follows ---

    def _lose(self, lost: Sequence[Lost], cause: str) -> None:
        present, now, seen = self._present, time.monotonic(), self._held.committed_at
        living, numbers = present.living, {each.rank for each in lost}
        present.exiting = [rank for rank in living if rank.is_exiting]
        self._losses += [str(each).replace(f"by signal {each.signal} ", "") for each in lost]
        present.lost += [rank for rank in living if int(rank.number) in numbers]
        present.forget(present.lost)
        for rank in present.lost:
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

    def _do(self, decision: Decision | None) -> None:
        if decision is None:
            return
        if decision.kind in (Next.FENCE, Next.SHRINK, Next.PART):
            self._write_resize(None)
        match decision.kind:
            case Next.START:
                self._start(decision.generation, decision.size)
            case Next.FENCE:
                self._fence()
            case Next.SHRINK:
                self._shrink()
            case Next.MEET:
                self._present.answer(self._present.living, "shrink")
            case Next.GO_ON:
                self._shrunk(decision.generation)
            case Next.PREPARE:
                self._prepare(decision.size)
            case Next.DROP:
                self._drop()
            case Next.PAUSE:
                self._pause()
            case Next.RESUME:
                self._present.answer(self._present.who_asked("paused"), "go on")
            case Next.RETURN:
                self._present.answer(self._present.living, "done")
            case Next.LEAVE:
                self._leave()
            case Next.PART:
                self._part(decision.leaving)
            case Next.TAKE_OVER:
                self._take_over(decision.generation)
            case Next.STOP:
                self._end(decision)

    def _start(self, generation: int, size: int) -> None:
        self._unwritten = self._membership.resize
        self._present = self._new_generation(generation, size)

    def _new_generation(self, number: int, size: int) -> Generation:
        self._ranks.token = os.urandom(16).hex()
        command = self._command(replace(self._job, ranks=size), elastic=True)
        # The terminal must not signal mpiexec: the membership decides what follows.
        made = Generation(number, size, command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._generations.append(made)
        return made

    def _shrink(self) -> None:
        """Have the ranks that are left make a communicator of their own, once all have asked."""
        self._held.go_on()
        present = self._present
        present.answer(present.who_asked("paused"), "raise", text="another rank has left")
        for rank in present.take_suspecting():
            present.ask(rank, WireMessage("suspect"), self._timeout_s)
        self._answer_all()

    def _fence(self) -> None:
        self._held.revoke()
        self._present.kill()

    def _end(self, stop: Decision) -> None:
        self._stop = stop
        self._membership.end()
        self._kill_newcomers()
        self._write_resize(None)
        self._fence()

    def _close(self) -> None:
        if not self._is_reported:  # the state must not be lost with this process
            self._held.revoke()
            tell(self._held.save(self._membership.generation))
        for generation in self._generations:  # after an error in this process
            generation.process.kill()
            generation.process.wait()
        if self._discovery is not None:
            self._discovery.close()
        self._commands.close()
        super()._close()
        self._held.close()
        self._events.close()
        socket_folder.remove(os.getpid())


def _timeout_of(given: Mapping[str, str]) -> float:
    """Return the communicators' timeout in seconds from the user's environment."""
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
