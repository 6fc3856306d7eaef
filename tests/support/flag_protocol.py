"""The protocol of exchanges through memory, as a machine whose every interleaving can be walked.

It is what `ringreduce.shm.executor` does, one access to memory a step.  What a rank has to say
has two halves, written and read one after the other.  Memory is seen in the order in which it was
written: that is what release and acquire make of the number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Slot(NamedTuple):
    """The number, and in the halves the exchange that they were written for."""

    number: int = 0
    first: int = 0
    second: int = 0


Block = tuple[Slot, Slot]
"""What one rank alone writes."""


class Rank(NamedTuple):
    """Where a rank is: its exchange, what it does next, and with whom it has done."""

    exchange: int = 1
    doing: str = "room"
    peer: int = -1
    done: frozenset[int] = frozenset()
    seen: tuple[int, ...] = ()
    """The latest number seen of each rank."""


State = tuple[tuple[Rank, ...], tuple[Block, ...]]
_WRITES = ("first", "second", "number")


class TornError(AssertionError):
    """A rank has read what was not, or no longer, meant for its exchange."""


@dataclass(frozen=True)
class Protocol:
    """The protocol, or one with a mistake, to see that it would be found."""

    ranks: int
    exchanges: int
    from_root: bool = False
    """Only rank 0 says something, and waits for nobody to hear it."""
    one_slot: bool = False
    """Every exchange writes the same slot."""
    number_first: bool = False
    """The number is put before the rest is there."""
    no_room: bool = False
    """Nobody asks whether the slot may be written."""

    def start(self) -> State:
        rank = Rank(seen=(0,) * self.ranks)
        return (rank,) * self.ranks, ((Slot(), Slot()),) * self.ranks

    def finished(self, state: State) -> bool:
        return all(rank.exchange > self.exchanges for rank in state[0])

    def after(self, state: State) -> Iterator[State]:
        """All states that one step of one rank leads to.  Raises TornError."""
        ranks, blocks = state
        for me, rank in enumerate(ranks):
            if rank.exchange <= self.exchanges:
                for following, block in self._steps(me, rank, blocks):
                    yield (
                        (*ranks[:me], following, *ranks[me + 1 :]),
                        (*blocks[:me], block, *blocks[me + 1 :]),
                    )

    def _steps(
        self, me: int, rank: Rank, blocks: tuple[Block, ...]
    ) -> Iterator[tuple[Rank, Block]]:
        block, exchange = blocks[me], rank.exchange
        others = set(range(self.ranks)) - {me}
        if rank.doing == "room":
            waiting = {p for p in others - rank.done if rank.seen[p] < exchange - 1}
            if not waiting or self.no_room:
                yield rank._replace(doing=self._order[0], done=frozenset()), block
            for peer in waiting:
                number = self._slot(blocks[peer], exchange - 1).number
                if number >= exchange - 1:
                    yield self._having_seen(rank, peer, exchange - 1), block
        elif rank.doing in _WRITES:
            slot = self._slot(block, exchange)._replace(**{rank.doing: exchange})
            order = (*self._order, "look")
            following = rank._replace(doing=order[order.index(rank.doing) + 1])
            here = 0 if self.one_slot else exchange & 1
            yield following, (slot, block[1]) if here == 0 else (block[0], slot)
        elif rank.doing == "look":
            awaited = {0} - {me} if self.from_root else others
            if awaited <= rank.done:
                yield Rank(exchange + 1, seen=rank.seen), block
            for peer in awaited - rank.done:
                if self._slot(blocks[peer], exchange).number >= exchange:
                    reading = self._having_seen(rank, peer, exchange)
                    yield reading._replace(doing="read first", peer=peer, done=rank.done), block
        else:
            slot = self._slot(blocks[rank.peer], exchange)
            if (slot.first if rank.doing == "read first" else slot.second) != exchange:
                raise TornError(f"rank {me} in exchange {exchange} reads of {blocks[rank.peer]}")
            if rank.doing == "read first":
                yield rank._replace(doing="read second"), block
            else:
                yield rank._replace(doing="look", done=rank.done | {rank.peer}), block

    @property
    def _order(self) -> tuple[str, ...]:
        return ("number", "first", "second") if self.number_first else _WRITES

    def _slot(self, block: Block, exchange: int) -> Slot:
        return block[0 if self.one_slot else exchange & 1]

    @staticmethod
    def _having_seen(rank: Rank, peer: int, number: int) -> Rank:
        seen = (*rank.seen[:peer], number, *rank.seen[peer + 1 :])
        return rank._replace(seen=seen, done=rank.done | {peer})


def explore(protocol: Protocol) -> int:
    """Walk every interleaving; how many states there are.

    Raises TornError for a wrong read, AssertionError where nobody can go on.
    """
    start = protocol.start()
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = list(protocol.after(state))
        assert following or protocol.finished(state), f"nobody can go on: {state}"
        for each in following:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return len(seen)
