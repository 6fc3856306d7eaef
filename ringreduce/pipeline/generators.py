"""The schedules of pipelines: generators of the actions of one rank, in order.

A generator is called with the number of ranks, this rank, the number of microbatches (`splits`),
and the number of stages of each rank (`virtual`).  Stage k is on rank k mod `ranks`.

In the docstrings P is the number of ranks, r this rank, M the number of microbatches, and v the
number of stages of a rank.  A microbatch's forward through all layers of a rank takes t_F, and its
backward t_B.  The gradient of the input takes t_I, half of t_B.  An activation is of one stage.
The claim above each generator has the same figures as formulas, and `proof` checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ringreduce.pipeline.actions import Action
from ringreduce.pipeline.definition import REGISTERED, PipelineClaim, pipeline


def _gpipe_claim(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    return PipelineClaim(
        held=(splits,) * ranks,
        posted_ahead=0,
        time=lambda forward, backward: (splits + ranks - 1) * (forward + backward),
    )


@pipeline("gpipe", _gpipe_claim)
def gpipe(ranks: int, rank: int, splits: int, virtual: int) -> Iterator[Action]:
    """Run all forwards, then all backwards.

    A rank holds M activations.  Time: (M + P - 1)(t_F + t_B).
    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
    parallelism", NeurIPS 2019.
    """
    for microbatch in range(splits):
        yield Action(rank, "F", microbatch)
    for microbatch in range(splits):
        yield Action(rank, "B", microbatch)


def _one_forward_one_backward_claim(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    return PipelineClaim(
        held=tuple(min(splits, ranks - rank) for rank in range(ranks)),
        posted_ahead=0,
        time=lambda forward, backward: (splits + ranks - 1) * (forward + backward),
    )


@pipeline("1f1b", _one_forward_one_backward_claim)
def one_forward_one_backward(ranks: int, rank: int, splits: int, virtual: int) -> Iterator[Action]:
    """Alternate forwards and backwards, after P - 1 - r forwards.

    A rank holds min(M, P - r) activations.  Time: (M + P - 1)(t_F + t_B).
    Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training",
    SOSP 2019.
    """
    forwards = [Action(rank, "F", microbatch) for microbatch in range(splits)]
    backwards = [Action(rank, "B", microbatch) for microbatch in range(splits)]
    yield from _alternate(forwards, backwards, warm_up=ranks - 1 - rank)


def _interleaved_claim(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    """One rank sends nothing.  Two ranks with two microbatches meet in every step."""

    def held(rank: int) -> int:
        warm_up = 2 * (ranks - 1 - rank) + (virtual - 1) * ranks
        return min(splits * virtual, warm_up + 1)

    return PipelineClaim(
        held=tuple(map(held, range(ranks))),
        posted_ahead=int(ranks > 1 and (ranks, splits) != (2, 2)),
        time=lambda forward, backward: (splits + (ranks - 1) / virtual) * (forward + backward),
    )


@pipeline("interleaved", _interleaved_claim)
def interleaved(ranks: int, rank: int, splits: int, virtual: int) -> Iterator[Action]:
    """Alternate as in 1F1B, and visit the v stages of the rank in turn, with P microbatches each.

    A rank holds min(Mv, 2(P - 1 - r) + (v - 1)P + 1) activations.  P divides M.  Ranks post
    receives one step ahead.  Time: (M + (P - 1)/v)(t_F + t_B).
    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021.
    """
    turns = [range(first, first + ranks) for first in range(0, splits, ranks)]
    stages = range(rank, ranks * virtual, ranks)
    forwards = [Action(k, "F", m) for turn in turns for k in stages for m in turn]
    backwards = [Action(k, "B", m) for turn in turns for k in reversed(stages) for m in turn]
    yield from _alternate(forwards, backwards, 2 * (ranks - 1 - rank) + (virtual - 1) * ranks)


def _zero_bubble_claim(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    """With at most P microbatches all forwards come first, and no rank waits for a receive."""

    def time(forward: float, backward: float) -> float:
        less, more = sorted((forward, backward / 2))
        return splits * (forward + backward) + (ranks - 1) * more + max(0, ranks - splits) * less

    return PipelineClaim(
        held=(min(splits, ranks),) * ranks, posted_ahead=int(splits > ranks > 1), time=time
    )


@pipeline("zero_bubble", _zero_bubble_claim)
def zero_bubble(ranks: int, rank: int, splits: int, virtual: int) -> Iterator[Action]:
    """Alternate as in 1F1B, and delay the gradients of the weights by r microbatches.

    They fill the time in which a rank would wait.  A rank holds min(M, P) activations.  Ranks post
    receives one step ahead.
    Time: M(t_F + t_B) + (P - 1) max(t_F, t_I) + max(0, P - M) min(t_F, t_I).
    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024: the variant ZB-H1.
    """
    warm_up, delay = min(splits, ranks - 1 - rank), min(splits, rank)
    for number in range(splits + warm_up + delay):
        if number < splits:
            yield Action(rank, "F", number)
        if warm_up <= number < splits + warm_up:
            yield Action(rank, "I", number - warm_up)
        if number >= warm_up + delay:
            yield Action(rank, "W", number - warm_up - delay)


def _sequential_claim(ranks: int, splits: int, virtual: int) -> PipelineClaim:
    return PipelineClaim(
        held=(1,) * ranks,
        posted_ahead=0,
        time=lambda forward, backward: splits * ranks * (forward + backward),
    )


@pipeline("sequential", _sequential_claim)
def sequential(ranks: int, rank: int, splits: int, virtual: int) -> Iterator[Action]:
    """Run one microbatch at a time forward and backward; all ranks but one idle.

    With one microbatch this is plain model parallelism.  A rank holds 1 activation.
    Time: MP(t_F + t_B).
    Source: Dean et al., "Large scale distributed deep networks", NeurIPS 2012.
    """
    for microbatch in range(splits):
        yield Action(rank, "F", microbatch)
        yield Action(rank, "B", microbatch)


SCHEDULES = dict(REGISTERED)
"""The schedules of the library: name -> generator and claim."""


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> Iterator[Action]:
    """Yield `warm_up` forwards, then a forward and a backward in turn until both are used up."""
    yield from forwards[:warm_up]
    for forward, backward in zip_longest(forwards[warm_up:], backwards):
        yield from filter(None, (forward, backward))
