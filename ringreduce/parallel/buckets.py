"""Buckets of gradients: parameters that are reduced by one call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import ringreduce as rr


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


class Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


class Bucket:
    """Parameters whose gradients are reduced by one call.  Subclasses have the arrays."""

    def __init__(self, members: Sequence[tuple[str, Any]]) -> None:
        self.kinds = {name: Kind(array.shape, array.dtype) for name, array in members}
        self.missing = set(self.kinds)
        """Names that are not reported yet in this step."""
        self.work: rr.Work[Any] | Now | None = None

    @property
    def shard(self) -> list[Any]:
        """This rank's shard of the gradients, as views."""
        raise NotImplementedError

    def put(self, name: str, gradient: Any, *, add: bool) -> None:
        """Write, or add, a gradient; it may be one number for all elements."""
        raise NotImplementedError

    def reduction(self, op: str) -> Callable[..., Any]:
        """Return the call that reduces the gradients; it takes `async_op`."""
        raise NotImplementedError

    def begin_again(self) -> None:
        """Forget the gradients of a step."""
        self.missing = set(self.kinds)
        self.work = None


class WholeBucket(Bucket):
    """A flat array of gradients, in shared memory if the ranks share it, that is all-reduced."""

    def __init__(
        self, comm: rr.Communicator, members: Sequence[tuple[str, Any]], how: Mapping[str, Any]
    ) -> None:
        super().__init__(members)
        self._comm, self._how = comm, how
        self.flat = empty(comm, members[0][1], sum(array.size for _, array in members))
        self.flat[...] = 0
        self.places: dict[str, Any] = {}
        """Name -> view of the gradient, in the parameter's shape."""
        start = 0
        for name, array in members:
            self.places[name] = self.flat[start : start + array.size].reshape(array.shape)
            start += array.size
        self._shard = [self.flat[part] for part in comm.shards(self.flat)[comm.rank]]

    @property
    def shard(self) -> list[Any]:
        return self._shard

    def put(self, name: str, gradient: Any, *, add: bool) -> None:
        place = self.places[name]
        if add:
            place += gradient
        elif gradient is not place:
            place[...] = gradient

    def reduction(self, op: str) -> Callable[..., Any]:
        call: Callable[..., Any] = self._comm.all_reduce
        return partial(call, self.flat, op, out=self.flat, **self._how)


def empty(comm: rr.Communicator, like: Any, count: int, dtype: Any = None) -> Any:
    """Return an uninitialised 1-d array on the device of `like`, of its dtype if none is given."""
    xp, dtype = module_of(like), like.dtype if dtype is None else dtype
    return comm.empty(count, dtype) if xp.__name__ == "numpy" else xp.empty(count, dtype)


def module_of(array: Any) -> ModuleType:
    """Return the module of an array, NumPy or CuPy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def cut(
    params: Sequence[tuple[str, Any]], first_bytes: int, others_bytes: int
) -> list[list[tuple[str, Any]]]:
    """Divide the parameters, in order, into buckets of one dtype each.

    The first bucket has at most `first_bytes`, the others `others_bytes`; a longer parameter has a
    bucket of its own.
    """
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
