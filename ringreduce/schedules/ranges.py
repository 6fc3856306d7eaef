"""Numbers in order, written as runs.

>>> runs([0, 1, 2, 5, 8, 9])
['0-2', '5', '8-9']
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.schedules.schedule import chunk_of, chunk_text, source_of


def runs(numbers: Sequence[int], shortest: int = 2) -> list[str]:
    """The runs of ranks, or of chunks, that follow each other, first to last.

    Those of fewer than `shortest` numbers are spelt out.
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [_words(run) if len(run) >= shortest else _spelt(run) for run in found]


def _words(run: Sequence[int]) -> str:
    source = source_of(run[0])
    words = f"{chunk_of(run[0])}-{chunk_of(run[-1])}"
    return words if source is None else f"{words}@{source}"


def _spelt(run: Sequence[int]) -> str:
    return ",".join(map(chunk_text, run))
