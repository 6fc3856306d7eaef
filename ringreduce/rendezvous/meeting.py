"""The meeting of a job's ranks: rank 0 receives the bytes of all ranks, and sends them to each.

Rank 0 listens, at a Unix address and by TCP.  It serves all who connect at the same time.  A rank
and rank 0 first prove to each other that they know RINGREDUCE_SECRET.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.system.addresses import listen, prepare, why
from ringreduce.system.unix_sockets import BACKLOG, LONGEST_WAIT_S, peer_process
from ringreduce.transports.base import not_assembled
from ringreduce.transports.conversations import (
    CONNECT_S,
    TALK_S,
    TIMED_OUT,
    Conversation,
    Conversations,
    StrangerError,
)

_LINE_BYTES = 1 << 20
"""The longest line of a rank.  The answer of rank 0 has at most as much for each rank."""
_MAGIC = b"ringreduce 1"
_NUMBER_BYTES, _NONCE_BYTES, _PROOF_BYTES = 16, 16, 32
_HELLO = struct.Struct(f"<{len(_MAGIC)}s{_NUMBER_BYTES}s{_NONCE_BYTES}s")
"""The first bytes of a rank: the number of its job, and random bytes."""
_REPLY = struct.Struct(f"<{len(_MAGIC)}s{_NUMBER_BYTES}s{_NONCE_BYTES}s{_PROOF_BYTES}s")
"""The first bytes of rank 0: the number of its job, random bytes, and its proof."""
_OF_RANK_0, _OF_ANOTHER = b"0", b"1"
"""Whose proof it is: neither can pass on what the other has sent."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25
"""Seconds between two attempts to find rank 0."""


