"""Gradients that are reduced as one array: which go together, where they lie, what carries them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ringreduce as rr


class Now:
    """A call that is carried out at once; what it raises comes when it is waited for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        self._error: rr.MismatchError | None = None
        try:
            call()
        except rr.MismatchError as error:
            self._error = error
        self.seconds = time.perf_counter() - begin

    def done(self) -> bool:
        """It is over."""
        return True

    def wait(self) -> None:
        """Raise what there was to raise."""
        if self._error is not None:
            raise self._error


class Bucket:
    """Gradients that are reduced as one array, which ranks of one host reach directly."""

    def __init__(self, comm: rr.Communicator, members: Sequence[tuple[str, Any]]) -> None:
        first, count = members[0][1], sum(array.size for _, array in members)
        xp = sys.modules[type(first).__module__.partition(".")[0]]
        here = xp.__name__ == "numpy"
        self.flat = comm.empty(count, first.dtype) if here else xp.empty(count, first.dtype)
        self.flat[...] = 0
        self.places: dict[str, Any] = {}
        start = 0
        for name, array in members:
            self.places[name] = self.flat[start : start + array.size].reshape(array.shape)
            start += array.size
        self.missing = set(self.places)
        self.work: rr.Work | Now | None = None


def cut(
    params: Sequence[tuple[str, Any]], first_bytes: int, others_bytes: int
) -> list[list[tuple[str, Any]]]:
    """Parameters that follow each other in buckets, each of one dtype."""
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
