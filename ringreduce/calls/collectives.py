"""The collectives, as users call them: each checks its arguments, and has its call run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from ringreduce.calls import compound
from ringreduce.calls.arguments import (
    as_counts,
    as_row_or_matrix,
    at_least_1d,
    check_selectors,
    reduction,
)
from ringreduce.calls.arrays import as_array
from ringreduce.calls.runner import Runner, members_of
from ringreduce.schedules.collectives import COLLECTIVES
from ringreduce.shm.fast_path import BARRIER, Function


class Collectives:
    """The collectives of a `Communicator`."""

    __module__ = "ringreduce"

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    # --- reductions ---

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str = "auto",
        wire: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks elementwise; every rank gets the result.

        Args:
            x: array of any shape, the same shape and dtype on every rank; or a list of arrays: all
                of one dtype are reduced in one call.  A number counts as a 0-d array, in a list
                too.
            op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"prod"``, or on integers and bools
                ``"and"``, ``"or"``, ``"xor"``.  Integers wrap; min and max propagate NaN; mean is
                for floats: a sum, divided once.  It overflows to infinity where the sum does, as of
                three times 60000 in float16; divide by `size` first and take the sum, or pass a
                wider dtype.  Ops of mpi4py with the same meaning, such as ``MPI.SUM``, are
                accepted; logical ops, such as ``MPI.LAND``, are for bools.
            out: array for the result: x's shape and dtype, or `x` itself (in place); for a list, a
                list of these.  None: a new array.
            algorithm: name, or ``"auto"``: the first algorithm whose predicted time is within 2 %
                of the lowest.
            wire: round float32 and float64 to ``"bfloat16"`` or ``"float16"`` for each message:
                half or a quarter of the bytes.
            async_op: return a `Work` instead of the result.
            timeout_s: seconds without any progress until PeerTimeoutError; None: the
                communicator's.

        Returns:
            `out`, or a new C-ordered array of x's shape and dtype; for a list, a list of these.  It
            is bitwise the same on every rank; subnormal numbers only if all ranks, or none, flush
            them to zero.

        Raises:
            TypeError, ValueError: wrong arguments, found on this rank before it sends a message.
            MismatchError: ranks passed different arguments or made different calls.
            PeerTimeoutError, PeerLostError: a rank stopped answering, or left.

        Example:
            >>> x = np.array([1.0, 2.0])
            >>> rr.spawn(lambda comm: comm.all_reduce(x * (comm.rank + 1)), 2)[0]
            array([3., 6.])
        """
        if isinstance(x, (list, tuple)):
            members = x if type(op) is str else members_of(x)
            how = reduction("all_reduce", members, op, algorithm, wire)
            return self._runner.all_reduce_list(members, how, out, timeout_s, async_op)
        array = x if type(x) is np.ndarray else as_array("all_reduce", x)
        how = reduction("all_reduce", (array,), op, algorithm, wire)
        return self._runner.make("all_reduce", array, how, out, timeout_s, async_op)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str = "auto",
        wire: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks; each rank gets its part of the flattened result.

        The first half of a ring all-reduce, also called scatter-reduce.

        Args:
            x: array of any shape, the same shape and dtype on every rank.
            out: array for the part: its shape and x's dtype.  It may be this rank's part of `x`,
                which costs a copy of `x`, and otherwise does not overlap it.  None: a new array.
            op, algorithm, wire, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new array: ``np.array_split(result.reshape(-1), size)[rank]``, where
            `result` is what `all_reduce` returns.  It is one-dimensional, and possibly empty.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.reduce_scatter(np.arange(4) + 10 * comm.rank), 2)
            [array([10, 12]), array([14, 16])]
        """
        array = x if type(x) is np.ndarray else as_array("reduce_scatter", x)
        how = reduction("reduce_scatter", (array,), op, algorithm, wire)
        return self._runner.make("reduce_scatter", array, how, out, timeout_s, async_op)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str = "auto",
        wire: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks elementwise; rank `root` gets the result, others None.

        Args:
            x: array of any shape, the same shape and dtype on every rank.
            root: the rank that gets the result; the same on every rank.
            out: array for the result, of x's shape and dtype, or `x` itself.  Only the root may
                pass it.
            op, algorithm, wire, async_op, timeout_s: as for `all_reduce`.

        Returns:
            On the root `out`, or a new C-ordered array of x's shape and dtype.  None on other
            ranks.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.reduce(np.array([3, 5]) * comm.rank, op="max"), 3)
            [array([ 6, 10]), None, None]
        """
        array = x if type(x) is np.ndarray else as_array("reduce", x)
        if type(root) is not int:
            check_selectors("reduce", root=root)
        how = {"root": root, **reduction("reduce", (array,), op, algorithm, wire)}
        return self._runner.make("reduce", array, how, out, timeout_s, async_op)

    # --- moving data ---

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Copy the array of rank `root` to every rank.

        Args:
            x: array of any shape, the same shape and dtype on every rank.  Only the root's values
                are read.
            root: the rank whose array is copied; the same on every rank.
            out: array for the result, of x's shape and dtype.  ``out=x`` overwrites `x`.  None: a
                new array.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new C-ordered array of x's shape and dtype, with the root's values.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.broadcast(np.full(2, comm.rank), root=1), 3)
            [array([1, 1]), array([1, 1]), array([1, 1])]
        """
        array = x if type(x) is np.ndarray else as_array("broadcast", x)
        if type(root) is not int or type(algorithm) is not str:
            check_selectors("broadcast", root=root, algorithm=algorithm)
        how = {"root": root, "algorithm": algorithm}
        return self._runner.make("broadcast", array, how, out, timeout_s, async_op)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Concatenate the arrays of all ranks along the first axis, in rank order, on every rank.

        Args:
            x: array; dtype and all dimensions but the first are the same on every rank.  A 0-d
                array counts as an array of shape (1,).
            out: array for the result.  With `counts`, `x` may be this rank's part of it; otherwise
                they do not overlap.  None: a new array.
            counts: the first dimension of each rank's array; the same on every rank.  None: ranks
                exchange them first, by one small all-gather.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new array of shape ``(sum(counts), *x.shape[1:])`` and x's dtype.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.all_gather(np.full(comm.rank + 1, comm.rank)), 3)[0]
            array([0, 1, 1, 2, 2, 2])
        """
        array = at_least_1d(x if type(x) is np.ndarray else as_array("all_gather", x))
        if type(algorithm) is not str:
            check_selectors("all_gather", algorithm=algorithm)
        if counts is not None:
            how = {"counts": as_counts("all_gather", counts), "algorithm": algorithm}
            return self._runner.make("all_gather", array, how, out, timeout_s, async_op)
        rest = algorithm, out, timeout_s, async_op
        return compound.gather(self._runner, "all_gather", array, None, *rest)

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Concatenate the arrays of all ranks along the first axis on rank `root`; others get None.

        Args:
            x: array; dtype and all dimensions but the first are the same on every rank.  A 0-d
                array counts as an array of shape (1,).
            root: the rank that gets the result; the same on every rank.
            out: array for the result, as for `all_gather`.  Only the root may pass it.
            counts, algorithm, async_op, timeout_s: as for `all_gather`.

        Returns:
            On the root `out`, or a new array of shape ``(sum(counts), *x.shape[1:])`` and x's
            dtype, in rank order.  None on other ranks.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.gather(np.array([comm.rank, 7]), root=1), 2)
            [None, array([0, 7, 1, 7])]
        """
        array = at_least_1d(x if type(x) is np.ndarray else as_array("gather", x))
        if type(root) is not int or type(algorithm) is not str:
            check_selectors("gather", root=root, algorithm=algorithm)
        if counts is not None:
            how = {"root": root, "counts": as_counts("gather", counts), "algorithm": algorithm}
            return self._runner.make("gather", array, how, out, timeout_s, async_op)
        rest = algorithm, out, timeout_s, async_op
        return compound.gather(self._runner, "gather", array, root, *rest)

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Split the array of rank `root` along the first axis; each rank gets its part.

        Args:
            x: on the root, an array of at least one dimension.  The other ranks pass None.
            root: the rank whose array is split; the same on every rank.
            out: array for this rank's part.  None: a new array.  With `counts` the root alone may
                pass None, and its `out` may be its part of `x`.  Without `counts`, if the shape or
                dtype of `out` is wrong, this rank raises ValueError after the call.
            counts: the first dimension of each rank's part; the same on every rank.  They add up to
                x's.  None: the root announces dtype and shape first, by one small broadcast.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new array: ``np.array_split(x, size)[rank]``, where `x` is the root's.  With
            `counts` the next ``counts[rank]`` rows of `x` after those of the ranks before.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.scatter(np.arange(5) if comm.rank == 0 else None), 2)
            [array([0, 1, 2]), array([3, 4])]
            >>> def program(comm):
            ...     x = np.arange(5) if comm.rank == 0 else None
            ...     out = np.empty((1, 4)[comm.rank], np.int64)
            ...     return comm.scatter(x, out=out, counts=[1, 4])
            >>> rr.spawn(program, 2)
            [array([0]), array([1, 2, 3, 4])]
        """
        check_selectors("scatter", root=root, algorithm=algorithm)
        if counts is None:
            return compound.scatter(self._runner, x, root, out, algorithm, timeout_s, async_op)
        array = self._runner.counted_to_scatter(x, root, out)
        how = {"root": root, "counts": as_counts("scatter", counts), "algorithm": algorithm}
        return self._runner.make("scatter", array, how, out, timeout_s, async_op)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Send the j-th piece of the first axis to rank j; piece i of the result is from rank i.

        Args:
            x: array of the same dtype on every rank.  Without `counts` its first dimension is a
                multiple of the number of ranks, and its shape is the same on every rank.  With
                `counts` all dimensions but the first are, and a 0-d array counts as an array of
                shape (1,).
            out: array for the result, which does not overlap `x`.  None: a new array.
            counts: how many rows of the first axis this rank sends to each rank: they add up to
                x's first dimension, and may be 0.  The ranks exchange them first, by one small
                all-gather.  Or the counts of all ranks, the same on every rank: ``counts[i][j]``
                rows go from rank i to rank j.  None: equal pieces.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new C-ordered array of x's dtype: what this rank gets from each rank, in
            rank order.  It has x's shape; with `counts` all dimensions of it but the first.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.all_to_all(np.arange(4) + 10 * comm.rank), 2)
            [array([ 0,  1, 10, 11]), array([ 2,  3, 12, 13])]
            >>> def program(comm):
            ...     counts = [1, 3] if comm.rank == 0 else [2, 0]
            ...     return comm.all_to_all(np.arange(sum(counts)) + 10 * comm.rank, counts=counts)
            >>> rr.spawn(program, 2)
            [array([ 0, 10, 11]), array([1, 2, 3])]
        """
        array = x if type(x) is np.ndarray else as_array("all_to_all", x)
        if type(algorithm) is not str:
            check_selectors("all_to_all", algorithm=algorithm)
        matrix = None
        if counts is not None:
            array = at_least_1d(array)
            row, matrix = as_row_or_matrix("all_to_all", counts)
            if row is not None:
                rest = algorithm, out, timeout_s, async_op
                return compound.all_to_all(self._runner, array, row, *rest)
        how = {"counts": matrix, "algorithm": algorithm}
        return self._runner.make("all_to_all", array, how, out, timeout_s, async_op)

    def barrier(self, *, async_op: bool = False, timeout_s: float | None = None) -> Any:
        """Wait until every rank has called `barrier`.

        Args:
            async_op: as for `all_reduce`: True returns a `Work`, which is over when every rank has
                called `barrier`.
            timeout_s: seconds without any progress until PeerTimeoutError; None: the
                communicator's.

        Returns:
            None, or a `Work` if `async_op`.

        Raises:
            ValueError: `timeout_s` is not above 0.
            MismatchError: ranks made different calls.
            PeerTimeoutError, PeerLostError: a rank stopped answering, or left.

        Example:
            >>> rr.spawn(lambda comm: comm.barrier(), 2)
            [None, None]
        """
        runner, engine = self._runner, self._runner.engine
        work = runner.meet("barrier", (), timeout_s, async_op)
        if engine.fast_path is not None:
            with engine.queue.lock:
                if not engine.queue.busy:
                    call = runner.calls.meeting("barrier", ())
                    engine.executables.admit_barrier(engine.fast_path, call)
        return work


_OF_ALL = ("self", "x", "out", "async_op", "timeout_s")


def _arguments_of(method: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the arguments that not all collectives have: name -> default."""
    parameters = signature(method).parameters
    return {name: each.default for name, each in parameters.items() if name not in _OF_ALL}


ARGUMENTS = {
    name: _arguments_of(method)
    for name, method in vars(Collectives).items()
    if name in COLLECTIVES and name != BARRIER
}
"""Collective that is one plan -> its arguments, with their defaults.

Signatures, and the keys of cached calls, have the arguments in this order.
"""
ENTRIES = (*ARGUMENTS, BARRIER)
"""The methods of a communicator that have a compiled entry."""


def compiled_entries(runner: Runner, kind: type) -> dict[str, Function]:
    """Return compiled functions for the methods that `kind` has from `Collectives`, by name.

    On the general path they call the methods of an object of their own: they keep the runner alive,
    and not the communicator that has them.
    """
    path, general, made = runner.engine.fast_path, Collectives(runner), {}
    if path is None:
        return {}
    for name in ENTRIES:
        if getattr(kind, name) is getattr(Collectives, name):
            counted = "counts" in ARGUMENTS.get(name, ()) and "its rank" in COLLECTIVES[name]
            made[name] = path.entry(name, getattr(general, name), counted)
    return made
