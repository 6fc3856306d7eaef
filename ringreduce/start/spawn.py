"""Run a function on ranks that are threads or processes of this program: `spawn`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

from ringreduce.calls.arguments import shown
from ringreduce.calls.communicator import Communicator
from ringreduce.config import DEFAULT_TIMEOUT_S, Config, as_seconds
from ringreduce.errors import RingReduceError
from ringreduce.rendezvous.env import of_environment
from ringreduce.shm.segments import share_segments
from ringreduce.start.init import NodesArgument, checked, communicator, init
from ringreduce.system.topology import parse_nodes
from ringreduce.trace.recorder import finish
from ringreduce.transports.thread import Switchboard, ThreadTransport

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

_GRACE_S = 5.0
"""Seconds that `spawn` waits for the other ranks after a rank has raised."""


def spawn(
    fn: Callable[[Communicator, *Args], Result],
    ranks: int = 4,
    *args: *Args,
    nodes: NodesArgument = None,
    timeout_s: float | None = None,
    config: Config | None = None,
    processes: bool = False,
) -> list[Result]:
    """Run ``fn(comm, *args)`` on `ranks` ranks, without MPI.

    Each rank is a thread of this process, or, with ``processes=True``, a process of its own.

    Args:
        fn: the function that each rank calls, with its `Communicator` first.
        ranks: the number of ranks.
        *args: further arguments of `fn`, the same on every rank.
        nodes: how many ranks each node has, ``(3, 1, 2)``, or the ranks, ``((0, 2), (1, 3))``.
            None: all ranks are on one node.
        timeout_s: seconds without progress until a call raises PeerTimeoutError.  None: 600.
        config: the other settings.
        processes: start processes, which compute on several cores.  They are forks of this process
            unless it has called `init` or runs ranks.  Then each is a new interpreter, which
            imports `fn`: a lambda cannot be imported.  Return values are pickled.

    Returns:
        The ranks' return values, in rank order.

    Raises:
        TypeError, ValueError: wrong arguments, before any rank starts.
        Exception: the exception of a rank that has raised.  Calls of the other ranks raise
            PeerLostError.  That of a process has the traceback of its rank as ``__cause__``.
        PeerLostError: the process of a rank was killed, or has ended without a result.

    Example:
        >>> rr.spawn(lambda comm: comm.all_reduce(comm.rank + 1).item(), 3)
        [6, 6, 6]
    """
    if not callable(fn):
        raise TypeError(
            f"spawn: fn is {shown(fn)}; pass a function without calling it, then the ranks, "
            "as in spawn(fn, 4)"
        )
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"spawn: ranks is {shown(ranks)}; pass an int of at least 1")
    timeout_s = as_seconds("spawn", DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
    placed = None if nodes is None else parse_nodes(nodes, ranks, "spawn")
    given = checked("spawn", config)
    if processes:
        from ringreduce.start import process_exit, spawning

        arguments = (fn, args, os.urandom(16).hex(), nodes, timeout_s, given)
        forks = not process_exit.has_begun() and spawning.is_forkable()
        found: list[Result] = spawning.run(_in_process, ranks, arguments, forks=forks)
        return found
    switchboard = Switchboard(ranks)
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []
    failed = threading.Event()

    def run(rank: int) -> None:
        transport = ThreadTransport(switchboard, rank, timeout_s)
        try:
            segments = share_segments(transport) if given.shared_memory else None
            with communicator(transport, placed, timeout_s, given, segments) as comm:
                results[rank] = fn(comm, *args)
                comm._ending.close("its function")
        except BaseException as error:
            failures.append(error)
            failed.set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failed.is_set():
            thread.join(0.05)
        thread.join(_GRACE_S if failed.is_set() else None)
    if failures:
        raise next((e for e in failures if not isinstance(e, RingReduceError)), failures[0])
    return results


def _in_process(
    rank: int,
    ranks: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    token: str,
    nodes: NodesArgument,
    timeout_s: float,
    config: Config,
) -> Any:
    """Call a function of `spawn` as a rank that is a process.  `token` is that of the job."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RINGREDUCE_TOKEN": token}
    meet = of_environment(rank, ranks, timeout_s, job)
    with init(rendezvous=meet, nodes=nodes, timeout_s=timeout_s, config=config) as comm:
        result = fn(comm, *args)
        comm._ending.close("its function")
    if rank == 0:
        finish()  # the end of this process calls no exit handlers
    return result
