"""Draw a schedule as SVG elements: its title and facts, frames, lanes and arrows.

>>> from ringreduce.algorithms import build
>>> schedule = build("all_reduce", "ring", nodes=[[0, 1, 2, 3]])
>>> title(schedule, StepColumns.of(schedule), nodes=None)
'all_reduce · ring: each rank sends 1.5 times the array in 6 steps'
>>> nodes = [[0, 1], [2, 3]]
>>> title(schedule, StepColumns.of(schedule), nodes)
'all_reduce · ring: 3 times the array crosses between nodes, in 6 steps'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt

from ringreduce.errors import counted
from ringreduce.picture.layout import (
    LARGEST_HEAD,
    NAME_WIDTH,
    TOP,
    Arrow,
    Layout,
    Nodes,
    StepColumns,
    head,
    label,
    label_of,
    label_width,
    line,
)
from ringreduce.picture.legend import Paints, legend
from ringreduce.picture.style import (
    EDGE,
    FACTS_SIZE,
    FAINT,
    FRAME,
    LANE,
    MARGIN,
    NAME_SIZE,
    NUMBER_SIZE,
    TITLE_SIZE,
    document,
    element,
    text,
    text_width,
    tooltip,
)
from ringreduce.schedules.matching import Message, chunks_text
from ringreduce.schedules.schedule import Schedule, chunk_of, chunk_text, source_of

_PAD = 7.0
_BAR_GAP = 3.0
_LABELLED_FROM = 16.0
"""The least height at the start of a message for a label."""
_FADED = 0.2
"""The opacity of messages without the chunk that is followed."""
_FAR_NAMES_FROM = 12
"""The least columns, or ranks, with which names are repeated on the far side."""


class Drawing:
    def __init__(self, schedule: Schedule, nodes: Nodes | None, follow: int | None = None) -> None:
        _check(schedule, nodes, follow)
        self._schedule, self._framed, self._follow = schedule, nodes is not None, follow
        self._total = sum(schedule.weights) or 1
        self._timeline = StepColumns.of(schedule)
        self._paints = Paints(len(schedule.weights), self._timeline, nodes)
        self._title = title(schedule, self._timeline, nodes, follow)
        self._facts = facts(schedule, nodes, self._timeline)
        if follow is not None:
            self._facts += f" · messages without chunk {follow} are faded"
        head = max(
            text_width(self._title, TITLE_SIZE, bold=True), text_width(self._facts, FACTS_SIZE)
        )
        labels = [label_width(label_of(message.chunks)) for message in self._timeline.messages]
        self._layout = Layout(
            self._timeline,
            nodes or [range(schedule.size)],
            framed=self._framed,
            label_width=max(labels, default=0.0),
            least_right=MARGIN + head - _PAD,
        )
        self._far = self._timeline.columns >= _FAR_NAMES_FROM, schedule.size >= _FAR_NAMES_FROM
        self.width = self._layout.right + (NAME_WIDTH if self._far[0] else _PAD) + MARGIN
        self._legend_top = self._layout.bottom + (36 if self._far[1] else 16)
        width = self.width - 2 * MARGIN
        self._legend, height = legend(schedule, self._timeline, self._paints, width)
        self.height = self._legend_top + height + MARGIN / 2

    def svg(self) -> str:
        # The messages to follow are in front of the others.
        arrows = sorted(self._layout.arrows(), key=lambda arrow: self._follows(arrow.message))
        at_legend = f"translate({MARGIN:g} {self._legend_top:.12g})"
        elements = [
            *self._words(),
            *self._frames(),
            *self._lanes(),
            *map(self._message, arrows),
            *self._local_reductions(),
            # After all lines, so that no line covers a label.
            *map(self._label, filter(self._has_label, arrows)),
            element("g", "".join(self._legend), transform=at_legend),
            element("defs", "".join(self._paints.definitions())),
        ]
        return document(self.width, self.height, self._title, elements)

    def _follows(self, message: Message) -> bool:
        return self._follow is None or self._follow in map(chunk_of, message.chunks)

    def _paint(self, message: Message) -> str:
        """Return the paint of the chunk that is followed, if the message has it, else of all."""
        if self._follow is not None and self._follows(message):
            return self._paints.of((self._follow,))
        return self._paints.of(message.chunks)

    def _has_label(self, arrow: Arrow) -> bool:
        message = arrow.message
        is_labelled = bool(message.chunks) and arrow.room[0] >= _LABELLED_FROM
        return is_labelled and self._follows(message)

    def _words(self) -> Iterator[str]:
        yield text(MARGIN, 34, self._title, TITLE_SIZE, font_weight="bold")
        yield text(MARGIN, 56, self._facts, FACTS_SIZE, fill=FAINT)
        axis = "step" if self._timeline.in_lockstep else "time"
        for y in (TOP - 10, self._layout.bottom + 20)[: 1 + self._far[1]]:
            if self._timeline.columns:
                yield text(
                    self._layout.left - 10, y, axis, NUMBER_SIZE, fill=FAINT, text_anchor="end"
                )
            for column in range(self._timeline.columns):
                middle = self._layout.x(column + 0.5)
                yield text(middle, y, str(column), NUMBER_SIZE, fill=FAINT, text_anchor="middle")

    def _frames(self) -> Iterator[str]:
        sides = {"x": MARGIN - _PAD, "width": self.width - 2 * (MARGIN - _PAD), "rx": 8}
        for number, (top, bottom) in enumerate(self._layout.frames if self._framed else ()):
            frame = element("rect", y=top, height=bottom - top, **sides, fill=FRAME, stroke=EDGE)
            name = text(
                MARGIN, top + 16, f"node {number}", NUMBER_SIZE, font_weight="bold", fill=FAINT
            )
            yield element("g", frame + name, class_="node")

    def _lanes(self) -> Iterator[str]:
        layout = self._layout
        for rank in layout.tops:
            y = layout.y(rank) + 4
            name = text(layout.left - 10, y, f"rank {rank}", NAME_SIZE, text_anchor="end")
            if self._far[0]:
                name += text(layout.right + 10, y, f"rank {rank}", NAME_SIZE)
            borders = pairwise(self._timeline.borders[rank])
            bars = [self._bar(rank, step, *columns) for step, columns in enumerate(borders)]
            yield element("g", name + "".join(bars), class_="rank", data_rank=rank)

    def _local_reductions(self) -> Iterator[str]:
        """Yield a disc with a plus at the end of each step in which a rank reduces copies."""
        for rank in range(self._schedule.size):
            for number, step in enumerate(self._schedule.steps(rank)):
                if step.folds:
                    end = self._layout.x(self._timeline.borders[rank][number + 1]) + LARGEST_HEAD
                    paint = self._paints.of(step.folds)
                    disc = head((end, self._layout.y(rank)), LARGEST_HEAD, paint, reduce=True)
                    words = f"rank {rank}, step {number}: all copies of {chunks_text(step.folds)}"
                    yield element("g", tooltip(f"{words} are added up") + disc, class_="fold")

    def _bar(self, rank: int, step: int, begin: int, end: int) -> str:
        return element(
            "rect",
            tooltip(f"rank {rank}, step {step}"),
            x=self._layout.x(begin) + _BAR_GAP / 2,
            y=self._layout.tops[rank],
            width=(end - begin) * self._layout.column - _BAR_GAP,
            height=self._layout.lanes[rank],
            rx=6,
            fill=LANE,
        )

    def _message(self, arrow: Arrow) -> str:
        message, reduce = arrow.message, arrow.message.reduce
        paint = self._paint(message)
        (x1, y1), (x2, y2) = arrow.start, arrow.end
        begin, tip, size = x1 + _PAD, x2 - _PAD, min(LARGEST_HEAD, 0.45 * arrow.room[1])
        if self._has_label(arrow):
            begin += label_width(label_of(message.chunks))
        share = sum(self._schedule.weights[chunk_of(c)] for c in message.chunks) / self._total
        width = min(1.5 + 3 * sqrt(share), 0.6 * min(arrow.room))
        faded = {} if self._follows(message) else {"opacity": _FADED}
        return element(
            "g",
            tooltip(_sentence(message))
            + line((begin, y1), (tip - 2 * size, y2), paint, width, reduce=reduce)
            + head((tip, y2), size, paint, reduce=reduce),
            class_=f"message {'reduce' if reduce else 'overwrite'}",
            data_sender=message.sender.rank,
            data_receiver=message.receiver.rank,
            data_chunks=" ".join(map(chunk_text, message.chunks)),
            **faded,
        )

    def _label(self, arrow: Arrow) -> str:
        x, y = arrow.start
        words = label_of(arrow.message.chunks)
        return element("g", label(x + _PAD, y, words, self._paint(arrow.message)))


def _check(schedule: Schedule, nodes: Nodes | None, follow: int | None) -> None:
    every = list(range(schedule.size))
    if nodes is not None and sorted(rank for node in nodes for rank in node) != every:
        raise ValueError(f"picture: nodes {nodes} do not list ranks 0 to {every[-1]} once")
    chunks = len(schedule.weights)
    if follow is not None and not 0 <= follow < chunks:
        raise ValueError(f"picture: there is no chunk {follow} of {chunks}")


def _sentence(message: Message) -> str:
    sender, receiver = message.sender, message.receiver
    does = " is added in" if message.reduce else " replaces" if message.chunks else ""
    if any(source_of(chunk) is not None for chunk in message.chunks):
        does = " is kept apart"
    return (
        f"rank {sender.rank}, step {sender.step}, to rank {receiver.rank}, step {receiver.step}: "
        f"{chunks_text(message.chunks)}{does}"
    )


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
    """Return text such as 1 node, 4 nodes of 2, nodes of 3, 1 and 4, 40 nodes of 1 to 8."""
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