@dataclass(frozen=True)
class Meeting:
    number: bytes
    """The number of the job, a hash; all ranks have the same."""
    secret: bytes
    """A key for hashes; empty if the job has no secret."""
    unix_address: bytes
    master: str
    """The host of rank 0, for ranks on other hosts; "": all ranks are on this host."""
    ports: Sequence[int]
    """Rank 0 listens at the first that is free."""
    timeout_s: float

    def serve(self, size: int, mine: bytes) -> list[bytes]:
        """As rank 0: receive the bytes of the other ranks, and send those of all ranks to each.

        Raises ValueError if another rank 0 listens, or a rank complains.
        """
        service = _Service(self, size, mine)
        with ExitStack() as closing:
            closing.callback(service.close)
            service.conversations.serve(closing.enter_context(self._unix()), service.hear)
            if self.master:
                service.conversations.serve(closing.enter_context(self._tcp()), service.hear)
            return service.run()

    def _unix(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(self.unix_address)
        except OSError:
            listening.close()
            raise ValueError(
                "init: another process is rank 0 of this MASTER_ADDR and MASTER_PORT; give each "
                "job its own port, and each rank its own RANK"
            ) from None
        listening.listen(BACKLOG)
        return listening

    def _tcp(self) -> socket.socket:
        try:
            return listen(self.ports)
        except OSError as error:
            name = "RINGREDUCE_PORT is" if len(self.ports) == 1 else "rank 0 may listen at"
            raise ValueError(
                f"init: {name} {self._ports_text}: {why(error)}; set RINGREDUCE_PORT to a free "
                "port, on all ranks"
            ) from None

    @property
    def _ports_text(self) -> str:
        first, last = self.ports[0], self.ports[-1]
        return f"{first}" if first == last else f"{first} to {last}"

    def ask(self, rank: int, size: int, mine: bytes) -> list[bytes]:
        """As another rank: send this rank's bytes to rank 0, and receive those of all ranks.

        Raises ValueError if rank 0 refuses this rank; PeerLostError if rank 0 has ended.
        """
        deadline = time.monotonic() + self.timeout_s
        with self._find(deadline) as connection, connection.makefile("rb") as answers:
            line = json.dumps({"rank": rank, "size": size, "entry": mine.hex()}).encode()
            try:
                # Rank 0 gives up after `timeout_s`, too, and then says who is missing.
                left = max(deadline - time.monotonic(), 0.0) + TALK_S
                connection.settimeout(min(left, LONGEST_WAIT_S))
                connection.sendall(line + b"\n")
                text = answers.readline(_LINE_BYTES * size)
            except TimeoutError:
                raise not_assembled(self.timeout_s, [0]) from None
            except OSError:
                text = b""
        if not text:
            raise PeerLostError("init: rank 0 has ended before the rendezvous was complete", (0,))
        answer = json.loads(text)
        match answer:
            case {"entries": [*entries]}:
                return [bytes.fromhex(entry) for entry in entries]
            case {"missing": [*missing]}:
                raise not_assembled(self.timeout_s, missing)
            case {"complaint": str(complaint)}:
                raise ValueError(complaint)
        raise ValueError(f"init: rank 0 answered {answer!r}; do all ranks have the same version?")

    def _find(self, deadline: float) -> socket.socket:
        """Return a connection with rank 0, after both have proven that they know the secret."""
        pause_s = _FIRST_PAUSE_S
        while True:
            problem, silent = "", set[str]()
            try:
                for family, host, where in self._places():
                    if host not in silent:  # else it answers at no port
                        left = min(deadline - time.monotonic(), CONNECT_S)
                        connection, problem = self._try(family, where, max(left, 0.001))
                        if connection is not None:
                            return connection
                        if problem == TIMED_OUT:
                            silent.add(host)
            except OSError as error:  # the name of the host is not known, or not yet
                problem = str(error)
            if time.monotonic() >= deadline:
                late = not_assembled(self.timeout_s, [0])
                tried = f": {self.master}, ports {self._ports_text}: {problem}"
                raise PeerTimeoutError(f"{late}{tried if self.master else ''}", late.ranks)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try(self, family: int, where: Any, seconds: float) -> tuple[socket.socket | None, str]:
        """Return a connection with rank 0; or None, and why it is not there."""
        with ExitStack() as closing:
            connection = closing.enter_context(socket.socket(family))
            connection.settimeout(seconds)
            number = connection.connect_ex(where)
            if number == errno.EAGAIN:  # also if a Unix socket keeps no more waiting
                return None, TIMED_OUT
            try:
                if number:
                    raise OSError(number, os.strerror(number))
                self._greet(connection)
            except TimeoutError:
                return None, "another program listens"
            except (OSError, StrangerError) as error:
                return None, str(error)
            closing.pop_all()
            return connection, ""

    def _places(self) -> Iterator[tuple[int, str, Any]]:
        """Yield the family, the host and the address of each place where rank 0 may listen."""
        yield socket.AF_UNIX, "", self.unix_address
        if self.master:
            found = socket.getaddrinfo(self.master, None, type=socket.SOCK_STREAM)
            for family, *_, (host, *_) in found:
                for port in self.ports:
                    yield family, str(host), (host, port)

    def _greet(self, connection: socket.socket) -> None:
        """Exchange proofs with rank 0.  Raises ValueError if it has another secret."""
        if connection.family != socket.AF_UNIX:
            prepare(connection)
        elif peer_process(connection) is None:
            raise ValueError("init: a process of another user listens in place of rank 0")
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_HELLO.pack(_MAGIC, self.number, mine))
        magic, number, theirs, proof = _REPLY.unpack(_received(connection, _REPLY.size))
        if magic != _MAGIC or number != self.number:
            raise StrangerError("another program or another job listens")
        if not compare_digest(proof, self._proof(_OF_RANK_0, mine, theirs)):
            raise ValueError(
                "init: rank 0 has another RINGREDUCE_SECRET than this rank; pass all ranks the same"
            )
        connection.sendall(self._proof(_OF_ANOTHER, theirs, mine))

    def _proof(self, whose: bytes, asked: bytes, added: bytes) -> bytes:
        """Return the bytes that prove knowledge of the secret to the process that `asked`."""
        said = whose + asked + added + self.number
        return blake2b(said, key=self.secret, digest_size=_PROOF_BYTES).digest()


