"""Make the tables and the pictures of the page on strategies, from runs of the strategies.

    python docs/strategies.py

writes the tables into `strategies.md` anew.  `docs/picture.py` draws the pictures.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from pathlib import Path

import ringreduce as rr
from ringreduce.algorithms import build
from ringreduce.parallel import store_messages
from ringreduce.parallel.mesh import Coordinates, coordinates
from ringreduce.parallel.store_replica import chain_of
from ringreduce.parallel.store_rule import Apply, Discard, Go, Number, Rule, Worker
from ringreduce.picture import to_svg
from ringreduce.picture.bars import Bar, BarGroup, draw_bars
from ringreduce.picture.lanes import Lane, LaneChart, Sample, draw_lanes
from ringreduce.picture.lanes import LaneBar as Action
from ringreduce.picture.style import (
    EDGE,
    FACTS_SIZE,
    FAINT,
    FRAME,
    GRID,
    MARGIN,
    NAME_SIZE,
    NUMBER_SIZE,
    PALETTE,
    TINTS,
    TITLE_SIZE,
    document,
    element,
    text,
)
from ringreduce.train import mlp, strategies
from ringreduce.train.compare import report
from ringreduce.train.configuration import to_flags
from ringreduce.train.search.halving import halve
from ringreduce.train.tensor_parallel import slices

PAGE = Path(__file__).with_name("strategies.md")
_RANKS = 4
_TWO_NODES = [2, 2]

# --- the table ------------------------------------------------------------------------------------

_WITH_OPTIONS: dict[str, list[dict[str, int]]] = {
    "zero": [{"zero": 1}, {"zero": 2}, {"zero": 3}],
    "pipeline": [{"splits": 4}],
    "hybrid": [{"stages": 2}],
}
"""Strategy -> the options of each of its rows in the table; others have one row, without."""
_IN_SHARDS = {
    1: "optimizer in shards",
    2: "optimizer and gradients in shards",
    3: "optimizer, gradients and parameters in shards",
}
"""Stage of ZeRO -> what is in shards."""


def settings() -> rr.train.Settings:
    """Return the settings that the page shows, for one epoch."""
    (shown,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    values = tomllib.loads(shown) | {"epochs": 1}
    return rr.train.Settings(**values | {"hidden": tuple(values["hidden"])})


@dataclass(frozen=True)
class Bytes:
    """Bytes of a run: the most that a rank sends in a step, and what ranks hold."""

    sent: int
    held: tuple[int, ...]
    """Rank -> the most bytes that it held."""


def measured(strategy: strategies.Strategy, ranks: int, chosen: rr.train.Settings) -> Bytes:
    """Train two steps, which send and hold as much as a whole run, on ranks that are threads."""
    split, few = rr.train.load(chosen), 2 * chosen.batch
    split = replace(split, train_x=split.train_x[:few], train_labels=split.train_labels[:few])

    def program(comm: rr.Communicator) -> tuple[int, int]:
        result = rr.train.train(comm, split, chosen, strategy=strategy)
        return result.sent_bytes, result.held_bytes

    nodes = _TWO_NODES if isinstance(strategy, strategies.MultiWorkerMirrored) else None
    sent, held = zip(*rr.spawn(program, ranks, nodes=nodes), strict=True)
    return Bytes(max(sent), held)


def table() -> str:
    """Return the strategies as a table of Markdown: where, how, when, and their bytes."""
    heads = "strategy", "where parameters are", "how gradients are added up", "when"
    of_bytes = "sent a step", "held by a rank", "held by all"
    rows = [(*heads, *of_bytes), (*["---"] * len(heads), *["--:"] * len(of_bytes))]
    shown = ((n, given) for n in strategies.STRATEGIES for given in _WITH_OPTIONS.get(n, [{}]))
    for name, given in shown:
        strategy = strategies.by_name(name, given)
        head = f"`{name}`" + f" `{' '.join(to_flags(given))}`" * bool(given)
        where = (
            _IN_SHARDS[strategy.stage] if isinstance(strategy, strategies.Zero) else strategy.where
        )
        rows.append((head, where, strategy.how, strategy.when, *_bytes_of(strategy)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _bytes_of(strategy: strategies.Strategy) -> tuple[str, str, str]:
    """Return the bytes of a strategy; those of TPU are a replica's, counted without JAX."""
    if isinstance(strategy, strategies.TPU):
        strategy = strategies.Mirrored()
    other = {strategies.OneDevice: 1, strategies.ParameterServer: _RANKS + 1}
    ranks = other.get(type(strategy), _RANKS)  # a server is a rank beside them
    found = measured(strategy, ranks, settings())
    return f"{found.sent:,}", f"{max(found.held):,}", f"{sum(found.held):,}"


# --- schedules that run ---------------------------------------------------------------------------


