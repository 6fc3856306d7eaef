"""An algorithm is a schedule, and a schedule is data.

A schedule says, for one rank, step by step, which chunks go to which peer and which chunks come
from which peer.  It knows nothing of bytes, dtypes, MPI or GPUs.  Everything else in the library
reads schedules: the checker, the cost model, the planner, the drawing.

What a step means, exactly:

- All receives of a step are posted, then all its sends; the step ends when all are complete.
- Sends read the values from before the step.  A reducing receive lands in scratch.
- In one step a chunk has either any number of sends and reducing receives, or one overwriting
  receive and no send.
- All contributions to a chunk in one step, the local value among them, are folded left to right in
  ascending rank order.
- Messages of an ordered pair of ranks match first in, first out within a flow.  A collective has
  one flow, and a pipeline has two.
- A value can also travel apart from the sum, as a *copy*.  A rank sends its own value of a chunk
  under the name ``copy_of(chunk, rank)``; other ranks keep the copy under that name and pass it on.
- The chunks in a step's `folds` are folded when all messages of the step are complete: the rank's
  own value and all copies that it has received, in ascending rank order.  The copies are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from ringreduce.errors import ScheduleError

Chunks = tuple[int, ...]
"""Numbers of chunks, and names of copies as `copy_of` returns them."""

_COPIES = 1 << 32


def copy_of(chunk: int, rank: int) -> int:
    """Return the name under which the value of `rank` for a chunk travels apart from the sum.

    Raises ValueError for numbers below 0, and for chunks of 2**32 and more.
    """
    if rank < 0 or not 0 <= chunk < _COPIES:
        raise ValueError(f"copy_of: no rank {rank} has a copy of chunk {chunk}")
    return chunk + (rank + 1) * _COPIES


def chunk_of(name: int) -> int:
    """Return the chunk of a name: of a copy, or of the chunk itself."""
    return name % _COPIES


def source_of(name: int) -> int | None:
    """Return the rank whose copy a name stands for; None for the chunk itself.

    >>> source_of(copy_of(chunk=3, rank=1)), source_of(3)
    (1, None)
    """
    return name // _COPIES - 1 if name >= _COPIES else None


@dataclass(frozen=True, slots=True)
class Send:
    """Send these chunks to `peer` as one message; no chunks is an empty message."""

    peer: int
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive these chunks from `peer`: reduce them into the local values, or overwrite those."""

    peer: int
    chunks: Chunks
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that are sent and received together; the step ends when all are complete."""

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()
    folds: Chunks = ()
    """Chunks into which their copies are folded at the end of the step."""


Steps = Iterator[Step]
"""The steps of one rank, as an algorithm yields them."""


@dataclass(frozen=True)
class Claim:
    """The counts that an algorithm claims for one rank; the checker requires exactly these."""

    steps: int
    """Empty ones included."""
    sent: int
    """Chunks sent."""
    received: int
    """Chunks received."""

    def __add__(self, then: Claim) -> Claim:
        return Claim(self.steps + then.steps, self.sent + then.sent, self.received + then.received)

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Claim:
        return cls(
            steps=len(steps),
            sent=sum(len(send.chunks) for step in steps for send in step.sends),
            received=sum(len(recv.chunks) for step in steps for recv in step.recvs),
        )


@dataclass(frozen=True)
class Schedule:
    """One collective among `size` ranks by one algorithm: the steps and the claim of each rank."""

    collective: str
    algorithm: str
    size: int
    weights: tuple[int, ...]
    """Relative lengths of the chunks, in order.

    Equal for a ring; unequal for nodes of different sizes.
    """
    steps: Callable[[int], Steps]
    holds_before: Callable[[int], Chunks]
    """Rank -> the chunks that have its contribution at the start."""
    holds_after: Callable[[int], Chunks]
    """Rank -> the chunks that have its result at the end."""
    claim: Callable[[int], Claim]
    digest: str = ""
    """Distinguishes user-written schedules of the same name, so that ranks can compare theirs."""
    completes: Callable[[int], frozenset[tuple[int, int]]] | None = None
    """Rank -> the (step, chunk) of its folds whose result has every contribution.

    None: the folds that are the last change of a chunk in `holds_after`.
    """


def joined(parts: Iterable[Chunks]) -> Chunks:
    return tuple(chain.from_iterable(parts))


def in_parallel(*schedules: Iterable[Step]) -> Steps:
    """Merge the steps of schedules on different chunks; messages to one peer become one.

    In one step all messages from one peer must reduce, or all overwrite.  A shorter schedule
    ends early.
    """
    for steps in zip_longest(*schedules, fillvalue=Step()):
        sends: dict[int, Chunks] = {}
        recvs: dict[tuple[int, bool], Chunks] = {}
        for step in steps:
            for send in step.sends:
                sends[send.peer] = sends.get(send.peer, ()) + send.chunks
            for recv in step.recvs:
                key = (recv.peer, recv.reduce)
                recvs[key] = recvs.get(key, ()) + recv.chunks
        yield Step(
            sends=tuple(Send(peer, chunks) for peer, chunks in sends.items()),
            recvs=tuple(Recv(peer, chunks, reduce) for (peer, reduce), chunks in recvs.items()),
            folds=joined(step.folds for step in steps),
        )


# --- text form ------------------------------------------------------------------------------------
#
#   rank 0
#     >1:3 <3:2+          send chunk 3 to rank 1, receive chunk 2 from rank 3 and add it
#     >1:2,3 <3:0         send chunks 2 and 3 in one message; chunk 0 overwrites
#     >1:0@2 <3:0@3 =0    pass on rank 2's copy of chunk 0, keep rank 3's, then fold all of them
#     -                   a step without messages


def step_to_text(step: Step) -> str:
    """Write one step: ``>peer:chunks`` sends, ``<peer:chunks`` receives, ``+`` reduces.

    ``=chunks`` folds copies, and ``3@1`` is rank 1's copy of chunk 3.
    """
    words = [f">{send.peer}:{_join(send.chunks)}" for send in step.sends]
    words += [f"<{recv.peer}:{_join(recv.chunks)}{'+' * recv.reduce}" for recv in step.recvs]
    words += [f"={_join(step.folds)}"] * bool(step.folds)
    return " ".join(words) or "-"


def step_from_text(text: str) -> Step:
    """Read a step that `step_to_text` wrote.  Raises ScheduleError quoting the wrong word."""
    sends: list[Send] = []
    recvs: list[Recv] = []
    folds: Chunks = ()
    for word in [] if text.strip() == "-" else text.split():
        peer, colon, chunks = word[1:].partition(":")
        reduce = chunks.endswith("+")
        try:
            if word[0] == "=" and not folds:
                folds = _split(word[1:])
                continue
            if not colon or word[0] not in "<>" or (word[0] == ">" and reduce):
                raise ValueError
            parsed = _split(chunks.removesuffix("+"))
            if word[0] == ">":
                sends.append(Send(int(peer), parsed))
            else:
                recvs.append(Recv(int(peer), parsed, reduce))
        except ValueError:
            raise ScheduleError(
                f"schedule text: {word!r} is no message; write >peer:chunks for a send, "
                "<peer:chunks for a receive, <peer:chunks+ for a reducing receive, =chunks at "
                "the end to fold copies, which are written chunk@rank"
            ) from None
    return Step(tuple(sends), tuple(recvs), folds)


def to_text(ranks: Sequence[Iterable[Step]]) -> str:
    lines = []
    for rank, steps in enumerate(ranks):
        lines.append(f"rank {rank}")
        lines += [f"  {step_to_text(step)}" for step in steps]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> list[list[Step]]:
    """Read the steps of all ranks that `to_text` wrote.  Raises ScheduleError with the line."""
    ranks: list[list[Step]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if line.startswith("rank "):
            if line.split() != ["rank", str(len(ranks))]:
                raise ScheduleError(f"schedule text, line {number}: wanted 'rank {len(ranks)}'")
            ranks.append([])
        elif not ranks:
            raise ScheduleError(f"schedule text, line {number}: a step before the first rank")
        else:
            try:
                ranks[-1].append(step_from_text(line))
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}") from None
    return ranks


def chunk_text(name: int) -> str:
    """Return text such as 3, or 3@1 for rank 1's copy of chunk 3."""
    source = source_of(name)
    return str(name) if source is None else f"{chunk_of(name)}@{source}"


def _chunk_from_text(text: str) -> int:
    chunk, apart, rank = text.partition("@")
    name = copy_of(int(chunk), int(rank)) if apart else int(chunk)
    if not apart and source_of(name) is not None:
        raise ValueError(f"{text} is no chunk")
    return name


def _join(chunks: Chunks) -> str:
    return ",".join(map(chunk_text, chunks))


def _split(text: str) -> Chunks:
    return tuple(map(_chunk_from_text, text.split(","))) if text else ()
