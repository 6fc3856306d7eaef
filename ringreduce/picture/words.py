"""The title of a picture of a schedule, and its facts.

>>> from ringreduce.algorithms import build
>>> schedule = build("all_reduce", "ring", nodes=[[0, 1, 2, 3]])
>>> title(schedule, StepColumns.of(schedule), nodes=None)
'all_reduce · ring: each rank sends 1.5 times the array in 6 steps'
>>> nodes = [[0, 1], [2, 3]]
>>> title(schedule, StepColumns.of(schedule), nodes)
'all_reduce · ring: 3 times the array crosses between nodes, in 6 steps'
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.errors import counted
from ringreduce.picture.timeline import Nodes, StepColumns
from ringreduce.schedules.matching import Message
from ringreduce.schedules.schedule import Schedule, chunk_of


def title(
    schedule: Schedule, timeline: StepColumns, nodes: Nodes | None, follow: int | None = None
) -> str:
    """Return the name of the schedule, and how much of the array its messages carry.

    With a chunk to `follow`, return how many of its messages cross between nodes.
    """
    name = f"{schedule.collective} · {schedule.algorithm}"
    crossing = timeline.crossing(nodes)
    if follow is not None:
        carrying, across = (
            sum(follow in map(chunk_of, message.chunks) for message in messages)
            for messages in (timeline.messages, crossing)
        )
        return (
            f"{name}: {across} of the {counted(carrying, 'message')} with chunk {follow} "
            f"{'crosses' if across == 1 else 'cross'} between nodes"
        )
    if not timeline.messages:
        return f"{name}: nothing is sent"
    steps = counted(timeline.steps, "step")
    if not any(schedule.weights):
        return f"{name}: {steps}, no data"
    if len([node for node in nodes or () if node]) > 1:
        crosses = sum(_weight(message, schedule) for message in crossing)
        return f"{name}: {_arrays(crosses, schedule)} crosses between nodes, in {steps}"
    sent = [0] * schedule.size
    for message in timeline.messages:
        sent[message.sender.rank] += _weight(message, schedule)
    is_alike = len({_arrays(each, schedule) for each in sent}) == 1
    who = "each rank" if is_alike else "the busiest rank"
    return f"{name}: {who} sends {_arrays(max(sent), schedule)} in {steps}"


def facts(schedule: Schedule, nodes: Nodes | None, timeline: StepColumns) -> str:
    """Return text such as: 8 ranks on nodes of 3, 1 and 4 · 10 steps · 18 chunks · 92 messages."""
    where = f" on {nodes_text([len(node) for node in nodes])}" if nodes else ""
    return " · ".join(
        [
            counted(schedule.size, "rank") + where,
            counted(timeline.steps, "step"),
            counted(len(schedule.weights), "chunk"),
            counted(len(timeline.messages), "message"),
        ]
    )


def nodes_text(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return "1 node"
    if min(sizes) == max(sizes):
        return f"{len(sizes)} nodes of {sizes[0]}"
    if len(sizes) > 6:
        return f"{len(sizes)} nodes of {min(sizes)} to {max(sizes)}"
    return f"nodes of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def _weight(message: Message, schedule: Schedule) -> int:
    return sum(schedule.weights[chunk_of(chunk)] for chunk in message.chunks)


def _arrays(weight: int, schedule: Schedule) -> str:
    return f"{weight / sum(schedule.weights):.3g} times the array"
