"""Numbers in order, written as runs.

>>> runs([0, 1, 2, 5, 8, 9])
['0-2', '5', '8-9']
"""

from __future__ import annotations

from collections.abc import Sequence


def runs(numbers: Sequence[int]) -> list[str]:
    """The runs of numbers that follow each other, first to last."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found]
