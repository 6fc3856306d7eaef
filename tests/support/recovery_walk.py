"""Walk every interleaving of a job of two or three ranks, its supervisor, one fault and one wish.

The decisions are those of `ringreduce.supervisor.membership` itself.  Ranks, files, communicators
and the supervisor's answers are modelled: a rank trains, one write or message a step of the walk,
and a fault kills or stops one rank anywhere.  At any time another number of ranks may be wanted.
In each state the walk proves that

- a committed slot has the samples of exactly so many whole steps,
- no rank commits that has looked at its lease after it was revoked,
- ranks of a generation begin with the same step, and no committed step is lost,
- checkpoints are written by generations in their order,
- ranks that leave by plan have made the same step,
- the job can go on, until it has made all steps.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from ringreduce.supervisor.membership import (
    Decision,
    Lost,
    Membership,
    Next,
    Phase,
    Rules,
)

STEPS, SAMPLES = 2, 3
FAULTS = ("crash", "stop")
_PAUSED, _FINISHED, _NONE = -2, -1, 0
NEVER = 99
"""A step after which no rank pauses."""
_LATE = 1e9
Contents = tuple[int, ...]
"""How often each sample of each step was counted."""
TORN: Contents = ()


class WalkError(AssertionError):
    """A state that must not be; the text has the way to it."""


class File(NamedTuple):
    """The memory file of a process."""

    step: int = 0
    committed: Contents = (0,) * STEPS * SAMPLES
    other: Contents = TORN
    lease: int = 0
    pause_at: int = NEVER


class Process(NamedTuple):
    """A process of a rank."""

    rank: int
    comm: int
    """The number of its communicator."""
    at: str = "copy arrays"
    """Its next action."""
    calls: int = 0
    """Calls that it has begun on its communicator."""
    generation: int = 1
    has_stepped: bool = False
    result: Any = None
    """The result of its last call."""
    alive: bool = True
    stopped: bool = False
    is_being_killed: bool = False
    asks: int | None = None
    pauses: bool = False
    """Whether it has seen that it is to pause after this step."""


class Comm(NamedTuple):
    """A communicator: its processes, and what each has passed to each call."""

    members: tuple[int, ...]
    passed: tuple[tuple[Any, ...], ...]


class World(NamedTuple):
    """A state of the job."""

    processes: tuple[Process, ...]
    files: tuple[File, ...]
    comms: tuple[Comm, ...]
    present: tuple[int, ...]
    """The processes of the present generation, in the order of their ranks."""
    lost: tuple[int, ...]
    source: int | None
    """The process whose file the present generation begins with."""
    members: str
    """The state of the `Membership`."""
    manifest: tuple[int, int]
    """Generation and step of the last checkpoint."""
    faults: int
    """Faults that may still come."""
    wishes: int = 0
    """Ranks that may still be wanted; 0: no wish comes."""
    newcomers: tuple[int, ...] = ()
    """The processes that start for the next generation."""
    kept: tuple[int, ...] = ()
    """Processes that were lost before, whose files are held until the present generation trains."""
    pause: tuple[str, int, int] = ("", 0, 0)
    """The action of the supervisor that has all ranks pause, the file that it writes, and the step;
    when all is done ``("set", 0, step)``."""


_GONE = Process(rank=-1, comm=-1, alive=False)


def expected(step: int) -> Contents:
    """The contents after so many steps."""
    return (1,) * step * SAMPLES + (0,) * (STEPS - step) * SAMPLES


def added(values: Collection[Contents]) -> Contents:
    """The sum of contents."""
    return tuple(map(sum, zip(*values, strict=True)))


def _digest(world: World) -> bytes:
    """Return what stands for a state among the known ones: millions of states would fill memory.

    What nobody reads any more is left out: most of a process that is gone, its file if no rank can
    take it, and the communicators that only such processes have.
    """
    read = {*world.present, *world.newcomers, *world.lost, *world.kept, world.source}
    used = {process.comm for process in world.processes if process.alive}
    processes, files = list(world.processes), list(world.files)
    for number, process in enumerate(world.processes):
        if process.alive:
            if process.at == "shrunk":
                used.add(process.result)
        elif number in read:
            processes[number] = Process(process.rank, process.comm, process.at, alive=False)
        else:
            processes[number], files[number] = _GONE, File()
    comms = [comm if number in used else None for number, comm in enumerate(world.comms)]
    left = world._replace(processes=tuple(processes), files=tuple(files), comms=())
    return blake2b(repr((left, comms)).encode(), digest_size=16).digest()


@dataclass
class Walk:
    """All states that can be reached; `live`: ranks can go on after a loss.

    `mistake` names a mistake in the protocol, which a walk must find.
    """

    live: bool
    mistake: str = ""
    fault: str = "crash"
    ranks: int = 3
    wish: int = 0
    """The number of ranks that is wanted at some time; 0: no other is."""
    states: int = 0
    _known: dict[str, Membership] = field(default_factory=dict)
    """The memberships, by their text."""

    def run(self) -> None:
        """Walk.  Raises WalkError at the first state that must not be."""
        members = Membership(Rules(self.ranks, least=1, most=self.ranks + 1), self.live)
        assert members.begin().kind is Next.START
        text = self._text(members)
        world = World((), (), (), (), (), None, text, (0, 0), faults=1, wishes=self.wish)
        first = self._started(world, self.ranks, generation=1)
        seen, left = {_digest(first)}, [first]
        while left:
            world = left.pop()
            followers = list(self._followers(world))
            if not followers and not self._is_over(world):
                raise WalkError(f"nothing can happen: {world}")
            for follower in (*followers, *self._after_faults(world)):
                digest = _digest(follower)
                if digest not in seen:
                    seen.add(digest)
                    left.append(follower)
        self.states = len(seen)

    # --- memberships, which are not hashable ---

    def _text(self, members: Membership) -> str:
        members.resize, members._cause, members._detected = None, "", (0.0, 0.0)  # for reports only
        text = repr(members)
        self._known.setdefault(text, members)
        return text

    def _copy(self, world: World) -> Membership:
        return copy.deepcopy(self._known[world.members])

    def _phase(self, world: World) -> Phase:
        return self._known[world.members].phase

    # --- what can happen ---

    def _followers(self, world: World) -> Iterator[World]:
        for number, process in enumerate(world.processes):
            if not process.alive:
                continue
            if process.is_being_killed:
                yield self._gone(world, number)
            if process.stopped:
                if number not in world.present or number in world.lost:
                    yield _with(world, number, stopped=False)  # it may go on before it is killed
                continue
            yield from self._of_rank(world, number, process)
        yield from self._of_supervisor(world)

    def _after_faults(self, world: World) -> Iterator[World]:
        """Yield the states after a fault."""
        if not world.faults:
            return
        less = world._replace(faults=0)
        for number in (*world.present, *world.newcomers):
            process = world.processes[number]
            if process.alive and process.at != "over":
                if self.fault == "crash":
                    yield self._gone(less, number)
                else:
                    yield _with(less, number, stopped=True)

    def _gone(self, world: World, number: int) -> World:
        return self._answered(_with(world, number, alive=False, asks=None))

    def _is_over(self, world: World) -> bool:
        ends = [world.processes[number] for number in world.present]
        if not all(each.at == "over" for each in ends if each.alive):
            return False
        for number in world.present:
            if world.processes[number].alive and world.files[number].step != STEPS:
                raise WalkError(f"the job has not made all steps: {world}")
        return True

    # --- ranks ---

    def _of_rank(self, world: World, number: int, process: Process) -> Iterator[World]:
        file, at = world.files[number], process.at
        if at == "newcomer":
            if number in world.present:
                yield _with(world, number, at="copy arrays")
            else:
                yield self._ready(_with(world, number, at="ready"))
        elif at == "leaving":
            yield self._gone(world, number)
        elif at == "copy arrays":
            if world.source is not None:
                file = file._replace(committed=world.files[world.source].committed)
            yield _filed(_with(world, number, at="copy step"), number, file)
        elif at == "copy step":
            step = 0 if world.source is None else world.files[world.source].step
            if file.committed != expected(step):
                raise WalkError(f"a rank begins with a mixture: {world}")
            file = file._replace(step=step, lease=process.generation)
            yield self._call(_filed(world, number, file), number, file.step, "barrier")
        elif at == "barrier":
            for now, steps in self._returned(world, number, process):
                if steps is not None and len(set(steps)) > 1 and self.mistake != "no agreement":
                    raise WalkError(f"ranks begin with the steps {steps}: {world}")
                yield now if steps is None else self._begun(now, number)
        elif at == "train":
            mine = [0] * STEPS * SAMPLES
            size = len(world.comms[process.comm].members)
            for sample in range(process.rank, SAMPLES, size):
                mine[file.step * SAMPLES + sample] = 1
            yield self._call(world, number, tuple(mine), "sum")
        elif at == "sum":
            for now, parts in self._returned(world, number, process):
                result = None if parts is None else added(parts)
                yield now if result is None else _with(now, number, at="write", result=result)
        else:
            yield from self._of_update(world, number, process, file)

    def _of_update(
        self, world: World, number: int, process: Process, file: File
    ) -> Iterator[World]:
        at, early = process.at, self.mistake == "commit before write"
        if at == "write":
            new = TORN if early else added([file.committed, process.result])
            yield _with(_filed(world, number, file._replace(other=new)), number, at="look")
        elif at == "fill":  # the slot is committed already
            new = added([expected(file.step - 1), process.result])
            now = _filed(world, number, file._replace(committed=new))
            yield self._reported(now, number, process, file)
        elif at == "look":
            if file.lease != process.generation and self.mistake != "lease ignored":
                yield self._gone(world, number)
            else:
                seen = file.lease == process.generation
                yield _with(world, number, at="commit", result=(seen, process.result))
        elif at == "commit":
            yield self._committed(world, number, process, file)
        elif at == "see":
            pauses = file.step >= file.pause_at
            yield self._reported(_with(world, number, pauses=pauses), number, process, file)
        elif at == "save":
            yield from self._saved(world, number, process, file)
        elif at == "pause":
            yield self._asked(_with(world, number, pauses=False), number, _PAUSED)
        elif at == "finish":
            yield self._asked(world, number, _FINISHED)
        elif at == "ask":
            yield self._asked(world, number, _NONE)
        else:
            yield from self._of_shrink(world, number, process, file)

    def _of_shrink(
        self, world: World, number: int, process: Process, file: File
    ) -> Iterator[World]:
        at = process.at
        if at == "shrink":
            members = world.comms[process.comm].members
            living = [each for each in members if world.processes[each].alive]
            if all(world.processes[each].at == "shrink" for each in living):
                comm = Comm(tuple(living), ((),) * len(living))
                now = world._replace(comms=(*world.comms, comm))
                for each in living:
                    now = _with(now, each, at="shrunk", result=len(now.comms) - 1)
                yield now
        elif at == "shrunk":
            size = len(world.comms[process.result].members)
            yield self._asked(world, number, size)
        elif at == "take":  # from a lost rank that has made the most steps
            ahead = world.files[process.result]
            torn = _filed(world, number, file._replace(committed=TORN))
            yield _with(torn, number, at="catch up", result=(ahead.step, ahead.committed, "agree"))
        elif at == "agree":
            yield self._call(world, number, (file.step, file.committed), "agreed")
        elif at == "agreed":
            for now, passed in self._returned(world, number, process):
                if passed is None:
                    yield now
                elif self.mistake == "no agreement" or file.step == max(passed)[0]:
                    yield _with(now, number, at="join")
                else:
                    torn = _filed(now, number, file._replace(committed=TORN))
                    yield _with(torn, number, at="catch up", result=(*max(passed), "join"))
        elif at == "catch up":
            step, contents, following = process.result
            now = _filed(world, number, file._replace(step=step, committed=contents))
            yield _with(now, number, at=following)
        elif at == "join":
            yield self._call(world, number, file.step, "barrier")

    def _committed(self, world: World, number: int, process: Process, file: File) -> World:
        seen, result = process.result
        if not seen:
            raise WalkError(f"a rank commits without a lease: {world}")
        early = self.mistake == "commit before write"
        file = file._replace(step=file.step + 1, committed=file.other, other=file.committed)
        if not early and file.committed != expected(file.step):
            raise WalkError(f"a step has other samples: {world}")
        now = _filed(world, number, file)
        if early:
            return _with(now, number, at="fill", result=result)
        return _with(now, number, at="see", result=None)

    def _reported(self, world: World, number: int, process: Process, file: File) -> World:
        """Tell the supervisor of the first step of a generation; go on after a step."""
        now = world
        if not process.has_stepped:
            now = _with(now, number, has_stepped=True)
            if number in now.present and self._phase(now) is not Phase.FENCING:
                members = self._copy(now)
                members.stepped(file.step)
                now = now._replace(members=self._text(members))
        at = "save" if process.rank == 0 else _next(file, now.processes[number])
        return _with(now, number, at=at, result=None)

    def _saved(self, world: World, number: int, process: Process, file: File) -> Iterator[World]:
        """Rank 0 holds the lock of the folder from its first checkpoint until it is gone."""
        holders = [
            each
            for each, other in enumerate(world.processes)
            if other.alive and other.rank == 0 and 0 < other.generation < process.generation
        ]
        if holders and self.mistake != "old manifest":
            return
        if world.manifest[0] > process.generation:
            raise WalkError(f"an old generation writes a checkpoint: {world}")
        now = world._replace(manifest=(process.generation, file.step))
        yield _with(now, number, at=_next(file, process))

    def _call(self, world: World, number: int, passed: Any, at: str) -> World:
        """Begin a call on the communicator of a process."""
        process = world.processes[number]
        comm = world.comms[process.comm]
        place = comm.members.index(number)
        row = (*comm.passed[place], passed)
        comm = comm._replace(passed=(*comm.passed[:place], row, *comm.passed[place + 1 :]))
        comms = (*world.comms[: process.comm], comm, *world.comms[process.comm + 1 :])
        return _with(world._replace(comms=comms), number, at=at, calls=process.calls + 1)

    def _returned(
        self, world: World, number: int, process: Process
    ) -> Iterator[tuple[World, list[Any] | None]]:
        """How the call of a process ends: with what all have passed, or with an error."""
        comm = world.comms[process.comm]
        if all(len(row) >= process.calls for row in comm.passed):
            yield world, [row[process.calls - 1] for row in comm.passed]
        others = [world.processes[each] for each in comm.members]
        if any(not o.alive or o.stopped or o.at == "ask" or o.asks == _NONE for o in others):
            yield _with(world, number, at="ask"), None

    def _begun(self, world: World, number: int) -> World:
        """Rank 0 says that its generation has begun."""
        now = _with(world, number, at="train")
        if world.files[number].step == STEPS:
            now = _with(world, number, at="finish")
        if world.processes[number].rank == 0 and self._phase(world) is Phase.STARTING:
            members = self._copy(world)
            members.started()
            now = self._done(now._replace(lost=(), kept=()), members, members.pursue({}))
            now = self._ready(now)
        return now

    # --- the supervisor ---

    def _of_supervisor(self, world: World) -> Iterator[World]:
        if world.pause[0] not in ("", "set"):
            yield self._pause_on(world)
            return  # it does nothing else meanwhile
        if world.wishes and self._phase(world) is Phase.RUNNING:
            members = self._copy(world)
            members.wish(world.wishes, "command")
            yield self._done(world._replace(wishes=0), members, members.pursue({}))
        new = [world.processes[number] for number in world.newcomers]
        if any(not process.alive or process.stopped for process in new):
            members = self._copy(world)
            members.unprepared()
            yield self._dropped(world._replace(members=self._text(members)))
        phase, living = self._phase(world), [n for n in world.present if n not in world.lost]
        if phase in (Phase.STARTING, Phase.RUNNING, Phase.SHRINKING):
            for number in living:
                process = world.processes[number]
                asks = any(world.processes[each].asks is not None for each in living)
                if not process.alive and process.at != "over":
                    yield self._lose(world, number, Lost(process.rank, 9), "killed")
                elif process.alive and process.stopped and asks:
                    yield self._lose(world, number, Lost(process.rank, 0), "stopped")
            if self._known[world.members].wakes_at is not None:
                members = self._copy(world)
                yield self._done(world, members, members.tick(_LATE))
        if phase is Phase.FENCING and self._is_fenced(world):
            members = self._copy(world)
            begun = ("copy arrays", "copy step")
            files = (*world.present, *world.kept)
            held = [n for n in files if world.processes[n].at not in begun]
            if world.source is not None and len(held) < len(world.present):
                held.append(world.source)
            best = max(held, key=lambda n: world.files[n].step, default=None)
            if best is not None and world.files[best].committed != expected(world.files[best].step):
                raise WalkError(f"the next generation begins with a mixture: {world}")
            now = world._replace(source=best)
            yield self._done(now, members, members.fenced(0.0))

    def _is_fenced(self, world: World) -> bool:
        """Whether all processes of the present generation are gone."""
        left = [world.processes[number] for number in world.present]
        left = [process for process in left if process.alive]
        if self.mistake == "old manifest":
            left = [process for process in left if process.at != "save"]
        return not left or self.mistake == "no fence"

    def _lose(self, world: World, number: int, lost: Lost, cause: str) -> World:
        members = self._copy(world)
        step = max(world.files[each].step for each in world.present)
        now = world._replace(lost=(*world.lost, number))
        if self.mistake != "no fence":
            now = _with(now, number, is_being_killed=True)
        return self._done(now, members, members.lost([lost], 0.0, cause=cause, step=step))

    def _done(self, world: World, members: Membership, decision: Decision | None) -> World:
        """Carry out what the membership has decided."""
        now = world._replace(members=self._text(members))
        match decision.kind if decision else None:
            case Next.STOP:
                assert members.left < members.rules.least, decision
                return now._replace(present=(), lost=())
            case Next.START:
                return self._started(now, decision.size, decision.generation)
            case Next.PREPARE:
                return self._prepared(now, decision.size)
            case Next.DROP:
                return self._dropped(now)
            case Next.PAUSE:
                return self._paused(now)
            case Next.LEAVE | Next.PART:
                return self._left(now, decision)
            case Next.MEET | Next.RESUME | Next.RETURN:
                return self._told(now, decision.kind)
            case Next.GO_ON:
                living = [n for n in now.present if n not in now.lost]
                return self._begun_again(now, living, decision.generation)
            case Next.TAKE_OVER:
                return self._taken_over(now, decision.generation)
            case Next.FENCE:
                return self._fenced(now)
            case Next.SHRINK:
                return self._answered(self._interrupted(now))
        return now

    def _fenced(self, world: World) -> World:
        """Kill all ranks of the present generation, and let none write."""
        now = world._replace(lost=(), pause=("", 0, 0))
        for number in now.present:
            now = _filed(now, number, now.files[number]._replace(lease=0))
            now = _with(now, number, is_being_killed=True, asks=None)
        return now

    # --- another number of ranks ---

    def _prepared(self, world: World, size: int) -> World:
        """Start the processes of the next generation beside the present one."""
        now = self._started(self._dropped(world), size, generation=0)
        new = now.present
        now = now._replace(present=world.present, lost=world.lost, newcomers=new)
        for number in new:
            now = _with(now, number, at="newcomer")
        return now

    def _paused(self, world: World) -> World:
        """Have all ranks pause after the same step."""
        now = world if self._are_ready(world) else self._dropped(world)
        if now.pause[0]:
            return now
        first = "read" if self.mistake == "no second look" else "stop"
        return now._replace(pause=(first, 0, 0))

    def _taken_over(self, world: World, generation: int) -> World:
        """Let the next generation begin."""
        now = world._replace(present=world.newcomers, newcomers=(), lost=(), kept=())
        now = now._replace(pause=("", 0, 0))
        for number in now.present:
            at = "newcomer" if now.processes[number].at == "newcomer" else "copy arrays"
            now = _with(now, number, at=at, generation=generation)
        return now

    def _are_ready(self, world: World) -> bool:
        new = [world.processes[number] for number in world.newcomers]
        return bool(new) and all(process.at == "ready" and process.alive for process in new)

    def _ready(self, world: World) -> World:
        """Have all ranks pause if those of the next generation are ready."""
        if not self._are_ready(world):
            return world
        members = self._copy(world)
        return self._done(world, members, members.prepared())

    def _dropped(self, world: World) -> World:
        """Kill what has started for the next generation; no rank pauses for it."""
        now = world
        for number in world.newcomers:
            now = _with(now, number, is_being_killed=True)
        now = self._unpaused(now._replace(newcomers=()))
        for number in now.present:
            if now.processes[number].asks == _PAUSED:
                now = _with(now, number, at=_next(now.files[number]), asks=None)
        return now

    def _unpaused(self, world: World) -> World:
        now = world._replace(pause=("", 0, 0))
        for number in now.present:
            now = _filed(now, number, now.files[number]._replace(pause_at=NEVER))
        return now

    def _interrupted(self, world: World) -> World:
        """Have no rank pause, for some make a communicator."""
        now = self._unpaused(world)
        for number in now.present:
            if now.processes[number].asks == _PAUSED:
                now = _with(now, number, at="ask", asks=None)
        return now

    def _pause_on(self, world: World) -> World:
        """Make one store, or one load, to have all ranks pause after the same step."""
        what, place, step = world.pause
        number = world.present[place]
        file, last = world.files[number], place + 1 == len(world.present)
        now = world
        if what == "read":
            step = max(step, file.step + 1)
        else:
            now = _filed(now, number, file._replace(pause_at=0 if what == "stop" else step))
        following = {"stop": "read", "read": "choose", "choose": "set"}[what]
        now = now._replace(pause=(following, 0, step) if last else (what, place + 1, step))
        return self._answered(now) if now.pause[0] == "set" else now

    def _left(self, world: World, decision: Decision) -> World:
        """Have ranks end, all or some, after the same step."""
        steps = {world.files[n].step for n in world.present if n not in world.lost}
        if len(steps) > 1:
            raise WalkError(f"ranks pause after the steps {steps}: {world}")
        if decision.kind is Next.LEAVE:
            now = world
            for number in now.present:
                now = _filed(now, number, now.files[number]._replace(lease=0))
                if now.processes[number].alive:
                    now = _with(now, number, at="leaving", asks=None, is_being_killed=True)
            return now
        leaving = tuple(n for n in world.present if world.processes[n].rank in decision.leaving)
        now = world._replace(lost=leaving)
        for number in leaving:
            now = _with(now, number, at="leaving", asks=None)
        return self._answered(self._interrupted(now))

    def _started(self, world: World, size: int, generation: int) -> World:
        first, comm = len(world.processes), len(world.comms)
        numbers = tuple(range(first, first + size))
        new = tuple(Process(rank, comm, generation=generation) for rank in range(size))
        return world._replace(
            processes=world.processes + new,
            files=world.files + (File(),) * size,
            comms=(*world.comms, Comm(numbers, ((),) * size)),
            present=numbers,
            lost=(),
            kept=(),
        )

    def _asked(self, world: World, number: int, what: int) -> World:
        now = _with(world, number, at="answer", asks=what)
        phase = self._phase(world)
        if phase is Phase.FENCING or number not in world.present:
            return now  # it is being killed
        if what == _PAUSED and phase is Phase.SHRINKING:
            return _with(now, number, at="ask", asks=None)
        return self._answered(now)

    def _early(self, world: World) -> World:
        """Answer the ranks that pause after an earlier step than all do."""
        now = world
        for number in world.present:
            file = world.files[number]
            step = world.pause[2] if world.pause[0] else NEVER
            if world.processes[number].asks == _PAUSED and file.step < step:
                now = _with(now, number, at=_next(file), asks=None)
        return now

    def _answered(self, world: World) -> World:
        """Answer all that are alive, if all have asked."""
        if world.pause[0] not in ("", "set"):
            return world  # the supervisor hears nothing meanwhile
        world = self._early(world)
        living = [n for n in world.present if n not in world.lost]
        asks = [world.processes[n].asks for n in living]
        gone = self.mistake == "no fence" or all(not world.processes[n].alive for n in world.lost)
        if not living or None in asks or not gone:
            return world
        members = self._copy(world)
        if members.phase in (Phase.FENCING, Phase.WAITING, Phase.ENDED):
            return world
        kinds = {_PAUSED: "paused", _FINISHED: "finished", _NONE: "suspect"}
        asked = [(kinds.get(a, "shrunk"), max(0, a)) for a in asks]
        return self._done(world, members, members.asked(asked, 1.0, 1.0))

    def _told(self, world: World, what: Next) -> World:
        """Answer all that are alive."""
        now = world
        for number in (n for n in world.present if n not in world.lost):
            if what is Next.MEET:
                now = _with(now, number, at="shrink", asks=None)
            elif what is Next.RETURN:
                now = _with(now, number, at="over", asks=None)
            elif world.processes[number].asks == _PAUSED:
                now = _with(now, number, at=_next(now.files[number]), asks=None)
        return now

    def _begun_again(self, world: World, living: Sequence[int], generation: int) -> World:
        """Begin a generation of the ranks that are left."""
        kept = (*world.kept, *world.lost)
        now, files = world._replace(present=tuple(living), kept=kept), world.files
        ahead = max(world.lost, key=lambda n: files[n].step)
        if files[ahead].step <= max(files[n].step for n in living):
            ahead = -1
        for rank, number in enumerate(living):
            now = _with(
                now,
                number,
                at="agree" if ahead < 0 else "take",
                result=ahead,
                asks=None,
                rank=rank,
                comm=world.processes[number].result,
                calls=0,
                generation=generation,
                has_stepped=False,
            )
            now = _filed(now, number, now.files[number]._replace(lease=generation))
        return now


def _next(file: File, process: Process | None = None) -> str:
    """Return the action of a process after a step."""
    if process is not None and process.pauses:
        return "pause"
    return "finish" if file.step == STEPS else "train"


def _with(world: World, number: int, **changes: Any) -> World:
    """Change a process."""
    before = world.processes
    changed = before[number]._replace(**changes)
    return world._replace(processes=(*before[:number], changed, *before[number + 1 :]))


def _filed(world: World, number: int, file: File) -> World:
    """Change the file of a process."""
    return world._replace(files=(*world.files[:number], file, *world.files[number + 1 :]))