def one_device() -> str:
    """Return one rank that computes four batches: a pipeline of one stage."""
    times = rr.pipeline.timeline(rr.pipeline.schedule("sequential", ranks=1, splits=4))
    fills = {"F": Sample(TINTS[0], "forward"), "B": Sample(TINTS[1], "backward")}
    (begins,), (ends,), acts = times.begins, times.ends, times.schedule.acts(0)
    bars = [
        Action(
            begin,
            end,
            f"{act.kind}{act.microbatch}",
            fills[act.kind].colour,
            f"{fills[act.kind].words} of batch {act.microbatch}, from {begin:g} to {end:g}",
        )
        for act, begin, end in zip(acts, begins, ends, strict=True)
    ]
    facts = f"1 rank · {times.schedule.splits} batches · time {times.time:g}"
    title = f"one device: {100 * times.idle[0]:.0f} % idle"
    chart = LaneChart(title, facts, [Lane("rank 0", bars)], arrows=[])
    return draw_lanes([chart], [*fills.values()], arrows=[])


def mirrored() -> str:
    """Return an all-reduce among the ranks of one node."""
    return to_svg(build("all_reduce", "two_shot", [[*range(_RANKS)]]))


def multi_worker_mirrored() -> str:
    """Return an all-reduce among two nodes, with the path of one chunk."""
    nodes = [[0, 1], [2, 3]]
    return to_svg(build("all_reduce", "hierarchical", nodes), nodes)


def sequential() -> str:
    """Return a model in four parts, and the whole batch."""
    return rr.pipeline.to_svg(rr.pipeline.schedule("sequential", ranks=_RANKS, splits=1))


def pipelines() -> str:
    """Return four schedules of the same microbatches, on one scale."""
    schedule = rr.pipeline.schedule
    return rr.pipeline.to_svg(
        schedule("gpipe", ranks=_RANKS, splits=_RANKS),
        schedule("1f1b", ranks=_RANKS, splits=_RANKS),
        schedule("interleaved", ranks=_RANKS, splits=_RANKS, virtual=2),
        schedule("zero_bubble", ranks=_RANKS, splits=_RANKS),
    )


# --- bytes held -----------------------------------------------------------------------------------

_DEEP = rr.train.Settings(
    data="synthetic",
    samples=64,
    inputs=256,
    hidden=(256,) * 7,
    batch=16,
    epochs=1,
    optimizer="adam",
    first_bucket_bytes=1 << 18,
    bucket_bytes=1 << 18,
)
"""A network whose state is large beside its activations; a bucket is a layer."""
_BARS: tuple[tuple[strategies.Strategy, str, str], ...] = (
    (strategies.Mirrored(), "mirrored", PALETTE[0]),
    (strategies.CentralStorage(), "central_storage", PALETTE[3]),
    (strategies.Zero(stage=1), "zero 1", PALETTE[1]),
    (strategies.Zero(stage=2), "zero 2", PALETTE[5]),
    (strategies.Zero(stage=3), "zero 3", PALETTE[2]),
)


def memory() -> str:
    """Return the bytes that a rank holds, by the number of ranks."""
    counts = (1, 2, 4, 8)
    means = {
        (name, ranks): statistics.fmean(measured(strategy, ranks, _DEEP).held)
        for strategy, name, _ in _BARS
        for ranks in counts
    }
    groups = [
        BarGroup(
            f"{ranks} rank{'s' * (ranks > 1)}",
            [
                Bar(name, means[name, ranks], f"{means[name, ranks] / 2**20:.1f} MiB", colour)
                for _, name, colour in _BARS
            ],
        )
        for ranks in counts
    ]
    share = means["zero 3", 8] / means["mirrored", 8]
    title = f"Stage 3 of ZeRO on 8 ranks: each holds {100 * share:.0f} % of a replica's bytes"
    layers = f"{len(_DEEP.hidden) + 1} layers of {_DEEP.inputs} inputs"
    facts = (
        f"Bytes a rank, on average: {layers}, {_DEEP.dtype}, {_DEEP.optimizer}, global batch "
        f"{_DEEP.batch}. A bucket is a layer."
    )
    return draw_bars(title, facts, groups)


# --- one copy of the parameters -------------------------------------------------------------------

_CHUNK_WIDE, _CHUNK_HIGH, _CHUNK_GAP = 34.0, 15.0, 2.0
_PART_GAP = 18.0
"""Space between the gradients of two ranks."""
_PART_HIGH = _RANKS * (_CHUNK_HIGH + _CHUNK_GAP) - _CHUNK_GAP
_PART_TOP = 116.0
_GRADIENTS, _SUMS, _SHARED = MARGIN + 64, 330.0, 520.0
"""The left sides of the columns."""
_SUM_WIDE, _SUM_HIGH, _SHARED_WIDE = 60.0, 26.0, 84.0


