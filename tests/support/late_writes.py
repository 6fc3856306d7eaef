"""Walk every order in which ranks write to arrays of peers that leave the call meanwhile.

The ranks run `executor.distribute` and `protocol.leave` themselves, uncompiled, one access to
shared memory a step.  Stores go to a buffer of their rank first, as on a processor: a later load
may overtake them, and a streaming store may stay there longer than others, until a fence empties
the buffer.  A function that is not over is run again from its beginning: it is given what it read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from ringreduce.compiler.records import address_of, size_of
from ringreduce.shm import executor, protocol
from ringreduce.shm.layout import RING_OFFSET, Destinations, DirectWrite, Peer, Team
from tests.support import interleavings

RESULT, ANOTHER = 7, 8
"""The value of the arrays of a call; the value that their owner writes after it has left."""


class LateError(AssertionError):
    """A rank has written to an array that was given back."""


class Store(NamedTuple):
    """A store that other ranks do not see yet."""

    address: int
    value: int
    streams: bool


class Rank(NamedTuple):
    """Where a rank is."""

    action: int = 0
    log: tuple[Any, ...] = ()
    """The values that the accesses of that action have read so far; None for those that wrote."""
    buffer: tuple[Store, ...] = ()


class State(NamedTuple):
    """Where all ranks are, and the memory that they share."""

    ranks: tuple[Rank, ...]
    shared: frozenset[tuple[int, int]] = frozenset()


class _WaitError(Exception):
    """The rank polls, and has seen nothing new."""


class Walk(interleavings.Walk):
    """Ranks that each do some of "write", to all peers, and "leave", one after another."""

    def __init__(self, *ranks: Sequence[str]) -> None:
        size = len(ranks)
        self.segments = [RING_OFFSET * (rank + 1) for rank in range(size)]  # never touched
        self.arrays = [8 * (rank + 1) for rank in range(size)]
        lists = size_of(Destinations) + (size - 1) * size_of(DirectWrite)
        head = size_of(Team) + (size - 1) * size_of(Peer)
        self._memory = np.zeros((size, head + lists), np.uint8)
        self.teams = [Team(row.ctypes.data) for row in self._memory]
        self.wanted = [address_of(team) + head for team in self.teams]
        self.actions = [[self._action(r, name) for name in names] for r, names in enumerate(ranks)]
        self.leaving = {rank for rank, names in enumerate(ranks) if "leave" in names}
        self.stored: dict[int, int] = {}
        self.buffer: list[Store] = []

    def _action(self, me: int, name: str) -> Callable[[], Any]:
        team, others = self.teams[me], [r for r in range(len(self.segments)) if r != me]
        team.segment, team.peer_count = self.segments[me], len(others)
        wanted = Destinations(self.wanted[me])
        wanted.direct_count, wanted.direct = len(others), address_of(wanted) + size_of(Destinations)
        for index, rank in enumerate(others):
            peer = protocol.peer_of(team, index)
            peer.segment, peer.output.address = self.segments[rank], self.arrays[rank]
            peer.output_is_shared = 1
            direct = DirectWrite(wanted.direct + index * size_of(DirectWrite))
            direct.peer = address_of(peer)

        def leave() -> None:
            protocol.leave(team)
            self.store(self.arrays[me], ANOTHER)

        write = lambda: executor.distribute(team, wanted, 0, 0, 8)  # noqa: E731
        return leave if name == "leave" else write

    # --- accesses ---

    def load(self, record: Any, field: str) -> int:
        def look() -> int:
            own = [each.value for each in self.buffer if each.address == address_of(record)]
            return own[-1] if own else self.stored.get(address_of(record), 0)

        return self.access(look)

    def store(self, address: int, value: int, streams: bool = False) -> None:
        self.access(lambda: self.buffer.append(Store(address, value, streams)))

    def fence(self) -> None:
        """Wait until the buffer is empty."""

        def wait() -> None:
            if self.buffer:
                raise _WaitError

        self.access(wait)

    # --- steps ---

    def after(self, state: State) -> Iterator[State]:
        """All states that one step of a rank, or one store out of a buffer, leads to."""
        for me, rank in enumerate(state.ranks):
            for index, stored in enumerate(rank.buffer):
                if stored.streams or all(each.streams for each in rank.buffer[:index]):
                    left = rank.buffer[:index] + rank.buffer[index + 1 :]
                    shared = {**dict(state.shared), stored.address: stored.value}
                    yield _with(state, me, rank._replace(buffer=left), shared)
            if rank.action < len(self.actions[me]):
                self.stored = dict(state.shared)
                moved = self._step(me, rank)
                if moved is not None:
                    yield _with(state, me, moved, self.stored)

    def _step(self, me: int, rank: Rank) -> Rank | None:
        """Let a rank make one access, and go on up to the next one; None if it has to wait."""
        self._moved, self._at = False, 0
        self._log, self.buffer = list(rank.log), list(rank.buffer)
        try:
            self.actions[me][rank.action]()
        except interleavings.PauseError:
            return Rank(rank.action, tuple(self._log), tuple(self.buffer))
        except _WaitError:
            return None
        return Rank(rank.action + 1, (), tuple(self.buffer))

    def check(self, state: State) -> None:
        """Check that all are done, and that arrays which were given back have kept their values."""
        done = [len(actions) for actions in self.actions]
        assert [rank.action for rank in state.ranks] == done, "no rank can go on"
        for rank in self.leaving:
            if dict(state.shared)[self.arrays[rank]] != ANOTHER:
                raise LateError(f"the array of rank {rank} was written after it had left")


def _with(state: State, me: int, rank: Rank, shared: dict[int, int]) -> State:
    return State((*state.ranks[:me], rank, *state.ranks[me + 1 :]), frozenset(shared.items()))


@contextmanager
def stepped(walk: Walk) -> Iterator[None]:
    """Let the functions make their accesses to shared memory through a walk."""

    def wait() -> None:
        raise _WaitError

    def record(kind: str) -> Callable[[int], Any]:
        """Records at addresses that nobody may touch: only their addresses count."""
        return lambda segment: protocol.WriteMark(segment + getattr(protocol, f"{kind}_OFFSET"))

    stepping = {
        "mark_of": record("MARK"),
        "departure_of": record("DEPARTURE"),
        "load_acquire": walk.load,
        "store_release": lambda record, _, value: walk.store(address_of(record), value),
        "fence": walk.fence,
        "nanoseconds": lambda _: 0,
        "yield_core": wait,
    }

    def push(_: Team, __: int, into: int, *___: int) -> bool:
        walk.store(into, RESULT, streams=True)
        return True

    with patch.multiple(protocol, **stepping), patch.object(executor, "push", push):
        yield


def explore(walk: Walk) -> int:
    """Walk every order; return the number of states.  Raises LateError, or AssertionError."""
    start = State((Rank(),) * len(walk.actions))
    with stepped(walk):
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            following = list(walk.after(state))
            if not following:
                walk.check(state)
            waiting += set(following) - seen
            seen.update(following)
    return len(seen)
