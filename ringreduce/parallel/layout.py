"""Index maps of a bucket: flat array, rows for the reduce-scatter, and this rank's shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import ringreduce as rr
from ringreduce.parallel.arrays import module_of

Pieces = list[tuple[slice, slice]]
"""Parts of one flat array and their places in another, in ascending order of the first."""


class RowLayout:
    """The places of the numbers of a bucket.

    The numbers of the parameters, one parameter after another, are the *flat* bucket.  The array of
    *rows* has a row for each rank, with the numbers of that rank's shard (`Communicator.shards`).
    All rows are as long as the longest, so that a reduce-scatter of the rows gives each rank its
    own row, and an all-gather returns them.
    """

    def __init__(self, comm: rr.Communicator, members: Sequence[tuple[str, Any]]) -> None:
        """Lay out the parameters, name and array; all have the same dtype."""
        like = members[0][1]
        ends = list(accumulate((array.size for _, array in members), initial=0))
        self.count = ends[-1]
        """Numbers of the flat bucket."""
        xp = module_of(like)
        shards = comm.shards(xp.broadcast_to(xp.zeros((), like.dtype), (self.count,)))
        lengths = [sum(part.stop - part.start for part in parts) for parts in shards]
        self.width = max(lengths)
        """Numbers in a row."""
        self.size = comm.size * self.width
        """Numbers in all rows."""
        self.nbytes = self.size * like.dtype.itemsize
        """Bytes of all rows."""
        self.length = lengths[comm.rank]
        """Numbers in this rank's shard."""
        self.padding = [
            slice(rank * self.width + length, (rank + 1) * self.width)
            for rank, length in enumerate(lengths)
        ]
        """The ends of the rows, which have no number of the bucket."""
        self.places = {
            name: slice(*place) for (name, _), place in zip(members, pairwise(ends), strict=True)
        }
        """Name -> its numbers in the flat bucket."""
        rows = [
            piece
            for rank, parts in enumerate(shards)
            for piece in _one_after_another(parts, rank * self.width)
        ]
        rows.sort(key=lambda piece: piece[0].start)
        self.in_rows = {name: _between(rows, at) for name, at in self.places.items()}
        """Name of a parameter -> pairs of a slice of the parameter, and of the rows."""
        self.own = list(_one_after_another(shards[comm.rank], 0))
        """The parts of this rank's shard, as an all-reduce reduces them: pairs of a slice of the
        flat bucket, and of the shard."""
        self.in_shard = {name: _between(self.own, at) for name, at in self.places.items()}
        """Name of a parameter -> pairs of a slice of the parameter, and of this rank's shard."""


def _one_after_another(parts: Sequence[slice], end: int) -> Iterator[tuple[slice, slice]]:
    """Yield each part with its place, from `end` on."""
    for part in parts:
        start, end = end, end + part.stop - part.start
        yield part, slice(start, end)


def _between(pieces: Pieces, place: slice) -> Pieces:
    """Return the pieces of a place in the first array, counted from the start of the place."""
    found = []
    for first, second in pieces:
        low, high = max(first.start, place.start), min(first.stop, place.stop)
        if low < high:
            shift = second.start - first.start
            counted = slice(low - place.start, high - place.start)
            found.append((counted, slice(low + shift, high + shift)))
    return found
