"""The candidates of a search: settings and a strategy, with all that was given left as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ringreduce as rr
from ringreduce.errors import counted
from ringreduce.parallel.mesh import Coordinates, fits
from ringreduce.train import mlp, optimizers, strategies
from ringreduce.train.configuration import Given
from ringreduce.train.settings import Settings
from ringreduce.train.strategies import Pipeline, Strategy

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
"""The schedules of a search, in the order in which one of several equal ones is chosen."""
VIRTUAL = 2
"""Stages of each rank in the interleaved schedule."""
_MOST_SPLITS = 64
_SMALLER, _LARGER = 2, 6
"""How often a batch is halved and doubled."""
_SPLITS_A_STAGE = (1, 2, 4)
"""Microbatches of a candidate mesh for each stage of its pipelines."""
_SIZES = ("data_parallel", "stages", "tensor")
"""The options with the sizes of a mesh, in the order of `Coordinates`."""
_MANY = 1 << 40
"""Stands for a number of samples or classes that no option exceeds."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Settings and a strategy, and what to call them."""

    values: Mapping[str, Any]
    """Option -> value: those that were given, and those that are searched for."""
    settings: Settings
    strategy: Strategy
    columns: Mapping[str, str]
    """Head of a column in the table -> text."""
    series: str
    """Line of the chart that shows this candidate."""
    x: int
    """Its x coordinate there."""

    @property
    def name(self) -> str:
        return ", ".join(f"{head} {text}" for head, text in self.columns.items() if text != "-")


@dataclass(frozen=True)
class Site:
    """Where the candidates are to run."""

    nodes: Sequence[Sequence[int]]
    sizes: Sequence[int]
    """The widths of the network, from inputs to classes."""
    samples: int
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", sum(map(len, self.nodes)))

    def costs(self, batch_norm: bool) -> list[int]:
        last = len(self.sizes) - 2
        return [
            mlp.parameter_count(self.sizes[layer : layer + 2])
            + 2 * self.sizes[layer + 1] * (batch_norm and layer < last)
            for layer in range(last + 1)
        ]


# --- what is searched for -------------------------------------------------------------------------


def split_sizes(given: Given, place: Site) -> Iterator[Candidate]:
    """Yield pipelines: split size, schedule and cut.

    A split size is the batch, halved again and again.  A cut is the one that is balanced by the
    number of parameters, or differs from it by one layer at one border.  Of schedules with the same
    actions the first is yielded.
    """
    settings = given.settings()
    fixed, seen = given.values, set()
    schedules = [fixed["schedule"]] if "schedule" in fixed else SCHEDULES
    for size in _halvings(settings.batch):
        for name in schedules:
            virtual = _virtual(name, fixed)
            stages = place.ranks * virtual
            if stages > len(place.sizes) - 1:
                continue
            actions = _actions(name, place.ranks, settings.batch, size, virtual)
            if actions is None or actions in seen:
                continue
            seen.add(actions)
            for cut in _cuts_of(place.costs(settings.batch_norm), stages, fixed):
                yield _pipeline(given, place, size, name, virtual, cut)


def _pipeline(
    given: Given, place: Site, size: int, schedule: str, virtual: int, cut: tuple[int, ...]
) -> Candidate:
    chosen = {"split_size": size, "schedule": schedule, "cut": cut}
    if virtual > 1:
        chosen["virtual"] = virtual
    columns = {"split size": str(size), "schedule": schedule, "cut": " ".join(map(str, cut))}
    return _candidate(given, place, chosen, columns, schedule, size)


def _with_another_choice(candidate: Candidate, given: Given, place: Site) -> Iterator[Candidate]:
    """Yield the pipelines that differ in one choice: schedule, split size, or a border of the cut.

    The split size is the next smaller or larger one, and the border has moved by one layer.  The
    options that are given stay as they are.
    """
    strategy, size, fixed = candidate.strategy, candidate.x, given.values
    assert isinstance(strategy, Pipeline)
    assert isinstance(strategy.cut, tuple)
    schedule, virtual, cut = strategy.schedule, strategy.virtual, strategy.cut
    batch = candidate.settings.batch
    sizes = _halvings(batch)
    at = sizes.index(size)
    schedules = [schedule] if "schedule" in fixed else SCHEDULES
    seen = {_actions(schedule, place.ranks, batch, size, virtual)}
    for other_size, other in (
        *((size, name) for name in schedules if _virtual(name, fixed) == virtual),
        *((near, schedule) for near in sizes[max(0, at - 1) : at + 2]),
    ):
        actions = _actions(other, place.ranks, batch, other_size, virtual)
        if actions is not None and actions not in seen:
            seen.add(actions)
            yield _pipeline(given, place, other_size, other, virtual, cut)
    for moved in () if "cut" in fixed else moved_cuts(cut):
        yield _pipeline(given, place, size, schedule, virtual, moved)