def central_storage() -> str:
    """Return what ranks do in a step: reduce-scatter gradients, and update one shared array."""
    schedule = build("reduce_scatter", "direct", [[*range(_RANKS)]])
    words = f"central storage: {_RANKS} ranks, 1 copy of the parameters"
    note = (
        "A reduce-scatter adds up the gradients. Each rank updates its shard of the shared array."
    )
    bottom = _part_top(_RANKS - 1) + _PART_HIGH
    middle = {"text_anchor": "middle"}
    elements = [
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, note, FACTS_SIZE, fill=FAINT),
        *(
            text(left + wide / 2, _PART_TOP - 14, name, NAME_SIZE, **middle)
            for left, wide, name in (
                (_GRADIENTS, _CHUNK_WIDE, "gradients"),
                (_SUMS, _SUM_WIDE, "sums"),
                (_SHARED, _SHARED_WIDE, "parameters, shared"),
            )
        ),
        *(_to_sum(rank, rank, rank) for rank in range(_RANKS)),  # nothing is sent
        *(
            _to_sum(rank, send.peer, chunk)
            for rank in range(_RANKS)
            for step in schedule.steps(rank)
            for send in step.sends
            for chunk in send.chunks
        ),
        *(each for rank in range(_RANKS) for each in _of_rank(rank)),
        *_read(bottom),
    ]
    return document(_SHARED + _SHARED_WIDE + 44, bottom + 60 + MARGIN, words, elements)


def _part_top(rank: int) -> float:
    return _PART_TOP + rank * (_PART_HIGH + _PART_GAP)


def _to_sum(rank: int, owner: int, chunk: int) -> str:
    """Return the line from a chunk of a rank's gradients to the sum on its owner."""
    x1, x2 = _GRADIENTS + _CHUNK_WIDE, _SUMS
    y1 = _part_top(rank) + chunk * (_CHUNK_HIGH + _CHUNK_GAP) + _CHUNK_HIGH / 2
    y2 = _part_top(owner) + _PART_HIGH / 2 + (rank - (_RANKS - 1) / 2) * 5
    bend = (x2 - x1) / 2
    curve = f"M{x1:g},{y1:g}C{x1 + bend:g},{y1:g} {x2 - bend:g},{y2:g} {x2:g},{y2:g}"
    return _line(curve, PALETTE[chunk])


def _of_rank(rank: int) -> Iterator[str]:
    """Yield the gradients of a rank, its sum, and its shard of the parameters."""
    top, middle = _part_top(rank), _part_top(rank) + _PART_HIGH / 2
    yield text(_GRADIENTS - 12, middle + 4, f"rank {rank}", NAME_SIZE, text_anchor="end")
    for chunk in range(_RANKS):
        y = top + chunk * (_CHUNK_HIGH + _CHUNK_GAP)
        yield _box(_GRADIENTS, y, _CHUNK_WIDE, _CHUNK_HIGH, chunk)
        yield _centred(_GRADIENTS + _CHUNK_WIDE / 2, y + _CHUNK_HIGH / 2, str(chunk))
    yield _box(_SUMS, middle - _SUM_HIGH / 2, _SUM_WIDE, _SUM_HIGH, rank)
    yield _centred(_SUMS + _SUM_WIDE / 2, middle, f"sum {rank}")
    yield from _arrow(_SUMS + _SUM_WIDE + 8, _SHARED - 8, middle, "update")
    high = _PART_HIGH + _PART_GAP
    yield _box(_SHARED, top - _PART_GAP / 2, _SHARED_WIDE, high, rank)
    yield _centred(_SHARED + _SHARED_WIDE / 2, middle, f"shard {rank}")


def _centred(x: float, y: float, words: str) -> str:
    return text(x, y + 4, words, NUMBER_SIZE, text_anchor="middle", font_weight="bold")


def _read(bottom: float) -> Iterator[str]:
    """Yield an arrow from the parameters back to all ranks."""
    x1, x2 = _SHARED + _SHARED_WIDE / 2, _GRADIENTS + _CHUNK_WIDE / 2
    y1, y2, low = bottom + _PART_GAP / 2 + 4, bottom + 8, bottom + 44
    path = f"M{x1:g},{y1:g}V{low:g}H{x2:g}V{y2 + 6:g}"
    yield element("path", d=path, fill="none", stroke=FAINT, stroke_width=1.5)
    yield element("path", d=f"M{x2:g},{y2:g}l-4.5,8h9z", fill=FAINT)
    words = "all ranks read all parameters, from the same memory"
    middle = {"fill": FAINT, "text_anchor": "middle"}
    yield text((x1 + x2) / 2, low - 8, words, FACTS_SIZE, **middle)


# --- columns and rows -----------------------------------------------------------------------------

_CELL = 26.0
"""The size of a column or a row of a weight, in units of the picture."""
_WIDE, _NARROW = 8, 4
"""Outputs of layer 0 and inputs of layer 1; inputs of layer 0 and outputs of layer 1."""


