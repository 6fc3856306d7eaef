"""Arrays on one GPU, by CuPy.  Imported when a call passes such an array for the first time.

All work of a call goes through one stream, which the communicator owns.  That stream waits for the
work that the caller queued before on CuPy's current stream.  The caller's stream waits for the
communicator's stream in turn.  The processor waits for neither: it polls events.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ringreduce.devices import cuda_kernels
from ringreduce.devices.base import Array, FoldFunction, FoldManyFunction

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_THREADS, _MOST_BLOCKS = 256, 4096
"""Threads of a block, and blocks of a kernel.

Each thread goes over the array in steps of the number of all threads.
"""
_SUCCESS, _NOT_READY = 0, 600
"""Results of ``cudaEventQuery``."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all GPUs."""
_ALREADY_PINNED = 712
"""``cudaErrorHostMemoryAlreadyRegistered``."""
_MOST_WORK = 100_000
"""Steps of `numpy.shares_memory` after which two strided arrays are taken to overlap."""


def as_gpu_array(x: Array) -> Array:
    return x if isinstance(x, cupy.ndarray) else cupy.from_dlpack(x)


def to_host(array: Array) -> np.ndarray:
    """Return a copy of an array in host memory, after the work that CuPy's current stream has."""
    with array.device:
        host: np.ndarray = cupy.asnumpy(array)
    return host


def from_host(host: np.ndarray, into: Array) -> None:
    """Copy `host`, which may change afterwards, into a GPU's array in CuPy's current stream."""
    with into.device:
        into[...] = cupy.asarray(host)


class CudaDevice:
    name = "cuda"

    def __init__(self, gpu: int = 0) -> None:
        self.gpu = gpu
        self.stream = CudaStream(gpu)
        self._modules: dict[str, cupy.RawModule] = {}
        self._kernels: dict[str, cupy.RawKernel] = {}

    # --- memory ---

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        with cupy.cuda.Device(self.gpu):
            return cupy.empty(shape, dtype)

    def scratch(self, nbytes: int) -> Array:
        return self.empty(nbytes, np.uint8)

    def flat(self, array: Array) -> Array:
        return cupy.ascontiguousarray(array).reshape(-1)

    def bytes_of(self, array: np.ndarray) -> memoryview:
        return memoryview(array.data).cast("B") if array.size else memoryview(bytearray())

    def address(self, array: Array) -> int:
        address: int = array.data.ptr
        return address

    def unowned(self, array: Array) -> Array:
        memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, None, self.gpu)
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def overlap(self, a: Array, b: Array) -> bool:
        """Return whether two arrays share any byte, exactly if that takes few steps.

        The processor computes it: CuPy's own function would wait for the GPU.
        """
        most_work: Any = _MOST_WORK  # NumPy takes any number; its stub allows two
        try:
            return np.shares_memory(_layout(a), _layout(b), max_work=most_work)
        except np.exceptions.TooHardError:
            return True

    # --- arithmetic ---

    def fold(self, op: str, dtype: DTypeLike) -> FoldFunction:
        name = np.dtype(dtype).name
        kernel = self._kernel(cuda_kernels.fold_name(op, name), name)

        def fold(left: Array, right: Array, into: Array) -> None:
            _launch(kernel, into.size, left, right, into)

        return fold

    def fold_many(self, op: str, dtype: DTypeLike) -> FoldManyFunction:
        dtype = np.dtype(dtype)
        if dtype.name in cuda_kernels.SHORT and op not in ("min", "max"):
            return self._fold_many_widened(op, dtype)
        fold = self.fold(op, dtype)

        def fold_many(sources: Sequence[Array], into: Array) -> None:
            total = self.empty(into.size, dtype)
            total[...] = sources[0]
            for source in sources[1:]:
                fold(total, source, total)
            into[...] = total

        return fold_many

    def _fold_many_widened(self, op: str, dtype: np.dtype) -> FoldManyFunction:
        kernel = self._kernel(cuda_kernels.accumulate_name(op, dtype.name), dtype.name)

        def fold_many(sources: Sequence[Array], into: Array) -> None:
            total = self.empty(into.size, np.float32)
            self.convert(sources[0], total)
            for source in sources[1:]:
                _launch(kernel, total.size, source, total)
            self.convert(total, into)

        return fold_many

    def divide(self, array: Array, by: int) -> None:
        name = array.dtype.name
        _launch(self._kernel(cuda_kernels.divide_name(name), name), array.size, array, float(by))

    def convert(self, source: Array, into: Array) -> None:
        names = source.dtype.name, into.dtype.name
        short = next(name for name in names if name in cuda_kernels.SHORT)
        kernel = self._kernel(cuda_kernels.convert_name(*names), short)
        _launch(kernel, into.size, source, into)

    def _kernel(self, kernel: str, dtype: str) -> cupy.RawKernel:
        """Return a kernel; the first one of a dtype compiles all kernels of the dtype."""
        if kernel not in self._kernels:
            if dtype not in self._modules:
                self._modules[dtype] = cupy.RawModule(
                    code=cuda_kernels.SOURCE,
                    options=cuda_kernels.OPTIONS,
                    name_expressions=cuda_kernels.names_for(dtype),
                )
            with cupy.cuda.Device(self.gpu):
                self._kernels[kernel] = self._modules[dtype].get_function(kernel)
        return self._kernels[kernel]


