"""The times of steps and messages, if every message takes one column and no rank is late.

>>> from ringreduce.algorithms import build
>>> timeline = StepColumns.of(build("all_reduce", "ring", nodes=[[0, 1, 2]]))
>>> timeline.columns, len(timeline.messages)
(4, 12)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringreduce.schedules.matching import Message, RankStep, match, other_end, posts, progress
from ringreduce.schedules.schedule import Schedule

Nodes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class StepColumns:
    """The columns of a schedule's steps and messages.

    A message is in the first column in which both its ranks have entered their steps.  A step lasts
    from the end of the step before until the column after its last message, at least one column.
    """

    borders: Sequence[Sequence[int]]
    """Rank -> the column in which each step begins, then the column after its last step."""
    messages: Mapping[Message, int]

    @classmethod
    def of(cls, schedule: Schedule) -> StepColumns:
        ranks = [list(schedule.steps(rank)) for rank in range(schedule.size)]
        messages: dict[Message, int] = {}
        posted = posts(match(ranks))
        borders: list[list[int]] = [[] for _ in ranks]
        for place in progress(ranks, posted):
            before = posted.get(RankStep(place.rank, place.step - 1), ())
            begun = borders[place.rank][-1] + 1 if place.step else 0
            borders[place.rank].append(max([begun, *(messages[m] + 1 for m in before)]))
            for message in posted.get(place, ()):
                other = other_end(message, place.rank)
                if other.step < len(borders[other.rank]):
                    both = borders[place.rank][place.step], borders[other.rank][other.step]
                    messages[message] = max(both)
        return cls(borders, messages)

    @property
    def columns(self) -> int:
        return max((borders[-1] for borders in self.borders), default=0)

    @property
    def steps(self) -> int:
        return max((len(borders) - 1 for borders in self.borders), default=0)

    def crossing(self, nodes: Nodes | None) -> list[Message]:
        node_of = {rank: number for number, node in enumerate(nodes or ()) for rank in node}
        ends = (
            (m, node_of.get(m.sender.rank), node_of.get(m.receiver.rank)) for m in self.messages
        )
        return [message for message, sender, receiver in ends if sender != receiver]

    @property
    def in_lockstep(self) -> bool:
        """Whether column k is step k of every rank that has a step k."""
        return all(list(borders) == list(range(len(borders))) for borders in self.borders)