def tensor() -> str:
    """Return the parts of two layers' weights that four ranks have."""
    words = f"The weights of 2 layers on {_RANKS} ranks: columns, then rows"
    note = "The ranks communicate after layer 1, and not between the two layers."
    high, low = _WIDE * _CELL, _NARROW * _CELL
    left, top = MARGIN + 60, 112.0
    first_end, middle = left + high, top + high / 2
    second = first_end + 156
    end = second + low
    names = {"text_anchor": "middle"}
    elements = [
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, note, FACTS_SIZE, fill=FAINT),
        text(left + high / 2, middle - low / 2 - 12, "layer 0, by columns", NAME_SIZE, **names),
        text(second + low / 2, top - 12, "layer 1, by rows", NAME_SIZE, **names),
        *_weight("0.weight", (_NARROW, _WIDE), left, middle - low / 2),
        *_weight("1.weight", (_WIDE, _NARROW), second, top),
        *_arrow(MARGIN, left - 8, middle, "x, whole"),
        *_arrow(first_end + 8, second - 8, middle, "each rank's columns"),
        *_arrow(end + 8, end + 128, middle, "all-reduce"),
    ]
    for rank in range(_RANKS):
        x, y = left + rank * 90, top + high + 26
        elements.append(_box(x, y, 20, 16, rank))
        elements.append(text(x + 28, y + 12.5, f"rank {rank}", NAME_SIZE))
    return document(end + 128 + MARGIN, top + high + 26 + 16 + MARGIN, words, elements)


def _weight(name: str, shape: Sequence[int], left: float, top: float) -> Iterator[str]:
    """Yield the part of a weight that each rank has."""
    for rank in range(_RANKS):
        rows, columns = slices(name, shape, rank, _RANKS)
        first_row, end_row, _ = rows.indices(shape[0])
        first, end, _ = columns.indices(shape[1])
        x, y = left + first * _CELL, top + first_row * _CELL
        wide, high = (end - first) * _CELL, (end_row - first_row) * _CELL
        yield _box(x + 1, y + 1, wide - 2, high - 2, rank)
        middle = {"text_anchor": "middle", "font_weight": "bold"}
        yield text(x + wide / 2, y + high / 2 + 4.5, str(rank), NAME_SIZE, **middle)


def _box(x: float, y: float, wide: float, high: float, number: int) -> str:
    """Return a box in the colour with a number."""
    size = {"x": x, "y": y, "width": wide, "height": high, "rx": 4}
    return element("rect", **size, fill=TINTS[number], stroke=PALETTE[number])


def _arrow(left: float, right: float, y: float, words: str) -> Iterator[str]:
    """Yield an arrow from `left` to `right`, or back if `right` is less, with words above it."""
    side = 1 if left < right else -1
    tip, end = f"M{right:g},{y:g}l{-8 * side},-4.5v9z", right - 6 * side
    yield element("path", d=f"M{left:g},{y:g}H{end:g}", stroke=FAINT, stroke_width=1.5)
    yield element("path", d=tip, fill=FAINT)
    middle = (left + right) / 2 - 2 * side
    yield text(middle, y - 9, words, FACTS_SIZE, fill=FAINT, text_anchor="middle")


# --- a mesh ---------------------------------------------------------------------------------------

_SIZES = Coordinates(data=2, pipeline=2, tensor=2)
_RANK_WIDE, _RANK_HIGH = 96.0, 40.0
_BETWEEN, _PAD = 36.0, 14.0
"""Space between two ranks of a stage, and around them."""
_STAGE_GAP, _REPLICA_GAP = 64.0, 48.0
_GROUPS = (
    ("tensor", "tensor: all-reduce of outputs of layers, and of their gradients", PALETTE[6]),
    ("pipeline", "pipeline: outputs of stages and their gradients, to the neighbour", PALETTE[4]),
    ("data", "data: all-reduce of gradients of parameters", PALETTE[5]),
)
"""The field of a place, what its groups send, and a colour that no rank has."""


def _corner(place: Coordinates) -> tuple[float, float]:
    """Return the upper left corner of a rank's box."""
    stage = _SIZES.tensor * (_RANK_WIDE + _BETWEEN) - _BETWEEN + 2 * _PAD
    x = MARGIN + 60 + place.data * (stage + _REPLICA_GAP) + _PAD
    y = 140.0 + place.pipeline * (_RANK_HIGH + 2 * _PAD + _STAGE_GAP) + _PAD
    return x + place.tensor * (_RANK_WIDE + _BETWEEN), y


def mesh() -> str:
    """Return the ranks of a mesh, and the three groups that each belongs to."""
    ranks = _SIZES.data * _SIZES.pipeline * _SIZES.tensor
    places = [coordinates(rank, _SIZES) for rank in range(ranks)]
    words = f"{ranks} ranks: data {_SIZES.data}, pipeline {_SIZES.pipeline}, tensor {_SIZES.tensor}"
    note = "Ranks of one colour have the same part of the model."
    elements = [
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, note, FACTS_SIZE, fill=FAINT),
        *(frame for place in places if not place.tensor for frame in _stage(place)),
        *(link for place in places for link in _links(place)),
    ]
    for rank, place in enumerate(places):
        x, y = _corner(place)
        elements.append(_box(x, y, _RANK_WIDE, _RANK_HIGH, 2 * place.pipeline + place.tensor))
        middle = {"text_anchor": "middle"}
        y += _RANK_HIGH / 2 + 4.5
        elements.append(text(x + _RANK_WIDE / 2, y, f"rank {rank}", NAME_SIZE, **middle))
    x, y = _corner(Coordinates(*(size - 1 for size in _SIZES)))
    right, below = x + _RANK_WIDE + _PAD + MARGIN, y + _RANK_HIGH + 72
    for row, (_, meaning, colour) in enumerate(_GROUPS):
        at = below + 22 * row
        elements.append(_line(f"M{MARGIN:g},{at:g}h34", colour))
        elements.append(text(MARGIN + 44, at + 4, meaning, FACTS_SIZE, fill=FAINT))
    return document(right, below + 44 + MARGIN, words, elements)


