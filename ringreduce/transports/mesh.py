"""Connect the ranks of a communicator with each other: by Unix sockets on a host, else by TCP.

The ranks first exchange their entries: addresses, host, and a random key.  A hash of all entries
and of RINGREDUCE_SECRET is a secret that only these ranks know.  Each pair of ranks then makes a
connection, and both ranks prove that they know it.  Unix addresses are abstract: no file is left
behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ringreduce.config import Environment
from ringreduce.errors import counted
from ringreduce.system.addresses import Address, listen, own_addresses, why
from ringreduce.system.cores import allowed
from ringreduce.system.proc import network
from ringreduce.system.topology import Nodes
from ringreduce.system.unix_sockets import BACKLOG
from ringreduce.transports.handshakes import Handshakes, RankEntry

Collect = Callable[[bytes], Sequence[bytes]]
"""Passes this rank's bytes, of any length, and returns those of all ranks, in rank order."""

_KEY_BYTES = 16


@dataclass(frozen=True)
class Way:
    """How the ranks of a mesh may be connected."""

    environment: Environment = field(default_factory=Environment)
    local_rank: int | None = None
    """Index among the ranks of the host; needed with RINGREDUCE_PORT."""
    mpi_rank: int | None = None
    """The rank in MPI_COMM_WORLD; None if MPI cannot connect this rank, or is not to do so."""
    one_host: bool = False
    """Whether all ranks are known to be on this host."""
    master: str = ""
    """A host to which the address comes first from which this host sends."""


@dataclass(frozen=True)
class SocketMesh:
    rank: int
    streams: Sequence[socket.socket | None]
    """By rank; None for this rank itself."""
    cores: int
    """Number of cores that the ranks of this host together may use."""
    nodes: Nodes
    """The ranks of each host, in order of their lowest rank."""
    way: Way = field(default_factory=Way)


class SeveralHostsError(Exception):
    """The ranks are on several hosts, and MPI can connect them.  Raised on all ranks.

    `mpi_ranks`: their ranks in MPI_COMM_WORLD.
    """

    def __init__(self, mpi_ranks: Sequence[int]) -> None:
        super().__init__("ranks on several hosts")
        self.mpi_ranks = mpi_ranks


def connect(
    collect: Collect,
    rank: int | None,
    size: int | None,
    timeout_s: float,
    where: str = "init",
    way: Way | None = None,
) -> SocketMesh:
    """Connect this rank with all others.  Collective.

    `collect` exchanges bytes once among the ranks.  If `rank` is None, it is the place of this
    rank's bytes in what `collect` returns; if `size` is None, it is the number of these.  After
    `timeout_s` seconds, for the connections alone, this rank gives up.

    Raises SeveralHostsError if MPI connects these ranks; ValueError if `collect` does not return
    one entry of each rank, or a variable is wrong; PeerLostError if a rank has ended or refuses;
    PeerTimeoutError if a rank does not connect or cannot be reached.
    """
    way = Way() if way is None else way
    with contextlib.ExitStack() as closing:
        key = secrets.token_hex(_KEY_BYTES)
        port, addresses, listening = 0, list[Address](), []
        if not way.one_host:
            addresses = own_addresses(way.master, way.environment.interface)
            with contextlib.suppress(OSError):  # this rank can still connect to others of its host
                listening.append(closing.enter_context(_listen(way)))
                port = listening[0].getsockname()[1]
        here = socket.gethostname(), network(), _cores(), allowed()
        mine = RankEntry(key, *here, way.mpi_rank, _mark(key, way), port, addresses)
        by_unix = closing.enter_context(socket.socket(socket.AF_UNIX))
        by_unix.bind(mine.unix_address)
        by_unix.listen(BACKLOG)
        packed = mine.pack()
        entries = _checked(collect(packed), packed, rank, size, where)
        rank = entries.index(packed)
        ranks = [_unpacked(entry, each, where) for each, entry in enumerate(entries)]
        nodes = _nodes(ranks)
        of_mpi = {each.mpi_rank for each in ranks} - {None}
        if len(nodes) > 1 and len(of_mpi) == len(ranks):
            raise SeveralHostsError([each.mpi_rank for each in ranks if each.mpi_rank is not None])
        _check_secrets(ranks, way, where)
        handshakes = Handshakes(rank, ranks, _secret(entries, way), timeout_s, where)
        try:
            handshakes.run([by_unix, *(listening if len(nodes) > 1 else ())])
        except BaseException:
            handshakes.close()
            raise
        near = [ranks[each] for node in nodes if rank in node for each in node]
        own = len({core for each in near for core in each.cores})
        cores = min(own, *(each.quota for each in near))
        return SocketMesh(rank, handshakes.streams, cores, nodes, way)


def _listen(way: Way) -> socket.socket:
    """Listen for ranks of other hosts.

    Raises OSError if this host has no TCP; ValueError if the port of RINGREDUCE_PORT is taken.
    """
    if way.environment.port is None:
        return listen([0])
    if way.local_rank is None:
        raise ValueError(
            "init: with RINGREDUCE_PORT a rank has to know its number on its host; set LOCAL_RANK"
        )
    port = way.environment.port + 1 + way.local_rank
    try:
        return listen([port])
    except OSError as error:
        raise ValueError(
            f"init: RINGREDUCE_PORT is {way.environment.port}, so local rank {way.local_rank} "
            f"listens at port {port}: {why(error)}; leave so many ports free above it"
        ) from None


def _nodes(ranks: Sequence[RankEntry]) -> Nodes:
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        hosts.setdefault(each.machine, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def _checked(
    entries: Sequence[bytes], mine: bytes, rank: int | None, size: int | None, where: str
) -> list[bytes]:
    wanted = f"{where}: the rendezvous must return the bytes of each rank, in rank order"
    try:
        found = [bytes(memoryview(entry)) for entry in entries]
    except TypeError:
        raise ValueError(f"{wanted}; it returned {entries!r}") from None
    if found.count(mine) != 1:
        raise ValueError(f"{wanted}; it returned this rank's bytes {found.count(mine)} times")
    if size is not None and len(found) != size:
        elements = counted(len(found), "element")
        raise ValueError(f"{wanted}; it returned {elements} for {counted(size, 'rank')}")
    if rank is not None and found.index(mine) != rank:
        raise ValueError(f"{wanted}; the bytes of rank {rank} have index {found.index(mine)}")
    return found


def _unpacked(entry: bytes, rank: int, where: str) -> RankEntry:
    try:
        return RankEntry.unpack(entry)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: the rendezvous returned other bytes for rank {rank} than ranks pass; do all "
            "ranks have the same version of ringreduce?"
        ) from None


def _check_secrets(ranks: Sequence[RankEntry], way: Way, where: str) -> None:
    others = [rank for rank, each in enumerate(ranks) if each.mark != _mark(each.key, way)]
    if others:
        raise ValueError(
            f"{where}: these ranks have another RINGREDUCE_SECRET than this rank: "
            f"{', '.join(map(str, others))}; pass all ranks the same"
        )


def _mark(key: str, way: Way) -> str:
    return blake2b(key.encode(), key=way.environment.secret_key, digest_size=16).hexdigest()


def _secret(entries: Sequence[bytes], way: Way) -> bytes:
    secret = blake2b(key=way.environment.secret_key)
    for entry in entries:
        secret.update(len(entry).to_bytes(8, "little") + entry)
    return secret.digest()


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))
