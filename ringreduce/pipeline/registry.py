"""Find schedules of pipelines by their names, and add those of users."""

from __future__ import annotations

from ringreduce.errors import unknown
from ringreduce.pipeline.definition import REGISTERED, Acts, PipelineSchedule, pipeline
from ringreduce.pipeline.generators import SCHEDULES


def schedule(name: str, ranks: int, splits: int, virtual: int = 1) -> PipelineSchedule:
    """Return the schedule of a pipeline by its name.

    `prove` proves it, `price` predicts its time, and `draw` and `to_svg` draw it.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zero_bubble", "sequential", or a registered name.
        ranks: number of ranks, at least 1.
        splits: number of microbatches, at least 1; for "interleaved" a multiple of `ranks`.
        virtual: number of stages of each rank, at least 1.  Of the library's own schedules only
            "interleaved" takes more than one.  Stage k is on rank ``k % ranks``.

    Returns:
        The schedule.

    Raises:
        ValueError: there is no such schedule, or it does not take these numbers.

    Example:
        >>> schedule = rr.pipeline.schedule("interleaved", ranks=2, splits=2, virtual=2)
        >>> " ".join(map(str, schedule.acts(1)))
        '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """
    if name not in REGISTERED:
        raise ValueError(unknown("pipeline schedule", name, SCHEDULES, unlisted=REGISTERED))
    for what, number in (("ranks", ranks), ("splits", splits), ("virtual", virtual)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"pipeline {name}: {what} is {number!r}; pass an int of at least 1")
    acts, claim = REGISTERED[name]
    if claim is None:
        return PipelineSchedule(name, ranks, splits, virtual, acts)
    _check_fit(name, ranks, splits, virtual)
    return PipelineSchedule(name, ranks, splits, virtual, acts, claim(ranks, splits, virtual))


def _check_fit(name: str, ranks: int, splits: int, virtual: int) -> None:
    if virtual > 1 and name != "interleaved":
        raise ValueError(
            f"pipeline {name}: virtual is {virtual}, but each rank has one stage; several stages a "
            "rank are for 'interleaved'"
        )
    if name == "interleaved" and splits % ranks:
        less, more = splits // ranks * ranks, -(-splits // ranks) * ranks
        nearest = f"{less} or {more}" if less else str(more)
        raise ValueError(
            f"pipeline interleaved: splits is {splits}, no multiple of the {ranks} ranks; choose "
            f"{nearest}"
        )


def register(name: str, acts: Acts) -> None:
    """Make your own schedule available as ``schedule(name, ...)``.

    A later registration under the same name replaces the earlier one.  `prove` proves the schedule
    for given numbers of ranks, microbatches and stages.

    Args:
        name: letters, digits and _; no name of the library.
        acts: ``acts(ranks, rank, splits, virtual)`` yields the actions of `rank` in order, as
            `Action` or as text.

    Raises:
        ValueError: the name is taken, or has other letters.
        TypeError: `acts` is no function.

    Example:
        >>> def depth_first(ranks, rank, splits, virtual):
        ...     for microbatch in range(splits):
        ...         yield f"{rank}F{microbatch}"
        ...         yield f"{rank}B{microbatch}"
        >>> rr.pipeline.register("depth_first", depth_first)
        >>> rr.pipeline.prove(rr.pipeline.schedule("depth_first", ranks=3, splits=2)).held
        (1, 1, 1)
    """
    if not (isinstance(name, str) and name.isascii() and name.replace("_", "a").isalnum()):
        raise ValueError(f"pipeline.register: name is {name!r}; choose letters, digits and _")
    if name in SCHEDULES:
        raise ValueError(
            f"pipeline.register: {name!r} is taken by the library; choose another name"
        )
    if not callable(acts):
        raise TypeError(f"pipeline.register: acts is {type(acts).__name__}; pass a function")
    pipeline(name, None)(acts)
