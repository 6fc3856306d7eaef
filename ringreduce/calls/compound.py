"""Calls of several plans: first the ranks tell each other the counts, or the shape, of the data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cache
from itertools import islice
from struct import calcsize, pack_into, unpack_from
from typing import Any

import numpy as np

from ringreduce.calls.arguments import Matrix, check_out, check_row, named_dtype
from ringreduce.calls.arrays import as_out, from_host, is_input
from ringreduce.calls.cache import Calls
from ringreduce.calls.call import Call
from ringreduce.calls.engine import NOTHING, Engine
from ringreduce.calls.runner import Runner
from ringreduce.calls.work import Polled
from ringreduce.config import as_seconds
from ringreduce.devices.base import Device
from ringreduce.errors import MismatchError, counted
from ringreduce.planning.plan import shard_counts

_UNKNOWN = -1
"""The expected count of a rank that accepts any count."""
_HEAD = "24s2q"
"""An announcement in the words of `struct`: the dtype's name, place, and number of dimensions."""
_ANNOUNCED_BYTES = calcsize(_HEAD) + 8 * 64
"""Bytes that hold an announcement with its shape: arrays of NumPy have at most 64 dimensions."""


def gather(
    runner: Runner,
    name: str,
    array: np.ndarray,
    root: int | None,
    algorithm: str,
    out: Any,
    timeout_s: float | None,
    async_op: bool,
) -> Any:
    """Exchange first dimensions, then gather.  `root` is None for an all-gather."""

    def lengths(table: Matrix) -> list[int]:
        return [sum(count for (count,) in table)] * runner.size

    def call_for(calls: Calls, table: Matrix) -> Call:
        counts = tuple(count for (count,) in table)
        rooted = {} if root is None else {"root": root}
        return calls.get(name, array, {**rooted, "counts": counts, "algorithm": algorithm})

    how = lengths, call_for, out, timeout_s, async_op
    return _exchange(runner, name, array, root, algorithm, array.shape[:1], *how)


def all_to_all(
    runner: Runner,
    array: np.ndarray,
    counts: tuple[int, ...],
    algorithm: str,
    out: Any,
    timeout_s: float | None,
    async_op: bool,
    expected: Sequence[int] | None = None,
) -> Any:
    """Exchange the counts that each rank sends to each rank, then the pieces.

    If a rank sends another count than its receiver has `expected`, all ranks raise MismatchError.
    """
    check_row("all_to_all", array, counts, runner.size)
    row = (*counts, *([_UNKNOWN] * runner.size if expected is None else expected))

    def lengths(table: Matrix) -> list[int]:
        _check_expected(table)
        return [sum(column) for column in islice(zip(*table, strict=True), runner.size)]

    def call_for(calls: Calls, table: Matrix) -> Call:
        matrix = tuple(row[: runner.size] for row in table)
        return calls.all_to_all_of_matrix(array, matrix, algorithm)

    how = lengths, call_for, out, timeout_s, async_op
    return _exchange(runner, "all_to_all", array, None, algorithm, row, *how)


def _exchange(
    runner: Runner,
    name: str,
    array: np.ndarray,
    root: int | None,
    algorithm: str,
    counts: tuple[int, ...],
    lengths: Callable[[Matrix], list[int]],
    call_for: Callable[[Calls, Matrix], Call],
    out: Any,
    timeout_s: float | None,
    async_op: bool,
) -> Any:
    """Exchange the `counts` of all ranks, then make the call ``call_for(calls, table)``.

    Row i of the table has the counts of rank i.  ``lengths(table)`` are the first dimensions of the
    results of all ranks.  Errors of `lengths`, and of a wrong `out` on one rank, are raised on all.
    """
    engine = runner.engine
    with engine.queue.lock:
        engine.check_usable()
        calls = runner.calls_on(array)
        first = runner.calls.exchange_counts(
            name, array.dtype, array.shape[1:], algorithm, root, calls.memory_kind
        )
        timeout_s = as_seconds(name, timeout_s)
        empty = _maker_of_results(calls.device)
        view = None if out is None else _gathered(name, calls.device, array, out)

        def body(header: bytes) -> Polled:
            mine = np.array([*counts, -1 if view is None else view.shape[0]], np.int64)
            rows = np.empty((runner.size, mine.size), np.int64)
            yield from engine.advance(first, mine, rows, header)
            table = tuple(map(tuple, rows[:, :-1].tolist()))
            try:
                _check_outs(name, rows[:, -1].tolist(), lengths(table))
            except ValueError as error:
                return error
            call = call_for(calls, table)
            target = view
            if target is None:
                target = empty(0 if call.shape is None else call.shape, call.dtype)
            yield from engine.advance(call, array, target, header)
            return None if call.shape is None else target if out is None else out

        return engine.run(first, body, timeout_s, async_op, calls.device.stream)


def _check_outs(name: str, given: Sequence[int], wanted: Sequence[int]) -> None:
    """Check the first dimension of `out` on each rank; -1: the rank passes no `out`."""
    for rank, (length, right) in enumerate(zip(given, wanted, strict=True)):
        if length not in (-1, right):
            raise ValueError(
                f"{name}: out on rank {rank} has first dimension {length}, the result has {right}"
            )


