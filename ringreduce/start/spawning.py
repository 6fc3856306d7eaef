"""Run a function on ranks that are processes of this program, for `ringreduce.spawn`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from ringreduce.errors import PeerLostError, RingReduceError
from ringreduce.system.prctl import die_with_parent

_OTHERS_S = 5.0
"""Seconds in which the other ranks may end after one has failed."""


class _Copies(ForkingPickler):
    """Pickles tensors by their numbers: their memory would end with the rank."""

    _extra_reducers: ClassVar[dict[type, Callable[[Any], Any]]] = {}


class RankTraceback(Exception):  # noqa: N818 - it is no error, but the cause of one
    """The traceback of an exception in the process of a rank, as text."""


def run(body: Callable[..., Any], ranks: int, arguments: Sequence[Any], *, forks: bool) -> Any:
    """Return what ``body(rank, ranks, *arguments)`` returns on each rank.

    Without `forks` each rank is a new interpreter.  An exception of a rank is raised here, with
    its traceback as the cause.  Raises PeerLostError for a rank that ends without a result, and
    TypeError for arguments that cannot reach a new interpreter.
    """
    if not forks:
        _check_importable(arguments)
    context = multiprocessing.get_context("fork" if forks else "spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries may be there
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                words = (theirs, os.getpid(), body, rank, ranks, arguments)
                process = context.Process(target=_rank, args=words)  # type: ignore[attr-defined]
                process.start()
                processes[ours] = process
                theirs.close()
        return _results(processes)
    finally:
        for end, process in processes.items():
            process.kill()
            process.join()
            end.close()


def _results(processes: Mapping[Connection, BaseProcess]) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    waiting = {end: rank for rank, end in enumerate(processes)}
    failures: list[BaseException] = []
    until: float | None = None

    def left_s() -> float | None:
        return None if until is None else max(until - time.monotonic(), 0)

    while waiting and (ready := wait(list(waiting), left_s())):
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                text, value = end.recv()
            except (EOFError, ConnectionError):
                failures.append(_lost(rank, processes[end]))
            else:
                if not text:
                    results[rank] = value
                    continue
                value.__cause__ = RankTraceback(f"\nrank {rank}:\n{text}")
                failures.append(value)
            until = until or time.monotonic() + _OTHERS_S
    for process in processes.values():
        process.join(left_s())
    if failures:  # the first that is no consequence of another
        raise min(failures, key=lambda e: (isinstance(e, RingReduceError), bool(e.__cause__)))
    return results


def _lost(rank: int, process: BaseProcess) -> PeerLostError:
    process.join()
    code = process.exitcode or 0
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return PeerLostError(f"spawn: rank {rank} {how} before it had a result", (rank,))


def _check_importable(arguments: Sequence[Any]) -> None:
    fn, reason, main = arguments[0], "", sys.modules["__main__"]
    if getattr(fn, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        reason = "no file has its module"
    try:
        ForkingPickler.dumps(arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise TypeError(
            f"spawn: processes=True starts new interpreters here, as this process has called init "
            f"or runs ranks; they cannot import {getattr(fn, '__qualname__', fn)} and its "
            f"arguments ({reason}); define it at the top of a module, or call spawn before init"
        ) from None


def _rank(
    end: Connection,
    parent: int,
    body: Callable[..., Any],
    rank: int,
    ranks: int,
    arguments: Sequence[Any],
) -> None:
    die_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends all
    os.register_at_fork(after_in_child=end.close)  # or this rank would not seem to end
    text, value = "", None
    try:
        value = body(rank, ranks, *arguments)
    except SystemExit:
        raise  # the parent names the exit code
    except BaseException as error:
        text, value = traceback.format_exc(), error
    try:
        packet = _Copies.dumps((text, value))
        if text:
            _Copies.loads(packet)  # some exceptions fail only here
    except Exception as error:
        what = f"raised {value!r}" if text else f"returns {type(value).__name__}"
        problem = f"spawn: rank {rank} {what}, which cannot be pickled: {error}"
        packet = _Copies.dumps((text or problem, TypeError(problem)))
    end.send_bytes(packet)


def is_forkable() -> bool:
    """Return whether a child by fork is safe: no MPI runs, and no thread of ours."""
    mpi = sys.modules.get("mpi4py.MPI")
    ours = any(each.name.startswith(("rank ", "ringreduce")) for each in threading.enumerate())
    return not ours and (mpi is None or not mpi.Is_initialized())