def _stage(place: Coordinates) -> Iterator[str]:
    """Yield the frame of a stage, its name, and above the first that of the replica."""
    x, y = _corner(place)
    wide = _SIZES.tensor * (_RANK_WIDE + _BETWEEN) - _BETWEEN + 2 * _PAD
    size = {"x": x - _PAD, "y": y - _PAD, "width": wide, "height": _RANK_HIGH + 2 * _PAD, "rx": 8}
    yield element("rect", **size, fill=FRAME, stroke=EDGE)
    if not place.data:
        y += _RANK_HIGH / 2 + 4
        yield text(x - _PAD - 10, y, f"stage {place.pipeline}", NAME_SIZE, text_anchor="end")
    if not place.pipeline:
        words = f"replica {place.data}"
        middle = {"text_anchor": "middle", "font_weight": "bold"}
        yield text(x - _PAD + wide / 2, 88, words, NAME_SIZE, **middle)


def _links(place: Coordinates) -> Iterator[str]:
    """Yield the lines from a rank to the next one of each of its groups."""
    x, y = _corner(place)
    for name, _, colour in _GROUPS:
        if getattr(place, name) + 1 == getattr(_SIZES, name):
            continue
        x2, y2 = _corner(place._replace(**{name: getattr(place, name) + 1}))
        if name == "tensor":
            line = f"M{x + _RANK_WIDE:g},{y + _RANK_HIGH / 2:g}H{x2:g}"
        elif name == "pipeline":
            line = f"M{x + _RANK_WIDE / 2:g},{y + _RANK_HIGH:g}V{y2:g}"
        else:  # above the first stage, and below the others
            up = -1 if not place.pipeline else 1
            start = y if up < 0 else y + _RANK_HIGH
            x, x2, bend = x + 24, x2 + 24, start + up * 48
            line = f"M{x:g},{start:g}C{x:g},{bend:g} {x2:g},{bend:g} {x2:g},{start:g}"
        yield _line(line, colour)


def _line(path: str, colour: str) -> str:
    return element("path", d=path, fill="none", stroke=colour, stroke_width=2)


# --- a search -------------------------------------------------------------------------------------

_CANDIDATES, _BUDGET_S = 8, 30.0
_SECOND, _ROW_HIGH, _ROW_GAP = 20.0, 20.0, 4.0
"""The width of a second; the height of a candidate, and the space between two."""
_SEARCH_LEFT, _SEARCH_TOP = MARGIN + 84, 106.0
_SEARCH_BOTTOM = _SEARCH_TOP + _CANDIDATES * (_ROW_HIGH + _ROW_GAP)


def search() -> str:
    """Return for how long successive halving measures each candidate."""
    rounds = _rounds()
    ends_s = [*accumulate((sum(spent.values()) for spent in rounds), initial=0.0)]
    words = f"Successive halving: {_CANDIDATES} candidates, a budget of {_BUDGET_S:g} s"
    note = "After each round the faster half stays. A number is how long a candidate is measured."
    elements = [
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, note, FACTS_SIZE, fill=FAINT),
    ]
    for row in range(_CANDIDATES):
        name, y = f"candidate {row}", _row(row) + _ROW_HIGH / 2 + 4
        elements.append(text(_SEARCH_LEFT - 12, y, name, NAME_SIZE, text_anchor="end"))
    for number, (spent, span) in enumerate(zip(rounds, pairwise(ends_s), strict=True)):
        elements += _measured(number, spent, *span)
    for end_s in ends_s:
        x = _SEARCH_LEFT + end_s * _SECOND
        line = f"M{x:g},{_SEARCH_TOP:g}V{_SEARCH_BOTTOM:g}"
        elements.append(element("path", d=line, stroke=GRID))
        middle = {"fill": FAINT, "text_anchor": "middle"}
        elements.append(text(x, _SEARCH_BOTTOM + 16, f"{end_s:.3g} s", NUMBER_SIZE, **middle))
    right = _SEARCH_LEFT + ends_s[-1] * _SECOND + 12
    return document(right + MARGIN, _SEARCH_BOTTOM + 24 + MARGIN, words, elements)


def _row(candidate: int) -> float:
    """Return the top of a candidate's row."""
    return _SEARCH_TOP + candidate * (_ROW_HIGH + _ROW_GAP)


