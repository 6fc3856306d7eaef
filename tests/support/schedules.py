"""Schedules that no algorithm makes: many contributions in one step, and random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

from hypothesis import strategies as st

from ringreduce.schedules.schedule import (
    Chunks,
    Claim,
    Recv,
    Schedule,
    Send,
    Step,
    Steps,
    chunk_of,
    copy_of,
    source_of,
)


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
    kept: list[set[int]] = [set() for _ in range(size)]
    rounds = [draw(_rounds(size, chunks, kept)) for _ in range(draw(st.integers(1, 5)))]
    held = [tuple(sorted(draw(st.sets(st.integers(0, chunks - 1))))) for _ in range(size)]
    weights = tuple(draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks)))
    schedule = by_hand("moves", size, weights, lambda rank: (step[rank] for step in rounds))
    return replace(schedule, holds_after=lambda rank: held[rank])


@st.composite
def _rounds(draw: st.DrawFn, size: int, chunks: int, kept: list[set[int]]) -> list[Step]:
    """One step of every rank, keeping to what a step may be; `kept` are each rank's copies."""
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
        for name in [] if reduce else draw(_copies(sender, chunks, kept[sender])):
            sent = chunk_of(name) if source_of(name) == sender else name
            if source_of(name) != receiver and not (
                "overwritten" in uses.get((sender, sent), ()) or uses.get((receiver, name))
            ):
                uses.setdefault((sender, sent), set()).add("sent")
                uses.setdefault((receiver, name), set()).add("overwritten")
                fits = (*fits, name)
        if fits or draw(st.booleans()):
            messages.append((sender, receiver, fits, reduce))
    return [
        Step(
            sends=tuple(Send(b, chunks) for a, b, chunks, _ in messages if a == rank),
            recvs=tuple(Recv(a, chunks, reduce) for a, b, chunks, reduce in messages if b == rank),
            folds=draw(_folds([chunks for _, b, chunks, _ in messages if b == rank], kept[rank])),
        )
        for rank in range(size)
    ]


@st.composite
def _copies(draw: st.DrawFn, sender: int, chunks: int, kept: set[int]) -> list[int]:
    """Some of a rank's own values, and of the copies that it has."""
    names = [*(copy_of(chunk, sender) for chunk in range(chunks)), *sorted(kept)]
    return draw(st.lists(st.sampled_from(names), unique=True, max_size=2))


@st.composite
def _folds(draw: st.DrawFn, came: list[Chunks], kept: set[int]) -> Chunks:
    """Keep what copies come, and fold those of some chunks that the step does not change."""
    names = {name for chunks in came for name in chunks}
    kept.update(name for name in names if source_of(name) is not None)
    possible = sorted({chunk_of(name) for name in kept} - names)
    if not came or not possible:
        return ()
    folded = draw(st.lists(st.sampled_from(possible), unique=True))
    kept.difference_update([name for name in kept if chunk_of(name) in folded])
    return tuple(folded)
