"""What the symbolic tests share: layouts, every algorithm there is, and schedules from text."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import dedent

from hypothesis import strategies as st

from ringreduce.algorithms import ALGORITHMS
from ringreduce.schedules.schedule import Claim, Recv, Schedule, Send, Step, copy_of, from_text

IN_NODE = ["ring", "halving_doubling", "two_shot", "leader"]
ALONG_RAILS = [
    *(name for name in ALGORITHMS["all_reduce"] if name != "hierarchical"),
    "star(3)",
]
HIERARCHICAL = [
    ("all_reduce", f"hierarchical({in_node}, {along_rails})")
    for in_node in IN_NODE
    for along_rails in ALONG_RAILS
]
"""Every combination of what it may use in the node and along the rails."""

PARAMETRISED = [
    "star(2)",
    "star(5)",
    "hierarchical(two_shot, halving_doubling)",
    "hierarchical(halving_doubling, star(3))",
    "hierarchical(leader, double_tree)",
]
"""All-reduces that the table does not list, since their parameters are part of the name."""

EVERY_ALGORITHM = [
    *((collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]),
    *(("all_reduce", name) for name in PARAMETRISED),
]
PART_BY_PART = [pair for pair in EVERY_ALGORITHM if pair[0] in {"gather", "scatter", "all_to_all"}]
"""Those whose ranks hold different chunks before and after, each of any length."""
ROOTED = [
    pair for pair in EVERY_ALGORITHM if pair[0] in {"broadcast", "reduce", "gather", "scatter"}
]

Ranks = list[list[Step]]
"""The steps of every rank."""


def block_layout(*sizes: int) -> list[list[int]]:
    """Nodes of these sizes, filled with ranks in order."""
    ranks = iter(range(sum(sizes)))
    return [[next(ranks) for _ in range(size)] for size in sizes]


@st.composite
def layouts(draw: st.DrawFn, max_nodes: int = 8, max_ranks: int = 64) -> list[list[int]]:
    """1 to `max_nodes` nodes of any sizes, with any assignment of ranks to nodes."""
    size = draw(st.integers(1, max_ranks), label="ranks")
    borders = st.sets(st.integers(1, max(1, size - 1)), max_size=min(max_nodes, size) - 1)
    cuts = [0, *sorted(draw(borders, label="borders between nodes")), size]
    ranks = list(range(size))
    if seed := draw(st.integers(0, 2**16), label="seed of the shuffle, 0 for none"):
        random.Random(seed).shuffle(ranks)
    return [ranks[low:high] for low, high in pairwise(cuts)]


def steps_of(schedule: Schedule) -> Ranks:
    return [list(schedule.steps(rank)) for rank in range(schedule.size)]


def with_steps(schedule: Schedule, ranks: Sequence[Iterable[Step]]) -> Schedule:
    """The same schedule, claims included, with these steps in place of its own."""
    return replace(schedule, steps=lambda rank: iter(ranks[rank]))


def written(text: str, chunks: int = 1, collective: str = "all_reduce") -> Schedule:
    """The schedule that the text spells; every rank holds every chunk, and claims what it does."""
    ranks = from_text(dedent(text))
    every = tuple(range(chunks))

    def claim(rank: int) -> Claim:
        return Claim(
            steps=len(ranks[rank]),
            sent=sum(len(send.chunks) for step in ranks[rank] for send in step.sends),
            received=sum(len(recv.chunks) for step in ranks[rank] for recv in step.recvs),
        )

    return Schedule(
        collective=collective,
        algorithm="written",
        size=len(ranks),
        weights=(1,) * chunks,
        steps=lambda rank: iter(ranks[rank]),
        holds_before=lambda rank: every,
        holds_after=lambda rank: every,
        claim=claim,
    )


_numbers = st.integers(0, 99)
_names = st.one_of(_numbers, st.builds(copy_of, _numbers, _numbers))
_chunks = st.lists(_names, max_size=4).map(tuple)
steps = st.builds(
    Step,
    folds=st.lists(_numbers, max_size=3).map(tuple),
    sends=st.lists(st.builds(Send, _numbers, _chunks), max_size=3).map(tuple),
    recvs=st.lists(st.builds(Recv, _numbers, _chunks, st.booleans()), max_size=3).map(tuple),
)
"""Any step that can be written down, right or wrong."""
