"""Ranks that are processes without MPI: they collect bytes from each other through their parent.

    python -m tests.support.processes RANK RANKS SOCKET MODULE:FUNCTION ARGUMENT ...

calls ``function(rank, ranks, collect, *arguments)`` as a rank, and prints the result as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.mpi import ROOT, environment

_LENGTH = struct.Struct("<q")


def run(ranks: int, function: str, *arguments: object, timeout_s: float = 60.0) -> list[Any]:
    """Run a function on ranks; return each rank's result, or None if it was killed by SIGKILL.

    A killed rank stays a zombie until all others have ended.  Raises AssertionError if a rank ends
    in another way, or if some rank does not end in time.
    """
    sockets, processes = [], []
    for rank in range(ranks):
        here, there = socket.socketpair()
        words = map(str, (rank, ranks, there.fileno(), function, *arguments))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.processes", *words],
                cwd=ROOT,
                env=environment(),
                pass_fds=(there.fileno(),),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        there.close()
        sockets.append(here)
    threading.Thread(target=_collect, args=(sockets,), daemon=True).start()
    try:
        _wait_for_all(processes, time.monotonic() + timeout_s)
        return [_result(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _wait_for_all(processes: list[subprocess.Popen[str]], deadline: float) -> None:
    """Wait until all have ended, without reaping them.  Their output fits in a pipe."""
    for process in processes:
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            assert time.monotonic() < deadline, "a rank does not end"
            time.sleep(0.01)


def _result(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate()
    if process.returncode == -signal.SIGKILL:
        return None
    assert process.returncode == 0, errors
    return json.loads(output)


def _collect(sockets: list[socket.socket]) -> None:
    """Pass on what ranks collect, until one of them ends."""
    try:
        while True:
            everybody = b"".join(_receive(each) for each in sockets)
            for each in sockets:
                _send(each, everybody)
    except OSError:
        for each in sockets:
            each.close()


def _send(to: socket.socket, message: bytes) -> None:
    to.sendall(_LENGTH.pack(len(message)) + message)


def _receive(source: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return _exactly(source, length)


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    received = source.recv(nbytes, socket.MSG_WAITALL)
    if len(received) < nbytes:
        raise ConnectionError("the other end has closed")
    return received


def collector(peer: socket.socket) -> Callable[[bytes], bytes]:
    """Return the function `collect` of a rank."""

    def collect(mine: bytes) -> bytes:
        _send(peer, mine)
        return _receive(peer)

    return collect


def main(rank: str, ranks: str, file: str, name: str, *arguments: str) -> None:
    module, _, function = name.partition(":")
    collect = collector(socket.socket(fileno=int(file)))
    called = getattr(importlib.import_module(module), function)
    print(json.dumps(called(int(rank), int(ranks), collect, *arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
