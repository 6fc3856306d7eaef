"""Find out whether intervals of memory overlap, by a natural merge sort.

Most lists of arrays are almost sorted by address, so that few merges are needed.
"""

from __future__ import annotations

from ringreduce.compiler.records import Address, compilable, size_of
from ringreduce.shm.layout import Interval

_INTERVAL_BYTES = size_of(Interval)


@compilable
def interval_of(intervals: Address, index: int) -> Interval:
    return Interval(intervals + index * _INTERVAL_BYTES)


@compilable
def add_interval(intervals: Address, count: int, begin: Address, nbytes: int, joins: bool) -> int:
    """Append an interval, unless it is empty, to `count` intervals; return the new count.

    `joins`: extend the last interval instead if the new one begins at or after its end.
    """
    if nbytes == 0:
        return count
    last = interval_of(intervals, count - 1)
    if joins and last.end <= begin:
        last.end = begin + nbytes
        return count
    new = interval_of(intervals, count)
    new.begin, new.end = begin, begin + nbytes
    return count + 1


@compilable
def end_of_run(intervals: Address, first: int, count: int) -> int:
    """The end of the ascending run that starts at `first`."""
    end = min(first + 1, count)
    while end < count:
        if interval_of(intervals, end - 1).begin > interval_of(intervals, end).begin:
            break
        end += 1
    return end


@compilable
def merge(intervals: Address, into: Address, count: int) -> int:
    """Merge every two ascending runs of `intervals` to `into`; return the number of merged runs."""
    runs, first = 0, 0
    while first < count:
        second = end_of_run(intervals, first, count)
        end = end_of_run(intervals, second, count)
        left, right = first, second
        for place in range(first, end):
            begin = interval_of(intervals, left).begin if left < second else 0
            other = interval_of(intervals, right).begin if right < end else 0
            taken = left
            if right < end and (left == second or other < begin):
                taken = right
                right += 1
            else:
                left += 1
            source, target = interval_of(intervals, taken), interval_of(into, place)
            target.begin, target.end = source.begin, source.end
        runs += 1
        first = end
    return runs


@compilable
def overlap(intervals: Address, count: int) -> bool:
    """Whether any two of `count` intervals overlap.  Memory for as many follows the intervals."""
    here, there = intervals, intervals + count * _INTERVAL_BYTES
    while merge(here, there, count) > 1:
        here, there = there, here
    end = 0
    for place in range(count):
        each = interval_of(there, place)
        if each.begin < end:
            return True
        end = each.end
    return False