def _measured(
    number: int, spent: Mapping[int, float], begin_s: float, end_s: float
) -> Iterator[str]:
    """Yield a box, with its seconds, for each candidate that is measured from begin to end."""
    x, wide = _SEARCH_LEFT + begin_s * _SECOND, (end_s - begin_s) * _SECOND
    middle = {"fill": FAINT, "text_anchor": "middle"}
    yield text(x + wide / 2, _SEARCH_TOP - 14, f"{len(spent)} candidates", NAME_SIZE, **middle)
    for candidate, seconds in spent.items():
        yield _box(x + 1, _row(candidate), wide - 2, _ROW_HIGH, number)
        yield _centred(x + wide / 2, _row(candidate) + _ROW_HIGH / 2, f"{seconds:.3g} s")


def _rounds() -> list[dict[int, float]]:
    """Return, for the candidates that are left after each drop, the seconds of each.

    The search's own function decides.  A smaller candidate is faster here, and each measurement
    takes the time that it is given.
    """
    now, rounds = 0.0, [dict[int, float]()]

    def measure(candidate: int, seconds: float) -> list[float]:
        nonlocal now
        now += seconds
        rounds[-1][candidate] = rounds[-1].get(candidate, 0.0) + seconds
        return [1.0 + candidate]

    def drop(candidate: int) -> None:
        if rounds[-1]:
            rounds.append({})

    halve([*range(_CANDIDATES)], measure, lambda: now, _BUDGET_S, drop=drop)
    return rounds


# --- servers and workers --------------------------------------------------------------------------

_BATCHES = 24


def parameter_server() -> str:
    """Return what workers and a server send to each other in a step."""
    words = f"1 server and {_RANKS} workers"
    note = "Workers push gradients and pull parameters. The server makes the updates."
    top, left, right, wide, high, gap = 84.0, MARGIN + 120, 340.0, 200.0, 52.0, 14.0
    middle, bottom = right + wide / 2, 84 + _RANKS * (high + gap) - gap
    frame = {"x": right, "y": top, "width": wide, "height": bottom - top, "rx": 8}
    elements = [
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, note, FACTS_SIZE, fill=FAINT),
        element("rect", **frame, fill=FRAME, stroke=EDGE),
        _centred(middle, top + 24, f"server, rank {_RANKS}"),
    ]
    for row, held in enumerate(("gradients", "optimizer's arrays", "parameters")):
        y = top + 46 + 66 * row
        elements += [_box(right + 20, y, wide - 40, 48, row), _centred(middle, y + 24, held)]
    for worker in range(_RANKS):
        y = top + worker * (high + gap)
        name = _centred(MARGIN + 60, y + high / 2, f"worker, rank {worker}")
        elements += [_box(MARGIN, y, 120, high, 3), name]
        elements += _arrow(left + 8, right - 8, y + 18, "push gradients")
        elements += _arrow(right - 8, left + 8, y + 44, "pull parameters")
    return document(right + wide + MARGIN, bottom + MARGIN, words, elements)


def placement() -> str:
    """Return how many numbers of each variable of the page's network each of two servers has."""
    sizes = (64, *settings().hidden, 10)
    arrays = mlp.named(mlp.views(mlp.init_params(sizes, seed=0), sizes))
    groups = [BarGroup(f"server {server}", list[Bar]()) for server in range(2)]
    placed = store_messages.place({name: array.size for name, array in arrays.items()}, 2)
    for name, pieces in placed.items():
        for server, start, stop in pieces:
            colour = PALETTE[2 * name.endswith("bias")]
            bar = Bar(name, stop - start, f"{stop - start:,}", colour)
            groups[server] = replace(groups[server], bars=[*groups[server].bars, bar])
    held = (f"{sum(bar.value for bar in group.bars):,}" for group in groups)
    facts = "How many numbers of each variable of this page's network lie on each server"
    return draw_bars(f"2 servers: {' and '.join(held)} numbers", facts, groups)


@dataclass(frozen=True)
class Computed:
    """A gradient that a worker has computed for a number; `staleness` is -1 if it was dropped."""

    worker: int
    number: int
    begin: float
    end: float = 0.0
    staleness: int = -1


Takes = Callable[[int, int], float]
"""(worker, number of its gradient, from 0) -> the time that it computes."""


def walk(takes: Takes, *rule: int | None, batches: int = _BATCHES) -> list[Computed]:
    """Walk a store's rule, for a bound and backup workers; messages and updates take no time."""
    store = Rule({worker: Worker() for worker in range(_RANKS)}, *rule)
    now, updates, made, seen = 0.0, 0, Counter[int](), Counter[int]()
    dealt, held = dict[int, int](), dict[int, Computed]()
    done, running = list[Computed](), list[tuple[float, int]]()
    for worker in range(_RANKS):
        store.steps(worker, batches)
    while True:
        while decided := store.decisions():
            for each in decided:
                if isinstance(each, Number) and each.number is not None:
                    dealt[each.worker] = each.number
                    store.pull(each.worker)
                elif isinstance(each, Go):
                    worker, seen[worker] = each.worker, updates
                    held[worker] = Computed(worker, dealt[worker], now)
                    heappush(running, (now + takes(worker, made[worker]), worker))
                elif isinstance(each, Discard):
                    done.append(held[each.worker])
                elif isinstance(each, Apply):
                    workers = [push.worker for push in each.pushes]
                    done += [replace(held[w], staleness=updates - seen[w]) for w in workers]
                    updates += 1
        if not running:
            return done
        now, worker = heappop(running)
        held[worker], made[worker] = replace(held[worker], end=now), made[worker] + 1
        store.push(worker, made[worker])
        store.steps(worker, batches)


