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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ringreduce as rr
from ringreduce.train.buckets import Bucket, Now, cut
from ringreduce.train.mismatches import Reported, check_alike, check_arrays, settle
from ringreduce.train.shares import JoinedBatch, Share

Batch = TypeVar("Batch")
_NO_BATCH: Any = object()
"""The batch of a rank that has no more."""


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
        self._weighed: Share | None = None
        """What `weigh` began in this step."""
        self._joined: JoinedBatch | None = None
        """The present turn of the loop of `join`."""
        self._left: rr.MismatchError | None = None
        """The error of a loop that this rank has left; the next call raises it."""
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
            ValueError: `samples` is negative, gradients are summed, the step has begun, or a loop
                of `join` runs, which weights gradients itself.

        Example:
            >>> def program(comm):
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(1)})
            ...     dp.weigh(3 if comm.rank == 0 else 1)
            ...     dp.ready("w", np.array([4.0 * comm.rank]))
            ...     return dp.finish()["w"]
            >>> rr.spawn(program, 2)[0]
            array([1.])
        """
        self._check_left()
        if samples < 0:
            raise ValueError(f"weigh: {samples} samples; wanted at least 0")
        if self._op == "sum":
            raise ValueError("weigh: gradients that are summed count as they are")
        if self._joined is not None:
            raise ValueError("weigh: join weights the gradients; pass samples= to join")
        if self._ready or self._accumulated or self._weighed is not None:
            raise ValueError("weigh: call it once a step, before the first ready")
        self._weighed = Share(self._comm, float(samples))

    def join(
        self, batches: Iterable[Batch], samples: Callable[[Batch], float] | None = None
    ) -> Iterator[Batch | None]:
        """Yield this rank's batches, and then None until all ranks have had theirs.

        For ranks with different numbers of batches.  In each turn of the loop, every rank makes the
        same calls of `finish`.  A rank that gets None has no gradients to report, and counts for no
        samples: `finish` returns the mean over the samples of the other ranks.  With
        ``op="sum"`` it adds zeros.

        A turn costs one all-reduce of two numbers.  A rank that has a batch waits for it in the
        first `ready`, as after `weigh`; a rank that has none waits at once.

        Args:
            batches: this rank's batches, of any type.
            samples: returns the number of samples in a batch, at least 0.  None: all batches count
                alike.

        Returns:
            An iterator, for one ``for`` statement.

        Raises:
            ValueError: gradients are summed, and `samples` is given; or another loop of `join` has
                not ended.
            MismatchError: a rank left the loop early, by ``break`` or an exception, or ranks made
                different calls in a turn.  The text names the ranks.  A rank that has left raises
                it in its next call of this DataParallel.

        Example:
            >>> def program(comm):
            ...     batches = [[1.0], [2.0, 6.0]] if comm.rank == 0 else [[2.0, 6.0]]
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(1)})
            ...     means = []
            ...     for batch in dp.join(batches, samples=len):
            ...         if batch is not None:
            ...             dp.ready("w", np.mean(batch, keepdims=True))
            ...         means.append(dp.finish()["w"].item())
            ...     return means
            >>> rr.spawn(program, 2)
            [[3.0, 4.0], [3.0, 4.0]]
        """
        self._check_left()
        if samples is not None and self._op == "sum":
            raise ValueError("join: gradients that are summed count as they are; pass no samples")
        if self._joined is not None:
            raise ValueError("join: another loop of join has not ended")
        return self._join(iter(batches), samples or (lambda batch: 1.0))

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
        self._check_left()
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
        share = self._share()
        if share != 1:
            # NaN times a share of 0 would be NaN.
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
        self._check_left()
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
        self._check_left()
        if not self._synchronises:
            raise ValueError("finish: call it after the no_sync block, and after a ready outside")
        begin = time.perf_counter()
        if self._joined is not None and not self._joined.has_batch:
            self._report_nothing()
        seen: rr.MismatchError | None = None
        try:
            mine = self._reported("finish", 0 if self._joined is None else self._joined.number)
            if not mine.missing:
                seen = self._wait()
            if mine.missing or seen is not None:
                raise self._explained(mine, seen)
            self._exposed_s += time.perf_counter() - begin
            self.times = StepTimes(self._communication_s(), self._exposed_s)
        finally:
            self._begin_again()
        return {name: bucket.places[name] for name, bucket in self._bucket_of.items()}

    # --- implementation ---

    def _join(
        self, batches: Iterator[Batch], samples: Callable[[Batch], float]
    ) -> Iterator[Batch | None]:
        """Iterate as `join` does.  An iterator that is closed before its end leaves the loop."""
        number, sums, ended = 0, self._op == "sum", False
        try:
            while True:
                number += 1
                batch = next(batches, _NO_BATCH)
                has_batch = batch is not _NO_BATCH
                count = float(samples(batch)) if has_batch else 0.0
                if count < 0:
                    raise ValueError(f"join: a batch has {count:g} samples; wanted at least 0")
                turn = JoinedBatch(self._comm, number, count, has_batch=has_batch, sums=sums)
                self._joined = turn
                if not has_batch and not self._anyone(turn):
                    ended = True
                    return
                yield batch if has_batch else None
                self._anyone(turn)
        finally:
            ended = ended or (self._joined is not None and self._joined.ended is not None)
            if not ended:
                self._leave(number)
            self._joined = None

    def _anyone(self, turn: JoinedBatch) -> bool:
        """Return whether any rank has a batch.  Raises MismatchError if the loop has to end."""
        if turn.ended is not None:
            raise turn.ended
        try:
            return turn.anyone()
        except rr.MismatchError as error:
            try:
                raise self._explained(self._reported("join", turn.number), error) from None
            finally:
                self._begin_again()

    def _leave(self, number: int) -> None:
        """Tell the other ranks that this rank leaves the loop in a turn, unless all ranks do."""
        # There is nobody to tell if the communicator is broken or closed.
        with suppress(rr.RingReduceError, ValueError):
            self._left = self._settle(self._reported("left", number), None)
        self._begin_again()

    def _check_left(self) -> None:
        """Raise the error of a loop that this rank has left."""
        if self._left is not None:
            error, self._left = self._left, None
            raise error

    def _report_nothing(self) -> None:
        """Report zeros for all gradients that are not reported."""
        for bucket in self._buckets:
            for name in bucket.missing - self._accumulated:
                bucket.places[name][...] = 0
            self._ready |= bucket.missing
            bucket.missing.clear()
        self._start_full_buckets()

    def _reported(self, place: str, turn: int = 0) -> Reported:
        missing = [name for name, bucket in self._bucket_of.items() if name in bucket.missing]
        return Reported(place, turn, self._weighed is not None, missing)

    def _start_full_buckets(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            bucket = self._buckets[self._started]
            op = self._op if self._joined is None and self._weighed is None else "sum"
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
        """Return the calls of this step: those of buckets in their order, then that of shares."""
        works: list[rr.Work[Any] | Now | None] = [bucket.work for bucket in self._buckets]
        shares = (self._weighed, self._joined)
        works += [share.work for share in shares if share is not None]
        return [work for work in works if work is not None]

    def _all_over(self) -> bool:
        return all(work.done() for work in self._works())

    def _bucket(self, name: str, where: str) -> Bucket:
        bucket = self._bucket_of.get(name)
        if bucket is None:
            raise ValueError(f"{where}: there is no parameter {name!r}")
        return bucket

    def _share(self) -> float:
        """Return the factor of this rank's gradients."""
        share = self._joined or self._weighed
        return 1.0 if share is None else share.value()

    def _wait(self) -> rr.MismatchError | None:
        """Wait for all calls of this step; return the first error."""
        seen: rr.MismatchError | None = None
        for work in self._works():
            try:
                work.wait()
            except rr.MismatchError as error:
                seen = seen or error
        return seen

    def _communication_s(self) -> float:
        return sum(work.seconds or 0.0 for work in self._works())

    def _explained(self, mine: Reported, seen: rr.MismatchError | None) -> rr.MismatchError:
        """Return the error of this step, which all ranks have."""
        error = self._settle(mine, seen)
        assert error is not None
        return error

    def _settle(self, mine: Reported, seen: rr.MismatchError | None) -> rr.MismatchError | None:
        """Return the error that names who did what, or else `seen`.  All ranks make this call.

        First waits until no call of this step is under way on this rank.
        """
        self._wait()
        error, ends = settle(self._comm, mine, seen, rounds=len(self._buckets) + 4)
        if self._joined is not None and ends:
            self._joined.ended = error
        return error

    def _begin_again(self) -> None:
        for bucket in self._buckets:
            bucket.missing = set(bucket.places)
            bucket.work = None
        self._started, self._weighed = 0, None
        self._exposed_s = 0.0
        self._ready.clear()
        self._accumulated.clear()
