"""A simulated GPU: NumPy arrays on which all work is done late, in the order of streams.

Work for a `Gpu` waits in a stream.  Each poll does a little of it.  New memory is poisoned, and so
is pinned memory after it was copied to the GPU.  So a message that starts too early, a block that
is used again too soon, or a stream that does not wait for another gives a wrong result.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.calls import arrays
from ringreduce.devices.cpu import CpuDevice
from tests.support.cases import CONFIG
from tests.support.on_gpus import asynchronous, on_the_same_arrays, one_after_another

POISON = 0xCB
_CUDA = 2
"""DLPack's device type of GPU memory."""

Operation = Callable[[], bool]
"""Done unless it says that it has to wait."""


class Stream:
    """Operations to be done one after another."""

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()


class Gpu:
    """Streams and memory.  Each thread has a current stream, the same for all at first."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.streams = [Stream()]
        self._current = threading.local()
        self._random = random.Random(number)
        self._memory: list[np.ndarray] = []
        """All that was ever allocated: work that is under way needs it when nobody else does."""

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.streams[0])

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current, stream
        try:
            yield
        finally:
            self._current.stream = before

    def new_stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def ask(self, work: Callable[[], Any], stream: Stream | None = None) -> None:
        """Have some work done in its turn."""
        with self.lock:
            (stream or self.current).operations.append(lambda: work() is not _AGAIN)

    def poll(self) -> None:
        """Do none, one or two operations of any streams."""
        for _ in range(self._random.randrange(3)):
            with self.lock:
                busy = [stream for stream in self.streams if stream.operations]
                if busy:
                    self._advance(self._random.choice(busy))

    def _advance(self, stream: Stream) -> bool:
        done = stream.operations[0]()
        if done:
            stream.operations.popleft()
        return done

    def finish(self) -> None:
        """Do everything."""
        with self.lock:
            while busy := [stream for stream in self.streams if stream.operations]:
                moved = [self._advance(stream) for stream in busy]
                assert any(moved), "streams wait in a circle"

    def array(self, shape: Any, dtype: Any) -> LateArray:
        memory = np.empty(shape, dtype)
        memory.reshape(-1).view(np.uint8)[...] = POISON
        self._memory.append(memory)
        late = memory.view(LateArray)
        late.gpu = self
        return late

    def put(self, values: Any) -> LateArray:
        """An array that will have these values, once the current stream gets there."""
        values = np.array(values)
        late = self.array(values.shape, values.dtype)
        self.assign(late, values)
        return late

    def assign(self, array: LateArray, values: Any) -> None:
        array[...] = values

    def at_once(self, array: LateArray) -> np.ndarray:
        """What the array has now, whatever is still to be done on it."""
        return now(array).copy()

    def values(self, array: LateArray) -> np.ndarray:
        """What the array has when all work is done."""
        self.finish()
        return now(array).copy()


_AGAIN = object()


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self._recorded = self._done = 0

    def record(self, gpu: Gpu, stream: Stream) -> None:
        self._recorded += 1
        gpu.ask(partial(setattr, self, "_done", self._recorded), stream)

    def hold(self, gpu: Gpu, stream: Stream) -> None:
        """Let the stream wait for what is recorded now."""
        wanted = self._recorded
        gpu.ask(lambda: None if self._done >= wanted else _AGAIN, stream)

    @property
    def done(self) -> bool:
        return self._done == self._recorded


class LateArray(np.ndarray):
    """Views are made at once, what is assigned comes late, what is read at once may be poison."""

    gpu: Gpu | None = None

    def __array_finalize__(self, parent: Any) -> None:
        self.gpu = getattr(parent, "gpu", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        assert self.gpu is not None
        here, value = now(self), now(value) if isinstance(value, LateArray) else np.array(value)
        self.gpu.ask(partial(here.__setitem__, key, value))

    def tolist(self) -> Any:
        assert self.gpu is not None
        return self.gpu.values(self).tolist()

    def __dlpack_device__(self) -> tuple[int, int]:
        assert self.gpu is not None
        return _CUDA, self.gpu.number


def now(array: np.ndarray) -> np.ndarray:
    """The array's memory as it is at this moment."""
    return array.view(np.ndarray)