def _launch(kernel: cupy.RawKernel, count: int, *arguments: Array | float) -> None:
    if count:
        blocks = min(-(-count // _THREADS), _MOST_BLOCKS)
        kernel((blocks,), (_THREADS,), (*arguments, np.int64(count)))


class _Addresses:
    """The addresses of an array's elements, for NumPy, which reads none of the elements."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "data": (array.data.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }


def _layout(array: Array) -> np.ndarray:
    return np.asarray(_Addresses(array))


class CudaMark:
    def __init__(self, gpu: int, stream: cupy.cuda.Stream) -> None:
        self._stream = stream
        with cupy.cuda.Device(gpu):
            self.event = cupy.cuda.Event(disable_timing=True)

    def set(self) -> None:
        self.event.record(self._stream)

    def reached(self) -> bool:
        status: int = runtime.eventQuery(self.event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return status == _SUCCESS


class CudaStream:
    """A stream of CUDA.  It and the default stream wait for each other only where asked to."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        with cupy.cuda.Device(gpu):
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pinned: list[weakref.finalize[..., Any]] = []

    @contextmanager
    def selected(self) -> Iterator[None]:
        with cupy.cuda.Device(self._gpu), self._stream:
            yield

    def follow(self) -> None:
        with cupy.cuda.Device(self._gpu):
            asked = cupy.cuda.Event(disable_timing=True)
            asked.record(cupy.cuda.get_current_stream())
            self._stream.wait_event(asked)

    def lead(self) -> None:
        mark = self.mark()
        mark.set()
        with cupy.cuda.Device(self._gpu):
            cupy.cuda.get_current_stream().wait_event(mark.event)

    def callers_empty(self) -> Callable[[int | tuple[int, ...], DTypeLike], Array]:
        """Return `empty` on the caller's current stream.

        CuPy reuses freed memory on the stream that allocated it.
        """
        with cupy.cuda.Device(self._gpu):
            stream = cupy.cuda.get_current_stream()

        def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
            with cupy.cuda.Device(self._gpu), stream:
                return cupy.empty(shape, dtype)

        return empty

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return memory outside of CuPy's pool, which would reuse it while copies run."""
        memory = cupy.cuda.PinnedMemory(nbytes, runtime.hostAllocPortable)
        return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def pin(self, host: np.ndarray) -> None:
        address = host.ctypes.data
        with cupy.cuda.Device(self._gpu):
            try:
                runtime.hostRegister(address, host.nbytes, _PORTABLE)
            except runtime.CUDARuntimeError as error:
                if error.status == _ALREADY_PINNED:
                    raise
                return  # the system refuses: copies are slower, and in the same order
        unpin = weakref.finalize(host, runtime.hostUnregister, address)
        unpin.atexit = False
        self._pinned.append(unpin)

    def copy_out(self, source: Array, host: np.ndarray) -> None:
        assert source.nbytes == host.nbytes
        self._copy(host.ctypes.data, source.data.ptr, host.nbytes, runtime.memcpyDeviceToHost)

    def copy_in(self, host: np.ndarray, into: Array) -> None:
        assert into.nbytes == host.nbytes
        self._copy(into.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)

    def _copy(self, into: int, source: int, nbytes: int, kind: int) -> None:
        runtime.memcpyAsync(into, source, nbytes, kind, self._stream.ptr)

    def mark(self) -> CudaMark:
        return CudaMark(self._gpu, self._stream)

    def close(self) -> None:
        self._stream.synchronize()
        while self._pinned:
            self._pinned.pop()()
