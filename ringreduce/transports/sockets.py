"""Messages between processes of one host by Unix sockets: no MPI is needed.

Each pair of ranks has one connection, a stream of bytes in both directions.  A message is a
*frame*: a header with its kind, flow and length, and then its bytes.  A message that arrives before
its receive is kept.  The kernel ends the connections of a process that ends, however it ends: a
connection that ends without a farewell means that its rank is lost.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import select
import socket
import struct
import time
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

from ringreduce.transports.base import lost, not_assembled
from ringreduce.transports.mesh import Mesh, connect

_HEADER = struct.Struct("<BIQ")
"""Kind, flow, and the number of bytes that follow."""
_DESCRIPTOR_BYTES = array("i", [0]).itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
_PART_BYTES = 1 << 20
"""A message without a receive is kept in parts of this size: its memory grows with what arrives."""
_FRAMES_AT_ONCE = 64
"""Frames to read from a connection before the others have their turn."""
_PARTS_AT_ONCE = 16
"""Parts of frames to write by one call of the kernel."""
_SELECTABLE = 1024
"""``FD_SETSIZE``: select takes descriptors below it."""
_YIELDS = 200
"""Idle polls after each of which a rank only yields the core; after later polls it sleeps."""
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 5e-5, 1e-3
"""Seconds; a frame that arrives ends the sleep."""
_SPINS = 200
"""Idle polls without a pause, where every rank has a core of its own."""


class _Kind(enum.IntEnum):
    DATA = 0
    CHANNEL_DATA = 1
    CONTROL = 2
    ENVELOPE = 3
    COLLECT = 4
    """Bytes of `collect`, or of a split; the flow is the number of the split, 0 for `collect`."""
    MEMORY = 5
    """A descriptor of the memory of `allocate_shared` comes with the header."""
    BYE = 6
    """The last frame of a rank that closes its transport."""


class _Receive:
    """A receive: of an `_Inbox`, once it is started, until it is complete."""

    def __init__(self, inbox: _Inbox, flow: int, buffer: memoryview) -> None:
        self.inbox, self.flow, self.buffer = inbox, flow, buffer.cast("B")
        self.complete = True

    def Start(self) -> None:  # noqa: N802 - mpi4py's name
        self.complete = False
        self.inbox.post(self)

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        if not self.complete:
            self.inbox.stream.progress()
        if not self.complete:
            self.inbox.stream.check()
        return self.complete

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        self.buffer = memoryview(b"")


class _Send:
    """A send; complete once the kernel has all its bytes."""

    def __init__(self, stream: _Stream, kind: _Kind, flow: int, buffer: memoryview) -> None:
        self._stream, self._buffer = stream, buffer.cast("B")
        self._header = _HEADER.pack(kind, flow, self._buffer.nbytes)
        self.complete = True

    def Start(self) -> None:  # noqa: N802 - mpi4py's name
        self._stream.check()
        self.complete = False
        self._stream.send(self._header, self._buffer, self)

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        if not self.complete:
            self._stream.progress()
        if not self.complete:
            self._stream.check()
        return self.complete

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        self._buffer = memoryview(b"")


class _Arrival:
    """A message that arrives: in the buffer of its receive, or kept until there is one."""

    def __init__(self, flow: int, nbytes: int, receive: _Receive | None) -> None:
        self.flow, self.nbytes = flow, nbytes
        self.receive = receive
        self.direct = receive is not None
        """Whether the bytes go to the buffer of the receive."""
        self.dropped = False
        """Whether the message is dropped once it is whole."""
        self._kept = bytearray()
        self._filled = 0

    @property
    def whole(self) -> bool:
        return self._filled == self.nbytes

    def read(self, connection: socket.socket) -> int:
        """Read some of the bytes that are missing; return how many."""
        missing = self.nbytes - self._filled
        if self.direct:
            assert self.receive is not None
            place = self.receive.buffer[self._filled : self.nbytes]
            read = connection.recv_into(place, missing)
        else:
            part = connection.recv(min(missing, _PART_BYTES))
            self._kept += part
            read = len(part)
        self._filled += read
        return read

    def bytes(self) -> bytes:
        """Return the kept bytes."""
        return bytes(self._kept)

    def deliver(self) -> None:
        """Complete the receive of a whole message."""
        assert self.receive is not None
        if not self.direct:
            self.receive.buffer[: self.nbytes] = self._kept
        self.receive.complete = True


class _Inbox:
    """Messages of one kind from one peer: receives and arrivals that have no counterpart yet."""

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        self._posted: dict[int, deque[_Receive]] = defaultdict(deque)
        """By flow: started receives without a message."""
        self._arrivals: list[_Arrival] = []
        """Messages without a receive, in the order of their headers."""

    def post(self, receive: _Receive) -> None:
        """Match a started receive with the earliest message of its flow, if there is one."""
        for arrival in self._arrivals:
            if arrival.flow == receive.flow and not arrival.dropped:
                _check_fits(arrival.nbytes, receive)
                self._arrivals.remove(arrival)
                arrival.receive = receive
                if arrival.whole:
                    arrival.deliver()
                return
        self._posted[receive.flow].append(receive)

    def begin(self, flow: int, nbytes: int) -> _Arrival:
        """Match a message whose header has arrived."""
        posted = self._posted[flow]
        if not posted:
            self._arrivals.append(_Arrival(flow, nbytes, None))
            return self._arrivals[-1]
        _check_fits(nbytes, posted[0])
        return _Arrival(flow, nbytes, posted.popleft())

    def withdraw(self, receive: _Receive) -> bool | None:
        """See `Transport.withdraw`."""
        if receive.complete:
            return False
        posted = self._posted[receive.flow]
        if receive not in posted:
            return None
        posted.remove(receive)
        receive.complete = True
        return True

    def discard(self) -> bool:
        """See `Transport.discard`."""
        if not self._arrivals:
            return False
        self._arrivals[0].dropped = True
        if not self._arrivals[0].whole:
            return False
        del self._arrivals[0]
        return True


def _check_fits(nbytes: int, receive: _Receive) -> None:
    room = receive.buffer.nbytes
    if nbytes > room:
        raise ValueError(f"a message of {nbytes} bytes came for a receive of {room}")


class _Stream:
    """The connection with one peer: the frames that leave, and those that arrive."""

    def __init__(self, peer: int, connection: socket.socket, events: _Events) -> None:
        self.peer, self.connection = peer, connection
        self.data, self.channel_data = _Inbox(self), _Inbox(self)
        self.control: deque[bytes] = deque()
        self.envelopes: deque[bytes] = deque()
        self.collected: dict[int, deque[bytes]] = defaultdict(deque)
        """By number of the split, 0 for none: the bytes of the peer's collections."""
        self.memory: deque[int] = deque()
        """Descriptors that the peer has sent."""
        self.ended = self.said_bye = False
        self._events = events
        self._leaving: deque[tuple[memoryview, _Send | None]] = deque()
        """Parts of frames that the kernel does not have yet; the last part of a message has it."""
        self._header = bytearray(_HEADER.size)
        self._header_filled = 0
        self._kind = _Kind.DATA
        self._arrival: _Arrival | None = None
        """The message that is arriving; None between two frames."""

    @property
    def flushed(self) -> bool:
        """Whether the kernel has all that was sent."""
        return not self._leaving

    def check(self) -> None:
        """Raise PeerLostError if the peer has ended, and all its control messages are polled."""
        if self.ended and not self.control:
            raise lost([self.peer])

    @property
    def is_lost(self) -> bool:
        """Whether the peer has ended without a farewell."""
        return self.ended and not self.said_bye

    def progress(self) -> None:
        """Send and receive what is possible now, on all connections."""
        self._events.progress()

    # --- frames that leave ---

    def send(self, header: bytes, body: memoryview, request: _Send | None) -> None:
        """Send a frame; `request` is complete once the kernel has it."""
        if self.ended:
            return
        with _ending_of(self):
            nothing_leaves = not self._leaving
            self._leaving.append((memoryview(header), None if body.nbytes else request))
            if body.nbytes:
                self._leaving.append((body, request))
            if nothing_leaves:
                self.write()
            if self._leaving:
                self._events.want(self)

    def post(self, kind: _Kind, message: bytes, flow: int = 0) -> None:
        """Send a short frame."""
        frame = _HEADER.pack(kind, flow, len(message)) + message
        self.send(frame, memoryview(b""), None)

    def post_descriptor(self, descriptor: int) -> None:
        """Send a MEMORY frame with a descriptor.  Nothing else is leaving."""
        assert self.flushed
        header = _HEADER.pack(_Kind.MEMORY, 0, 0)
        with _ending_of(self):
            sent = socket.send_fds(self.connection, [header], [descriptor])
            assert sent == len(header), "the kernel has no room for a header"

    def write(self) -> None:
        """Give the kernel as many bytes as it takes."""
        with _ending_of(self):
            while self._leaving:
                parts = [part for part, _ in islice(self._leaving, _PARTS_AT_ONCE)]
                self._taken(self.connection.sendmsg(parts))

    def _taken(self, nbytes: int) -> None:
        while self._leaving:
            part, request = self._leaving[0]
            if nbytes < part.nbytes:
                self._leaving[0] = part[nbytes:], request
                return
            nbytes -= part.nbytes
            self._leaving.popleft()
            if request is not None:
                request.complete = True

    # --- frames that arrive ---

    def read(self) -> None:
        """Take what has arrived, of so many frames at most."""
        with _ending_of(self):
            for _ in range(_FRAMES_AT_ONCE):
                if self._arrival is None:
                    self._read_header()
                if self.ended:
                    return
                self._read_body()

    def _read_header(self) -> None:
        while self._header_filled < _HEADER.size:
            place = memoryview(self._header)[self._header_filled :]
            read, extra, _, _ = self.connection.recvmsg_into(
                [place], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            if not read:
                self.end()
                return
            for level, what, data in extra:
                if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self.memory.extend(array("i", data))
            self._header_filled += read
        self._header_filled = 0
        kind, flow, nbytes = _HEADER.unpack(self._header)
        self._kind = _Kind(kind)
        match self._kind:
            case _Kind.DATA:
                self._arrival = self.data.begin(flow, nbytes)
            case _Kind.CHANNEL_DATA:
                self._arrival = self.channel_data.begin(flow, nbytes)
            case _:
                self._arrival = _Arrival(flow, nbytes, None)

    def _read_body(self) -> None:
        arrival = self._arrival
        assert arrival is not None
        while not arrival.whole:
            if not arrival.read(self.connection):
                self.end()
                return
        self._arrival = None
        match self._kind:
            case _Kind.DATA | _Kind.CHANNEL_DATA:
                if arrival.receive is not None:
                    arrival.deliver()
            case _Kind.CONTROL:
                self.control.append(arrival.bytes())
            case _Kind.ENVELOPE:
                self.envelopes.append(arrival.bytes())
            case _Kind.COLLECT:
                self.collected[arrival.flow].append(arrival.bytes())
            case _Kind.BYE:
                self.said_bye = True

    # --- the end ---

    def end(self) -> None:
        """Note that the peer has closed the connection, or has ended."""
        if not self.ended:
            self.ended = True
            self._leaving.clear()
            self._events.forget(self)

    def close(self) -> None:
        self.end()
        self.connection.close()
        while self.memory:
            os.close(self.memory.popleft())


@contextlib.contextmanager
def _ending_of(stream: _Stream) -> Iterator[None]:
    """Stop where the kernel can do no more for now; note it if the connection has ended.

    Any other exception, such as that of a signal's handler, may have come between a call of the
    kernel and the note of what it did.  So it ends the connection, for both ranks.
    """
    try:
        yield
    except BlockingIOError:
        pass
    except (BrokenPipeError, ConnectionResetError):
        stream.end()
    except BaseException:
        stream.end()
        with contextlib.suppress(OSError):
            stream.connection.shutdown(socket.SHUT_RDWR)
        raise


class _Events:
    """Waits until connections can be read, or written if something has to leave."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self._writing: set[int] = set()
        """Descriptors that are watched for room, too."""

    def add(self, stream: _Stream) -> None:
        descriptor = stream.connection.fileno()
        self._streams[descriptor] = stream
        self._epoll.register(descriptor, select.EPOLLIN)

    def want(self, stream: _Stream) -> None:
        """Watch for room to write, until all that leaves is written."""
        descriptor = stream.connection.fileno()
        if descriptor not in self._writing:
            self._writing.add(descriptor)
            self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def forget(self, stream: _Stream) -> None:
        descriptor = stream.connection.fileno()
        if self._streams.pop(descriptor, None) is not None:
            self._writing.discard(descriptor)
            self._epoll.unregister(descriptor)

    def progress(self) -> None:
        """Send and receive what is possible now."""
        for descriptor, events in self._epoll.poll(0):
            stream = self._streams.get(descriptor)
            if stream is None:
                continue
            if events & select.EPOLLOUT:
                stream.write()
                if stream.flushed and descriptor in self._writing:
                    self._writing.discard(descriptor)
                    self._epoll.modify(descriptor, select.EPOLLIN)
            if events & ~select.EPOLLOUT:
                stream.read()

    def wait(self, seconds: float) -> None:
        """Return once something is possible, at the latest after so long."""
        if self._epoll.fileno() < _SELECTABLE:
            select.select([self._epoll], (), (), seconds)
        else:  # `epoll.poll` waits for whole milliseconds
            time.sleep(seconds)

    def close(self) -> None:
        self._epoll.close()


class SocketTransport:
    """One rank's end of the connections between all ranks of a communicator."""

    name = "sockets"
    threads = True
    one_process = False

    def __init__(self, mesh: Mesh, timeout_s: float = 600.0) -> None:
        self.rank, self.size = mesh.rank, len(mesh.streams)
        self.job_ranks: Sequence[int] = range(self.size)
        self.spins = _SPINS if self.size <= mesh.cores else 0
        self._timeout_s = timeout_s
        self._events = _Events()
        self._streams = {
            peer: _Stream(peer, connection, self._events)
            for peer, connection in enumerate(mesh.streams)
            if connection is not None
        }
        for stream in self._streams.values():
            self._events.add(stream)
        self._channel: SocketChannel | None = None
        _heed_forks()
        _open.add(self)

    # --- data ---

    def sender(self, peer: int, flow: int, buffer: memoryview) -> _Send:
        return _Send(self._streams[peer], _Kind.DATA, flow, buffer)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> _Receive:
        return _Receive(self._streams[peer].data, flow, buffer)

    def translate(self, error: Exception) -> Exception:
        return error  # a lost peer raises PeerLostError here

    def withdraw(self, receiver: Any) -> bool | None:
        self._events.progress()
        found: bool | None = receiver.inbox.withdraw(receiver)
        if found is None:
            receiver.inbox.stream.check()
        return found

    def discard(self, peer: int) -> bool:
        self._events.progress()
        return self._streams[peer].data.discard()

    # --- control ---

    def send_control(self, peer: int, message: bytes) -> None:
        self._streams[peer].post(_Kind.CONTROL, message)

    def control_sent(self, peers: Iterable[int]) -> bool:
        self._events.progress()
        return all(self._streams[peer].flushed for peer in peers if peer != self.rank)

    def poll_control(self) -> list[tuple[int, bytes]]:
        self._events.progress()
        arrived = []
        for peer, stream in self._streams.items():
            while stream.control:
                arrived.append((peer, stream.control.popleft()))
        gone = [peer for peer, stream in self._streams.items() if stream.is_lost]
        if gone and not arrived:
            raise lost(gone)
        return arrived

    def channel(self) -> SocketChannel:
        if self._channel is None:
            self._channel = SocketChannel(self, self._streams, self._events)
        return self._channel

    # --- waiting, topology ---

    def pause(self, idle: int) -> None:
        if idle < _YIELDS:
            os.sched_yield()
        else:
            self._events.wait(min(_SHORTEST_SLEEP_S * (idle / _YIELDS), _LONGEST_SLEEP_S))

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.size)),)

    # --- before the first call ---

    def collect(self, mine: bytes) -> bytes:
        return b"".join(self._exchange(mine, range(self.size), 0, self._timeout_s))

    def _exchange(
        self, mine: bytes, members: Sequence[int], number: int, timeout_s: float
    ) -> list[bytes]:
        """Return the bytes that `members` pass, in their order; lengths may differ."""
        peers = [peer for peer in members if peer != self.rank]
        for peer in peers:
            self._streams[peer].check()
            self._streams[peer].post(_Kind.COLLECT, mine, number)
        came = {peer: self._streams[peer].collected[number] for peer in peers}
        where = "split" if number else "init"
        self._wait_for(lambda: [peer for peer in peers if not came[peer]], timeout_s, where)
        return [mine if peer == self.rank else came[peer].popleft() for peer in members]

    def _wait_for(
        self, missing: Callable[[], list[int]], timeout_s: float, where: str = "init"
    ) -> None:
        """Wait until no rank is missing.

        Raises PeerLostError if a missing rank has ended, PeerTimeoutError after `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while absent := missing():
            for peer in absent:
                self._streams[peer].check()
            if time.monotonic() > end:
                raise not_assembled(timeout_s, absent, where)
            self._events.wait(_LONGEST_SLEEP_S)
            self._events.progress()

    def allocate_shared(self, nbytes: int) -> Sequence[Any] | None:
        """See `Transport.allocate_shared`: rank 0 makes a memory file, and sends its descriptor."""
        descriptor = _new_file(nbytes * self.size) if self.rank == 0 else None
        if 0 in self.collect(bytes((self.rank > 0 or descriptor is not None,))):
            return None
        if descriptor is not None:
            self._wait_for(self._unflushed, self._timeout_s)
            for stream in self._streams.values():
                stream.post_descriptor(descriptor)
        else:
            root = self._streams[0]
            self._wait_for(lambda: [] if root.memory else [0], self._timeout_s)
            descriptor = root.memory.popleft()
        whole = memoryview(mmap.mmap(descriptor, nbytes * self.size))
        os.close(descriptor)
        return [whole[rank * nbytes : (rank + 1) * nbytes] for rank in range(self.size)]

    def _unflushed(self) -> list[int]:
        return [peer for peer, stream in self._streams.items() if not stream.flushed]

    # --- other transports, end ---

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> SocketTransport:
        mesh = connect(
            lambda mine: self._exchange(mine, members, number + 1, timeout_s),
            members.index(self.rank),
            len(members),
            timeout_s,
            "split",
        )
        return SocketTransport(mesh, timeout_s)

    def shrunk(self, timeout_s: float) -> SocketTransport:
        raise NotImplementedError(
            "shrink: ranks that were started without MPI end after a loss; "
            "use Open MPI 5, with `mpiexec --with-ft ulfm`"
        )

    def replace_world(self) -> None:
        raise NotImplementedError("shrunk() makes no transport that could replace this one")

    def close(self) -> None:
        """See `Transport.close`.  A rank leaves once all others have said farewell."""
        try:
            for stream in self._streams.values():
                if not stream.ended:
                    stream.post(_Kind.BYE, b"")
            self._wait_for(self._staying, self._timeout_s, "close")
        finally:
            self.release()

    def _staying(self) -> list[int]:
        """Return the ranks that have not said farewell, or for whom something is leaving."""
        return [
            peer
            for peer, stream in self._streams.items()
            if not stream.said_bye or not (stream.flushed or stream.ended)
        ]

    def release(self) -> None:
        """Close all connections."""
        _open.discard(self)
        for stream in self._streams.values():
            stream.close()
        self._events.close()

    def release_in_child(self) -> None:
        """Close this process's copies of the connections, which the parent goes on using.

        The parent watches them by the same epoll instance: nothing is unregistered.
        """
        for stream in self._streams.values():
            stream.ended = True
            stream.connection.close()
        self._events.close()


class SocketChannel:
    """Envelopes and data between two ranks, as frames of kinds of their own."""

    def __init__(
        self, transport: SocketTransport, streams: dict[int, _Stream], events: _Events
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._streams, self._events = transport, streams, events

    def post(self, peer: int, envelope: bytes) -> None:
        stream = self._streams[peer]
        stream.check()
        stream.post(_Kind.ENVELOPE, envelope)

    def poll(self, peer: int) -> list[bytes]:
        self._events.progress()
        stream = self._streams[peer]
        arrived = list(stream.envelopes)
        stream.envelopes.clear()
        if not arrived:
            stream.check()
        return arrived

    def sender(self, peer: int, flow: int, buffer: memoryview) -> _Send:
        return _Send(self._streams[peer], _Kind.CHANNEL_DATA, flow, buffer)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> _Receive:
        return _Receive(self._streams[peer].channel_data, flow, buffer)

    def translate(self, error: Exception) -> Exception:
        return self._transport.translate(error)

    def pause(self, idle: int) -> None:
        self._transport.pause(idle)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.envelopes.clear()


def _new_file(nbytes: int) -> int | None:
    """Return a descriptor of a new memory file; None where the system has none."""
    try:
        descriptor = os.memfd_create("ringreduce")
    except (AttributeError, OSError):
        return None
    os.ftruncate(descriptor, nbytes)
    return descriptor


_open: weakref.WeakSet[SocketTransport] = weakref.WeakSet()
"""Transports that are not closed."""


@cache
def _heed_forks() -> None:
    """Register a hook for forks, once in a process.

    A forked child closes its copies of connections: peers must see the end of the rank itself.
    """

    def forked() -> None:
        for transport in list(_open):
            transport.release_in_child()

    os.register_at_fork(after_in_child=forked)
