"""Checks in a separate process.  Each prints one line of JSON, and `ask` reads the line.

    python -m ringreduce.launch.probe mpi                  under mpiexec: this rank's MPI
    python -m ringreduce.launch.probe shrink               under mpiexec: whether ranks go on
    python -m ringreduce.launch.probe module NAME          an optional package
    python -m ringreduce.launch.probe kernels              which 16-bit floats have compiled loops
    python -m ringreduce.launch.probe memory               whether ranks would share memory
    python -m ringreduce.launch.probe gpus                 CuPy and the GPUs that it sees
    python -m ringreduce.launch.probe hold                 memory for another process to read
    python -m ringreduce.launch.probe read PID ADDRESS     read that memory

A package that crashes, hangs or prints does so outside of the command that asks.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringreduce.supervisor.mpiexec import answered
from ringreduce.system.prctl import allow_reads

_SEGMENT_BYTES = 2 << 20
_SECRET = b"ringreduce single copy probe"
_THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class ProbeResult:
    """The JSON lines that a probe printed, and, if it failed, the last line of its stderr."""

    lines: Sequence[dict[str, Any]]
    complaint: str = ""


def ask(*arguments: str) -> ProbeResult:
    return answer_of(command(*arguments))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "ringreduce.launch.probe", *arguments]


def answer_of(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> ProbeResult:
    """Run a probe.  The answer has lines only if the exit code is 0."""
    try:
        ended = answered(argv, environment)
    except subprocess.TimeoutExpired as error:
        return ProbeResult((), f"no answer within {error.timeout:g} s")
    if ended.returncode == 0:
        lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        return ProbeResult([json.loads(line) for line in lines])
    complaints = [line for line in ended.stderr.splitlines() if line.strip()]
    return ProbeResult((), complaints[-1] if complaints else f"exit code {ended.returncode}")


# --- the probes -----------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    if argv[0] == "hold":
        hold()
    else:
        probes: dict[str, Callable[..., dict[str, Any]]]
        probes = {"mpi": mpi, "shrink": shrink, "module": module, "kernels": kernels}
        probes |= {"memory": memory, "gpus": gpus, "read": read}
        _print(probes[argv[0]](*argv[1:]))
    return 0


def mpi() -> dict[str, Any]:
    module = importlib.import_module("mpi4py.MPI")
    levels = {getattr(module, f"THREAD_{name}"): name for name in _THREAD_LEVELS}
    return {
        "library": module.Get_library_version().strip("\0\n"),
        "thread_level": levels[module.Query_thread()],
        "rank": module.COMM_WORLD.Get_rank(),
        "size": module.COMM_WORLD.Get_size(),
    }


def shrink() -> dict[str, Any]:
    """Why ranks of this job cannot go on after a loss; the size of a shrunk communicator.

    The reason is "" if the ranks can go on, and the size 0 if they cannot.  Call it on every
    rank.
    """
    transports = importlib.import_module("ringreduce.transports.mpi")
    if reason := transports.why_not_shrink():
        return {"reason": reason, "size": 0}
    shrunk = importlib.import_module("mpi4py.MPI").COMM_WORLD.Shrink()
    return {"reason": "", "size": shrunk.Get_size()}


def module(name: str) -> dict[str, Any]:
    return {"version": str(importlib.import_module(name).__version__)}


def kernels() -> dict[str, Any]:
    compiled = importlib.import_module("ringreduce.devices.compiled")
    return {name: compiled.kernel(f"sum-{name}") is not None for name in ("float16", "bfloat16")}


def memory() -> dict[str, Any]:
    """Whether ranks of one host would share memory, and whether they would read peers' arrays.

    Two processes map memory of each other as two ranks do in `init`.
    """
    ends = socket.socketpair()
    child = os.fork()  # before the import of NumPy, which starts threads
    rank = int(child == 0)
    ends[1 - rank].close()
    try:
        segments = importlib.import_module("ringreduce.shm.segments")
        found = segments.map_files(_SEGMENT_BYTES, partial(_exchange, ends[rank], rank), rank)
    finally:
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    functions = importlib.import_module("ringreduce.shm.functions")
    shared = functions.would_be_available()
    facts = "single_copy", "writes", "quick"
    return {"shared": shared} | {
        fact: shared and found is not None and getattr(found, fact) for fact in facts
    }


def _exchange(peer: socket.socket, rank: int, mine: bytes) -> bytes:
    peer.sendall(mine)
    theirs = peer.recv(len(mine), socket.MSG_WAITALL)
    if len(theirs) < len(mine):
        raise EOFError("the other process has ended")
    return mine + theirs if rank == 0 else theirs + mine


def gpus() -> dict[str, Any]:
    cupy = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime
    seen = [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
    return {
        "version": cupy.__version__,
        "cuda": runtime.runtimeGetVersion(),
        "gpus": [
            {
                "name": gpu["name"].decode(errors="replace"),
                "memory_bytes": gpu["totalGlobalMem"],
                "compute": f"{gpu['major']}.{gpu['minor']}",
            }
            for gpu in seen
        ],
    }


def hold() -> None:
    """Print the address of a secret in this process, for `read`, and keep it until stdin ends.

    With the first line of stdin, allow every process of the user to read it, as ranks do.
    """
    held = ctypes.create_string_buffer(_SECRET)
    _print({"pid": os.getpid(), "address": ctypes.addressof(held)})
    for _ in sys.stdin:
        allow_reads()
        _print({"allowed": True})


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read(pid: str, address: str) -> dict[str, Any]:
    """Read the secret of `hold` with process_vm_readv: "error" is "" if that works.

    Then write it back with process_vm_writev: "writes" is False if that is not allowed.
    """
    into = ctypes.create_string_buffer(len(_SECRET))
    local = _IoVec(ctypes.addressof(into), len(_SECRET))
    remote = _IoVec(int(address), len(_SECRET))
    libc, one, flags = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(1), ctypes.c_ulong(0)
    libc.process_vm_readv.restype = libc.process_vm_writev.restype = ctypes.c_ssize_t
    move = int(pid), ctypes.byref(local), one, ctypes.byref(remote), one, flags
    if libc.process_vm_readv(*move) < 0:
        return {"error": os.strerror(ctypes.get_errno())}
    if into.raw != _SECRET:
        return {"error": "the bytes read are not those of the peer"}
    return {"error": "", "writes": libc.process_vm_writev(*move) == len(_SECRET)}


def _print(found: dict[str, Any]) -> None:
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
