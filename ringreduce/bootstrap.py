"""How a communicator comes into being: over MPI with `init`, among threads with `spawn`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringreduce.calls.arguments import check_timeout
from ringreduce.calls.communicator import Communicator
from ringreduce.config import Config, Environment
from ringreduce.devices.cpu import CpuDevice
from ringreduce.errors import MismatchError, RingReduceError
from ringreduce.shm.segments import Segments, share_segments
from ringreduce.topology import Topology, parse_nodes
from ringreduce.transports.base import Transport
from ringreduce.transports.thread import Switchboard, ThreadTransport

if TYPE_CHECKING:
    from mpi4py import MPI

NodesArgument = Sequence[int] | Sequence[Sequence[int]] | None

DEFAULT_TIMEOUT_S = 600.0
_GRACE_S = 5.0
"""How long `spawn` waits for the other ranks after one has failed."""


class UnavailableError(Exception):
    """The transport that is asked for cannot be had, on any rank."""


def init(
    mpi_comm: MPI.Comm | None = None,
    *,
    transport: str | None = None,
    nodes: NodesArgument = None,
    timeout_s: float | None = None,
    config: Config | None = None,
) -> Communicator:
    """A communicator of all MPI ranks, on duplicates of its own of `mpi_comm`.  Collective.

    Args:
        mpi_comm: the mpi4py communicator to duplicate; None takes ``MPI.COMM_WORLD``.
        transport: ``"mpi"``: messages of MPI; ``"shm"``: ranks of one host exchange data through
            memory that they share; or ``"auto"``: that, where it can be had.  None asks
            RINGREDUCE_TRANSPORT, or else takes ``"auto"``.
        nodes: the ranks of each node, ``(3, 1, 2)``, or which ranks, ``((0, 2), (1, 3))``, in place
            of what is discovered.
        timeout_s: seconds without any progress until a call raises PeerTimeoutError; 600 unless
            the launcher says otherwise.
        config: the other settings.

    Raises ImportError when there is no mpi4py or no MPI, ValueError for wrong arguments,
    MismatchError when ranks pass different nodes or settings.
    """
    environment = Environment.read()
    transport = transport or environment.transport or "auto"
    if transport not in ("auto", "mpi", "shm"):
        raise ValueError(f"init: unknown transport {transport!r}; choose 'auto', 'mpi' or 'shm'")
    timeout_s = environment.timeout_s if timeout_s is None else timeout_s
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    check_timeout("init", timeout_s)
    # Importing mpi4py.MPI initialises MPI, so it is done here and not with the package.
    from mpi4py import MPI

    from ringreduce.process_exit import close_at_exit, never_finalize, prepare
    from ringreduce.transports.mpi import MpiTransport

    prepare(environment, MPI.COMM_WORLD.Get_size())
    if mpi_comm is None and nodes is None:
        nodes = environment.nodes
    if nodes is not None:
        parse_nodes(nodes, (mpi_comm or MPI.COMM_WORLD).Get_size())
    config = config or Config()
    shares = transport == "shm" or (transport == "auto" and config.shared_memory is not False)
    over_mpi = None
    try:
        over_mpi = MpiTransport(mpi_comm, timeout_s, config.synchronous_sends)
        if len(set(over_mpi.collect(bytes((shares,))))) > 1:
            raise MismatchError("init: ranks differ in whether to share memory: transport, config")
        config = replace(config, shared_memory=shares)
        segments = share_segments(over_mpi) if shares else None
        if transport == "shm" and segments is None:
            raise UnavailableError
        comm = _communicator(over_mpi, nodes, timeout_s, config, segments, close_at_exit)
    except MismatchError:
        assert over_mpi is not None
        over_mpi.close()
        raise
    except UnavailableError:
        assert over_mpi is not None
        over_mpi.close()
        raise ValueError(
            "init: transport='shm', but these ranks cannot share memory: they have to be on one "
            "host, with Numba; 'ringreduce doctor' says what is missing"
        ) from None
    except BaseException:
        never_finalize()
        raise
    close_at_exit(comm)
    return comm


def spawn(
    fn: Callable[..., Any],
    ranks: int = 4,
    *args: Any,
    nodes: NodesArgument = None,
    timeout_s: float | None = None,
    config: Config | None = None,
) -> list[Any]:
    """Run ``fn(comm, *args)`` on `ranks` ranks, each a thread of this process; no MPI needed.

    Returns what they returned, in rank order.  When one raises, the others are woken with
    PeerLostError and its exception is raised here.

    >>> rr.spawn(lambda comm: comm.all_reduce(comm.rank + 1).item(), 3)
    [6, 6, 6]
    """
    if ranks < 1:
        raise ValueError(f"spawn: ranks is {ranks}; pass at least 1")
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    check_timeout("spawn", timeout_s)
    if nodes is not None:
        parse_nodes(nodes, ranks)
    given = config or Config()
    switchboard = Switchboard(ranks)
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []
    failed = threading.Event()

    def run(rank: int) -> None:
        transport = ThreadTransport(switchboard, rank, timeout_s)
        try:
            segments = share_segments(transport) if given.shared_memory else None
            with _communicator(transport, nodes, timeout_s, given, segments) as comm:
                results[rank] = fn(comm, *args)
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


def _communicator(
    transport: Transport,
    nodes: NodesArgument,
    timeout_s: float,
    config: Config,
    segments: Segments | None,
    adopt: Callable[[Communicator], None] | None = None,
) -> Communicator:
    found = transport.nodes() if nodes is None else parse_nodes(nodes, transport.size)
    topology = Topology(found, transport.rank)
    return Communicator(transport, topology, CpuDevice(), config, timeout_s, segments, adopt)