def _virtual(schedule: str, fixed: Mapping[str, Any]) -> int:
    virtual: int = fixed.get("virtual", VIRTUAL if schedule == "interleaved" else 1)
    return virtual


def _actions(name: str, ranks: int, batch: int, size: int, virtual: int) -> Sequence[Any] | None:
    """Return the actions of all ranks; None if there are too many microbatches of `size`, or if the
    schedule does not take these numbers."""
    splits = -(-batch // size)
    if splits > _MOST_SPLITS:
        return None
    try:
        schedule = rr.pipeline.schedule(name, ranks, splits, virtual)
    except ValueError:
        return None
    return tuple(schedule.acts(rank) for rank in range(ranks))


def _cuts_of(costs: Sequence[int], stages: int, fixed: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the cuts into stages; if a cut is given, that one or none."""
    if "cut" not in fixed:
        return cuts(costs, stages)
    cut: tuple[int, ...] = fixed["cut"]
    return [cut] if len(cut) == stages and sum(cut) == len(costs) else []


def meshes(given: Given, place: Site) -> Iterator[Candidate]:
    """Yield hybrids: the meshes of all ranks, with several numbers of microbatches."""
    settings, fixed = given.settings(), given.values
    narrowest = min(place.sizes[1:])
    for sizes in fits(place.ranks):
        wanted = [fixed.get(name) for name in _SIZES]
        is_other = any(want not in (None, size) for want, size in zip(wanted, sizes, strict=True))
        if is_other or sizes.tensor > narrowest or sizes.data > settings.batch:
            continue
        for splits in _splits(sizes, settings, fixed):
            chosen = dict(zip(_SIZES, sizes, strict=True), splits=splits)
            columns = {
                "data": str(sizes.data),
                "stages": str(sizes.pipeline),
                "tensor": str(sizes.tensor),
                "splits": str(splits),
            }
            series = "·".join(map(str, sizes))
            yield _candidate(given, place, chosen, columns, series, splits)


def _splits(sizes: Coordinates, settings: Settings, fixed: Mapping[str, Any]) -> list[int]:
    if "splits" in fixed:
        return [fixed["splits"]]
    if sizes.pipeline == 1:
        return [1]
    rows = settings.batch // sizes.data
    numbers = (times * sizes.pipeline for times in _SPLITS_A_STAGE)
    return [splits for splits in numbers if splits <= min(rows, _MOST_SPLITS)]


def batches(given: Given, place: Site) -> Iterator[Candidate]:
    """Yield batches: the one of the settings, halved and doubled, up to the training samples."""
    settings = given.settings()
    base = settings.lr_batch or settings.batch
    sizes = {settings.batch * 2**times // 2**_SMALLER for times in range(_SMALLER + _LARGER + 1)}
    for batch in sorted(size for size in sizes if 1 <= size <= place.samples):
        lr = optimizers.linear_scaling(settings.lr, batch, base)
        columns = {"batch": str(batch), "lr": f"{lr:g}"}
        chosen = {"batch": batch, "lr": settings.lr, "lr_batch": base}
        yield _candidate(given, place, chosen, columns, "", batch)


@dataclass(frozen=True)
class Searched:
    candidates: Callable[[Given, Site], Iterator[Candidate]]
    strategy: str | None
    """The strategy whose options are searched for; None: any."""
    options: tuple[str, ...]
    """The options that must not be given."""
    x_name: str
    lines: str
    """What the lines of the picture are, as a sentence; "" if there is one."""
    neighbours: Callable[[Candidate, Given, Site], Iterable[Candidate]] = lambda *_: []
    """Lists the candidates next to one: they need not be among `candidates`."""


KINDS: Mapping[str, Searched] = {
    "split_size": Searched(
        split_sizes,
        "pipeline",
        ("split_size", "splits"),
        "split size",
        "A line is a schedule with the best cut for each split size, but one cut for memory.",
        _with_another_choice,
    ),
    "batch": Searched(batches, None, (), "global batch", ""),
    "mesh": Searched(
        meshes,
        "hybrid",
        (),
        "microbatches",
        "A line is a mesh of data·stages·tensor ranks.",
    ),
}
"""Name, as on the command line -> kind."""


def fitting(kind: str, given: Given, place: Site) -> Iterator[Candidate]:
    """Yield the candidates that can run.  Raises ValueError, with a reason, if there are none."""
    fits, reason = False, ""
    for candidate in KINDS[kind].candidates(given, place):
        try:
            check(candidate, place)
        except ValueError as error:
            reason = reason or str(error)
        else:
            fits = True
            yield candidate
    if not fits:
        raise ValueError(
            f"no {kind.replace('_', ' ')} fits {counted(place.ranks, 'rank')} and these options: "
            f"{reason or _why_none(kind, given, place)}"
        )


def _why_none(kind: str, given: Given, place: Site) -> str:
    """Return why not even an invalid candidate was listed."""
    layers, fixed = len(place.sizes) - 1, given.values
    stages = place.ranks * _virtual(fixed.get("schedule", ""), fixed)
    if kind == "split_size" and stages > layers:
        return (
            f"{counted(stages, 'stage')} need as many layers; the network has "
            f"{counted(layers, 'layer')}: add hidden layers, or use fewer ranks"
        )
    if kind == "mesh":
        sizes = ", ".join(f"{name} is {fixed[name]}" for name in _SIZES if name in fixed)
        return (
            f"{sizes}; wanted sizes with the product {place.ranks}, data_parallel at "
            "most the batch, and tensor at most the columns of the narrowest layer"
        )
    if "cut" in fixed:
        cut = " ".join(map(str, fixed["cut"]))
        return f"cut is {cut}; wanted {counted(stages, 'stage')} of {counted(layers, 'layer')}"
    return "choose other values for these options, or leave them out"


def check_fits(kind: str, given: Given, nodes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if no candidate fits the ranks of these nodes; the data are not read."""
    # One input, and more samples and classes than any options ask for.
    sizes = (1, *given.settings().hidden, _MANY)
    next(fitting(kind, given, Site(nodes, sizes, _MANY)))


def _candidate(
    given: Given,
    place: Site,
    chosen: Mapping[str, Any],
    columns: Mapping[str, str],
    series: str,
    x: int,
) -> Candidate:
    values = {**given.values, **chosen}
    complete = Given(values)
    strategy = complete.strategy() or strategies.default(place.nodes)
    return Candidate(values, complete.settings(), strategy, columns, series, x)


def check(candidate: Candidate, place: Site) -> None:
    settings = candidate.settings
    candidate.strategy.check_device(Given(candidate.values).outputs().device)
    candidate.strategy.check(place.nodes, settings)
    steps = settings.epochs * -(-place.samples // settings.batch)
    if settings.warm_up > steps:
        raise ValueError(f"warm_up is {settings.warm_up}; the run has {counted(steps, 'step')}")


# --- parts ----------------------------------------------------------------------------------------


def cuts(costs: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """Return the balanced cut of layers into stages, and those with one border moved by a layer.

    >>> cuts([1, 1, 1, 1], stages=2)
    [(2, 2), (1, 3), (3, 1)]
    """
    balanced = rr.pipeline.balance(costs, stages)
    return [balanced, *moved_cuts(balanced)]


def moved_cuts(cut: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts that differ by one layer at one border."""
    for border in range(len(cut) - 1):
        for less, more in ((border, border + 1), (border + 1, border)):
            moved = list(cut)
            moved[less] -= 1
            moved[more] += 1
            if moved[less]:
                yield tuple(moved)


def _halvings(batch: int) -> list[int]:
    """Return the batch, halved again and again, rounded up."""
    sizes = [batch]
    while sizes[-1] > 1:
        sizes.append(-(-batch // 2 ** len(sizes)))
    return sizes
