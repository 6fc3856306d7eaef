"""The claims of each schedule: activations held, receives posted ahead, and time, as formulas.

These are the figures of the generators' docstrings, for any number of ranks and microbatches.
`ringreduce.pipeline.proof` finds the figures of the generated actions, and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineClaim:
    """The figures that a schedule claims; the proof requires exactly these."""

    held: tuple[int, ...]
    """Rank -> the most activations that it holds at once, each of one stage and microbatch."""
    posted_ahead: int
    """The number of steps by which receives have to be posted ahead."""
    time: Callable[[float, float], float]
    """Times of the forward and of the backward through a rank's layers -> time of all ranks."""


def gpipe(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    return PipelineClaim(
        held=(splits,) * ranks,
        posted_ahead=0,
        time=lambda forward, backward: (splits + ranks - 1) * (forward + backward),
    )


def one_forward_one_backward(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    return PipelineClaim(
        held=tuple(min(splits, ranks - rank) for rank in range(ranks)),
        posted_ahead=0,
        time=lambda forward, backward: (splits + ranks - 1) * (forward + backward),
    )


def interleaved(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    """One rank sends nothing.  Two ranks with two microbatches meet in every step."""

    def held(rank: int) -> int:
        warm_up = 2 * (ranks - 1 - rank) + (virtual - 1) * ranks
        return min(splits * virtual, warm_up + 1)

    return PipelineClaim(
        held=tuple(map(held, range(ranks))),
        posted_ahead=int(ranks > 1 and (ranks, splits) != (2, 2)),
        time=lambda forward, backward: (splits + (ranks - 1) / virtual) * (forward + backward),
    )


def zero_bubble(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    """With at most P microbatches all forwards come first, and no rank waits for a receive."""

    def time(forward: float, backward: float) -> float:
        less, more = sorted((forward, backward / 2))
        return splits * (forward + backward) + (ranks - 1) * more + max(0, ranks - splits) * less

    return PipelineClaim(
        held=(min(splits, ranks),) * ranks, posted_ahead=int(splits > ranks > 1), time=time
    )


def sequential(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    return PipelineClaim(
        held=(1,) * ranks,
        posted_ahead=0,
        time=lambda forward, backward: splits * ranks * (forward + backward),
    )
