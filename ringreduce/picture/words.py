"""The title of a picture of a schedule, and its facts.

>>> from ringreduce.algorithms import build
>>> schedule = build("all_reduce", "ring", nodes=[[0, 1, 2, 3]])
>>> title(schedule, Timeline.of(schedule), nodes=None)
'all_reduce · ring: each rank sends 1.5 times the array in 6 steps'
>>> nodes = [[0, 1], [2, 3]]
>>> title(schedule, Timeline.of(schedule), nodes)
'all_reduce · ring: 3 times the array crosses between nodes, in 6 steps'
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.picture.timeline import Timeline
from ringreduce.schedules.matching import Message
from ringreduce.schedules.schedule import Schedule, chunk_of

Nodes = Sequence[Sequence[int]]
"""The ranks of each node."""


def title(
    schedule: Schedule, timeline: Timeline, nodes: Nodes | None, follow: int | None = None
) -> str:
    """Return the name of the schedule, and how much of the array its messages carry.

    With a chunk to `follow`, return how many of its messages cross between nodes.
    """
    name = f"{schedule.collective} · {schedule.algorithm}"
    node_of = {rank: number for number, node in enumerate(nodes or ()) for rank in node}
    crossing = [
        m for m in timeline.messages if node_of.get(m.sender.rank) != node_of.get(m.receiver.rank)
    ]
    if follow is not None:
        carrying = [m for m in timeline.messages if follow in map(chunk_of, m.chunks)]
        across = sum(message in crossing for message in carrying)
        return (
            f"{name}: {across} of the {counted(len(carrying), 'message')} with chunk {follow} "
            f"{'crosses' if across == 1 else 'cross'} between nodes"
        )
    if not timeline.messages:
        return f"{name}: nothing is sent"
    steps = counted(max((len(borders) - 1 for borders in timeline.borders), default=0), "step")
    if not any(schedule.weights):
        return f"{name}: {steps}, no data"
    if len(set(node_of.values())) > 1:
        return f"{name}: {_arrays(schedule, crossing)} crosses between nodes, in {steps}"
    sent = [
        _arrays(schedule, [m for m in timeline.messages if m.sender.rank == rank])
        for rank in range(schedule.size)
    ]
    most = max(sent, key=lambda words: float(words.split()[0]))
    who = "each rank" if len(set(sent)) == 1 else "the busiest rank"
    return f"{name}: {who} sends {most} in {steps}"


def facts(schedule: Schedule, nodes: Nodes | None, timeline: Timeline) -> str:
    """Return text such as: 8 ranks on nodes of 3, 1 and 4 · 10 steps · 18 chunks · 92 messages."""
    steps = max((len(borders) - 1 for borders in timeline.borders), default=0)
    where = f" on {nodes_text([len(node) for node in nodes])}" if nodes else ""
    return " · ".join(
        [
            counted(schedule.size, "rank") + where,
            counted(steps, "step"),
            counted(len(schedule.weights), "chunk"),
            counted(len(timeline.messages), "message"),
        ]
    )


def nodes_text(sizes: Sequence[int]) -> str:
    """Return text such as 1 node, 4 nodes of 2, nodes of 3, 1 and 4, 40 nodes of 1 to 8."""
    if len(sizes) == 1:
        return "1 node"
    if min(sizes) == max(sizes):
        return f"{len(sizes)} nodes of {sizes[0]}"
    if len(sizes) > 6:
        return f"{len(sizes)} nodes of {min(sizes)} to {max(sizes)}"
    return f"nodes of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def counted(number: int, what: str) -> str:
    """Return text such as 1 step or 2 steps."""
    return f"{number} {what}{'s' * (number != 1)}"


def _arrays(schedule: Schedule, messages: Sequence[Message]) -> str:
    """Return how much data these messages carry, such as 1.5 times the array."""
    weights = schedule.weights
    carried = sum(weights[chunk_of(chunk)] for m in messages for chunk in m.chunks)
    return f"{carried / sum(weights):.3g} times the array"
