"""Buckets: parameters whose gradients one call reduces, and where their numbers are.

A bucket is a flat array of gradients and a `BucketSetting`.  Replicas, ZeRO's stages and central
storage are settings of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

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


Update = Callable[[Any, tuple[Any, ...], Any], None]
"""(parameters, the optimizer's arrays, gradient) -> None, on 1-d arrays of one shape."""


class BucketSetting(NamedTuple):
    """How ranks share the buckets of a model."""

    reduce: Literal["all_reduce", "reduce_scatter"]
    """The call that reduces gradients.  After a reduce-scatter each rank has the sums of its shard,
    and updates its shard of the parameters."""
    gather: Literal["never", "after the step", "before use"]
    """When the shards of the parameters are gathered.  Before use: a rank keeps its shard alone."""
    arrays: int
    """Arrays for gradients that all buckets use in turn; 0: each bucket keeps one."""


REPLICAS = BucketSetting("all_reduce", "never", 0)
STAGES = {
    1: BucketSetting("reduce_scatter", "after the step", 0),
    # A bucket is filled, another one is reduced.
    2: BucketSetting("reduce_scatter", "after the step", 2),
    # Also, a layer is in use, and another one is gathered.
    3: BucketSetting("reduce_scatter", "before use", 4),
}
CENTRAL = {2: BucketSetting("reduce_scatter", "never", 2)}
_GATHERS = {"never": 0, "after the step": 1, "before use": 2}
"""When -> how often a step gathers; before use: for forward, and for backward."""


class Now:
    """Makes a call at once; `wait` raises its error.  Stands in for `Work`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        self._error: rr.MismatchError | None = None
        try:
            call()
        except rr.MismatchError as error:
            self._error = error
        self.seconds = time.perf_counter() - begin

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class Workspace:
    """Arrays of `nbytes` bytes that buckets use in turn; at most `most` are kept."""

    def __init__(self, make: Callable[[int], Any], nbytes: int, most: int) -> None:
        self._make, self._nbytes, self._most = make, nbytes, most
        self._free: list[Any] = []
        self._in_use = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, in use or not."""
        return (self._in_use + len(self._free)) * self._nbytes

    @property
    def is_full(self) -> bool:
        """Whether `most` arrays are in use.  `take` makes one more if it is needed."""
        return self._in_use >= self._most

    def take(self) -> Any:
        self._in_use += 1
        return self._free.pop() if self._free else self._make(self._nbytes)

    def give_back(self, array: Any) -> None:
        """Keep an array for the next bucket, or drop it if there are enough."""
        self._in_use -= 1
        if self._in_use + len(self._free) < self._most:
            self._free.append(array)


class Bucket:
    """Parameters, pairs of name and array, whose gradients one call reduces by a setting."""

    def __init__(
        self,
        comm: rr.Communicator,
        members: Sequence[tuple[str, Any]],
        layout: RowLayout,
        setting: BucketSetting,
        how: Mapping[str, Any],
        slots: Sequence[str],
        workspace: Workspace,
    ) -> None:
        self._comm, self._setting, self._how = comm, setting, how
        self.layout, self.workspace = layout, workspace
        xp, dtype = module_of(members[0][1]), members[0][1].dtype
        self._zero = xp.zeros((), dtype)
        self.likes = {name: xp.broadcast_to(self._zero, array.shape) for name, array in members}
        """Name -> zeros of the parameter's shape and dtype, which take no memory."""
        self.missing = set(self.likes)
        """Names that are not reported yet in this step."""
        self.work: rr.Work[Any] | Now | None = None
        self._lent: Any = None
        """The array of the workspace in which the rows are."""
        self.places: dict[str, Any] = {}
        """Of replicas, name -> the gradient in `rows`, in the parameter's shape."""
        self.rows: Any = None
        """The gradients that are reduced.  Replicas' are always here, one after another.  Those of
        all ranks' shards are here, row by row, from the first `put` to `release`."""
        if setting.reduce == "all_reduce":
            self.rows = self._zeros(layout.count)
            self.places = self._by_name(self.rows)
        self.gradient = self._zeros(layout.width) if self.rows is None else self.rows
        """The reduced gradients: of replicas all, otherwise this rank's shard and padding."""
        self.slots = {slot: self._zeros(layout.width) for slot in slots}
        """Name -> this rank's shard of an array of the optimizer, and padding."""
        self._take(members)

    def _take(self, members: Sequence[tuple[str, Any]]) -> None:
        """Take the parameters of a new bucket; replicas need none."""
        self.parameters: dict[str, Any] = {}
        """Name -> the whole parameter, while this rank has it."""
        self._kept: Any = None
        """This rank's shard of the parameters, and padding, if they are gathered before use."""
        self._gathering: tuple[rr.Work[Any], Any] | None = None
        """The gather of parameters under way, and the array of the workspace that it fills."""
        self._lent_flat: Any = None
        """The array of the workspace with the parameters that were gathered before use."""
        if self._setting.gather == "before use":
            self._kept = self._zeros(self.layout.width)
            for name, array in members:
                self.keep(self._kept, name, array)
        elif not self.places:
            self.parameters = dict(members)

    def _zeros(self, count: int) -> Any:
        array = empty(self._comm, self._zero, count)
        array[...] = 0
        return array

    def _view(self, array: Any, count: int) -> Any:
        """Return the first bytes of an array of the workspace as `count` numbers."""
        dtype = self._zero.dtype
        return array[: count * dtype.itemsize].view(dtype)

    def _by_name(self, flat: Any) -> dict[str, Any]:
        """Return the parts of a flat bucket, name -> view in the parameter's shape."""
        places = self.layout.places.items()
        return {name: flat[at].reshape(self.likes[name].shape) for name, at in places}

    # --- gradients ---

    @property
    def shard(self) -> list[Any]:
        """This rank's shard of the gradients, as views: the same parts for all settings."""
        which = 0 if self.places else 1
        return [self.gradient[piece[which]] for piece in self.layout.own]

    def put(self, name: str, gradient: Any, *, add: bool) -> None:
        """Write, or add, a gradient, which may be in its place already."""
        if self.rows is None:
            self._lent = self.workspace.take()
            self.rows = self._view(self._lent, self.layout.size)
            for padding in self.layout.padding:
                self.rows[padding] = 0
        if name in self.places:
            parts = [(self.places[name], gradient)]
        else:
            flat = gradient.reshape(-1)
            parts = [(self.rows[row], flat[place]) for place, row in self.layout.in_rows[name]]
        for place, part in parts:
            if add:
                place += part
            elif part is not place:
                place[...] = part

    def reduction(self, op: str) -> Callable[..., Any]:
        """Return the call that reduces the gradients; it takes `async_op`."""
        call: Callable[..., Any] = getattr(self._comm, self._setting.reduce)
        return partial(call, self.rows, op, out=self.gradient, **self._how)

    def begin_again(self) -> None:
        self.missing = set(self.likes)
        self.work = None
        self.release()

    def release(self) -> None:
        """Give the rows back to the workspace."""
        if self._lent is not None:
            self.workspace.give_back(self._lent)
            self.rows = self._lent = None

    def sent_bytes(self, op: str) -> int:
        sent, how, width = self._comm.sent_bytes, self._how, self.layout.width
        if self.places:
            return sent("all_reduce", self.rows, op=op, **how)
        rows = module_of(self._zero).broadcast_to(self._zero, (self.layout.size,))
        reduced = sent("reduce_scatter", rows, op=op, **how)
        counts = [width] * self._comm.size
        gathered = sent("all_gather", rows[:width], counts=counts, **how)
        return reduced + _GATHERS[self._setting.gather] * gathered

    # --- parameters ---

    def update(self, update: Update) -> None:
        for parameters, own in self._updated():
            slots = tuple(slot[own] for slot in self.slots.values())
            update(parameters, slots, self.gradient[own])
            if self._setting.gather == "after the step":
                self.gradient[own] = parameters  # which `gather` sends

    def _updated(self) -> Iterator[tuple[Any, slice]]:
        """Yield parameters that this rank updates, and their place in its shard."""
        if self._kept is not None:
            own = slice(self.layout.length)
            yield self._kept[own], own
            return
        for name, pieces in self.layout.in_shard.items():
            flat = self.parameters[name].reshape(-1)
            yield from ((flat[place], own) for place, own in pieces)

    def gather(self, when: str) -> None:
        """Start to gather the parameters if the setting says `when`, and they are not here."""
        is_here = self._gathering is not None or self._lent_flat is not None
        if when == self._setting.gather and not is_here:
            lent = self.workspace.take()
            shard = self.gradient if self._kept is None else self._kept
            self._gathering = self._all_gather(shard, self._view(lent, self.layout.size)), lent

    def end_gather(self) -> float:
        """Wait until the parameters are here.  Return the seconds of the gather."""
        if self._gathering is None:
            return 0.0
        (work, lent), self._gathering = self._gathering, None
        try:
            rows = work.wait()
            if self._kept is not None:
                self._lent_flat = self.workspace.take()
                flat = self._view(self._lent_flat, self.layout.count)
                self.parameters = self._by_name(flat)
            self._copy(rows, self.parameters)
        finally:
            self.workspace.give_back(lent)
        return work.seconds or 0.0

    def drop(self) -> None:
        """Drop parameters that were gathered before use; wait for a gather that is under way."""
        if self._gathering is not None:
            (work, lent), self._gathering = self._gathering, None
            with suppress(rr.RingReduceError):  # another error is being raised
                work.wait()
            self.workspace.give_back(lent)
        if self._lent_flat is not None:
            self.workspace.give_back(self._lent_flat)
            self._lent_flat, self.parameters = None, {}

    def _all_gather(self, shard: Any, rows: Any) -> rr.Work[Any]:
        call: Callable[..., Any] = self._comm.all_gather
        counts = [self.layout.width] * self._comm.size
        work: rr.Work[Any] = call(shard, out=rows, counts=counts, async_op=True, **self._how)
        return work

    def _copy(self, rows: Any, arrays: Mapping[str, Any]) -> None:
        """Copy rows into arrays in the parameters' shapes."""
        for name, pieces in self.layout.in_rows.items():
            flat = arrays[name].reshape(-1)
            for place, row in pieces:
                flat[place] = rows[row]

    # --- whole arrays ---

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, without those of the workspace."""
        kept = self.parameters.values() if self._kept is None else (self._kept,)
        return sum(int(array.nbytes) for array in (self.gradient, *self.slots.values(), *kept))

    @property
    def own(self) -> list[Any]:
        """The parameters on this rank, as views."""
        if self._kept is None:
            return list(self.parameters.values())
        return [self._kept[: self.layout.length]]

    def whole(self, shard: Any) -> dict[str, Any]:
        """Return new arrays, by name, of which each rank passes its shard.  Collective."""
        rows = self._all_gather(shard, empty(self._comm, shard, self.layout.size)).wait()
        arrays = self._by_name(empty(self._comm, shard, self.layout.count))
        self._copy(rows, arrays)
        return arrays

    def whole_parameters(self) -> dict[str, Any]:
        if self._kept is None:
            return {name: array.copy() for name, array in self.parameters.items()}
        return self.whole(self._kept)

    def new(self, name: str) -> Any:
        like = self.likes[name]
        return empty(self._comm, like, like.size).reshape(like.shape)

    def load(self, name: str, array: Any) -> None:
        if self._kept is None:
            self.parameters[name][...] = array
        else:
            self.keep(self._kept, name, array)

    def keep(self, shard: Any, name: str, array: Any) -> None:
        """Write the numbers of a whole array that belong there into a shard."""
        flat = array.reshape(-1)
        for place, own in self.layout.in_shard[name]:
            shard[own] = flat[place]


def make_buckets(
    comm: rr.Communicator,
    members: Sequence[Sequence[tuple[str, Any]]],
    setting: BucketSetting,
    how: Mapping[str, Any],
    slots: Sequence[str] = (),
) -> list[Bucket]:
    """Return the buckets of `members`, with the workspaces that the setting says."""
    layouts = [RowLayout(comm, each) for each in members]
    a_byte = module_of(members[0][0][1]).empty(0, np.uint8)  # refers to no parameter
    make: Callable[[int], Any] = partial(empty, comm, a_byte)
    shared = Workspace(make, max(layout.nbytes for layout in layouts), setting.arrays)
    return [
        Bucket(
            comm,
            each,
            layout,
            setting,
            how,
            slots,
            shared if setting.arrays else Workspace(make, layout.nbytes, 1),
        )
        for each, layout in zip(members, layouts, strict=True)
    ]


def empty(comm: rr.Communicator, like: Any, count: int) -> Any:
    """Return an uninitialised 1-d array on the device of `like`, and of its dtype."""
    xp = module_of(like)
    return comm.empty(count, like.dtype) if xp.__name__ == "numpy" else xp.empty(count, like.dtype)


def cut(
    params: Sequence[tuple[str, Any]], first_bytes: int, others_bytes: int
) -> list[list[tuple[str, Any]]]:
    """Divide parameters, in order, into buckets of one dtype; one that is too long has its own."""
    buckets: list[list[tuple[str, Any]]] = []
    nbytes = 0
    for name, array in params:
        limit = first_bytes if len(buckets) == 1 else others_bytes
        fits = buckets and nbytes + array.nbytes <= limit
        if fits and buckets[-1][0][1].dtype == array.dtype:
            buckets[-1].append((name, array))
            nbytes += array.nbytes
        else:
            buckets.append([(name, array)])
            nbytes = array.nbytes
    return buckets
