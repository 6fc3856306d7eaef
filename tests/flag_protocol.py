"""The protocol of an exchange through memory, as a machine whose every interleaving can be walked.

It is what `ringreduce.devices.exchange` does, one access to memory a step.  A message has two
halves, written and read one after the other; in the first stands the number of its call.  Memory is
seen in the order in which it was written: that is what release and acquire make of the flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Block(NamedTuple):
    """What one rank alone writes; in the halves stand numbers of calls."""

    flag: int = 0
    slots: tuple[tuple[int, int], ...] = ((-1, -1), (-1, -1))


class Rank(NamedTuple):
    """Where a rank is: its call, what it does next, whom it reads, whose messages it has."""

    call: int = 0
    doing: str = "first half"
    peer: int = -1
    slot: int = -1
    has: frozenset[int] = frozenset()


State = tuple[tuple[Rank, ...], tuple[Block, ...]]


class TornError(AssertionError):
    """A rank has read what was not, or no longer, the message of its call."""


@dataclass(frozen=True)
class Protocol:
    """The protocol, or one with a mistake, to see that it would be found."""

    ranks: int
    calls: int
    one_slot: bool = False
    """Every call writes the same slot."""
    flag_first: bool = False
    """The flag is raised before the message is there."""
    goes_on_early: bool = False
    """A rank goes on to its next call with the first message that it has."""
    reads_where_the_flag_says: bool = False
    """A rank that is behind looks into the slot of the later message."""

    def start(self) -> State:
        return (Rank(),) * self.ranks, (Block(),) * self.ranks

    def finished(self, state: State) -> bool:
        return all(rank.call == self.calls for rank in state[0])

    def after(self, state: State) -> Iterator[State]:
        """All states that one step of one rank leads to.  Raises TornError."""
        ranks, blocks = state
        for me, rank in enumerate(ranks):
            if rank.call < self.calls:
                for next_rank, block in self._steps(me, rank, blocks):
                    yield (
                        (*ranks[:me], next_rank, *ranks[me + 1 :]),
                        (*blocks[:me], block, *blocks[me + 1 :]),
                    )

    def _steps(
        self, me: int, rank: Rank, blocks: tuple[Block, ...]
    ) -> Iterator[tuple[Rank, Block]]:
        block, call = blocks[me], rank.call
        turn = 0 if self.one_slot else call % 2
        if rank.doing in ("first half", "second half", "flag"):
            order = ["first half", "second half", "flag", "look"]
            if self.flag_first:
                order = ["flag", "first half", "second half", "look"]
            doing = order[0] if rank.doing == "first half" and rank.peer == -1 else rank.doing
            following = order[order.index(doing) + 1]
            yield rank._replace(doing=following, peer=-2), self._written(block, doing, call, turn)
        elif rank.doing == "look":
            for peer in set(range(len(blocks))) - {me} - rank.has:
                flag = blocks[peer].flag
                theirs, slot = (flag >> 1) - 1, flag & 1
                if theirs < call:
                    continue
                if theirs > call and not self.one_slot and not self.reads_where_the_flag_says:
                    slot = 1 - slot
                # The number in the message, which decides whether it is read at all.
                if blocks[peer].slots[slot][0] == call or self.one_slot:
                    yield rank._replace(doing="read first", peer=peer, slot=slot), block
        else:
            first = rank.doing == "read first"
            if blocks[rank.peer].slots[rank.slot][not first] != call:
                raise TornError(f"rank {me} in call {call} reads of {blocks[rank.peer]}")
            if first:
                yield rank._replace(doing="read second"), block
            else:
                yield self._has_one_more(rank), block

    @staticmethod
    def _written(block: Block, doing: str, call: int, turn: int) -> Block:
        if doing == "flag":
            return block._replace(flag=2 * (call + 1) + turn)
        halves = list(block.slots[turn])
        halves[doing == "second half"] = call
        slots = list(block.slots)
        slots[turn] = (halves[0], halves[1])
        return block._replace(slots=tuple(slots))

    def _has_one_more(self, rank: Rank) -> Rank:
        has = rank.has | {rank.peer}
        if len(has) == self.ranks - 1 or self.goes_on_early:
            return Rank(rank.call + 1)
        return Rank(rank.call, "look", has=has)


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
