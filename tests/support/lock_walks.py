"""Walk every interleaving, and every death, of ranks that run `ringreduce.shm.block_access` itself.

The functions run uncompiled, one access to shared memory a step: a lock, the version, a word of a
block or of a result.  A rank may die before any step.  An operation that is not over is run again
from its beginning: it is given what it read before.  All ranks see memory in the order in which it
was written, as release and acquire order make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from ringreduce.compiler.memory import load, store
from ringreduce.compiler.records import (
    compare_and_swap,
    fetch_and_add,
    load_acquire,
    size_of,
    store_release,
)
from ringreduce.shm import block_access
from ringreduce.shm.block_access import (
    ADD,
    CONTINUE,
    DONE,
    LOCK_BYTES,
    READ,
    TAKE_OVER,
    Access,
    holder_of,
)

WORD = 8
BLOCK_WORDS = 2
_BLOCK_BYTES = BLOCK_WORDS * WORD


class BrokenError(AssertionError):
    """A block is torn, or has other adds than it may have."""


class Rank(NamedTuple):
    """Where a rank is."""

    operation: int
    """Index of its operation."""
    request: int | None
    """The request under way; None: the rank has yet to choose it."""
    log: tuple[Any, ...]
    """What the accesses of that request have read so far; None for those that wrote."""
    memory: bytes
    """The rank's own records and array when the request began."""
    waits: bool = False
    """Whether the operation waits for a lock."""
    alive: bool = True


class State(NamedTuple):
    """Where all ranks are, and the memory that they share."""

    ranks: tuple[Rank, ...]
    shared: bytes


class _PauseError(Exception):
    """The rank has made its one access, and would make another."""


