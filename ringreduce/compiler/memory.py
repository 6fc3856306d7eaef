"""Memory and compiled functions by their addresses.

Compiled code runs the instructions that `ringreduce.compiler.intrinsics` emits for each of these
functions.  Python runs the bodies below, which do the same without the caches and without speed.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from ringreduce.compiler.records import Address

_LINE_BYTES = 64


def load(address: Address) -> int:
    return ctypes.c_int64.from_address(address).value


def store(address: Address, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def copy(into: Address, source: Address, nbytes: int) -> None:
    """Copy bytes from one address to another; they do not overlap."""
    ctypes.memmove(into, source, nbytes)


def stream_line(into: Address, source: Address) -> None:
    """Copy 64 bytes by streaming stores, which bypass the caches; `into` is a multiple of 32."""
    ctypes.memmove(into, source, _LINE_BYTES)


def claim(address: Address) -> None:
    """Prefetch the cache line at an address for writing."""


def fence() -> None:
    """Order all loads and stores before, streaming stores too, before all after."""


def pointer(address: Address) -> Any:
    """An address as `numba.carray` takes it."""
    return ctypes.c_void_p(address)


def yield_core() -> None:
    """Offer the core to another process: ``sched_yield``."""
    os.sched_yield()


def nanoseconds(memory: Address) -> int:
    """Read a monotonic clock, in nanoseconds; `memory` is two words of scratch."""
    return time.monotonic_ns()


def read_process(process: int, vectors: Address) -> int:
    """Read another process's memory: ``process_vm_readv``; the bytes read, -1 if it failed.

    At `vectors` are two pairs of address and length: the local memory and the remote memory.
    """
    return _move("process_vm_readv", process, vectors)


def write_process(process: int, vectors: Address) -> int:
    """Write another process's memory: ``process_vm_writev``; as `read_process`."""
    return _move("process_vm_writev", process, vectors)


def _move(name: str, process: int, vectors: Address) -> int:
    move = getattr(ctypes.CDLL(None), name)
    move.restype = ctypes.c_ssize_t
    word = ctypes.c_size_t
    local, remote = ctypes.c_void_p(vectors), ctypes.c_void_p(vectors + 16)
    done: int = move(ctypes.c_int(process), local, word(1), remote, word(1), word(0))
    return done


def call_fold(
    fold: Address,
    into: Address,
    sources: Address,
    n: int,
    count: int,
    divisor: int,
    memory: Address,
) -> None:
    """Call the compiled fold at an address, with arguments as `devices.folds` describes them."""
    ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 6)(fold)(into, sources, n, count, divisor, memory)


def call_mpi(function: Address, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> int:
    """Call a function of MPI at an address; return its error code.

    A function of fewer parameters ignores the last arguments.
    """
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *(ctypes.c_int64,) * 7)
    error: int = kind(function)(a, b, c, d, e, f, g)
    return error


def call_run(run: Address, program: Address, number: int, source: Address, target: Address) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 4)(run)
    result: int = function(program, number, source, target)
    return result
