"""Connect a rank with all others, whose entries it knows: each pair of ranks proves who it is."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from hashlib import blake2b
from hmac import compare_digest

from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.system import unix_sockets
from ringreduce.system.addresses import Address, family_of, prepare
from ringreduce.system.unix_sockets import LONGEST_WAIT_S, peer_process
from ringreduce.transports.base import not_assembled
from ringreduce.transports.conversations import (
    CONNECT_S,
    TIMED_OUT,
    Conversation,
    Conversations,
    StrangerError,
)

_PROOF_BYTES = 32
GREETING = struct.Struct(f"<I{_PROOF_BYTES}s")
"""The number and the proof of the rank that connects."""
_ATTEMPTS = 3
"""How often a rank tries an address: packets may be lost."""


@dataclass(frozen=True)
class RankEntry:
    """The data that a rank publishes before the ranks connect."""

    key: str
    """Random, so that no two ranks have the same entry."""
    host: str
    machine: str
    """The boot and the network namespace: equal exactly on ranks that Unix sockets can connect."""
    cores: Sequence[int]
    """The cores that the rank may use."""
    quota: int
    """How many cores the rank's quota allows."""
    mpi_rank: int | None
    """The rank in MPI_COMM_WORLD; None if MPI cannot connect the rank, or is not to do so."""
    mark: str
    """A hash of `key` and RINGREDUCE_SECRET, by which ranks notice that they have other secrets."""
    port: int
    """Where the rank listens for ranks of other hosts."""
    addresses: Sequence[Address]
    """The addresses of the rank's host, in the order in which other hosts try them."""

    @property
    def unix_address(self) -> bytes:
        return f"\0ringreduce-{self.key}".encode()

    def pack(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    @classmethod
    def unpack(cls, entry: bytes) -> RankEntry:
        """Raises ValueError if the bytes are no entry."""
        fields = json.loads(entry)
        match fields:
            case [str(), str(), str(), [*cores], int(), int() | None, str(), int(), [*places]]:
                numbers = all(isinstance(core, int) for core in cores)
                pairs = [(name, text) for name, text in places]
                if numbers and all(isinstance(word, str) for pair in pairs for word in pair):
                    fields[-1] = [Address(*pair) for pair in pairs]
                    return cls(*fields)
        raise ValueError("no entry of a rank")


@dataclass
class _Search:
    """The way to a rank of another host."""

    untried: list[Address]
    """Addresses to try, in this order."""
    problems: dict[Address, str] = field(default_factory=dict)
    """Why an address does not lead to the rank."""
    open: set[socket.socket] = field(default_factory=set)
    """Connections that may lead to the rank."""
    next_at: float = 0.0
    """When the next address is tried, though an earlier one may still answer."""


class Handshakes:
    """The connections of a rank while they are made.

    A rank connects to all lower ranks, and is connected to by all higher ones: by a Unix socket on
    its own host, by TCP on another.  It does all of this at the same time, so no ranks wait in a
    circle.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[RankEntry],
        secret: bytes,
        timeout_s: float,
        where: str,
    ) -> None:
        self.streams: list[socket.socket | None] = [None] * len(ranks)
        self._rank, self._ranks, self._secret = rank, ranks, secret
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._where = where
        self._missing = set(range(len(ranks))) - {rank}
        self._searches: dict[int, _Search] = {}
        """By lower rank of another host: what is known of the way to it."""
        self._conversations = Conversations()

    def run(self, listening: Iterable[socket.socket]) -> None:
        """Raises PeerLostError if a rank has ended, PeerTimeoutError if it is missing."""
        try:
            for each in listening:
                self._conversations.serve(each, self._hear)
            for peer in range(self._rank):
                self._call(peer)
            while self._missing:
                self._conversations.step(min(self._seconds_left(), CONNECT_S / 10))
                for peer, search in list(self._searches.items()):
                    if search.untried and search.next_at <= time.monotonic():
                        self._try_next(peer)
        finally:
            self._conversations.close()

    def close(self) -> None:
        for stream in self.streams:
            if stream is not None:
                stream.close()

    def _proof(self, sender: int, receiver: int) -> bytes:
        """Return the bytes by which `sender` proves to `receiver` that it knows the secret."""
        names = f"{sender} {receiver}".encode()
        return blake2b(names, key=self._secret, digest_size=_PROOF_BYTES).digest()

    def _hear(self, connection: socket.socket) -> Conversation:
        """Talk with a process that has connected, which may be a higher rank."""
        if connection.family == socket.AF_UNIX:
            if peer_process(connection) is None:
                raise StrangerError("it belongs to another user")
        else:
            prepare(connection)
        number, proof = GREETING.unpack((yield GREETING.size))
        proofs = (self._proof(number, rank) for rank in range(len(self._ranks)))
        if number <= self._rank or not compare_digest(proof, self._proof(number, self._rank)):
            seeks_another = any(compare_digest(proof, each) for each in proofs)
            # The address of another host may lead here, too.
            raise StrangerError("" if seeks_another else "it is no rank of this job")
        if number not in self._missing:
            raise StrangerError("")  # it has connected by another address
        connection.sendall(self._proof(self._rank, number))
        return self._adopt(number, connection)

    def _greet(self, peer: int, connection: socket.socket) -> Conversation:
        """Talk with the process to which this rank has connected, which may be `peer`."""
        connection.sendall(GREETING.pack(self._rank, self._proof(self._rank, peer)))
        if not compare_digest((yield _PROOF_BYTES), self._proof(peer, self._rank)):
            raise StrangerError("another process answers")
        if peer in self._searches:
            for other in self._searches.pop(peer).open - {connection}:
                self._conversations.end(other)
        return self._adopt(peer, connection)

    def _adopt(self, peer: int, connection: socket.socket) -> Callable[[], None]:
        self.streams[peer] = connection
        self._missing.remove(peer)
        return partial(self._lose, peer)

    def _lose(self, peer: int, _: str = "") -> None:
        text = f"{self._where}: rank {peer} has ended before all ranks were connected"
        raise PeerLostError(text, (peer,))

    def _call(self, peer: int) -> None:
        """Begin to connect to a lower rank, which listens since before the exchange of entries."""
        entry = self._ranks[peer]
        if entry.machine != self._ranks[self._rank].machine:
            self._searches[peer] = _Search([*entry.addresses] * _ATTEMPTS)
            self._try_next(peer)
            return
        connection = socket.socket(socket.AF_UNIX)
        try:
            unix_sockets.connect(connection, entry.unix_address, self._deadline)
        except TimeoutError:
            connection.close()
            raise self._timeout_error([peer]) from None
        except OSError:
            connection.close()
            self._lose(peer)
        self._conversations.begin(
            *(connection, self._greet(peer, connection)),
            *(LONGEST_WAIT_S, partial(self._lose, peer)),
        )

    def _try_next(self, peer: int) -> None:
        """Connect to the next address of a lower rank, unless an earlier one may still answer.

        Raises PeerLostError or PeerTimeoutError if there is none.
        """
        search = self._searches[peer]
        if not search.untried:
            if not search.open:
                raise self._unreachable(peer, search)
            return
        address = search.untried.pop(0)
        connection = socket.socket(family_of(address.address))
        prepare(connection)
        search.open.add(connection)
        search.next_at = time.monotonic() + CONNECT_S
        self._conversations.begin(
            *(connection, self._greet(peer, connection), LONGEST_WAIT_S),
            partial(self._fail, peer, address, connection),
            (address.address, self._ranks[peer].port),
        )

    def _fail(self, peer: int, address: Address, connection: socket.socket, reason: str) -> None:
        search = self._searches[peer]
        search.open.discard(connection)
        search.problems[address] = reason
        self._try_next(peer)

    def _unreachable(self, peer: int, search: _Search) -> PeerLostError | PeerTimeoutError:
        entry = self._ranks[peer]
        found = "; ".join(
            f"{address} port {entry.port} ({interface}): {reason}"
            for (interface, address), reason in search.problems.items()
        )
        text = (
            f"{self._where}: rank {self._rank} cannot connect to rank {peer} on {entry.host} at "
            f"{found or 'any address: no interface is up there'}; is the rank there, and does no "
            "firewall close the port?  RINGREDUCE_INTERFACE and RINGREDUCE_PORT choose others"
        )
        timed_out = TIMED_OUT in search.problems.values()
        return (PeerTimeoutError if timed_out else PeerLostError)(text, (peer,))

    def _timeout_error(self, peers: Iterable[int]) -> PeerTimeoutError:
        return not_assembled(self._timeout_s, sorted(peers), self._where)

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._timeout_error(self._missing)
        return left