def _one_slow(worker: int, made: int) -> float:
    return 4 if worker == 1 else 1


def _slow_in_turn(worker: int, made: int) -> float:
    return 4 if made % _RANKS == worker else 1


_FACTS: dict[Takes, str] = {
    _one_slow: f"{_RANKS} workers · worker 1 takes 4 for a batch, the others 1",
    _slow_in_turn: f"{_RANKS} workers · every {_RANKS}th batch of a worker takes 4, others 1",
}
_FILLS = (
    Sample(TINTS[0], "a gradient that is not stale"),
    Sample(TINTS[1], "a stale one"),
    Sample(TINTS[3], "a dropped one"),
)


def _lines(*shown: tuple[str, Takes, int | None, int]) -> str:
    """Return a time-line for each (words, times, bound, backup workers)."""
    charts, kinds = [], set[int]()
    for words, takes, *rule in shown:
        bars: list[list[Action]] = [[] for _ in range(_RANKS)]
        for each in sorted(walk(takes, *rule), key=lambda each: each.begin):
            kind = 2 if each.staleness < 0 else min(each.staleness, 1)
            kinds.add(kind)
            fate = "dropped" if kind == 2 else f"staleness {each.staleness}"
            tip = f"batch {each.number}, from {each.begin:g} to {each.end:g}, {fate}"
            bar = Action(each.begin, each.end, str(each.number), _FILLS[kind].colour, tip)
            bars[each.worker].append(bar)
        lanes = [Lane(f"worker {worker}", of_worker) for worker, of_worker in enumerate(bars)]
        chart = LaneChart(words, f"{_BATCHES} batches · {_FACTS[takes]}", lanes, arrows=[])
        alone = max(each.end for each in walk(takes, 0))
        title = f"{words}: time {chart.time:g}" + f" instead of {alone:g}" * any(rule)
        charts.append(replace(chart, title=title))
    return draw_lanes(charts, [_FILLS[kind] for kind in sorted(kinds)], arrows=[])


def staleness() -> str:
    """Return how many gradients have which staleness, by bound, if one worker is slow."""
    batches, groups = 400, []
    for words, limit in ("synchronous", 0), ("bound 2", 2), ("no bound", None):
        done = walk(_one_slow, limit, batches=batches)
        counts = sorted(Counter(each.staleness for each in done).items())
        bars = [Bar(f"staleness {n}", c, f"{c}", PALETTE[min(n, 1)]) for n, c in counts]
        groups.append(BarGroup(f"{words}: time {max(each.end for each in done):g}", bars))
    title = f"No bound: a gradient is up to {counts[-1][0]} updates behind"
    return draw_bars(title, f"{batches} batches · {_FACTS[_one_slow]}", groups)


_SHARD_WIDE, _SHARD_HIGH, _SERVER_GAP = 124.0, 36.0, 90.0
_COPIES, _KILLED = 3, 1
"""Servers, each with a shard of its own and a copy of another; and the one that is killed."""
_SERVERS_HIGH = 40 + _COPIES * (_SHARD_HIGH + 16)


def copies() -> str:
    """Return the copies of each shard, and their tasks before and after a server is killed."""
    words = f"{_COPIES} servers, 2 copies of each shard: server {_KILLED} is killed"
    note = "Workers push to the head of a shard's chain. Its tail acknowledges, and answers pulls."
    right = 2 * (MARGIN + _PAD) + _COPIES * (_SHARD_WIDE + _SERVER_GAP) - _SERVER_GAP
    elements = [
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, note, FACTS_SIZE, fill=FAINT),
        *_servers(76, ()),
        *_servers(76 + _SERVERS_HIGH + 28, (_KILLED,)),
    ]
    return document(right, 104 + 2 * _SERVERS_HIGH + MARGIN, words, elements)


