"""Schedules that no algorithm makes: many contributions in one step, and random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

from hypothesis import strategies as st

from ringreduce.schedule import Claim, Recv, Schedule, Send, Step, Steps


def one_shot(size: int) -> Schedule:
    """Every rank sends its whole array to every other and folds what comes: N-way, in one step."""

    def steps(rank: int) -> Steps:
        others = [peer for peer in range(size) if peer != rank]
        yield Step(
            sends=tuple(Send(peer, (0,)) for peer in others),
            recvs=tuple(Recv(peer, (0,), reduce=True) for peer in others),
        )

    return by_hand("all_reduce", size, (1,), steps)


def two_shot(size: int) -> Schedule:
    """Direct: chunk i goes to rank i from everybody at once, and back from there."""

    def steps(rank: int) -> Steps:
        others = [peer for peer in range(size) if peer != rank]
        yield Step(
            sends=tuple(Send(peer, (peer,)) for peer in others),
            recvs=tuple(Recv(peer, (rank,), reduce=True) for peer in others),
        )
        yield Step(
            sends=tuple(Send(peer, (rank,)) for peer in others),
            recvs=tuple(Recv(peer, (peer,)) for peer in others),
        )

    return by_hand("all_reduce", size, (1,) * size, steps)


def by_hand(
    collective: str, size: int, weights: tuple[int, ...], steps: Callable[[int], Steps]
) -> Schedule:
    """A schedule in which every rank holds every chunk, and which claims nothing."""
    every = tuple(range(len(weights)))
    return Schedule(
        collective=collective,
        algorithm="by hand",
        size=size,
        weights=weights,
        steps=steps,
        holds_before=lambda rank: every,
        holds_after=lambda rank: every,
        claim=lambda rank: Claim(0, 0, 0),
    )


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    """Rounds of random messages among a few ranks: right as steps go, whatever they come to."""
    size, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    rounds = [draw(_rounds(size, chunks)) for _ in range(draw(st.integers(1, 5)))]
    held = [tuple(sorted(draw(st.sets(st.integers(0, chunks - 1))))) for _ in range(size)]
    weights = tuple(draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks)))
    schedule = by_hand("moves", size, weights, lambda rank: (step[rank] for step in rounds))
    return replace(schedule, holds_after=lambda rank: held[rank])


@st.composite
def _rounds(draw: st.DrawFn, size: int, chunks: int) -> list[Step]:
    """One step of every rank, keeping to what a step may be."""
    uses: dict[tuple[int, int], set[str]] = {}
    messages = []
    for sender, receiver in draw(st.permutations(list(permutations(range(size), 2)))):
        reduce = draw(st.booleans())
        allowed = {"sent", "reduced"} if reduce else set()
        wanted = draw(st.lists(st.integers(0, chunks - 1), unique=True, max_size=chunks))
        fits = tuple(
            chunk
            for chunk in wanted
            if "overwritten" not in uses.get((sender, chunk), ())
            and uses.get((receiver, chunk), set()) <= allowed
        )
        for chunk in fits:
            uses.setdefault((sender, chunk), set()).add("sent")
            uses.setdefault((receiver, chunk), set()).add("reduced" if reduce else "overwritten")
        if fits or draw(st.booleans()):
            messages.append((sender, receiver, fits, reduce))
    return [
        Step(
            sends=tuple(Send(b, chunks) for a, b, chunks, _ in messages if a == rank),
            recvs=tuple(Recv(a, chunks, reduce) for a, b, chunks, reduce in messages if b == rank),
        )
        for rank in range(size)
    ]
