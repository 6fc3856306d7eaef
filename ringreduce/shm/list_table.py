"""Lists of arrays that compiled code reduces: their batches, and the arrays' current addresses.

A batch is the part of a list that one program reduces.  The program reads and writes the arrays
in place: as one buffer if they are contiguous, end to end in memory, else through an iovec.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from ringreduce.compiler.memory import load, store
from ringreduce.compiler.pyobjects import CONTIGUOUS_AND_ALIGNED, WRITABLE, PyArray, same_kind
from ringreduce.compiler.records import (
    Address,
    Record,
    Word,
    address_of,
    array_address,
    compilable,
    record,
    size_of,
)
from ringreduce.shm.intervals import add_interval, overlap
from ringreduce.shm.layout import WORD, Interval, Iovec

SCATTERED, MOVED = 1, 2
"""Flags of a list: arrays are not end to end in memory; the address of an array has changed."""
DIFFERENT = -1
"""Result of `locate_all`: the arrays do not match the programs of the list."""
UNKNOWN, SEPARATE, MIXED = range(3)
"""Whether a result overlaps another array: not tested yet; no; yes."""


@record
class ListState(Record):
    """A list of arrays of one dtype, and of their results."""

    members: Word
    batches: Word
    first_batch: Address
    # The address of memory for 4 intervals for each array, which `overlap` sorts.
    intervals: Address
    # UNKNOWN, SEPARATE or MIXED, for the arrays of the latest `locate_all`.
    mixing: Word
    # Scratch: the address behind the last array of a batch.
    end: Address


@record
class ListBatch(Record):
    """The arrays of a list that are reduced together."""

    members: Word
    nbytes: Word
    # Addresses of arrays that have the dtypes and shapes of the members, but not their memory.
    likes: Address
    # 1: the arrays are single-copy, so they must be end to end in memory; 0: they are not.
    single_copy: Word
    # The arrays, as pieces of one buffer.
    sources: Iovec
    # The results, as pieces of one buffer.
    targets: Iovec
    # INPUT of the program: the address of the arrays, or the negated address of `sources`.
    source: Word
    # OUTPUT of the program: the address of the results, or the negated address of `targets`.
    target: Word
    program: Address
    executable: Address


BATCH_BYTES = size_of(ListBatch)


@compilable
def batch_of(state: ListState, index: int) -> ListBatch:
    return ListBatch(state.first_batch + index * BATCH_BYTES)


@compilable
def _locate(
    state: ListState, batch: ListBatch, items: Address, flags: int, places: Address, also: Address
) -> int:
    """Record the addresses of a batch's arrays in `places` and `also`; return SCATTERED | MOVED.

    Returns DIFFERENT if an array's type, dtype, shape or flags do not match.
    """
    found, end = 0, 0
    for i in range(batch.members):
        array = PyArray(load(items + i * WORD))
        if not same_kind(array, PyArray(load(batch.likes + i * WORD))):
            return DIFFERENT
        if array.flags & flags != flags:
            return DIFFERENT
        place = array.data
        if load(places + i * WORD) != place or load(also + i * WORD) != place:
            found |= MOVED
            store(places + i * WORD, place)
            store(also + i * WORD, place)
        nbytes = load(batch.sources.sizes + i * WORD)
        if nbytes:
            if end and place != end:
                found |= SCATTERED
            end = place + nbytes
    state.end = end
    return found


@compilable
def _locate_batch(state: ListState, batch: ListBatch, given: Address, out: Address) -> int:
    """Set INPUT and OUTPUT of a batch's program; return MOVED, 0 or DIFFERENT."""
    sources, targets = batch.sources.addresses, batch.targets.addresses
    in_place, writable = given == out, CONTIGUOUS_AND_ALIGNED | WRITABLE
    flags = writable if in_place else CONTIGUOUS_AND_ALIGNED
    read = _locate(state, batch, given, flags, sources, targets if in_place else sources)
    source = state.end - batch.nbytes
    written, target = read, source
    if not in_place:
        written = _locate(state, batch, out, writable, targets, targets)
        target = state.end - batch.nbytes
    scattered = (read | written) & SCATTERED
    if read < 0 or written < 0 or (scattered and batch.single_copy):
        return DIFFERENT
    batch.source = -address_of(batch.sources) if read & SCATTERED else source
    batch.target = -address_of(batch.targets) if written & SCATTERED else target
    return (read | written) & MOVED


