"""Draw a schedule as text: who sends what when, a row a step and a column a rank.

>>> from ringreduce.algorithms import build
>>> print(draw(build("reduce_scatter", "ring", nodes=[[0, 1, 2]]), failed={1: 0}))
step  rank 0       rank 1       rank 2
   0   >1:2 <2:1+  !>2:0 <0:2+   >0:1 <1:0+
   1   >1:1 <2:0+   >2:2 <0:1+   >0:0 <1:2+
>1:2 sends chunk 2 to rank 1; <2:1+ adds chunk 1 from rank 2
! did not finish: rank 1 in step 0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice, pairwise

from ringreduce.errors import counted
from ringreduce.schedules.ranges import range_texts
from ringreduce.schedules.schedule import (
    Chunks,
    Recv,
    Schedule,
    Send,
    Step,
    chunk_of,
    chunk_text,
    source_of,
)

_MESSAGES_A_CELL = 4
_RANGES_A_MESSAGE = 3


def draw(
    schedule: Schedule | Sequence[Iterable[Step]],
    *,
    failed: Mapping[int, int] | None = None,
    max_ranks: int = 8,
    max_steps: int = 16,
) -> str:
    """Return a grid of the schedule, or of the steps of all its ranks, with a legend below.

    `failed` is rank -> the step that it did not finish; that cell is marked with ``!``.  Of a large
    schedule at most `max_ranks` ranks and `max_steps` steps are drawn: those nearest to the failed
    ones, or else the first.  Only the drawn ranks generate steps, up to the last drawn step.
    """
    failed = dict(sorted((failed or {}).items()))
    size = schedule.size if isinstance(schedule, Schedule) else len(schedule)
    ranks = window(size, list(failed), max_ranks)
    steps, lengths = _steps(schedule, ranks)
    marked = {rank: step for rank, step in failed.items() if rank in ranks}
    count = max([*lengths, *(step + 1 for step in marked.values())], default=0)
    rows = window(count, list(marked.values()), max_steps)
    columns = {rank: list(islice(steps[rank], rows[-1] + 1 if rows else 0)) for rank in ranks}

    table = [["step", *(f"rank {rank}" for rank in ranks)]]
    for above, row in pairwise([-1, *rows]):
        if row > above + 1:
            table.append(["…"])
        table.append([f"{row:4}", *(_cell(columns[rank], row, marked.get(rank)) for rank in ranks)])
    if rows and rows[-1] + 1 < count:
        table.append(["…"])
    lines = [
        *aligned(table),
        *left_out(len(ranks), size, "ranks"),
        *left_out(len(rows), count, "steps"),
        *_legend([column[row] for column in columns.values() for row in rows if row < len(column)]),
        *_failures(failed, max_ranks),
    ]
    return "\n".join(lines)


def _steps(
    schedule: Schedule | Sequence[Iterable[Step]], ranks: Sequence[int]
) -> tuple[dict[int, Iterable[Step]], list[int]]:
    """Return the steps of `ranks`, and how many each has: of a Schedule, by its claims."""
    if isinstance(schedule, Schedule):
        claims = [schedule.claim(rank) for rank in ranks]
        return {rank: schedule.steps(rank) for rank in ranks}, [claim.steps for claim in claims]
    steps = {rank: list(schedule[rank]) for rank in ranks}
    return dict(steps), [len(column) for column in steps.values()]


def window(count: int, centres: Sequence[int], limit: int) -> list[int]:
    """Return the `limit` numbers below `count` that are nearest to any centre, ascending."""
    centres = centres[:limit] or [0]
    return sorted(
        nsmallest(limit, range(count), key=lambda i: min((abs(i - c), i > c) for c in centres))
    )


def _cell(steps: Sequence[Step], row: int, failed: int | None) -> str:
    mark = "!" if row == failed else " "
    if row >= len(steps):
        return mark
    messages = _messages(steps[row])
    words = [_message(message) for message in messages[:_MESSAGES_A_CELL]]
    if len(messages) > _MESSAGES_A_CELL:
        words.append(f"…{len(messages) - _MESSAGES_A_CELL} more")
    words += [f"={_ranges(steps[row].folds)}"] * bool(steps[row].folds)
    return mark + (" ".join(words) or "-")


def _messages(step: Step) -> list[Send | Recv]:
    return [*step.sends, *step.recvs]


def _message(message: Send | Recv) -> str:
    if isinstance(message, Send):
        return f">{message.peer}:{_ranges(message.chunks)}"
    return f"<{message.peer}:{_ranges(message.chunks)}{'+' * message.reduce}"


def _legend(steps: Sequence[Step]) -> list[str]:
    messages = [message for step in steps for message in _messages(step)[:_MESSAGES_A_CELL]]
    kinds: dict[int, Send | Recv] = {}
    for message in sorted(messages, key=lambda message: len(_message(message))):
        kinds.setdefault(_kind(message), message)
    explained = [f"{_message(kinds[kind])} {_meaning(kinds[kind])}" for kind in sorted(kinds)]
    copies = [name for m in kinds.values() for name in m.chunks if source_of(name) is not None]
    apart = [
        f"{chunk_text(name)} is rank {source_of(name)}'s copy of chunk {chunk_of(name)}, kept apart"
        for name in copies[:1]
    ]
    folds = min((step.folds for step in steps if step.folds), key=len, default=())
    if folds:
        apart.append(f"={_ranges(folds)} adds up all copies of {_counted(folds)}")
    return ["; ".join(texts) for texts in (explained, apart) if texts]


_MEANINGS = (
    "sends {chunks} to rank {rank}",
    "sends an empty message to rank {rank}",
    "receives an empty message from rank {rank}",
    "adds {chunks} from rank {rank}",
    "overwrites {chunks} with rank {rank}'s",
    "receives {chunks} from rank {rank}",
)


def _kind(message: Send | Recv) -> int:
    if isinstance(message, Send):
        return 0 if message.chunks else 1
    if not message.chunks:
        return 2
    copies = any(source_of(name) is not None for name in message.chunks)
    return 3 if message.reduce else 5 if copies else 4


def _meaning(message: Send | Recv) -> str:
    meaning = _MEANINGS[_kind(message)]
    return meaning.format(chunks=_counted(message.chunks), rank=message.peer)


def _counted(chunks: Chunks) -> str:
    return f"chunk{'s' * (len(chunks) > 1)} {_ranges(chunks)}"


def _ranges(chunks: Chunks) -> str:
    """Return text such as 1,2,4-9: ranges of three and more are shortened, and long lists cut."""
    words = range_texts(chunks, shortest=3)
    return ",".join(words[:_RANGES_A_MESSAGE] + ["…"] * (len(words) > _RANGES_A_MESSAGE))


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in table
    ]


def left_out(drawn: int, count: int, what: str) -> list[str]:
    return [f"… {count - drawn} of {count} {what} are not drawn"] if drawn < count else []


def _failures(failed: Mapping[int, int], limit: int) -> list[str]:
    if not failed:
        return []
    words = [f"rank {rank} in step {step}" for rank, step in list(failed.items())[:limit]]
    if len(failed) > limit:
        words.append(counted(len(failed) - limit, "more rank"))
    return ["! did not finish: " + ", ".join(words)]
