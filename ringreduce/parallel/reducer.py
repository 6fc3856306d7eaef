"""Collect gradients in buckets, and reduce a bucket while other gradients are being computed.

Backward goes from the last layer to the first, so buckets are filled in the reverse order of the
parameters.  The collective call of a bucket starts as soon as the bucket is full.  The first bucket
is small, so that communication begins early.

Source: Li et al., "PyTorch distributed: experiences on accelerating data parallel training",
VLDB 13(12), 2020.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import numpy as np

import ringreduce as rr
from ringreduce.errors import shown
from ringreduce.parallel.arrays import check_comm, check_used, plain, scale, whole
from ringreduce.parallel.buckets import Bucket, BucketSetting, Now, make_buckets
from ringreduce.parallel.consensus import Reported, check_alike, check_arrays, settle

Batch = TypeVar("Batch")
_MOST_SAMPLES = 1e300
"""The most samples of a rank: the sum over all ranks stays finite."""
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

    communication_s: float
    """Time in which collective calls were under way, including waits for other ranks."""
    exposed_s: float
    """Time in `ready` and `finish`, and of waits for parameters: this rank computed nothing."""


StepTimes.__module__ = "ringreduce.train"  # not before: dataclasses look that module up


def agree(
    where: str, comm: rr.Communicator, params: Mapping[str, Any], op: str, **sizes: int
) -> dict[str, Any]:
    """Check the arguments of `where`, and return the parameters, now rank 0's.  Collective."""
    check_comm(where, comm)
    for name, value in sizes.items():
        whole(f"{where}: {name}", value, least=1)
    if op not in ("mean", "sum"):
        raise ValueError(f"{where}: op is {shown(op)}; wanted mean or sum")
    params = check_arrays(where, params)
    check_alike(where, comm, params)
    for array in params.values():
        comm.broadcast(array, root=0, out=array)
    return params