@compilable
def locate_all(state: ListState, given: Address, out: Address) -> int:
    """Set INPUT and OUTPUT of all programs, given the items of the lists of arrays and results.

    Returns MOVED if the address of an array has changed, else 0.  Returns DIFFERENT if the arrays
    do not match the table, or if single-copy arrays are not end to end in memory.
    """
    found = 0
    for index in range(state.batches):
        batch = batch_of(state, index)
        seen = _locate_batch(state, batch, given, out)
        if seen < 0:
            return DIFFERENT
        found |= seen
        given += batch.members * WORD
        out += batch.members * WORD
    return found


@compilable
def _add_intervals(state: ListState, joined: bool) -> int:
    """Write the intervals of memory of all arrays and results; return their number.

    `joined`: arrays that follow each other in a list and in memory are one interval.
    """
    first_batch = batch_of(state, 0)
    sources, targets = first_batch.sources.addresses, first_batch.targets.addresses
    sizes, count = first_batch.sources.sizes, 0
    for is_target in (False, True):
        places, first = targets if is_target else sources, count
        for i in range(state.members):
            place = load(places + i * WORD)
            if not is_target or place != load(sources + i * WORD):
                joins = joined and count > first
                nbytes = load(sizes + i * WORD)
                count = add_interval(state.intervals, count, place, nbytes, joins)
    return count


@compilable
def mixes(state: ListState) -> bool:
    """Whether, after `locate_all`, a result may overwrite an array that is still to be read."""
    mixed = True
    for joined in (
        True,
        False,
    ):  # joined intervals are few, but may overlap although no arrays do
        mixed = mixed and overlap(state.intervals, _add_intervals(state, joined))
    return mixed


class ListTable:
    """The memory of one `ListState` and its batches.

    `batches` are the shapes of the arrays that are reduced together.  Batches of `single_copy_from`
    bytes or more are single-copy; None: no batch is.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[tuple[int, ...]]],
        dtype: np.dtype[Any],
        single_copy_from: int | None,
    ) -> None:
        self.shapes = [*chain.from_iterable(batches)]
        self._likes = {shape: np.broadcast_to(np.empty((), dtype), shape) for shape in self.shapes}
        """An array of each shape, to compare members with."""
        likes = np.array([id(self._likes[shape]) for shape in self.shapes], np.int64)
        sizes = np.array([prod(shape) for shape in self.shapes], np.int64) * dtype.itemsize
        places = np.zeros((2, len(self.shapes)), np.int64)
        intervals = np.empty((2, 2 * len(self.shapes) * size_of(Interval)), np.uint8)
        words = np.zeros(size_of(ListState) + len(batches) * BATCH_BYTES, np.uint8)
        self._memory = likes, sizes, places, intervals, words
        self.address = array_address(words)
        self.state = state = ListState(self.address)
        state.members, state.batches = len(self.shapes), len(batches)
        state.first_batch = self.address + size_of(ListState)
        state.intervals = array_address(intervals)
        first = 0
        for index, shapes in enumerate(batches):
            batch, last = batch_of(state, index), first + len(shapes)
            batch.members, batch.nbytes = len(shapes), int(sizes[first:last].sum())
            batch.likes = array_address(likes[first:])
            batch.single_copy = int(
                single_copy_from is not None and batch.nbytes >= single_copy_from
            )
            for pieces, addresses in zip((batch.sources, batch.targets), places, strict=True):
                pieces.addresses = array_address(addresses[first:])
                pieces.sizes = array_address(sizes[first:])
            first = last

    def batch(self, index: int) -> ListBatch:
        return batch_of(self.state, index)
