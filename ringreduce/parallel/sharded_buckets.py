"""Buckets of which each rank keeps a shard: of the optimizer's arrays, and of more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ringreduce as rr
from ringreduce.parallel.buckets import Bucket, empty, module_of
from ringreduce.parallel.layout import Layout

Update = Callable[[Any, tuple[Any, ...], Any], None]
"""(parameters, the optimizer's arrays, gradient) -> None, on 1-d arrays of one shape."""


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
        """Whether as many arrays are in use as are kept.  One more is made if it is needed."""
        return self._in_use >= self._most

    def take(self) -> Any:
        """Return an array that is not in use."""
        self._in_use += 1
        return self._free.pop() if self._free else self._make(self._nbytes)

    def give_back(self, array: Any) -> None:
        """Keep an array for the next bucket, or drop it if there are enough."""
        self._in_use -= 1
        if self._in_use + len(self._free) < self._most:
            self._free.append(array)


class ShardedBucket(Bucket):
    """Parameters whose gradients are reduce-scattered.  Subclasses know where parameters are.

    `half` is the algorithm of the reduce-scatter and the all-gather.
    """

    def __init__(
        self,
        comm: rr.Communicator,
        members: Sequence[tuple[str, Any]],
        layout: Layout,
        slots: Sequence[str],
        half: str,
        workspace: Workspace,
    ) -> None:
        super().__init__(members)
        self._comm, self._half = comm, half
        first = members[0][1]
        self._like = module_of(first).empty(0, first.dtype)
        self.layout, self.workspace = layout, workspace
        self.gradient = self._zeros()
        """This rank's shard of the gradients, and padding."""
        self.slots = {slot: self._zeros() for slot in slots}
        """Name -> this rank's shard of an array of the optimizer, and padding."""
        self._lent: Any = None
        """The array of the workspace in which the rows are."""
        self.rows: Any = None
        """The gradients of all ranks' shards, row by row, while they are in use."""
        self._begin(members)

    def _begin(self, members: Sequence[tuple[str, Any]]) -> None:
        """Take the parameters of a new bucket."""
        raise NotImplementedError

    def _zeros(self) -> Any:
        row = empty(self._comm, self._like, self.layout.width)
        row[...] = 0
        return row

    # --- gradients ---

    @property
    def shard(self) -> list[Any]:
        """As `Bucket.shard`, in a replica's order of parts: `global_norm` has the same bits."""
        return [self.gradient[place] for place in self.layout.own]

    def put(self, name: str, gradient: Any, *, add: bool) -> None:
        if self._lent is None:
            self._borrow()
            for padding in self.layout.padding:
                self.rows[padding] = 0
        is_one = gradient.ndim == 0
        flat = gradient if is_one else gradient.reshape(-1)
        for place, row in self.layout.in_rows[name]:
            value = flat if is_one else flat[place]
            if add:
                self.rows[row] += value
            else:
                self.rows[row] = value

    def reduction(self, op: str) -> Callable[..., Any]:
        call: Callable[..., Any] = self._comm.reduce_scatter
        return partial(call, self.rows, op, out=self.gradient, algorithm=self._half)

    def begin_again(self) -> None:
        super().begin_again()
        self.release()

    def _borrow(self) -> None:
        """Take an array of the workspace for the rows."""
        self._lent = self.workspace.take()
        self.rows = self._view(self._lent, self.layout.size)

    def release(self) -> None:
        """Give the rows back to the workspace."""
        if self._lent is not None:
            self.workspace.give_back(self._lent)
            self.rows = self._lent = None

    def _view(self, array: Any, count: int) -> Any:
        """Return the first bytes of an array of the workspace as `count` numbers."""
        dtype = self._like.dtype
        return array[: count * dtype.itemsize].view(dtype)

    # --- bytes of the messages of a step ---

    gathers = 1
    """How often a step gathers the parameters."""

    def sent_bytes(self, op: str) -> int:
        """Return the bytes that this rank sends in a step."""
        comm, width, how = self._comm, self.layout.width, {"algorithm": self._half}
        rows = self._like_of(self.layout.size)
        counts = [width] * comm.size
        reduced = comm.sent_bytes("reduce_scatter", rows, op=op, **how)
        gathered = comm.sent_bytes("all_gather", rows[:width], counts=counts, **how)
        return reduced + self.gathers * gathered

    def _like_of(self, count: int) -> Any:
        """Return `count` numbers without memory of their own."""
        zero = module_of(self._like).zeros(1, self._like.dtype)
        return module_of(self._like).broadcast_to(zero, (count,))

    # --- parameters ---

    def update(self, update: Update) -> None:
        """Update this rank's shard of the parameters."""
        raise NotImplementedError

    def publish(self) -> None:
        """Start to send the shard to ranks that keep all parameters."""

    def end_publish(self) -> float:
        """Wait until all ranks' shards are here.  Return the seconds of the gather."""
        return 0.0

    def fetch(self) -> None:
        """Start to gather the parameters, unless they are here or on their way."""

    def end_fetch(self) -> float:
        """Wait until the parameters are here.  Return the seconds of the gather."""
        return 0.0

    def parameter(self, name: str) -> Any:
        """Return a whole parameter, after `end_fetch`."""
        raise NotImplementedError

    def drop(self) -> None:
        """Drop what was gathered by `fetch`; wait for a gather that is under way."""

    def _gather(self, shard: Any, rows: Any) -> rr.Work[Any]:
        call: Callable[..., Any] = self._comm.all_gather
        counts = [self.layout.width] * self._comm.size
        work: rr.Work[Any] = call(
            shard, out=rows, counts=counts, algorithm=self._half, async_op=True
        )
        return work

    # --- whole arrays ---

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, without those of the workspace."""
        kept = (self.gradient, *self.slots.values())
        return sum(int(array.nbytes) for array in kept)

    @property
    def own(self) -> list[Any]:
        """The parameters on this rank, as views."""
        raise NotImplementedError

    def whole_parameters(self) -> dict[str, Any]:
        """Return copies of the parameters, by name.  Collective."""
        raise NotImplementedError

    def whole(self, shard: Any) -> dict[str, Any]:
        """Return new arrays, by name, of which each rank passes its shard.  Collective."""
        rows = self._gather(shard, empty(self._comm, shard, self.layout.size)).wait()
        return self._by_name(rows, empty(self._comm, shard, self.layout.count))

    def new(self, name: str) -> Any:
        """Return an uninitialised array like a parameter."""
        shape = self.kinds[name].shape
        return empty(self._comm, self._like, math.prod(shape)).reshape(shape)

    def _by_name(self, rows: Any, flat: Any) -> dict[str, Any]:
        """Copy rows into a flat bucket.  Return its arrays, by name, as views."""
        for place, row in self.layout.rows:
            flat[place] = rows[row]
        places = self.layout.places.items()
        return {name: flat[at].reshape(self.kinds[name].shape) for name, at in places}

    def load(self, name: str, array: Any) -> None:
        """Set a parameter."""
        raise NotImplementedError

    def keep(self, shard: Any, name: str, array: Any) -> None:
        """Write the numbers of a whole array that belong there into a shard."""
        flat = array.reshape(-1)
        for place, own in self.layout.in_shard[name]:
            shard[own] = flat[place]


class ReplicatedBucket(ShardedBucket):
    """Every rank keeps the parameters, and updates its shard of them: stages 1 and 2."""

    def _begin(self, members: Sequence[tuple[str, Any]]) -> None:
        self._parameters = dict(members)
        self._publishing: rr.Work[Any] | None = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(int(array.nbytes) for array in self._parameters.values())

    def update(self, update: Update) -> None:
        for name, pieces in self.layout.in_shard.items():
            flat = self.parameter(name).reshape(-1)
            for place, own in pieces:
                slots = tuple(slot[own] for slot in self.slots.values())
                update(flat[place], slots, self.gradient[own])
                if self.gathers:
                    self.gradient[own] = flat[place]  # which `publish` sends

    def publish(self) -> None:
        self._borrow()
        self._publishing = self._gather(self.gradient, self.rows)

    def end_publish(self) -> float:
        if self._publishing is None:
            return 0.0
        work, self._publishing = self._publishing, None
        try:
            work.wait()
            for name, pieces in self.layout.in_rows.items():
                flat = self.parameter(name).reshape(-1)
                for place, row in pieces:
                    flat[place] = self.rows[row]
        finally:
            self.release()
        return work.seconds or 0.0

    def parameter(self, name: str) -> Any:
        return self._parameters[name]

    @property
    def own(self) -> list[Any]:
        return list(self._parameters.values())

    def whole_parameters(self) -> dict[str, Any]:
        return {name: array.copy() for name, array in self._parameters.items()}

    def load(self, name: str, array: Any) -> None:
        self._parameters[name][...] = array


class PartitionedBucket(ShardedBucket):
    """Every rank keeps its shard of the parameters, and gathers them for a while: stage 3."""

    gathers = 2  # for forward, and for backward

    def _begin(self, members: Sequence[tuple[str, Any]]) -> None:
        self.parameters = self._zeros()
        """This rank's shard of the parameters, and padding."""
        for name, array in members:
            self.keep(self.parameters, name, array)
        self._fetching: tuple[rr.Work[Any], Any] | None = None
        """The gather under way, and the array of the workspace that it fills."""
        self._lent_flat: Any = None
        """The array of the workspace with the flat bucket."""
        self._fetched: dict[str, Any] = {}
        """Name -> the whole parameter, while it is here."""

    @property
    def nbytes(self) -> int:
        return super().nbytes + int(self.parameters.nbytes)

    def update(self, update: Update) -> None:
        own = slice(self.layout.length)
        slots = tuple(slot[own] for slot in self.slots.values())
        update(self.parameters[own], slots, self.gradient[own])

    def fetch(self) -> None:
        if self._fetching is None and not self._fetched:
            lent = self.workspace.take()
            rows = self._view(lent, self.layout.size)
            self._fetching = self._gather(self.parameters, rows), lent

    def end_fetch(self) -> float:
        if self._fetching is None:
            return 0.0
        (work, lent), self._fetching = self._fetching, None
        try:
            rows = work.wait()
            self._lent_flat = self.workspace.take()
            flat = self._view(self._lent_flat, self.layout.count)
            self._fetched = self._by_name(rows, flat)
        finally:
            self.workspace.give_back(lent)
        return work.seconds or 0.0

    def parameter(self, name: str) -> Any:
        return self._fetched[name]

    def drop(self) -> None:
        if self._fetching is not None:
            (work, lent), self._fetching = self._fetching, None
            with suppress(rr.RingReduceError):  # another error is being raised
                work.wait()
            self.workspace.give_back(lent)
        if self._lent_flat is not None:
            self.workspace.give_back(self._lent_flat)
            self._lent_flat, self._fetched = None, {}

    @property
    def own(self) -> list[Any]:
        return [self.parameters[: self.layout.length]]

    def whole_parameters(self) -> dict[str, Any]:
        return self.whole(self.parameters)

    def load(self, name: str, array: Any) -> None:
        self.keep(self.parameters, name, array)
