"""Whether areas of memory overlap: they are sorted, and most of them lie in order as they come.

An area is two words, where it begins and where it ends; it is not empty.
"""

from __future__ import annotations

from typing import Any

from ringreduce.compiler.memory import load, store
from ringreduce.compiler.records import compilable
from ringreduce.shm.layout import WORD

AREA_BYTES = 2 * WORD


@compilable
def add_area(areas: Any, count: Any, begin: Any, nbytes: Any, joins: Any) -> Any:
    """Put an area behind so many others, unless it is empty; how many there are now.

    If it `joins` the last of them, and lies behind it, they become one, with what lies between.
    """
    if nbytes == 0:
        return count
    last = areas + (count - 1) * AREA_BYTES
    if joins and load(last + WORD) <= begin:
        store(last + WORD, begin + nbytes)
        return count
    store(areas + count * AREA_BYTES, begin)
    store(areas + count * AREA_BYTES + WORD, begin + nbytes)
    return count + 1


@compilable
def _run(areas: Any, first: Any, count: Any) -> Any:
    """Behind how many areas a run of them ends, of which none begins before the one before."""
    end = min(first + 1, count)
    while end < count and load(areas + (end - 1) * AREA_BYTES) <= load(areas + end * AREA_BYTES):
        end += 1
    return end


@compilable
def _merge(areas: Any, into: Any, count: Any) -> Any:
    """Merge every two runs of areas; how many runs come of it."""
    runs, first = 0, 0
    while first < count:
        second = _run(areas, first, count)
        end = _run(areas, second, count)
        left, right = first, second
        for place in range(first, end):
            begin = load(areas + left * AREA_BYTES) if left < second else 0
            other = load(areas + right * AREA_BYTES) if right < end else 0
            taken = left
            if right < end and (left == second or other < begin):
                taken = right
                right += 1
            else:
                left += 1
            for word in (0, WORD):
                value = load(areas + taken * AREA_BYTES + word)
                store(into + place * AREA_BYTES + word, value)
        runs += 1
        first = end
    return runs


@compilable
def overlap(areas: Any, count: Any) -> bool:
    """Whether any two of so many areas overlap.  There is room for as many behind them."""
    here, there = areas, areas + count * AREA_BYTES
    while _merge(here, there, count) > 1:
        here, there = there, here
    end = 0
    for place in range(count):
        if load(there + place * AREA_BYTES) < end:
            return True
        end = load(there + place * AREA_BYTES + WORD)
    return False