def checked_samples(where: str, value: Any) -> float:
    """Return a number of samples.  Raises TypeError or ValueError, which begins with `where`."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{where} {shown(value)} samples; wanted a number")
    try:
        number = float(value)
    except OverflowError:  # an int
        number = math.inf
    if not 0 <= number <= _MOST_SAMPLES:
        raise ValueError(
            f"{where} {number:g} samples; wanted a finite number of at least 0, and at most "
            f"{_MOST_SAMPLES:g}"
        )
    return number


class Turn:
    """A step in which gradients count by samples: one of `weigh`, or a turn of the loop of `join`.

    An all-reduce adds up the samples of all ranks while this rank computes.
    """

    def __init__(
        self,
        comm: rr.Communicator,
        samples: float,
        number: int = 0,
        *,
        has_batch: bool = True,
        sums: bool = False,
    ) -> None:
        """Start the all-reduce.  The first turn of a loop has number 1, that of `weigh` has 0.

        With `sums`, the gradients are shares already.
        """
        self.number, self.has_batch = number, has_batch
        self._samples = samples
        numbers = [samples, has_batch] if number else [samples]
        self.work = comm.all_reduce(np.array(numbers, np.float64), async_op=True)
        self._share = float(has_batch) if sums else None
        self.ended: rr.MismatchError | None = None
        """The error that has ended the loop on all ranks."""

    def share(self) -> float:
        """Return the factor of this rank's gradients: its samples, divided by those of all ranks.

        Waits until all ranks have begun.  After a MismatchError the share is 0: `finish` then
        raises the same error on all ranks.
        """
        if self._share is None:
            try:
                # Sums over samples, to be divided in the end, could overflow 16 bits on the wire.
                self._share = self._samples / (float(self.work.wait()[0]) or 1.0)
            except rr.MismatchError:
                self._share = 0.0
        return self._share

    def anyone(self) -> bool:
        """Return whether any rank has a batch in this turn of a loop.  Raises MismatchError."""
        return bool(self.work.wait()[1])


class Reducer:
    """Reduces gradients in buckets, of `members` each.  A subclass chooses their setting."""

    __module__ = "ringreduce.train"

    def __init__(
        self,
        comm: rr.Communicator,
        members: Sequence[Sequence[tuple[str, Any]]],
        setting: BucketSetting,
        op: str,
        how: Mapping[str, Any],
        slots: Sequence[str] = (),
    ) -> None:
        self._comm, self._op = comm, op
        self._buckets = make_buckets(comm, members, setting, how, slots)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.likes}
        self._started = 0
        """Buckets whose call is under way or done, in order."""
        self._ready: set[str] = set()
        self._accumulated: set[str] = set()
        self._synchronises = True
        self._weighed: Turn | None = None
        """The turn that `weigh` began in this step."""
        self._joined: Turn | None = None
        """The present turn of the loop of `join`."""
        self._left: rr.MismatchError | None = None
        """The error of a loop that this rank has left; the next call raises it."""
        self._exposed_s = 0.0
        self._gathered_s = 0.0
        self._sent_bytes: int | None = None
        self.times = StepTimes(0.0, 0.0)

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters in each bucket, in the order in which buckets are reduced."""
        return tuple(tuple(bucket.likes) for bucket in self._buckets)

    @property
    def shard(self) -> list[Any]:
        """This rank's shard of the gradients that `finish` reduced, as views, for `global_norm`.

        The shards of all ranks together have each number of the gradients once.
        """
        return [part for bucket in self._buckets for part in bucket.shard]

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and of gathered parameters that this rank sends in a step."""
        if self._sent_bytes is None:
            self._sent_bytes = sum(bucket.sent_bytes(self._op) for bucket in self._buckets)
        return self._sent_bytes

    def weigh(self, samples: int) -> None:
        """Weight this rank's gradients of this step by `samples`.

        For batches of different size: the gradients of a rank are means over its own samples, and
        `finish` returns the mean over the samples of all ranks.  The gradients of a rank with 0
        samples are ignored.  Every rank must call `weigh` before its first `ready` of the step;
        that `ready` then waits until all ranks have called `weigh`.

        Args:
            samples: samples in this rank's part of the batch, a finite number of at least 0.

        Raises:
            TypeError: `samples` is no number.
            ValueError: `samples` is negative or not finite, gradients are summed, the step has
                begun, or a loop of `join` runs, which weights gradients itself.

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
        weight = checked_samples("weigh:", samples)
        if self._op == "sum":
            raise ValueError("weigh: gradients that are summed count as they are")
        if self._joined is not None:
            raise ValueError("weigh: join weights the gradients; pass samples= to join")
        if self._ready or self._accumulated or self._weighed is not None:
            raise ValueError("weigh: call it once a step, before the first ready")
        self._weighed = Turn(self._comm, weight)

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
                it in its next call of this object.

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

    def ready(self, name: str, gradient: Any) -> None:
        """Report the final gradient of a parameter.

        The reduction of a bucket starts when the bucket is full and those of all buckets before it
        have started.

        Args:
            name: name of the parameter.
            gradient: array of the parameter's shape and dtype.  It is copied, and may be
                overwritten as soon as `ready` returns.

        Raises:
            ValueError: an unknown parameter, one that was reported before in this step, or a
                gradient of another shape or dtype.
            TypeError: the gradient is no array, or None, as of a parameter that was not used:
                report zeros for it.

        Example:
            >>> def program(comm):
            ...     sharded = rr.train.ShardedParallel(comm, {"w": np.zeros(2)}, stage=1)
            ...     sharded.ready("w", np.array([1.0, 2.0]) * comm.rank)
            ...     sharded.finish()
            ...     return sharded.shard[0].tolist()
            >>> rr.spawn(program, 2)
            [[0.5], [1.0]]
        """
        begin = time.perf_counter()
        self._check_left()
        bucket = self._bucket(name, "ready")
        if name in self._ready:
            raise ValueError(f"ready: {name!r} was ready before in this step; call finish first")
        like = bucket.likes[name]
        check_used("ready", name, gradient, like)
        gradient = plain("ready", f"the gradient of {name!r}", gradient)
        if (gradient.shape, gradient.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"ready: the gradient of {name!r} is {gradient.dtype}{list(gradient.shape)}; "
                f"wanted {like.dtype}{list(like.shape)}"
            )
        turn = self._joined or self._weighed
        share = 1.0 if turn is None else turn.share()
        if share != 1:
            gradient = gradient.copy()
            if share:
                scale(gradient, share, out=gradient)
            else:
                gradient[...] = 0  # NaN times 0 would be NaN
        self._put(bucket, name, gradient)
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

    # --- implementation ---

    def _finish(self) -> None:
        self._check_left()
        if not self._synchronises:
            raise ValueError("finish: call it after the no_sync block, and after a ready outside")
        begin = time.perf_counter()
        if self._has_no_batch:
            self._report_nothing()
        try:
            lacks = any(bucket.missing for bucket in self._buckets)
            seen = None if lacks else self._wait()
            if lacks or seen is not None:
                raise self._explained("finish", seen)
            self._exposed_s += time.perf_counter() - begin
            seconds = sum(work.seconds or 0.0 for work in self._works())
            self.times = StepTimes(seconds + self._gathered_s, self._exposed_s)
        finally:
            self._begin_again()

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
                count = checked_samples("join: a batch has", samples(batch)) if has_batch else 0.0
                turn = Turn(self._comm, count, number, has_batch=has_batch, sums=sums)
                self._joined = turn
                if not has_batch and not self._anyone(turn):
                    ended = True
                    return
                yield batch if has_batch else None
                self._anyone(turn)
        finally:
            ended = ended or (self._joined is not None and self._joined.ended is not None)
            if not ended:
                # There is nobody to tell if the communicator is broken or closed.
                with suppress(rr.RingReduceError, ValueError):
                    self._left = self._settle("left", number, None)
            self._joined = None

    def _anyone(self, turn: Turn) -> bool:
        """Return whether any rank has a batch.  Raises MismatchError if the loop has to end."""
        if turn.ended is not None:
            raise turn.ended
        try:
            return turn.anyone()
        except rr.MismatchError as error:
            raise self._explained("join", error) from None

    def _explained(self, place: str, seen: rr.MismatchError | None) -> rr.MismatchError:
        """Return the error of this step, which all ranks have.  Collective."""
        error = self._settle(place, 0 if self._joined is None else self._joined.number, seen)
        assert error is not None
        return error

    def _settle(
        self, place: str, turn: int, seen: rr.MismatchError | None
    ) -> rr.MismatchError | None:
        """Return the error that names who did what, or else `seen`; begin a new step.  Collective.

        `place` and `turn` are those of `Reported`.  First waits until no call of this step is under
        way on this rank.
        """
        missing = [name for name, bucket in self._bucket_of.items() if name in bucket.missing]
        mine = Reported(place, turn, self._weighed is not None, missing)
        try:
            self._wait()
            error, ends = settle(self._comm, mine, seen, rounds=len(self._buckets) + 4)
        finally:
            self._begin_again()
        if self._joined is not None and ends:
            self._joined.ended = error
        return error

    def _check_left(self) -> None:
        if self._left is not None:
            error, self._left = self._left, None
            raise error

    @property
    def _has_no_batch(self) -> bool:
        """Whether `join` has given None to this rank in the present turn."""
        return self._joined is not None and not self._joined.has_batch

    def _report_nothing(self) -> None:
        """Report zeros for all gradients that are not reported."""
        for bucket in self._buckets:
            self._report_zeros(bucket)

    def _report_zeros(self, bucket: Bucket) -> None:
        """Report zeros for the gradients of a bucket that are not reported."""
        for name in bucket.missing - self._accumulated:
            self._put(bucket, name, bucket.likes[name])
        self._ready |= bucket.missing
        bucket.missing.clear()
        self._start_full_buckets()

    def _put(self, bucket: Bucket, name: str, gradient: Any) -> None:
        if bucket.rows is None:
            self._make_room(bucket)
        bucket.put(name, gradient, add=name in self._accumulated)

    def _make_room(self, bucket: Bucket) -> None:
        """Wait for reductions, in their order, until the bucket's workspace is not full."""
        for reduced in self._buckets[: self._started]:
            if not bucket.workspace.is_full:
                return
            if reduced.workspace is bucket.workspace and reduced.work is not None:
                with suppress(rr.MismatchError):  # `finish` raises it
                    reduced.work.wait()
                reduced.release()

    def _start_full_buckets(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            bucket = self._buckets[self._started]
            op = self._op if self._joined is None and self._weighed is None else "sum"
            reduce = bucket.reduction(op)
            # The last gradient ends backward.  If no other reduction is under way, this thread
            # makes the call itself: a small all-reduce takes less time than to wake another thread.
            if bucket is self._buckets[-1] and all(work.done() for work in self._works()):
                bucket.work = Now(reduce)
            else:
                bucket.work = reduce(async_op=True)
            self._started += 1

    def _works(self) -> list[rr.Work[Any] | Now]:
        """Return the calls of this step: those of buckets in their order, then that of the turn."""
        works: list[rr.Work[Any] | Now | None] = [bucket.work for bucket in self._buckets]
        works += [turn.work for turn in (self._weighed, self._joined) if turn is not None]
        return [work for work in works if work is not None]

    def _wait(self) -> rr.MismatchError | None:
        """Wait for all calls of this step; return the first error."""
        seen: rr.MismatchError | None = None
        for work in self._works():
            try:
                work.wait()
            except rr.MismatchError as error:
                seen = seen or error
        return seen

    def _bucket(self, name: str, where: str) -> Bucket:
        bucket = self._bucket_of.get(name)
        if bucket is None:
            raise ValueError(f"{where}: there is no parameter {name!r}")
        return bucket

    def _begin_again(self) -> None:
        for bucket in self._buckets:
            bucket.begin_again()
        self._started, self._weighed = 0, None
        self._exposed_s = self._gathered_s = 0.0
        self._ready.clear()
        self._accumulated.clear()
