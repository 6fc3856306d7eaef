"""Run a function on ranks that are processes of this program, for `ringreduce.spawn`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ringreduce.errors import PeerLostError, RingReduceError
from ringreduce.launch.job import die_with_parent

_OTHERS_S = 5.0
"""Seconds in which the other ranks may end after one has failed."""


class RankTraceback(Exception):  # noqa: N818 - it is no error, but the cause of one
    """The traceback of an exception in the process of a rank, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run(body: Callable[..., Any], ranks: int, arguments: Sequence[Any], *, forks: bool) -> Any:
    """Return what ``body(meet, rank, ranks, *arguments)`` returns on each rank.

    `meet` is a rendezvous.  Without `forks` each rank is a new interpreter.  An exception of a rank
    is raised here, with the traceback of the rank as its cause.  Raises PeerLostError for a rank
    that ends without a result, and TypeError for arguments that cannot reach a new interpreter.
    """
    if not forks:
        _check_importable(arguments)
    context = multiprocessing.get_context("fork" if forks else "spawn")
    ends: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries may be there
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                made = context.Process(  # type: ignore[attr-defined]
                    target=_rank, args=(theirs, os.getpid(), body, rank, ranks, arguments)
                )
                made.start()
                theirs.close()
                ends[ours] = rank
                processes.append(made)
        return _results(ends, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for end in ends:
            end.close()


def _results(ends: dict[Connection, int], processes: Sequence[BaseProcess]) -> list[Any]:
    """Collect the results of all ranks.  Raises the exception of the rank that failed."""
    ranks, open_ends = len(processes), set(ends)
    meeting: dict[int, bytes] = {}
    results: dict[int, Any] = {}
    failures: list[BaseException] = []
    until: float | None = None
    while open_ends:
        ready = wait(list(open_ends), None if until is None else max(until - time.monotonic(), 0))
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends[end]
            try:
                kind, value = end.recv()
            except (EOFError, ConnectionError):
                open_ends.discard(end)
                if rank not in results:
                    failures.append(_lost(rank, processes[rank]))
                    until = until or time.monotonic() + _OTHERS_S
                continue
            if kind == "meet":
                meeting[rank] = value
                if len(meeting) == ranks:
                    for each in ends:
                        with contextlib.suppress(OSError):  # a rank that is gone is seen above
                            each.send([meeting[other] for other in range(ranks)])
            elif kind == "result":
                results[rank] = value
            else:
                error, text = value
                error.__cause__ = RankTraceback(f"rank {rank}:\n{text}")
                failures.append(error)
                results[rank] = None
                until = until or time.monotonic() + _OTHERS_S
    if failures:
        lost = [each for each in failures if isinstance(each, PeerLostError) and not each.__cause__]
        own = [each for each in failures if not isinstance(each, RingReduceError)]
        raise [*own, *lost, *failures][0]
    return [results[rank] for rank in range(ranks)]


def _lost(rank: int, process: BaseProcess) -> PeerLostError:
    process.join()
    code = process.exitcode or 0
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return PeerLostError(f"spawn: rank {rank} {how} before it had a result", (rank,))


def _check_importable(arguments: Sequence[Any]) -> None:
    """Raise TypeError unless a new interpreter can import the function and read the arguments."""
    fn = arguments[0]
    main = sys.modules["__main__"]
    in_no_file = getattr(fn, "__module__", "") == "__main__" and not hasattr(main, "__file__")
    try:
        ForkingPickler.dumps(arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "no file has its module" if in_no_file else ""
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
    """Be a rank: run the body, and send its result."""
    die_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends all

    def meet(mine: bytes) -> list[bytes]:
        end.send(("meet", mine))
        found: list[bytes] = end.recv()
        return found

    try:
        message: Any = "result", body(meet, rank, ranks, *arguments)
    except SystemExit:
        raise  # the parent names the exit code
    except BaseException as error:
        message = "error", (error, traceback.format_exc())
    try:
        packet = ForkingPickler.dumps(message)
        ForkingPickler.loads(packet)
    except Exception as error:
        kind, value = message
        what = f"returns {type(value).__name__}" if kind == "result" else f"raised {value[0]!r}"
        text = f"spawn: rank {rank} {what}, which cannot be pickled: {error}"
        packet = ForkingPickler.dumps(("error", (TypeError(text), text)))
    end.send_bytes(packet)


def is_forkable() -> bool:
    """Return whether a child by fork is safe: no MPI runs, and no thread of ours."""
    mpi = sys.modules.get("mpi4py.MPI")
    ours = any(each.name.startswith(("rank ", "ringreduce")) for each in threading.enumerate())
    return not ours and (mpi is None or not mpi.Is_initialized())
