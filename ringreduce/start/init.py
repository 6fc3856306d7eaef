"""Make a communicator among the processes of a job: `init`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce.calls.arguments import shown
from ringreduce.calls.communicator import Communicator
from ringreduce.calls.ending import Ending, Parts
from ringreduce.config import DEFAULT_TIMEOUT_S, TRANSPORTS, Config, Environment, as_seconds
from ringreduce.devices.cpu import CpuDevice
from ringreduce.errors import MismatchError
from ringreduce.rendezvous import default as default_rendezvous
from ringreduce.rendezvous import find as find_rendezvous
from ringreduce.rendezvous.definition import Rendezvous
from ringreduce.shm.segments import Segments, share_segments
from ringreduce.system import place
from ringreduce.system.topology import Nodes, Topology, parse_nodes
from ringreduce.trace.recorder import RECORDERS
from ringreduce.transports.base import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

NodesArgument = Sequence[int] | Sequence[Sequence[int]] | None


class UnavailableError(Exception):
    """The ranks cannot share memory, although `transport` is "shm".  Raised on all ranks."""


def init(
    mpi_comm: MPI.Intracomm | None = None,
    *,
    rendezvous: Any = None,
    rank: int | None = None,
    size: int | None = None,
    transport: str | None = None,
    nodes: NodesArgument = None,
    timeout_s: float | None = None,
    config: Config | None = None,
) -> Communicator:
    """Return a communicator of all ranks of the job.  Collective.

    The rendezvous ``"env://"`` connects the ranks if torchrun has started the process.  Otherwise
    MPI connects them if an MPI launcher has started it.  Otherwise ``"env://"`` does if RANK or
    WORLD_SIZE is set.  A process that nothing has started is a job of one rank, and needs no MPI.

    Args:
        mpi_comm: the mpi4py communicator to duplicate; None takes ``MPI.COMM_WORLD``, or what
            `elastic` has left of it.
        rendezvous: how the ranks find each other.  They then need no MPI: TCP connects ranks of
            several hosts, or MPI if its launcher has started all of them.
            ``"env://"``: by the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
            ``"file://PATH"``: by a file, which is removed again.  A ``torch.distributed.Store``.
            Or a function that takes the bytes of this rank and returns a list of those of all
            ranks, in rank order.
        rank: the number of this rank, for a rendezvous that does not know it.
        size: the number of ranks, for a rendezvous that does not know it.
        transport: ``"mpi"``: send data in messages of MPI; ``"sockets"``: send them by Unix sockets
            and TCP, also in a job of MPI; ``"shm"``: share memory, which needs all ranks on one
            host; ``"auto"``: share memory if possible.  None reads RINGREDUCE_TRANSPORT, where
            ``mpi`` means sockets without an MPI; without that variable it means ``"auto"``.
        nodes: how many ranks each node has, ``(3, 1, 2)``, or the ranks, ``((0, 2), (1, 3))``.
            None discovers them.
        timeout_s: seconds without progress until a call raises PeerTimeoutError, above 0;
            ``math.inf``: without a limit.  None takes the launcher's timeout, or 600.
        config: the other settings.

    Returns:
        The communicator.  Unless the program closes it, it is closed at the end of the program, or
        by the next `init` over the same MPI communicator after all ranks have dropped it.

    Raises:
        ImportError: MPI is to connect the ranks, and there is no mpi4py, or no MPI.
        RuntimeError: MPI is to connect the ranks, and the program has not initialised it, or has
            finalised it, or has no more communicators: `Communicator.close` frees some.
        TypeError, ValueError: wrong arguments or variables, ``transport="shm"`` for ranks that
            cannot share memory, or a worker process of a rank that would take part in the rank's
            job.
        MismatchError: ranks pass different nodes or settings.
        PeerTimeoutError: a rank does not call `init`, or another host cannot be reached.
        PeerLostError: a rank of a rendezvous has ended meanwhile, or its host refuses connections.

    Example:
        On two ranks, started by ``mpirun -n 2`` or by ``torchrun --nproc-per-node 2``:

        >>> with rr.init() as comm:
        ...     print(comm.all_reduce(np.array([1.0, 2.0]) * (comm.rank + 1)))
        [3. 6.]
    """
    environment = Environment.read()
    wanted = transport
    transport = transport or environment.transport or "auto"
    if transport not in TRANSPORTS:
        raise ValueError(
            f"init: unknown transport {transport!r}; choose 'auto', 'mpi', 'sockets' or 'shm'"
        )
    config = checked("init", config)
    timeout_s = environment.timeout_s if timeout_s is None else timeout_s
    timeout_s = as_seconds("init", DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
    if mpi_comm is not None and rendezvous is not None:
        raise ValueError("init: pass mpi_comm or rendezvous: either connects the ranks")
    if mpi_comm is None and rendezvous is None:
        rendezvous = default_rendezvous()
    if rendezvous is None and (rank is not None or size is not None):
        raise ValueError("init: rank and size belong to a rendezvous; MPI knows both")
    if wanted == "mpi" and rendezvous is not None:
        raise ValueError(
            "init: transport='mpi', but a rendezvous connects the ranks; start them with mpirun"
        )
    shares = transport == "shm" or (transport == "auto" and config.shared_memory is not False)
    config = replace(config, shared_memory=shares)
    given = _Given(transport, nodes, timeout_s, config, environment)
    by_variables = isinstance(rendezvous, str) and rendezvous == "env://"
    _check_not_worker(rendezvous is None or (by_variables and None in (rank, size)))
    if rendezvous is None and mpi_comm is None and wanted != "mpi" and not environment.launched:
        try:
            _import_mpi()
        except ImportError:  # a process that nothing has started needs no other ranks
            return _init_over_sockets(Rendezvous(lambda mine: [mine], 0, 1, True), given)
    if rendezvous is None:
        by_sockets = transport == "sockets"
        return (_init_by_mpi if by_sockets else _init_over_mpi)(mpi_comm, given)
    return _init_over_sockets(find_rendezvous(rendezvous, rank, size, timeout_s), given)


def _check_not_worker(joins: bool) -> None:
    """Mark this process as a rank, or, if it `joins` the job of its rank, raise ValueError."""
    if not place.is_worker():
        place.mark()
    elif joins:
        raise ValueError(
            "init: this process is a worker of a rank, and no rank itself; call init in the rank "
            "alone, and pass to its workers what they need, such as comm.rank.  A worker that "
            "multiprocessing starts runs the script again, up to `if __name__ == '__main__':`.  "
            "Workers make a job of their own with rendezvous=, rank= and size="
        )


@dataclass(frozen=True)
class _Given:
    """The arguments of `init` that do not depend on how the ranks are connected."""

    transport: str
    nodes: NodesArgument
    timeout_s: float
    config: Config
    environment: Environment


def _init_over_mpi(mpi_comm: MPI.Intracomm | None, given: _Given) -> Communicator:
    parent, nodes = _world_of_mpi(mpi_comm, given)
    from ringreduce.start.process_exit import close_at_exit, never_finalize
    from ringreduce.transports.mpi import PARTS, Assembly, MpiTransport

    size = parent.Get_size()
    placed = None if nodes is None else parse_nodes(nodes, size)
    try:
        parts: Any = parent.Get_attr(PARTS) or Parts(parent.Get_rank())
        parent.Set_attr(PARTS, parts)
        mine = np.array(parts.dropped()).tobytes()
        rows = np.frombuffer(Assembly(parent, given.timeout_s).collect(mine), int)
        parts.close_dropped(rows.reshape(size, -1).tolist())
        over = MpiTransport(parent, given.timeout_s, given.config.synchronous_sends)
    except BaseException as error:
        if type(error) is not RuntimeError:  # MPI made no communicator, and all ranks live
            never_finalize()
        raise
    comm = _assemble(over, placed, given, close_at_exit, never_finalize)
    parts.add(comm._ending, comm._runner, range(size))
    return comm


def _world_of_mpi(
    mpi_comm: MPI.Intracomm | None, given: _Given
) -> tuple[MPI.Intracomm, NodesArgument]:
    """Return the communicator of MPI whose ranks are to be connected, and their nodes."""
    module = _import_mpi()
    from ringreduce.start.process_exit import check_size, prepare

    prepare(given.environment)
    if not (mpi_comm is None or isinstance(mpi_comm, module.Intracomm)):
        raise TypeError(
            f"init: mpi_comm is {shown(mpi_comm)}; pass a communicator of mpi4py, "
            "or nothing for all ranks of the job"
        )
    _check_mpi_runs(module)
    check_size(given.environment, module.COMM_WORLD.Get_size())
    from ringreduce.transports.mpi import world

    parent, nodes = world() if mpi_comm is None else mpi_comm, given.nodes
    whole = mpi_comm is None and parent.Get_size() == module.COMM_WORLD.Get_size()
    return parent, given.environment.nodes if nodes is None and whole else nodes


def _init_by_mpi(mpi_comm: MPI.Intracomm | None, given: _Given) -> Communicator:
    """Connect ranks of MPI by sockets: MPI passes their entries alone."""
    parent, nodes = _world_of_mpi(mpi_comm, given)
    from ringreduce.start.process_exit import close_at_exit, never_finalize
    from ringreduce.transports.mpi import Assembly

    def collect(mine: bytes) -> list[bytes]:
        assembly = Assembly(parent, given.timeout_s)
        lengths = np.frombuffer(assembly.collect(np.array(len(mine)).tobytes()), int).tolist()
        found = assembly.collect(mine.ljust(max(lengths), b"\0"))
        begins = range(0, len(found), max(lengths))
        return [bytes(found[at : at + n]) for at, n in zip(begins, lengths, strict=True)]

    rendezvous = Rendezvous(collect, parent.Get_rank(), parent.Get_size())
    given = replace(given, nodes=nodes)
    return _init_over_sockets(rendezvous, given, close_at_exit, never_finalize)


def _init_over_sockets(
    rendezvous: Rendezvous,
    given: _Given,
    adopt: Callable[[Ending], None] | None = None,
    give_up: Callable[[], None] = lambda: None,
) -> Communicator:
    """Connect ranks by sockets.  `give_up` is called if that fails."""
    from ringreduce.start.process_exit import close_without_mpi_at_exit, prepare
    from ringreduce.transports.mesh import SeveralHostsError, Way, connect
    from ringreduce.transports.sockets import SocketTransport

    prepare(given.environment)
    size, nodes, timeout_s = rendezvous.size, given.nodes, given.timeout_s
    if nodes is not None and size is not None:
        parse_nodes(nodes, size)  # before the other ranks hear of this one
    way = Way(
        given.environment,
        place.local_rank(),
        None if given.transport == "sockets" else place.mpi_rank(),
        rendezvous.one_host,
        place.master(),
    )
    try:
        mesh = connect(rendezvous.collect, rendezvous.rank, size, timeout_s, way=way)
    except SeveralHostsError as error:
        members = _among(error.mpi_ranks)
        comm = _init_over_mpi(members, given)
        members.Free()
        return comm
    except BaseException:
        give_up()
        raise
    over = SocketTransport(mesh, timeout_s)

    def release() -> None:
        over.release()
        give_up()

    try:
        placed = None if nodes is None else parse_nodes(nodes, over.size)
    except BaseException:
        release()
        raise
    return _assemble(over, placed, given, adopt or close_without_mpi_at_exit, release)


def _among(mpi_ranks: Sequence[int]) -> MPI.Intracomm:
    """Return an MPI communicator of ranks of MPI_COMM_WORLD, in this order.  Collective."""
    module = _import_mpi()
    _check_mpi_runs(module)
    world: MPI.Intracomm = module.COMM_WORLD
    every = world.Get_group()
    members = every.Incl(mpi_ranks)
    comm = world.Create_group(members)
    members.Free()
    every.Free()
    return comm


def _assemble(
    over: Transport,
    placed: Nodes | None,
    given: _Given,
    adopt: Callable[[Ending], None],
    give_up: Callable[[], None],
) -> Communicator:
    """Return the communicator over a new transport.  `give_up` is called if that fails midway."""
    config, path = given.config, given.environment.trace
    launched = given.environment.expected_size is not None
    if path is not None:
        from ringreduce.trace import traces
    try:
        if path is not None and over.rank == 0 and not (launched or RECORDERS):
            traces.prepare(path)
        flags = over.collect(bytes((bool(config.shared_memory), path is not None)))
        _check_all_share(flags[::2])
        if path is not None:
            rank = place.mpi_rank() if over.name == "mpi" else None
            traces.begin(path, over.rank if rank is None else rank)
        segments = share_segments(over, placed) if config.shared_memory else None
        if given.transport == "shm" and (segments is None or len(over.nodes()) > 1):
            raise UnavailableError
        comm = communicator(over, placed, given.timeout_s, config, segments, adopt)
        if path is not None:
            traces.join(comm, path, all_record=all(flags[1::2]), launched=launched)
        return comm
    except MismatchError:
        over.close()
        raise
    except UnavailableError:
        over.close()
        raise ValueError(
            "init: transport='shm', but these ranks cannot share memory: they have to be on one "
            "host, with Numba; 'ringreduce doctor' says what is missing"
        ) from None
    except BaseException:
        give_up()
        raise


def _check_all_share(shares: bytes) -> None:
    """Raise MismatchError unless all ranks share memory, or none; `shares` has 1 or 0 per rank."""
    if len(set(shares)) > 1:
        ranks = ", ".join(str(rank) for rank, share in enumerate(shares) if share)
        raise MismatchError(
            f"init: these ranks share memory, and the others do not: {ranks}; every rank must "
            "pass the same transport and config"
        )


def _import_mpi() -> ModuleType:
    """Import mpi4py.MPI, which initialises MPI: so the package itself does not import it.

    Raises ImportError, with what to install, where mpi4py or its MPI cannot be loaded.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # Any other RuntimeError is MPI's own: there is an MPI, and it does not start.
        if isinstance(error, ImportError) or "cannot load MPI library" in str(error):
            from ringreduce.supervisor.mpiexec import no_mpi_text

            reason = " ".join(str(error).split())
            raise ImportError(f"init: {no_mpi_text(reason)}") from None
        raise
    return MPI


def _check_mpi_runs(module: Any) -> None:
    if not module.Is_initialized():
        raise RuntimeError(
            "init: MPI is not initialised, because mpi4py.rc.initialize is false; "
            "call MPI.Init_thread() first"
        )
    if module.Is_finalized():
        raise RuntimeError("init: MPI is finalised; a process cannot initialise it again")


def checked(where: str, config: Config | None) -> Config:
    """Return the settings to use.  Raises TypeError if `config` is no Config."""
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise TypeError(f"{where}: config is {shown(config)}; pass a ringreduce.Config(...)")
    return config


def communicator(
    transport: Transport,
    nodes: Nodes | None,
    timeout_s: float,
    config: Config,
    segments: Segments | None,
    adopt: Callable[[Ending], None] | None = None,
) -> Communicator:
    found = transport.nodes() if nodes is None else nodes
    topology = Topology(found, transport.rank)
    return Communicator(transport, topology, CpuDevice(), config, timeout_s, segments, adopt)