class _Service:
    """What rank 0 has heard of the ranks so far."""

    def __init__(self, meeting: Meeting, size: int, mine: bytes) -> None:
        self.conversations = Conversations()
        self._meeting, self._size = meeting, size
        self._entries: dict[int, bytes] = {0: mine}
        self._waiting: list[socket.socket] = []
        self._complaint = ""

    def run(self) -> list[bytes]:
        timeout_s = self._meeting.timeout_s
        deadline = time.monotonic() + timeout_s
        while len(self._entries) < self._size and not self._complaint:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = sorted(set(range(self._size)) - set(self._entries))
                self._answer({"missing": missing})
                raise not_assembled(timeout_s, missing)
            self.conversations.step(min(left, LONGEST_WAIT_S))
        if self._complaint:
            self._answer({"complaint": self._complaint})
            raise ValueError(self._complaint)
        everybody = [self._entries[rank] for rank in range(self._size)]
        self._answer({"entries": [entry.hex() for entry in everybody]})
        return everybody

    def hear(self, connection: socket.socket) -> Conversation:
        """Talk with a process that has connected, which may be a rank of the job."""
        meeting = self._meeting
        if connection.family != socket.AF_UNIX:
            prepare(connection)
        elif peer_process(connection) is None:
            raise StrangerError("it belongs to another user")
        magic, number, theirs = _HELLO.unpack((yield _HELLO.size))
        if magic != _MAGIC:
            raise StrangerError("it is no rank")
        mine = secrets.token_bytes(_NONCE_BYTES)
        proof = meeting._proof(_OF_RANK_0, theirs, mine)
        connection.sendall(_REPLY.pack(_MAGIC, meeting.number, mine, proof))
        if number != meeting.number:
            raise StrangerError("")  # a rank of another job looks for its rank 0
        if not compare_digest((yield _PROOF_BYTES), meeting._proof(_OF_ANOTHER, mine, theirs)):
            raise StrangerError("it does not know RINGREDUCE_SECRET")
        line = _parsed((yield -_LINE_BYTES))
        self._complaint = _complaint(line, self._entries, self._size)
        self._entries.setdefault(line["rank"], bytes.fromhex(line["entry"]))
        self._waiting.append(connection)
        return None

    def _answer(self, answer: Mapping[str, Any]) -> None:
        line = json.dumps(answer).encode() + b"\n"
        for connection in self._waiting:
            try:
                connection.settimeout(TALK_S)
                connection.sendall(line)
            except OSError:  # the rank has ended: those who connect to it notice
                continue

    def close(self) -> None:
        self.conversations.close()
        for connection in self._waiting:
            connection.close()


def _parsed(text: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        match json.loads(text):
            case {"rank": int(), "size": int(), "entry": str(entry)} as line:
                bytes.fromhex(entry)
                return dict(line)
    raise StrangerError("its line is not that of a rank; do all have the same version?")


def _complaint(line: Mapping[str, Any], entries: Mapping[int, bytes], size: int) -> str:
    """Return the text of an error in the line of a rank; "" if the line is right."""
    rank = line["rank"]
    if line["size"] != size:
        return f"init: WORLD_SIZE is {size} on rank 0, and {line['size']} on rank {rank}"
    if rank in entries:
        return f"init: two processes have RANK {rank}"
    if not 0 <= rank < size:
        return f"init: RANK is {rank} on a rank of {size}; ranks count from 0"
    return ""


def _received(connection: socket.socket, nbytes: int) -> bytes:
    """Receive so many bytes.  Raises OSError if the connection ends before."""
    found = bytearray()
    while len(found) < nbytes:
        part = connection.recv(nbytes - len(found))
        if not part:
            raise ConnectionResetError("it has closed the connection")
        found += part
    return bytes(found)
