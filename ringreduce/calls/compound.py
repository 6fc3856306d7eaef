"""Calls of several plans, and calls on converted or concatenated arrays.

The engine raises a ValueError that one of them returns after the call is complete, so that no rank
waits for others in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cache
from struct import calcsize, pack_into, unpack_from
from typing import Any

import numpy as np

from ringreduce.calls.arguments import named_dtype
from ringreduce.calls.call import Call, Fused
from ringreduce.calls.engine import Engine
from ringreduce.calls.queue import Polled

Empty = Callable[[int | tuple[int, ...], Any], Any]
"""Makes an array of a shape and dtype for a result."""

Table = tuple[tuple[int, ...], ...]
"""The counts of all ranks, by rank."""

_HEAD = "24s2q"
"""An announcement in the words of `struct`: the dtype's name, place, and number of dimensions."""
ANNOUNCED_BYTES = calcsize(_HEAD) + 8 * 64
"""Bytes that hold an announcement with its shape: arrays of NumPy have at most 64 dimensions."""


def move(
    engine: Engine, call: Call, source: np.ndarray, target: np.ndarray, header: bytes
) -> Polled:
    """Run one plan; on converted copies if messages have another dtype than the arrays."""
    if not call.converts:
        yield from engine.advance(call, source, target, header)
        return
    device, dtype = call.device, call.wire_dtype
    sent = device.empty(source.size, dtype)
    device.convert(device.flat(source), sent)
    received = sent if target.size == source.size else device.empty(target.size, dtype)
    source_shape, target_shape = call.shapes
    wired = sent.reshape(source_shape), received.reshape(target_shape)
    yield from engine.advance(call, *wired, header)
    flat = device.flat(target)
    device.convert(received, flat)
    if not device.overlap(flat, target):
        target[...] = flat.reshape(target.shape)


def reduce_list(
    engine: Engine,
    fused: Fused,
    arrays: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    header: bytes,
) -> Polled:
    """Concatenate the arrays of each dtype, reduce them in place, and copy them to `targets`.

    Every array is read before any target is written, so a target may be any of the arrays.
    """
    concatenated = []
    for call, members in fused.groups:
        whole = call.device.empty(call.shape or 0, call.dtype)
        at = 0
        for index in members:
            array = arrays[index]
            whole[at : at + array.size].reshape(array.shape)[...] = array
            at += array.size
        concatenated.append(whole)
    for (call, members), whole in zip(fused.groups, concatenated, strict=True):
        yield from move(engine, call, whole, whole, header)
        at = 0
        for index in members:
            target = targets[index]
            target[...] = whole[at : at + target.size].reshape(target.shape)
            at += target.size


def exchange_counts(
    engine: Engine,
    first: Call,
    counts: Sequence[int],
    lengths: Callable[[Table], Sequence[int]],
    call_for: Callable[[Table], Call],
    array: np.ndarray,
    out: np.ndarray | None,
    empty: Empty,
    header: bytes,
) -> Polled:
    """Exchange the `counts` of all ranks by the call `first`, then make the call `call_for(table)`.

    Row i of the table has the counts of rank i.  ``lengths(table)`` are the first dimensions of the
    results of all ranks; a ValueError out of it, or a wrong `out` on one rank, is raised on all.
    """
    mine = np.array([*counts, -1 if out is None else out.shape[0]], np.int64)
    rows = np.empty((engine.size, mine.size), np.int64)
    yield from engine.advance(first, mine, rows, header)
    table = tuple(map(tuple, rows[:, :-1].tolist()))
    outs = rows[:, -1].tolist()
    try:
        wanted = lengths(table)
    except ValueError as error:
        return error
    for rank, (given, length) in enumerate(zip(outs, wanted, strict=True)):
        if given not in (-1, length):
            return ValueError(
                f"{first.signature.collective}: out on rank {rank} has first dimension {given}, "
                f"the result has {length}"
            )
    call = call_for(table)
    target = out
    if target is None:
        target = empty(0 if call.shape is None else call.shape, call.dtype)
    yield from engine.advance(call, array, target, header)
    return None if call.shape is None else target


def announce(
    engine: Engine, first: Call, array: np.ndarray | None, on_gpu: bool, header: bytes
) -> Generator[bool, None, tuple[tuple[int, ...], np.dtype[Any], bool]]:
    """Broadcast the shape, the dtype and the place of the root's array; return them.

    `first` is the call of the broadcast.  `array` is None on other ranks.  The place is whether the
    array is on a GPU.
    """
    announced = bytearray(ANNOUNCED_BYTES)
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