def _check_expected(table: Matrix) -> None:
    """Check that the ranks send what the others expect.  Raises MismatchError.

    A row of the table has the counts that a rank sends to each rank, and then the counts that it
    expects from each rank, or `_UNKNOWN`.
    """
    size = len(table)
    for receiver, row in enumerate(table):
        for sender, expected in enumerate([] if row[-1] == _UNKNOWN else row[size:]):
            if expected != table[sender][receiver]:
                sent = counted(table[sender][receiver], "element")
                raise MismatchError(
                    f"all_to_all: rank {sender} sends {sent} to rank {receiver}, which expects "
                    f"{expected}"
                )


def _gathered(name: str, device: Device, array: np.ndarray, out: Any) -> Any:
    """View `out` as an array for a gather whose first dimension is not known yet."""
    view = as_out(name, out, array)
    if view.ndim == 0:
        raise ValueError(f"{name}: out is 0-d; the result has at least one dimension")
    check_out(name, view, (*view.shape[:1], *array.shape[1:]), array.dtype)
    is_input(name, device, array, view, allowed=False)
    return view


def scatter(
    runner: Runner,
    x: Any,
    root: int,
    out: Any,
    algorithm: str,
    timeout_s: float | None,
    async_op: bool,
) -> Any:
    """Announce the root's shape and dtype, then scatter."""
    engine = runner.engine
    with engine.queue.lock:
        engine.check_usable()
        first = runner.calls.announcement(root, _ANNOUNCED_BYTES, algorithm)
        array = runner.to_scatter(x, root)
        view = None if out is None else as_out("scatter", out, out if array is None else array)
        if view is not None:
            check_out("scatter", view, view.shape, view.dtype)
        calls = runner.calls_on(next((a for a in (array, view) if a is not None), NOTHING))
        how = calls, array, view, _maker_of_results(calls.device), root, algorithm
        timeout_s = as_seconds("scatter", timeout_s)

        def body(header: bytes) -> Polled:
            part = yield from _announce_and_scatter(runner, header, first, *how)
            return out if part is view and out is not None else part

        return engine.run(first, body, timeout_s, async_op, calls.device.stream)


def _announce_and_scatter(
    runner: Runner,
    header: bytes,
    first: Call,
    calls: Calls,
    array: np.ndarray | None,
    out: np.ndarray | None,
    empty: Callable[[int | tuple[int, ...], Any], Any],
    root: int,
    algorithm: str,
) -> Polled:
    """Run a scatter of unknown shape; return this rank's part.

    The root's array decides how the data travel.  If it is in host memory, the part for an
    `out` on a GPU goes through host memory, too.
    """
    on_gpu = calls is not runner.calls
    shape, dtype, of_gpu = yield from _announce(runner.engine, first, array, on_gpu, header)
    counts = tuple(shard_counts(shape[0], runner.size))
    part = counts[runner.rank], *shape[1:]
    fits = out is not None and (out.shape, out.dtype) == (part, dtype)
    through_host = on_gpu and not of_gpu
    if of_gpu and not on_gpu:
        calls = runner.by_messages
    elif through_host:
        calls, empty = runner.calls, np.empty
    target = out if out is not None and fits and not through_host else empty(part, dtype)
    given = {"root": root, "counts": counts, "algorithm": algorithm}
    call = calls.get("scatter", target if array is None else array, given)
    source = target[:0] if array is None else array
    yield from runner.engine.advance(call, source, target, header)
    if out is None or target is out:
        return target
    if not fits:
        return ValueError(
            f"scatter: out is {out.dtype}{list(out.shape)}, this rank's part is {dtype}{list(part)}"
        )
    from_host("scatter", target, out)
    return out


def _announce(
    engine: Engine, first: Call, array: np.ndarray | None, on_gpu: bool, header: bytes
) -> Generator[bool, None, tuple[tuple[int, ...], np.dtype[Any], bool]]:
    """Broadcast the shape, the dtype and the place of the root's array; return them.

    `first` is the call of the broadcast.  `array` is None on other ranks.  The place is whether the
    array is on a GPU.
    """
    announced = bytearray(_ANNOUNCED_BYTES)
    if array is not None:
        values = _name_of(array.dtype), on_gpu, array.ndim, *array.shape
        pack_into(f"{_HEAD}{array.ndim}q", announced, 0, *values)
    memory = np.frombuffer(announced, np.uint8)
    yield from engine.advance(first, memory, memory, header)
    name, of_gpu, ndim = unpack_from(_HEAD, announced)
    return unpack_from(f"{ndim}q", announced, calcsize(_HEAD)), _dtype_of(name), bool(of_gpu)


@cache
def _name_of(dtype: np.dtype[Any]) -> bytes:
    return dtype.name.encode()


@cache
def _dtype_of(name: bytes) -> np.dtype[Any]:
    return named_dtype(name.rstrip(b"\0").decode())


def _maker_of_results(device: Device) -> Callable[[int | tuple[int, ...], Any], Any]:
    """Return a function that makes arrays for the caller while a call is running."""
    return device.empty if device.stream is None else device.stream.callers_empty()
