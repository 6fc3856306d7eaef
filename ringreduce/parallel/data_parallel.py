"""DataParallel: every rank has all parameters, and gets all gradients by all-reduces."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import ringreduce as rr
from ringreduce.parallel.arrays import check_comm, module_of
from ringreduce.parallel.buckets import REPLICAS, cut
from ringreduce.parallel.consensus import check_alike, check_arrays
from ringreduce.parallel.reducer import Reducer, agree, checked_samples

_IN_BUFFER: Any = object()
"""The gradient of a call of `ready` without one."""


class DataParallel(Reducer):
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
            Ranks add gradients up, and divide the sum.  A sum above the largest number of the
            dtype becomes infinity, such as that of three ranks with 60000 in float16.  Then use a
            smaller loss scale, or ``"sum"``, and divide by ``comm.size`` before `ready`.
        wire: ``"bfloat16"`` or ``"float16"`` sends half as many bytes; see
            `Communicator.all_reduce`.
        algorithm: of the all-reduces.

    Attributes:
        times: the `StepTimes` of the last finished step.

    Raises:
        MismatchError: parameters differ; all ranks raise it, and it names a parameter.
        ValueError: a size below 1, another op, or a wire or algorithm that is not available.
            Or a parameter that is read-only.
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
        params = agree("DataParallel", comm, params, op, **sizes)
        backwards = list(params.items())[::-1]
        members = cut(backwards, first_bucket_bytes, bucket_bytes)
        how: dict[str, Any] = {"wire": wire, "algorithm": algorithm}
        super().__init__(comm, members, REPLICAS, op, how)
        for bucket in self._buckets:
            comm.all_reduce(bucket.rows[:0], op, **how)  # raises here if not available
        self._lent: set[str] = set()
        """Names whose buffer was asked for in this step."""

    def buffer(self, name: str) -> Any:
        """Return the array in which the gradient of a parameter is reduced.

        A gradient that is computed into this array is not copied: call ``ready(name)`` without it,
        or with this array itself if it was kept from an earlier step.
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
        place = self._bucket(name, "buffer").places[name]
        self._lent.add(name)
        return place

    def ready(self, name: str, gradient: Any = _IN_BUFFER) -> None:
        """Report the final gradient of a parameter.

        The all-reduce of a bucket starts when the bucket is full and the all-reduces of all buckets
        before it have started.

        Args:
            name: name of the parameter.
            gradient: array of the parameter's shape and dtype.  It is copied, and may be
                overwritten as soon as `ready` returns.  Left out: the gradient is in the
                parameter's `buffer`, which was asked for in this step.

        Raises:
            ValueError: an unknown parameter, one that was reported before in this step, or a
                gradient of another shape or dtype.  Or no gradient, and no `buffer` in this step.
            TypeError: the gradient is no array, or None, as of a parameter that was not used:
                report zeros for it.

        Example:
            >>> def program(comm):
            ...     dp = rr.train.DataParallel(comm, {"w": np.zeros(2), "b": np.zeros(())})
            ...     dp.ready("b", np.asarray(1.0 + comm.rank))
            ...     dp.ready("w", np.ones(2))
            ...     return dp.finish()["b"].item()
            >>> rr.spawn(program, 2)
            [1.5, 1.5]
        """
        place = self._bucket(name, "ready").places[name]
        if gradient is _IN_BUFFER:
            gradient = place
            if name not in self._lent | self._ready | self._accumulated:
                raise ValueError(
                    f"ready: {name!r} has no gradient: buffer({name!r}) was not called in this "
                    "step; pass the gradient, or write it into that buffer"
                )
        if gradient is place and name in self._accumulated:
            raise ValueError(f"ready: the sum of {name!r} is in its buffer; pass the gradient")
        super().ready(name, gradient)

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
        self._finish()
        return {name: bucket.places[name] for name, bucket in self._bucket_of.items()}

    def _begin_again(self) -> None:
        super()._begin_again()
        self._lent.clear()


def average(comm: rr.Communicator, params: Mapping[str, Any], samples: float = 1) -> None:
    """Overwrite arrays on all ranks with their mean over the ranks, by one fused all-reduce.

    Args:
        comm: the communicator of the ranks.
        params: name -> array of floats; the same names, shapes and dtypes on all ranks.
        samples: the weight of this rank's arrays, at least 0.  0: they are ignored, also NaN.

    Raises:
        TypeError: a parameter is no array of floats, or `samples` is no number.
        ValueError: `samples` is negative, not finite, or 0 on all ranks: then all raise it.  Or a
            parameter is read-only.
        MismatchError: parameters differ.  All ranks raise it, and keep their arrays.

    Example:
        >>> def program(comm):
        ...     params = {"w": np.array([4.0, 8.0]) * comm.rank}
        ...     rr.train.average(comm, params, samples=3 - 2 * comm.rank)
        ...     return params["w"]
        >>> rr.spawn(program, 2)[0]
        array([1., 2.])
    """
    check_comm("average", comm)
    weight = checked_samples("average:", samples)
    arrays = check_arrays("average", params)
    xp = module_of(next(iter(arrays.values())))
    names = zlib.crc32(repr(list(arrays)).encode()) % 2**16
    addends = [xp.asarray([weight, names, names**2])]
    for array in arrays.values():
        dtype = "float32" if array.dtype.itemsize < 4 else array.dtype
        addends.append(array.astype(dtype) * weight if weight else xp.zeros(array.shape, dtype))
    head, *totals = comm.all_reduce(addends)
    whole, once, squared = head.tolist()
    if comm.size * squared != once**2:  # they are equal if all ranks have the same names
        check_alike("average", comm, arrays)
    if not whole:
        raise ValueError("average: samples is 0 on all ranks; wanted more on at least one")
    for array, total in zip(arrays.values(), totals, strict=True):
        array[...] = total / whole
