"""Connect the ranks of one host with each other by Unix sockets.

The ranks first exchange their entries: address, host, and a random key.  A hash of all entries is a
secret that only these ranks know.  Each pair of ranks then makes a connection, and both ranks prove
that they know the secret.  The addresses are abstract: no file is left behind.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

from ringreduce.errors import PeerLostError, PeerTimeoutError, counted
from ringreduce.system import unix_sockets
from ringreduce.system.cores import allowed
from ringreduce.system.place import mpi_rank
from ringreduce.system.proc import network
from ringreduce.system.unix_sockets import BACKLOG, LONGEST_WAIT_S, peer_process
from ringreduce.transports.base import not_assembled

Collect = Callable[[bytes], Sequence[bytes]]
"""Passes this rank's bytes, of any length, and returns those of all ranks, in rank order."""

_KEY_BYTES = 16
_PROOF_BYTES = 32
_GREETING = struct.Struct(f"<I{_PROOF_BYTES}s")
"""The number and the proof of the rank that connects."""
_GREETING_S = 5.0
"""Seconds that a process of this user may take to send its greeting."""


@dataclass(frozen=True)
class SocketMesh:
    rank: int
    streams: Sequence[socket.socket | None]
    """By rank; None for this rank itself."""
    cores: int
    """Number of cores that the ranks together may use."""


@dataclass(frozen=True)
class _Entry:
    """The data that a rank publishes before the ranks connect."""

    key: str
    """Random, so that no two ranks have the same entry."""
    host: str
    machine: str
    """The boot and the network namespace: equal exactly on ranks that can connect."""
    cores: Sequence[int]
    """The cores that the rank may use."""
    quota: int
    """How many cores the rank's quota allows."""
    mpi_rank: int | None
    """The rank in MPI_COMM_WORLD; None if no launcher of an MPI has started the process."""

    @property
    def address(self) -> bytes:
        return f"\0ringreduce-{self.key}".encode()

    def pack(self) -> bytes:
        entry = [self.key, self.host, self.machine, list(self.cores), self.quota, self.mpi_rank]
        return json.dumps(entry).encode()

    @classmethod
    def unpack(cls, entry: bytes) -> _Entry:
        match json.loads(entry):
            case [str(), str(), str(), [*cores], int(), int() | None] as fields if all(
                isinstance(core, int) for core in cores
            ):
                return cls(*fields)
        raise ValueError("no entry of a rank")


class SeveralHostsError(ValueError):
    """The ranks are on several hosts, so they cannot connect.  Raised on all ranks.

    `mpi_ranks`: their ranks in MPI_COMM_WORLD; None if no MPI launcher has started all of them.
    """

    def __init__(self, text: str, mpi_ranks: Sequence[int] | None) -> None:
        super().__init__(text)
        self.mpi_ranks = mpi_ranks


