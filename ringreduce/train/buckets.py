"""Buckets of gradients: parameters that share one flat array and one all-reduce."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

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
        """Return True."""
        return True

    def wait(self) -> None:
        """Raise the error of the call, if there was one."""
        if self._error is not None:
            raise self._error


class Bucket:
    """A flat array of gradients that is reduced as one; in shared memory if the ranks share it."""

    def __init__(self, comm: rr.Communicator, members: Sequence[tuple[str, Any]]) -> None:
        first, count = members[0][1], sum(array.size for _, array in members)
        xp = sys.modules[type(first).__module__.partition(".")[0]]
        here = xp.__name__ == "numpy"
        self.flat = comm.empty(count, first.dtype) if here else xp.empty(count, first.dtype)
        self.flat[...] = 0
        self.places: dict[str, Any] = {}
        """Name -> view of the gradient, in the parameter's shape."""
        start = 0
        for name, array in members:
            self.places[name] = self.flat[start : start + array.size].reshape(array.shape)
            start += array.size
        self.missing = set(self.places)
        """Names that are not reported yet in this step."""
        self.work: rr.Work[Any] | Now | None = None


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
