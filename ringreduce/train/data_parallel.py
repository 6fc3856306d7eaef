"""Reduce gradients over the ranks while the other gradients are still being computed.

Gradients are collected in buckets: flat arrays, each reduced by one all-reduce.  Backward goes from
the last layer to the first, so buckets are filled in the reverse order of the parameters.  The
all-reduce of a bucket starts as soon as the bucket is full.  The first bucket is small, so that
communication begins early.

Source: Li et al., "PyTorch distributed: experiences on accelerating data parallel training",
VLDB 13(12), 2020.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.train.buckets import Bucket, Now, cut
from ringreduce.train.mismatches import Reported, announce, check_alike, check_arrays, explained


@dataclass(frozen=True)
class StepTimes:
    """Times of one step on this rank, in seconds.

    Example:
        >>> def program(comm):
        ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(1000)})
        ...     dp.ready("w", np.ones(1000))
        ...     dp.finish()
        ...     return dp.times.communication_s > 0 and dp.times.exposed_s > 0
        >>> rr.spawn(program, 2)
        [True, True]
    """

    __module__ = "ringreduce.train"

    communication_s: float
    """Time in which all-reduces were under way, including waits for other ranks."""
    exposed_s: float
    """Time in `ready` and `finish`, in which this rank computed nothing."""


class DataParallel:
    """One rank's part of a data-parallel model: any model whose parameters are named arrays.

    Every rank makes a DataParallel, with parameters of the same names, shapes and dtypes; arrays
    are NumPy's or CuPy's.  All ranks' parameters are overwritten with those of rank 0.  Then, in
    every step, on every rank::

        for name, gradient in backward():      # from the last layer to the first
            dp.ready(name, gradient)
        gradients = dp.finish()                # the means over all ranks
        update(params, gradients)

    Args:
        comm: the communicator of the ranks.
        params: name -> array of floats, in the order in which a forward pass uses them.
        first_bucket_bytes, bucket_bytes: the longest buckets, in bytes; a gradient that is longer
            has a bucket of its own.
        op: ``"mean"``; or ``"sum"``, if a rank's gradients are its share of the mean already: sums
            over its samples, divided by the number of samples of all ranks.
        wire: ``"bfloat16"`` or ``"float16"`` sends half as many bytes; see
            `Communicator.all_reduce`.
        algorithm: of the all-reduces.

    Attributes:
        times: the `StepTimes` of the last finished step.

    Raises:
        MismatchError: parameters differ; all ranks raise it, and it names a parameter.
        ValueError: a size below 1, another op, or a wire or algorithm that is not available.
        TypeError: a parameter is no array of floats.

    Example:
        >>> def program(comm):
        ...     params = {"w": np.full(2, comm.rank + 1.0)}
        ...     dp = rr.train.DataParallel(comm, params)  # all ranks now have rank 0's
        ...     dp.ready("w", np.array([1.0, 2.0]) * comm.rank)
        ...     params["w"] -= 0.1 * dp.finish()["w"]
        ...     return params["w"]
        >>> rr.spawn(program, 2)[1]
        array([0.95, 0.9 ])
    """

    __module__ = "ringreduce.train"

    def __init__(
        self,
        comm: rr.Communicator,
        params: Mapping[str, Any],
        *,
        first_bucket_bytes: int = 1 << 20,
        bucket_bytes: int = 25 << 20,
        op: str = "mean",
        wire: str | None = None,
        algorithm: str = "auto",
    ) -> None:
        sizes = {"first_bucket_bytes": first_bucket_bytes, "bucket_bytes": bucket_bytes}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"DataParallel: {name} is {value}; wanted at least 1")
        if op not in ("mean", "sum"):
            raise ValueError(f"DataParallel: op is {op!r}; wanted mean or sum")
        self._op = op
        self._comm = comm
        self._how: dict[str, Any] = {"wire": wire, "algorithm": algorithm}
        check_arrays(params)
        check_alike(comm, params)
        for array in params.values():
            comm.broadcast(array, root=0, out=array)
        backwards = list(params.items())[::-1]
        members = cut(backwards, first_bucket_bytes, bucket_bytes)
        self._buckets = [Bucket(comm, each) for each in members]
        self._shards = [
            bucket.flat[part]
            for bucket in self._buckets
            for part in comm.shards(bucket.flat)[comm.rank]
        ]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.places}
        for bucket in self._buckets:
            comm.all_reduce(bucket.flat[:0], op, **self._how)  # raises here if not available
        self._started = 0
        """Buckets whose all-reduce is under way or done, in order."""
        self._ready: set[str] = set()
        self._accumulated: set[str] = set()
        self._synchronises = True
        self._samples: float | None = None
        self._share: float | None = None
        """This rank's samples divided by all ranks' samples, once known."""
        self._total: rr.Work[np.ndarray[Any, np.dtype[np.float64]]] | None = None
        self._exposed_s = 0.0
        self.times = StepTimes(0.0, 0.0)
        """Times of the last finished step."""

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters in each bucket, in the order in which buckets are reduced."""
        return tuple(tuple(bucket.places) for bucket in self._buckets)

    @property
    def shard(self) -> list[Any]:
        """This rank's shard of the gradients that `finish` returned, as views, for `global_norm`.

        The shards of all ranks together have each number of the gradients once.
        """
        return list(self._shards)

    def weigh(self, samples: int) -> None:
        """Weight this rank's gradients of this step by `samples`.

        For batches of different size: the gradients of a rank are means over its own samples, and
        `finish` returns the mean over the samples of all ranks.  The gradients of a rank with 0
        samples are ignored.  Every rank must call `weigh` before its first `ready` of the step;
        that `ready` then waits until all ranks have called `weigh`.

        Args:
            samples: samples in this rank's part of the batch, at least 0.

        Raises:
            ValueError: `samples` is negative, gradients are summed, or the step has begun.

        Example:
            >>> def program(comm):
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(1)})
            ...     dp.weigh(3 if comm.rank == 0 else 1)
            ...     dp.ready("w", np.array([4.0 * comm.rank]))
            ...     return dp.finish()["w"]
            >>> rr.spawn(program, 2)[0]
            array([1.])
        """
        if samples < 0:
            raise ValueError(f"weigh: {samples} samples; wanted at least 0")
        if self._op == "sum":
            raise ValueError("weigh: gradients that are summed count as they are")
        if self._ready or self._accumulated or self._samples is not None:
            raise ValueError("weigh: call it once a step, before the first ready")
        self._samples = float(samples)
        mine = np.array([samples], np.float64)
        self._total = self._comm.all_reduce(mine, async_op=True)

    def buffer(self, name: str) -> Any:
        """Return the array in which the gradient of a parameter is reduced.

        A gradient that is computed into this array is not copied: call ``ready(name)`` without it.
        After `finish`, until the next step, the array has the mean.  Between `ready` and `finish`
        its contents are undefined.

        Args:
            name: name of the parameter.

        Returns:
            An array of the parameter's shape and dtype.

        Raises:
            ValueError: there is no such parameter.

        Example:
            >>> def program(comm):
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(2)})
            ...     np.copyto(dp.buffer("w"), comm.rank)  # a gradient that is computed into it
            ...     dp.ready("w")
            ...     return dp.finish()["w"]
            >>> rr.spawn(program, 2)[0]
            array([0.5, 0.5])
        """
        return self._bucket(name, "buffer").places[name]

    def ready(self, name: str, gradient: Any = None) -> None:
        """Report the final gradient of a parameter.

        The all-reduce of a bucket starts when the bucket is full and the all-reduces of all buckets
        before it have started.

        Args:
            name: name of the parameter.
            gradient: array of the parameter's shape and dtype.  It is copied, and may be
                overwritten as soon as `ready` returns.  None: the gradient is in the parameter's
                `buffer`.

        Raises:
            ValueError: an unknown parameter, one that was reported before in this step, or a
                gradient of another shape or dtype.
            TypeError: the gradient is no array.

        Example:
            >>> def program(comm):
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(2), "b": np.zeros(())})
            ...     dp.ready("b", np.asarray(1.0 + comm.rank))
            ...     dp.ready("w", np.ones(2))
            ...     return dp.finish()["b"].item()
            >>> rr.spawn(program, 2)
            [1.5, 1.5]
        """
        begin = time.perf_counter()
        bucket = self._bucket(name, "ready")
        if name in self._ready:
            raise ValueError(f"ready: {name!r} was ready before in this step; call finish first")
        place = bucket.places[name]
        if gradient is None:
            gradient = place
            if name in self._accumulated:
                raise ValueError(f"ready: the sum of {name!r} is in its buffer; pass the gradient")
        if not hasattr(gradient, "dtype"):
            raise TypeError(f"ready: the gradient of {name!r} is {gradient!r}; wanted an array")
        if gradient.shape != place.shape or gradient.dtype != place.dtype:
            raise ValueError(
                f"ready: the gradient of {name!r} is {gradient.dtype}{list(gradient.shape)}; "
                f"wanted {place.dtype}{list(place.shape)}"
            )
        if self._samples is not None:
            # NaN times a share of 0 would be NaN.
            share = self._weight()
            gradient = gradient * place.dtype.type(share) if share else place.dtype.type(0)
        if name in self._accumulated:
            place += gradient
        elif gradient is not place:
            place[...] = gradient
        if self._synchronises:
            self._ready.add(name)
            bucket.missing.discard(name)
            self._start_full_buckets()
        else:
            self._accumulated.add(name)
        self._exposed_s += time.perf_counter() - begin

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone, as a context manager.

        For batches that are computed in several parts: inside the block `ready` adds gradients up
        without sending them.  The `ready` after the block adds its gradient to the sum, and sends
        the result.

        Returns:
            A context manager.

        Raises:
            ValueError: some gradients of this step are on their way already.

        Example:
            >>> def program(comm):
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(1)})
            ...     with dp.no_sync():
            ...         dp.ready("w", np.array([1.0]))
            ...     dp.ready("w", np.array([2.0 * comm.rank]))
            ...     return dp.finish()["w"]
            >>> rr.spawn(program, 2)[0]
            array([2.])
        """
        if self._ready:
            raise ValueError("no_sync: some gradients of this step are on their way already")
        before, self._synchronises = self._synchronises, False
        try:
            yield
        except BaseException:
            self._accumulated.clear()  # a part of a sum is of no use
            raise
        finally:
            self._synchronises = before

    def finish(self) -> dict[str, Any]:
        """Wait for all buckets, and return name -> mean gradient, the same on all ranks.

        With ``op="sum"`` the gradients are sums.

        Returns:
            A dict of arrays, which the next step overwrites.

        Raises:
            MismatchError: a rank has not reported all gradients.  All ranks raise it, and it names
                parameters and ranks.  The step is then void, and the next step may begin.
            ValueError: it was called inside a `no_sync` block.

        Example:
            >>> def program(comm):
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(3)})
            ...     dp.ready("w", np.arange(3.0) * comm.rank)
            ...     return dp.finish()
            >>> rr.spawn(program, 2)[0]
            {'w': array([0. , 0.5, 1. ])}
        """
        if not self._synchronises:
            raise ValueError("finish: call it after the no_sync block, and after a ready outside")
        begin = time.perf_counter()
        missing = [name for name, bucket in self._bucket_of.items() if name in bucket.missing]
        mine = Reported(self._samples is not None, missing)
        try:
            if missing:
                announce(self._comm, mine)
            self._wait()
            self._exposed_s += time.perf_counter() - begin
            self.times = StepTimes(self._communication_s(), self._exposed_s)
        except rr.MismatchError as error:
            raise self._explained(mine, error) from None
        finally:
            self._begin_again()
        return {name: bucket.places[name] for name, bucket in self._bucket_of.items()}

    # --- implementation ---

    def _start_full_buckets(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            bucket = self._buckets[self._started]
            op = self._op if self._samples is None else "sum"
            call: Callable[..., Any] = self._comm.all_reduce
            reduce = partial(call, bucket.flat, op, out=bucket.flat, **self._how)
            # The last gradient ends backward.  If no other all-reduce is under way, this thread
            # makes the call itself: a small all-reduce takes less time than to wake another thread.
            if bucket is self._buckets[-1] and self._all_over():
                bucket.work = Now(reduce)
            else:
                bucket.work = reduce(async_op=True)
            self._started += 1

    def _works(self) -> list[rr.Work[Any] | Now]:
        """Return the calls of this step: those of buckets in their order, then that of `weigh`."""
        works = [*(bucket.work for bucket in self._buckets), self._total]
        return [work for work in works if work is not None]

    def _all_over(self) -> bool:
        return all(work.done() for work in self._works())

    def _bucket(self, name: str, where: str) -> Bucket:
        bucket = self._bucket_of.get(name)
        if bucket is None:
            raise ValueError(f"{where}: there is no parameter {name!r}")
        return bucket

    def _weight(self) -> float:
        """Return this rank's share of all samples; gradients times shares add up to the mean.

        Sums over samples, to be divided in the end, could overflow 16 bits on the wire.
        """
        if self._share is None:
            assert self._total is not None
            assert self._samples is not None
            try:
                self._share = self._samples / (float(self._total.wait()[0]) or 1.0)
            except rr.MismatchError:
                self._share = 0.0  # `finish` raises the same error on all ranks
        return self._share

    def _wait(self) -> None:
        for work in self._works():
            work.wait()

    def _communication_s(self) -> float:
        return sum(work.seconds or 0.0 for work in self._works())

    def _explained(self, mine: Reported, seen: rr.MismatchError) -> rr.MismatchError:
        """Return the error that names what all ranks have not reported, or else `seen`.

        First waits until no call of this step is under way on any rank.
        """
        for work in self._works():
            with suppress(rr.MismatchError):
                work.wait()
        return explained(self._comm, mine, seen, rounds=len(self._buckets) + 3)

    def _begin_again(self) -> None:
        for bucket in self._buckets:
            bucket.missing = set(bucket.places)
            bucket.work = None
        self._started, self._samples, self._share, self._total = 0, None, None, None
        self._exposed_s = 0.0
        self._ready.clear()
        self._accumulated.clear()