class Walk:
    """Ranks that each make operations on `blocks` blocks; at most `deaths` of them die.

    `operations` has those of each rank: a number to add to every element, or None to read.
    """

    def __init__(
        self, operations: Sequence[Sequence[int | None]], blocks: int = 1, deaths: int = 1
    ) -> None:
        self.operations, self.blocks, self.deaths = operations, blocks, deaths
        self._results = LOCK_BYTES * (1 + blocks)
        self._array = self._results + len(operations) * _BLOCK_BYTES
        count = blocks * BLOCK_WORDS
        self.shared = np.zeros(self._array // WORD + count, np.int64)
        # One row more: after all, somebody reads.
        self.memory = np.zeros((len(operations) + 1, size_of(Access) // WORD + count), np.int64)
        self.own = self.memory[:, -count:]
        self.accesses = [self._access(rank) for rank in range(len(operations) + 1)]
        self._log: list[Any] = []
        self._at, self._moved, self._stepped = 0, False, True

    def _access(self, rank: int) -> Access:
        access, begin = Access(self.memory[rank].ctypes.data), self.shared.ctypes.data
        access.version, access.locks = begin, begin + LOCK_BYTES
        access.results, access.blocks = begin + self._results, begin + self._array
        access.nbytes, access.block_bytes = self.blocks * _BLOCK_BYTES, _BLOCK_BYTES
        access.block_count, access.item_bytes = self.blocks, WORD
        access.rank, access.first = rank, rank * self.blocks // len(self.operations)
        access.fold, access.spins = 1, 1
        return access

    # --- one access a step ---

    def access(self, make: Callable[[], Any]) -> Any:
        """Make an access to shared memory; or give what it gave when it was made before."""
        if not self._stepped:
            return make()
        if self._at < len(self._log):
            self._at += 1
            return self._log[self._at - 1]
        if self._moved:
            raise _PauseError
        self._moved = True
        self._log.append(make())
        self._at += 1
        return self._log[-1]

    def start(self) -> State:
        """The state before the first step."""
        ranks = tuple(Rank(0, None, (), memory.tobytes()) for memory in self.memory[:-1])
        return State(ranks, self.shared.tobytes())

    def after_a_step(self, state: State) -> Iterator[State]:
        """All states that one step of one rank leads to.  Raises BrokenError."""
        dead = {me for me, rank in enumerate(state.ranks) if not rank.alive}
        for me, rank in enumerate(state.ranks):
            if rank.alive and rank.operation < len(self.operations[me]):
                self.shared[:] = np.frombuffer(state.shared, np.int64)
                moved = self._step(me, rank, dead)
                if moved != rank:
                    yield _with(state, me, moved)._replace(shared=self.shared.tobytes())

    def after_a_death(self, state: State) -> Iterator[State]:
        """All states that the death of one rank leads to."""
        if sum(not rank.alive for rank in state.ranks) < self.deaths:
            for me, rank in enumerate(state.ranks):
                if rank.alive and rank.operation < len(self.operations[me]):
                    yield _with(state, me, rank._replace(alive=False))

    def _step(self, me: int, rank: Rank, dead: set[int]) -> Rank:
        """Let a rank make one access, and go on up to the next one."""
        self._moved = False
        while rank.operation < len(self.operations[me]):
            self.memory[me] = np.frombuffer(rank.memory, np.int64)
            self._log, self._at = list(rank.log), 0
            if rank.request is None:
                request = self._choose(me, rank, dead)
                rank = rank._replace(request=request, memory=self.memory[me].tobytes())
            try:
                own = self.own[me].ctypes.data
                result = block_access.serve(self.accesses[me], rank.request, own)
            except _PauseError:
                return rank._replace(log=tuple(self._log))
            memory = self.memory[me].tobytes()
            if result != DONE:
                return Rank(rank.operation, None, (), memory, waits=True)
            if self.operations[me][rank.operation] is None:
                whole(self.own[me])
            rank = Rank(rank.operation + 1, None, (), memory)
        return rank

    def _choose(self, me: int, rank: Rank, dead: set[int]) -> int:
        """Choose the next request of a rank, and fill its own array for a new operation."""
        if rank.waits:
            return TAKE_OVER if holder_of(self.accesses[me].found) in dead else CONTINUE
        number = self.operations[me][rank.operation]
        self.own[me] = -1 if number is None else number
        return READ if number is None else ADD

    # --- what has to hold ---

    def finished(self, state: State) -> bool:
        """Whether all ranks that live have done all."""
        pairs = zip(state.ranks, self.operations, strict=True)
        return all(not rank.alive or rank.operation == len(them) for rank, them in pairs)

    def check(self, state: State) -> None:
        """Check the version, and each block as a last rank reads it.  Raises BrokenError."""
        pairs = [*zip(state.ranks, self.operations, strict=True)]
        completed = [x for rank, them in pairs for x in them[: rank.operation] if x is not None]
        sums = {sum(completed)}
        for rank, them in pairs:
            if not rank.alive:
                sums |= {each + (them[rank.operation] or 0) for each in sums}
        values = self._read_last(state)
        if self.shared[0] != len(completed) or not set(values) <= sums:
            found = f"version {self.shared[0]}, blocks {values}"
            raise BrokenError(f"{found} after adds of {completed}; possible are {sums}")

    def _read_last(self, state: State) -> list[int]:
        """Read all blocks when no other rank runs; return the value of each."""
        self.shared[:] = np.frombuffer(state.shared, np.int64)
        self._stepped = False
        own, access = self.own[-1], self.accesses[-1]
        result = block_access.serve(access, READ, own.ctypes.data)
        while result != DONE:
            assert not state.ranks[holder_of(access.found)].alive, "a lock is left behind"
            result = block_access.serve(access, TAKE_OVER, 0)
        self._stepped = True
        return whole(own)


def _with(state: State, me: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:me], rank, *state.ranks[me + 1 :]))


def whole(array: np.ndarray) -> list[int]:
    """Return the value of each block.  Raises BrokenError if the words of one differ."""
    blocks = array.reshape(-1, BLOCK_WORDS)
    if (blocks != blocks[:, :1]).any():
        raise BrokenError(f"torn blocks: {blocks.tolist()}")
    return [int(value) for value in blocks[:, 0]]


@contextmanager
def stepped(walk: Walk) -> Iterator[None]:
    """Let `block_access` make its accesses to shared memory through a walk."""

    def through(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: walk.access(lambda: make(*given))

    def by_words(into: int, source: int, nbytes: int) -> None:
        for at in range(0, nbytes, WORD):
            walk.access(lambda at=at: store(into + at, load(source + at)))

    def add(_: int, into: int, sources: int, n: int, count: int, *__: int) -> None:
        left, right = load(sources), load(sources + WORD)
        for at in range(0, count * WORD, WORD):
            walk.access(lambda at=at: store(into + at, load(left + at) + load(right + at)))

    stepping = {
        "load_acquire": through(load_acquire),
        "store_release": through(store_release),
        "compare_and_swap": through(compare_and_swap),
        "fetch_and_add": through(fetch_and_add),
        "copy": by_words,
        "call_fold": add,
    }
    with patch.multiple(block_access, **stepping):
        yield


def explore(walk: Walk) -> int:
    """Walk every interleaving and every death; return the number of states.

    Raises BrokenError for a wrong block or version, AssertionError where no living rank can go on.
    States are kept by their hashes of 64 bits.
    """
    with stepped(walk):
        start = walk.start()
        seen, waiting = {hash(start)}, [start]
        while waiting:
            state = waiting.pop()
            following = list(walk.after_a_step(state))
            if not following:
                assert walk.finished(state), "no living rank can go on"
                walk.check(state)
            for each in (*following, *walk.after_a_death(state)):
                if hash(each) not in seen:
                    seen.add(hash(each))
                    waiting.append(each)
    return len(seen)


# --- mistakes -------------------------------------------------------------------------------------


def in_place(access: Access, lock: Any, block: int) -> None:
    """`commit`, were the word of the lock left as it is."""
    block_access.copy_result(access, access.rank, block)


def without_the_result(access: Access) -> None:
    """`take_over`, did it free the lock and leave the block."""
    lock = block_access.lock_of(access, block_access.next_block(access))
    block_access.compare_and_swap(lock, "word", access.found, block_access.FREE)


def by_all_that_wait(access: Access) -> None:
    """`take_over`, did each rank that waits copy the result, and not one of them alone."""
    block = block_access.next_block(access)
    source = block_access.source_of(access.found)
    if source >= 0:
        block_access.copy_result(access, source, block)
    lock = block_access.lock_of(access, block)
    block_access.compare_and_swap(lock, "word", access.found, block_access.FREE)


def in_its_own_name(access: Access) -> None:
    """`take_over`, did the word not say whose result is copied."""
    block, found = block_access.next_block(access), access.found
    lock, source = block_access.lock_of(access, block), block_access.source_of(found)
    if block_access.compare_and_swap(lock, "word", found, block_access.held(access.rank)):
        if source >= 0:
            block_access.copy_result(access, source, block)
        block_access.store_release(lock, "word", block_access.FREE)


def without_a_swap(access: Access, lock: Any) -> bool:
    """`acquire`, did it load and store."""
    access.found = block_access.load_acquire(lock, "word")
    if access.found != block_access.FREE:
        return False
    block_access.store_release(lock, "word", block_access.held(access.rank))
    return True


MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "the result is copied before the word says so": ("commit", in_place),
    "the result of a dead rank is dropped": ("take_over", without_the_result),
    "all that wait copy the result of a dead rank": ("take_over", by_all_that_wait),
    "a second death finds no result": ("take_over", in_its_own_name),
    "two ranks hold one lock": ("acquire", without_a_swap),
}
"""What goes wrong -> the function that is replaced, and by what."""