def connect(
    collect: Collect, rank: int | None, size: int | None, timeout_s: float, where: str = "init"
) -> SocketMesh:
    """Connect this rank with all others.  Collective.

    `collect` exchanges bytes once among the ranks.  If `rank` is None, it is the place of this
    rank's bytes in what `collect` returns; if `size` is None, it is the number of these.  After
    `timeout_s` seconds, for the connections alone, this rank gives up.

    Raises SeveralHostsError; ValueError if `collect` does not return one entry of each rank;
    PeerLostError if a rank has ended; PeerTimeoutError if a rank does not connect.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        key = secrets.token_hex(_KEY_BYTES)
        mine = _Entry(key, socket.gethostname(), network(), _cores(), allowed(), mpi_rank())
        listening.bind(mine.address)
        listening.listen(BACKLOG)
        packed = mine.pack()
        entries = _checked(collect(packed), packed, rank, size, where)
        rank = entries.index(packed)
        ranks = [_unpacked(entry, each, where) for each, entry in enumerate(entries)]
        _check_one_host(ranks, where)
        handshakes = _Handshakes(listening, rank, ranks, _secret(entries), timeout_s, where)
        try:
            handshakes.run()
        except BaseException:
            handshakes.close()
            raise
        own = len({core for each in ranks for core in each.cores})
        return SocketMesh(rank, handshakes.streams, min(own, *(each.quota for each in ranks)))


class _Handshakes:
    def __init__(
        self,
        listening: socket.socket,
        rank: int,
        ranks: Sequence[_Entry],
        secret: bytes,
        timeout_s: float,
        where: str,
    ) -> None:
        self.streams: list[socket.socket | None] = [None] * len(ranks)
        self._listening, self._rank, self._ranks, self._secret = listening, rank, ranks, secret
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._where = where

    def run(self) -> None:
        """Connect to the lower ranks, accept the higher ones, then receive the lower ones' proofs.

        Each rank greets all lower ranks before it waits for any rank: so no ranks wait in a circle.
        """
        for peer in range(self._rank):
            self.streams[peer] = self._connect_to(peer)
        missing = set(range(self._rank + 1, len(self._ranks)))
        while missing:
            accepted = self._accept(missing)
            if accepted is not None:
                missing.remove(accepted)
        for peer in range(self._rank):
            stream = self.streams[peer]
            assert stream is not None
            if not compare_digest(self._receive(stream, _PROOF_BYTES, peer), self._proof(peer)):
                raise self._lost_error(peer)
        for stream in self.streams:
            if stream is not None:
                stream.setblocking(False)

    def close(self) -> None:
        for stream in self.streams:
            if stream is not None:
                stream.close()

    def _proof(self, sender: int) -> bytes:
        """Return the bytes with which `sender` proves that it knows the secret."""
        return blake2b(str(sender).encode(), key=self._secret, digest_size=_PROOF_BYTES).digest()

    def _connect_to(self, peer: int) -> socket.socket:
        """Connect to a rank, which listens since before the exchange, and send the greeting."""
        stream = socket.socket(socket.AF_UNIX)
        try:
            unix_sockets.connect(stream, self._ranks[peer].address, self._deadline, awaits=False)
            stream.sendall(_GREETING.pack(self._rank, self._proof(self._rank)))
        except TimeoutError:
            stream.close()
            raise self._timeout_error([peer]) from None
        except OSError:
            stream.close()
            raise self._lost_error(peer) from None
        return stream

    def _accept(self, missing: set[int]) -> int | None:
        """Accept a connection; return the rank of `missing` that made it, None if it is none."""
        self._listening.settimeout(self._seconds_left(missing))
        try:
            stream, _ = self._listening.accept()
        except TimeoutError:
            raise self._timeout_error(missing) from None
        peer: int | None = None
        try:
            if peer_process(stream) is not None:
                stream.settimeout(_GREETING_S)
                number, proof = _GREETING.unpack(_received(stream, _GREETING.size))
                if number in missing and compare_digest(proof, self._proof(number)):
                    stream.sendall(self._proof(self._rank))
                    self.streams[number] = stream
                    peer = number
        except OSError:  # no rank, or a rank that has ended: the deadline finds that it is missing
            pass
        if peer is None:
            stream.close()
        return peer

    def _receive(self, stream: socket.socket, nbytes: int, peer: int) -> bytes:
        stream.settimeout(self._seconds_left({peer}))
        try:
            return _received(stream, nbytes)
        except TimeoutError:
            raise self._timeout_error([peer]) from None
        except OSError:
            raise self._lost_error(peer) from None

    def _timeout_error(self, peers: Iterable[int]) -> PeerTimeoutError:
        return not_assembled(self._timeout_s, sorted(peers), self._where)

    def _lost_error(self, peer: int) -> PeerLostError:
        text = f"{self._where}: rank {peer} has ended before all ranks were connected"
        return PeerLostError(text, (peer,))

    def _seconds_left(self, missing: set[int]) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._timeout_error(missing)
        return min(left, LONGEST_WAIT_S)


def _received(stream: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        part = stream.recv(nbytes - len(received))
        if not part:
            raise ConnectionResetError
        received += part
    return bytes(received)


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


def _unpacked(entry: bytes, rank: int, where: str) -> _Entry:
    try:
        return _Entry.unpack(entry)
    except ValueError:
        raise ValueError(
            f"{where}: the rendezvous returned other bytes for rank {rank} than ranks pass; do all "
            "ranks have the same version of ringreduce?"
        ) from None


def _check_one_host(ranks: Sequence[_Entry], where: str) -> None:
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        hosts.setdefault(each.machine, []).append(rank)
    if len(hosts) > 1:
        found = "; ".join(
            f"{', '.join(map(str, members))} on {ranks[members[0]].host}"
            for members in hosts.values()
        )
        of_mpi = [each.mpi_rank for each in ranks if each.mpi_rank is not None]
        raise SeveralHostsError(
            f"{where}: the ranks are on {len(hosts)} hosts: {found}.  Without MPI all ranks have "
            "to be on one; start these with mpirun or srun, and let MPI connect them",
            of_mpi if len(set(of_mpi)) == len(ranks) else None,
        )


def _secret(entries: Sequence[bytes]) -> bytes:
    secret = blake2b()
    for entry in entries:
        secret.update(len(entry).to_bytes(8, "little") + entry)
    return secret.digest()


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))