class LateDevice:
    """The device of such arrays."""

    name = "late"

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self._cpu = gpu, CpuDevice()
        self.stream = LateStream(gpu)

    def empty(self, shape: Any, dtype: Any) -> LateArray:
        return self.gpu.array(shape, dtype)

    def scratch(self, nbytes: int) -> LateArray:
        return self.empty(nbytes, np.uint8)

    def flat(self, array: LateArray) -> Any:
        if array.flags.c_contiguous:
            return array.reshape(-1)
        flat = self.empty(array.shape, array.dtype)
        flat[...] = array
        return flat.reshape(-1)

    def fold(self, op: str, dtype: Any) -> Callable[..., None]:
        fold = self._cpu.fold(op, dtype)
        return lambda *arrays: self.gpu.ask(partial(fold, *map(now, arrays)))

    def fold_many(self, op: str, dtype: Any) -> Callable[..., None]:
        fold = self._cpu.fold_many(op, dtype)

        def fold_many(sources: Any, into: LateArray) -> None:
            self.gpu.ask(partial(fold, list(map(now, sources)), now(into)))

        return fold_many

    def divide(self, array: LateArray, by: int) -> None:
        self.gpu.ask(partial(self._cpu.divide, now(array), by))

    def convert(self, source: LateArray, into: LateArray) -> None:
        self.gpu.ask(partial(self._cpu.convert, now(source), now(into)))

    def bytes_of(self, array: np.ndarray) -> memoryview:
        return self._cpu.bytes_of(array)

    def address(self, array: LateArray) -> int:
        return self._cpu.address(now(array))

    def unowned(self, array: LateArray) -> LateArray:
        unowned = self._cpu.unowned(now(array)).view(LateArray)
        unowned.gpu = self.gpu
        return unowned

    def overlap(self, a: LateArray, b: LateArray) -> bool:
        return self._cpu.overlap(now(a), now(b))


class LateMark:
    def __init__(self, gpu: Gpu, stream: Stream) -> None:
        self._gpu, self._stream, self._event = gpu, stream, Event()

    def set(self) -> None:
        self._event.record(self._gpu, self._stream)

    def reached(self) -> bool:
        self._gpu.poll()
        return self._event.done


class LateStream:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._stream = gpu, gpu.new_stream()

    def selected(self) -> Any:
        return self._gpu.using(self._stream)

    def _let_wait(self, waiting: Stream, other: Stream) -> None:
        event = Event()
        event.record(self._gpu, other)
        event.hold(self._gpu, waiting)

    def follow(self) -> None:
        self._let_wait(self._stream, self._gpu.current)

    def lead(self) -> None:
        self._let_wait(self._gpu.current, self._stream)

    def callers_empty(self) -> Callable[..., LateArray]:
        return self._gpu.array

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, POISON, np.uint8)

    def pin(self, host: np.ndarray) -> None:
        host[...] = POISON

    def copy_out(self, source: LateArray, host: np.ndarray) -> None:
        assert source.nbytes == host.nbytes
        bytes_now = now(source).view(np.uint8)
        self._gpu.ask(partial(host.__setitem__, ..., bytes_now), self._stream)

    def copy_in(self, host: np.ndarray, into: LateArray) -> None:
        assert into.nbytes == host.nbytes

        def copy() -> None:
            now(into).view(np.uint8)[...] = host
            host[...] = POISON

        self._gpu.ask(copy, self._stream)

    def mark(self) -> LateMark:
        return LateMark(self._gpu, self._stream)

    def close(self) -> None:
        self._gpu.finish()


def spawn(program, ranks, *args, nodes=None, config=CONFIG):
    """Run ``program(comm, gpu, *args)`` on ranks with a GPU each, numbered by the rank."""
    gpus = [Gpu(rank) for rank in range(ranks)]
    cuda = SimpleNamespace(
        CudaDevice=lambda number: LateDevice(gpus[number]), as_gpu_array=lambda x: x
    )
    with mock.patch.object(arrays, "_cuda", return_value=cuda):
        return rr.spawn(
            lambda comm: program(comm, gpus[comm.rank], *args),
            ranks,
            nodes=nodes,
            timeout_s=20,
            config=config,
        )


def on_a_gpu_that_stops(comm: rr.Communicator, gpu: Gpu) -> None:
    """A call on a GPU that does nothing any more raises an error after its timeout."""
    x = gpu.put(np.ones(700))
    gpu.poll = lambda: None  # type: ignore[method-assign]
    with pytest.raises(rr.PeerTimeoutError):
        comm.all_reduce(x, timeout_s=0.3)
    assert comm.broken


def must_be_found(owner: type, name: str, wrong: Any, spawn: Callable[..., Any]) -> None:
    """Plant a bug: at least one program must fail, in one of several runs."""

    def run_them() -> None:
        for _ in range(20):
            for program in (one_after_another, on_the_same_arrays, asynchronous):
                spawn(program, 2)

    with mock.patch.object(owner, name, wrong), pytest.raises((AssertionError, rr.RingReduceError)):
        run_them()
