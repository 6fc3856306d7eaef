"""Write ascending numbers of ranks or chunks as ranges.

>>> range_texts([0, 1, 2, 5, 8, 9])
['0-2', '5', '8-9']
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ringreduce.schedules.schedule import chunk_of, chunk_text, source_of


def range_texts(numbers: Sequence[int], shortest: int = 2) -> list[str]:
    """Return one text for each range of consecutive numbers, in order.

    A range of fewer than `shortest` numbers is written as a list of them.
    """
    ends = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    cuts = [0, *ends, len(numbers)] if numbers else []
    found = [numbers[start:stop] for start, stop in pairwise(cuts)]
    return [_first_and_last(each) if len(each) >= shortest else _every(each) for each in found]


def _first_and_last(numbers: Sequence[int]) -> str:
    source = source_of(numbers[0])
    text = f"{chunk_of(numbers[0])}-{chunk_of(numbers[-1])}"
    return text if source is None else f"{text}@{source}"


def _every(numbers: Sequence[int]) -> str:
    return ",".join(map(chunk_text, numbers))
