"""The checks that `ringreduce doctor` runs in a separate process.  Each prints one line of JSON.

    python -m ringreduce.launch.probe mpi                  under mpiexec: this rank's MPI
    python -m ringreduce.launch.probe module NAME          an optional package
    python -m ringreduce.launch.probe kernels              which 16-bit floats have compiled loops
    python -m ringreduce.launch.probe gpus                 CuPy and the GPUs that it sees
    python -m ringreduce.launch.probe hold                 memory for another process to read
    python -m ringreduce.launch.probe read PID ADDRESS     read that memory

A package that crashes, hangs or prints does so outside of `ringreduce doctor` itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

_SECRET = b"ringreduce single copy probe"
_THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def main(argv: Sequence[str]) -> int:
    """Run the probe that `argv` names, and print its result."""
    if argv[0] == "hold":
        hold()
    else:
        probes: dict[str, Callable[..., dict[str, Any]]]
        probes = {"mpi": mpi, "module": module, "kernels": kernels, "gpus": gpus, "read": read}
        _print(probes[argv[0]](*argv[1:]))
    return 0


def mpi() -> dict[str, Any]:
    """The library, thread level, rank and size of this rank's MPI.  Call it on every rank."""
    module = importlib.import_module("mpi4py.MPI")
    levels = {getattr(module, f"THREAD_{name}"): name for name in _THREAD_LEVELS}
    return {
        "library": module.Get_library_version().strip("\0\n"),
        "thread_level": levels[module.Query_thread()],
        "rank": module.COMM_WORLD.Get_rank(),
        "size": module.COMM_WORLD.Get_size(),
    }


def module(name: str) -> dict[str, Any]:
    """Import a package and return its version."""
    return {"version": str(importlib.import_module(name).__version__)}


def kernels() -> dict[str, Any]:
    """Whether compiled loops add float16 and bfloat16."""
    compiled = importlib.import_module("ringreduce.devices.compiled")
    return {name: compiled.kernel(f"sum-{name}") is not None for name in ("float16", "bfloat16")}


def gpus() -> dict[str, Any]:
    """CuPy's version and the GPUs it sees: name, memory in bytes, compute capability."""
    cupy = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime
    seen = [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
    return {
        "version": cupy.__version__,
        "cuda": runtime.runtimeGetVersion(),
        "gpus": [
            {
                "name": gpu["name"].decode(),
                "memory_bytes": gpu["totalGlobalMem"],
                "compute": f"{gpu['major']}.{gpu['minor']}",
            }
            for gpu in seen
        ],
    }


def hold() -> None:
    """Print the address of a secret in this process, for `read`, and keep it until stdin ends."""
    held = ctypes.create_string_buffer(_SECRET)
    _print({"pid": os.getpid(), "address": ctypes.addressof(held)})
    sys.stdin.read()


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read(pid: str, address: str) -> dict[str, Any]:
    """Read the secret of `hold` with process_vm_readv.  The error is "" if the bytes are right."""
    into = ctypes.create_string_buffer(len(_SECRET))
    local = _IoVec(ctypes.addressof(into), len(_SECRET))
    remote = _IoVec(int(address), len(_SECRET))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    got = libc.process_vm_readv(
        int(pid),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    if got < 0:
        return {"error": os.strerror(ctypes.get_errno())}
    return {"error": "" if into.raw == _SECRET else "other bytes came"}


def _print(found: dict[str, Any]) -> None:
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