def _servers(top: float, lost: Sequence[int]) -> Iterator[str]:
    """Yield servers with their shards; those that are lost are crossed out."""
    x = [MARGIN + _PAD + server * (_SHARD_WIDE + _SERVER_GAP) for server in range(_COPIES)]
    wide, bottom = _SHARD_WIDE + 2 * _PAD, top + _SERVERS_HIGH
    for server in range(_COPIES):
        size = {"x": x[server] - _PAD, "y": top, "width": wide, "height": _SERVERS_HIGH, "rx": 8}
        yield element("rect", **size, fill=FRAME, stroke=EDGE)
        yield _centred(x[server] + _SHARD_WIDE / 2, top + 18, f"server {server}")
    for server in lost:
        x1, x2 = x[server] - _PAD, x[server] + _SHARD_WIDE + _PAD
        cross = f"M{x1:g},{top:g}L{x2:g},{bottom:g}M{x2:g},{top:g}L{x1:g},{bottom:g}"
        yield _line(cross, PALETTE[1])
    for shard in range(_COPIES):
        y, chain = top + 40 + shard * (_SHARD_HIGH + 16), chain_of(shard, _COPIES, 2, lost)
        for server in chain:
            tasks = ["head"] * (server == chain[0]) + ["tail"] * (server == chain[-1])
            name = f"shard {shard}: {', '.join(tasks)}"
            yield _box(x[server], y, _SHARD_WIDE, _SHARD_HIGH, shard)
            yield _centred(x[server] + _SHARD_WIDE / 2, y + _SHARD_HIGH / 2, name)
        for head, tail in pairwise(chain):
            start, end = x[head] + _SHARD_WIDE + 4, x[tail] - 4
            if tail < head:
                start, end = x[head] - 4, x[tail] + _SHARD_WIDE + 4
            yield from _arrow(start, end, y + _SHARD_HIGH / 2, "gradients")


# --- averages of weights --------------------------------------------------------------------------

_EVERY, _STEPS = 4, 8
"""Steps from one average to the next, and steps of a rank."""


def local_sgd() -> str:
    """Return the same steps with an all-reduce in every step, and in every fourth."""
    fills = [Sample(TINTS[0], "step"), Sample(TINTS[1], "all-reduce, of gradients or of weights")]
    facts = f"{_RANKS} ranks · a step takes 2, every fourth step of a rank 3 · an all-reduce 1"
    charts = []
    for words, every in ("all-reduce in every step", 1), (f"average every {_EVERY} steps", _EVERY):
        bars = _steps(every, [sample.colour for sample in fills])
        lanes = [Lane(f"rank {rank}", of_rank) for rank, of_rank in enumerate(bars)]
        charts.append(LaneChart(f"{words}: time {bars[0][-1].end:g}", facts, lanes, arrows=[]))
    return draw_lanes(charts, fills, arrows=[])


def _steps(every: int, colours: Sequence[str]) -> list[list[Action]]:
    """Return the bars of each rank; an all-reduce begins when the last rank is there."""
    bars: list[list[Action]] = [[] for _ in range(_RANKS)]
    for step in range(_STEPS):
        for rank, of_rank in enumerate(bars):
            begin = of_rank[-1].end if of_rank else 0.0
            end = begin + (3 if step % _RANKS == rank else 2)
            words = f"step {step}, from {begin:g} to {end:g}"
            of_rank.append(Action(begin, end, str(step), colours[0], words))
        if (step + 1) % every == 0:
            begin = max(of_rank[-1].end for of_rank in bars)
            words = f"all-reduce, from {begin:g} to {begin + 1:g}"
            for of_rank in bars:
                of_rank.append(Action(begin, begin + 1, "a", colours[1], words))
    return bars


# --- a comparison ---------------------------------------------------------------------------------

_RESULTS = PAGE.parent.parent / "bench_results" / "strategies.jsonl"


def recorded() -> list[report.StrategyRow]:
    """Return the rows of a comparison in which one rank is slow, which a benchmark has recorded."""
    lines = map(json.loads, _RESULTS.read_text(encoding="utf-8").splitlines())
    rows = []
    for figures in (line["figures"] for line in lines if line["case"] == "slow"):
        strategy = strategies.by_name(figures["strategy"], figures["options"])
        ranks, servers = figures["ranks"], figures["servers"]
        rows.append(report.StrategyRow(strategy, ranks, servers, to=90, runs=[figures]))
    return rows


def compared() -> str:
    """Return the table that `compare` prints of these rows."""
    return "\n".join(["```text", *report.table(recorded()), "```"])


def compare() -> str:
    """Return the picture that `compare` draws of these rows."""
    return report.picture(recorded())


PICTURES: dict[str, Callable[[], str]] = {
    "strategy-one-device": one_device,
    "strategy-mirrored": mirrored,
    "strategy-multi-worker-mirrored": multi_worker_mirrored,
    "strategy-central-storage": central_storage,
    "strategy-sequential": sequential,
    "strategy-pipelines": pipelines,
    "strategy-tensor": tensor,
    "strategy-hybrid": mesh,
    "strategy-memory": memory,
    "strategy-search": search,
    "strategy-parameter-server": parameter_server,
    "strategy-waiting": partial(
        _lines, ("synchronous", _one_slow, 0, 0), ("no bound", _one_slow, None, 0)
    ),
    "strategy-staleness": staleness,
    "strategy-bound": partial(
        _lines, ("bound 2", _slow_in_turn, 2, 0), ("bound 2, one slow worker", _one_slow, 2, 0)
    ),
    "strategy-backup": partial(_lines, ("one backup worker", _one_slow, 0, 1)),
    "strategy-placement": placement,
    "strategy-copies": copies,
    "strategy-local-sgd": local_sgd,
    "strategy-compare": compare,
}


def main() -> None:
    """Write the tables into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, written in {"table": table(), "compared": compared()}.items():
        place = re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n<!-- end -->)", re.S)
        page = place.sub(lambda _, written=written: written, page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
