"""Connections between two ranks, by Unix sockets or TCP: frames, and the matching of messages.

A connection is a stream of bytes in both directions.  A message is a *frame*: a header with its
kind, flow and length, and then its bytes.  A message that arrives before its receive is kept.  The
kernel ends the connections of a process that ends, in whatever way it ends.  Small messages are
sent and received by one system call each.

Two threads may use the connections at the same time: collectives and messages between two ranks
have locks of their own.  Each thread moves the frames of both.  So a thread holds `Events.lock`
while it moves frames and while it matches messages.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from ringreduce.transports.base import lost

_HEADER = struct.Struct("<BIQ")
"""Kind, flow, and the number of bytes that follow."""
_DESCRIPTOR_BYTES = array("i", [0]).itemsize
_ANCILLARY_BYTES = (socket.CMSG_SPACE(_DESCRIPTOR_BYTES),)
_RECEIVE_FLAGS = (socket.MSG_CMSG_CLOEXEC,)
_PART_BYTES = 1 << 20
"""A message without a receive is kept in parts of this size: its memory grows with what arrives."""
_AHEAD_BYTES = 8 << 10
"""The most bytes that are read before it is known of which messages they are."""
_JOINED_BYTES = 4 << 10
"""The longest message that is copied behind its header, so that both are sent as one part."""
_READS_AT_ONCE = 128
"""System calls that read from one connection before other connections are read."""
_PARTS_AT_ONCE = 16
"""Parts of frames to write by one call of the kernel."""
_SELECTABLE = 1024
"""``FD_SETSIZE``: select takes descriptors below it."""
_ENDS = frozenset(
    (
        *(errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT),
        *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN),
    )
)
"""Errors of a connection that has ended."""


class FrameType(enum.IntEnum):
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


class FrameReceive:
    def __init__(self, inbox: _Inbox, flow: int, buffer: memoryview) -> None:
        self.inbox, self.flow, self.buffer = inbox, flow, buffer.cast("B")
        self.complete = True

    def Start(self) -> None:  # noqa: N802 - mpi4py's name
        self.complete = False
        self.inbox.post(self)

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return self.complete or self.inbox.stream.completes(self)

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        self.buffer = memoryview(b"")


class FrameSend:
    def __init__(self, stream: FrameStream, kind: FrameType, flow: int, buffer: memoryview) -> None:
        self._stream, self._buffer = stream, buffer.cast("B")
        self._header = _HEADER.pack(kind, flow, self._buffer.nbytes)
        self.complete = True

    def Start(self) -> None:  # noqa: N802 - mpi4py's name
        self._stream.check()
        self.complete = False
        self._stream.send(self._header, self._buffer, self)

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return self.complete or self._stream.completes(self)

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        self._buffer = memoryview(b"")


class _Arrival:
    """A message that arrives: in the buffer of its receive, or kept until there is one."""

    def __init__(self, flow: int, nbytes: int, receive: FrameReceive | None) -> None:
        self.flow, self.nbytes = flow, nbytes
        self.receive = receive
        self.direct = receive is not None
        self.dropped = False
        self._kept = bytearray()
        self._filled = 0

    @property
    def whole(self) -> bool:
        return self._filled == self.nbytes

    @property
    def missing(self) -> int:
        return self.nbytes - self._filled

    @property
    def place(self) -> memoryview:
        """The memory of the bytes that are missing, if they go to the buffer of the receive."""
        assert self.receive is not None
        return self.receive.buffer[self._filled : self.nbytes]

    def add(self, part: memoryview | bytes) -> None:
        """Take bytes that have been read elsewhere."""
        if self.direct:
            self.place[: len(part)] = part
        else:
            self._kept += part
        self._filled += len(part)

    def note(self, nbytes: int) -> None:
        """Note that so many bytes have been read to `place`."""
        self._filled += nbytes

    def bytes(self) -> bytes:
        return bytes(self._kept)

    def deliver(self) -> None:
        assert self.receive is not None
        if not self.direct:
            self.receive.buffer[: self.nbytes] = self._kept
        self.receive.complete = True


class _Inbox:
    """Messages of one kind from one peer: receives and arrivals that have no counterpart yet."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self._posted: dict[int, deque[FrameReceive]] = defaultdict(deque)
        """By flow: started receives without a message."""
        self._arrivals: list[_Arrival] = []
        """Messages without a receive, in the order of their headers."""

    def post(self, receive: FrameReceive) -> None:
        """Match a started receive with the earliest message of its flow, if there is one."""
        with self.stream.lock:
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

    def withdraw(self, receive: FrameReceive) -> bool | None:
        with self.stream.lock:
            if receive.complete:
                return False
            posted = self._posted[receive.flow]
            if receive not in posted:
                return None
            posted.remove(receive)
            receive.complete = True
            return True

    def discard(self) -> bool:
        with self.stream.lock:
            if not self._arrivals:
                return False
            self._arrivals[0].dropped = True
            if not self._arrivals[0].whole:
                return False
            del self._arrivals[0]
            return True


def _check_fits(nbytes: int, receive: FrameReceive) -> None:
    room = receive.buffer.nbytes
    if nbytes > room:
        raise ValueError(f"a message of {nbytes} bytes came for a receive of {room}")


class FrameStream:
    """The connection with one peer: the frames that leave, and those that arrive."""

    def __init__(self, peer: int, connection: socket.socket, events: Events) -> None:
        self.peer, self.connection = peer, connection
        self.data, self.channel_data = _Inbox(self), _Inbox(self)
        self._inboxes: dict[int, _Inbox] = {
            FrameType.DATA: self.data,
            FrameType.CHANNEL_DATA: self.channel_data,
        }
        self.control: deque[bytes] = deque()
        self.envelopes: deque[bytes] = deque()
        self.collected: dict[int, deque[bytes]] = defaultdict(deque)
        """By number of the split, 0 for none: the bytes of the peer's collections."""
        self.memory: deque[int] = deque()
        """Descriptors that the peer has sent."""
        self.ended = self.said_bye = False
        self._peer_closed = False
        """Whether the peer reads nothing more; frames that it sent before are still read."""
        self._events = events
        self._is_consistent = True
        """Whether the fields of this object agree with what the kernel did.

        If they do, the connection can be used after an exception."""
        self._leaving: deque[tuple[memoryview, FrameSend | None]] = deque()
        """Parts of frames that the kernel has not taken yet, each with the message that it ends."""
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._ahead_filled = 0
        """Bytes of `_ahead` that have been read: less than a header, after each system call."""
        self._takes_descriptors = connection.family == socket.AF_UNIX
        self._kind: int = FrameType.DATA
        self._arrival: _Arrival | None = None
        """The message of which bytes are missing; none of them are in `_ahead`."""

    @property
    def lock(self) -> Any:
        return self._events.lock

    @property
    def flushed(self) -> bool:
        return not self._leaving

    def check(self) -> None:
        """Raise PeerLostError if the peer has ended, and all its control messages are polled."""
        if self.ended and not self.control:
            raise lost([self.peer])

    @property
    def is_lost(self) -> bool:
        return self.ended and not self.said_bye

    def completes(self, request: FrameSend | FrameReceive) -> bool:
        """Send and receive what is possible now; return whether `request` is complete then.

        Raises PeerLostError as `check`, unless it is complete.
        """
        with self.lock:
            self._events.progress()
            if not request.complete:
                self.check()
        return request.complete

    # --- frames that leave ---

    def send(self, header: bytes, body: memoryview, request: FrameSend | None) -> None:
        """Send a frame; `request` is complete once the kernel has it."""
        with self.lock:
            if self.ended or self._peer_closed:
                return
            nothing_leaves = not self._leaving
            try:
                self._is_consistent = False
                if body.nbytes <= _JOINED_BYTES:
                    self._leaving.append((memoryview(header + body), request))
                else:
                    self._leaving.append((memoryview(header), None))
                    self._leaving.append((body, request))
                self._is_consistent = True
                if nothing_leaves:
                    self.write()
                if self._leaving:
                    self._events.want(self)
            except BaseException as error:
                self._end_by(error)

    def post(self, kind: FrameType, message: bytes, flow: int = 0) -> None:
        frame = _HEADER.pack(kind, flow, len(message)) + message
        self.send(frame, memoryview(b""), None)

    def post_descriptor(self, descriptor: int) -> None:
        """Send a MEMORY frame with a descriptor.  Nothing else is leaving."""
        assert self.flushed
        header = _HEADER.pack(FrameType.MEMORY, 0, 0)
        try:
            self._is_consistent = False
            sent = socket.send_fds(self.connection, [header], [descriptor])
            self._is_consistent = True
        except BaseException as error:
            self._end_by(error)
        else:
            assert sent == len(header), "the kernel has no room for a header"

    def write(self) -> None:
        try:
            while self._leaving:
                if len(self._leaving) == 1:
                    self._call(self._taken, self.connection.send, (self._leaving[0][0],))
                else:
                    parts = [part for part, _ in islice(self._leaving, _PARTS_AT_ONCE)]
                    self._call(self._taken, self.connection.sendmsg, (parts,))
        except BlockingIOError:
            pass
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _ENDS:
                self._peer_closed = True
                self._leaving.clear()
            else:
                self._end_by(error)

    def _end_by(self, error: BaseException) -> None:
        """After an error of a system call, or of a signal's handler, note what it means.

        If the kernel can do no more for now, nothing.  If the connection is broken, it has ended.
        Any other error is raised again: the connection stays in use if this object is consistent;
        otherwise it ends for both ranks.
        """
        if isinstance(error, BlockingIOError):
            self._is_consistent = True
        elif isinstance(error, OSError) and error.errno in _ENDS:
            self.end()
        else:
            recovered = False
            try:
                recovered = self.recover()
            finally:
                if not recovered:
                    self.end()
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
            raise error

    def _call(
        self, note: Callable[[Any], None], function: Callable[..., Any], *args: tuple[Any]
    ) -> None:
        """Make a system call, and pass its result to `note`, also if a signal's handler raises.

        No handler runs between the call and the end of `extend`: `map`, which takes each
        argument in a tuple, and `extend` are compiled.
        """
        result: list[Any] = []
        try:
            self._is_consistent = False
            result.extend(map(function, *args))
        finally:
            if result:
                note(result.pop())
            self._is_consistent = True

    def recover(self) -> bool:
        """Continue after an exception, if the connection is consistent; return whether it is."""
        if self._is_consistent and self._leaving:
            self._events.want(self)
        return self._is_consistent

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
        """Read frames that have arrived, by `_READS_AT_ONCE` system calls at most."""
        try:
            for _ in range(_READS_AT_ONCE):
                if self.ended or not self._read_part():
                    return
        except BlockingIOError:
            pass
        except BaseException as error:
            self._end_by(error)

    def _read_part(self) -> bool:
        """Make a system call that reads; return whether there may be more to read."""
        arrival = self._arrival
        if arrival is None:
            place = self._ahead[self._ahead_filled :]
            if self._takes_descriptors:
                how = ([place],), _ANCILLARY_BYTES, _RECEIVE_FLAGS
                self._call(self._descriptors_read, self.connection.recvmsg_into, *how)
            else:
                self._call(self._ahead_read, self.connection.recv_into, (place,))
            return self._arrival is not None
        if arrival.direct:
            self._call(self._body_read, self.connection.recv_into, (arrival.place,))
        else:
            length = min(arrival.missing, _PART_BYTES)
            self._call(self._body_read, self.connection.recv, (length,))
        return not arrival.whole

    def _descriptors_read(self, result: tuple[int, list[tuple[int, int, bytes]], int, Any]) -> None:
        read, extra, _, _ = result
        for level, what, data in extra:
            if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.memory.extend(array("i", data))
        self._ahead_read(read)

    def _ahead_read(self, read: int) -> None:
        """Take the messages apart of which some bytes have been read."""
        if not read:
            self.end()
            return
        ahead, at, end = self._ahead, 0, self._ahead_filled + read
        while end - at >= _HEADER.size:
            kind, flow, nbytes = _HEADER.unpack_from(ahead, at)
            at += _HEADER.size
            arrival = self._begin_message(kind, flow, nbytes)
            if nbytes and at < end:
                part = ahead[at : min(at + nbytes, end)]
                arrival.add(part)
                at += len(part)
            if not arrival.whole:
                self._arrival = arrival
                break
            self._end_message(arrival)
        if at < end:
            ahead[: end - at] = ahead[at:end]
        self._ahead_filled = end - at

    def _begin_message(self, kind: int, flow: int, nbytes: int) -> _Arrival:
        inbox = self._inboxes.get(kind)
        if inbox is not None:
            self._kind = kind
            return inbox.begin(flow, nbytes)
        self._kind = FrameType(kind)
        return _Arrival(flow, nbytes, None)

    def _body_read(self, read: int | bytes) -> None:
        arrival = self._arrival
        assert arrival is not None
        if isinstance(read, int):
            arrival.note(read)
        else:
            arrival.add(read)
        if not read:
            self.end()
        elif arrival.whole:
            self._arrival = None
            self._end_message(arrival)

    def _end_message(self, arrival: _Arrival) -> None:
        if self._kind in self._inboxes:
            if arrival.receive is not None:
                arrival.deliver()
            return
        match self._kind:
            case FrameType.CONTROL:
                self.control.append(arrival.bytes())
            case FrameType.ENVELOPE:
                self.envelopes.append(arrival.bytes())
            case FrameType.COLLECT:
                self.collected[arrival.flow].append(arrival.bytes())
            case FrameType.BYE:
                self.said_bye = True

    # --- the end ---

    def end(self) -> None:
        if not self.ended:
            self._events.forget(self)
            self._leaving.clear()
            self.ended = True

    def close(self) -> None:
        self.end()
        self.connection.close()
        while self.memory:
            os.close(self.memory.popleft())


class Events:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while frames move, and while messages are matched."""
        self._epoll = select.epoll()
        self._streams: dict[int, FrameStream] = {}
        self._writing: set[int] = set()
        """Descriptors that are watched for room, too."""

    def add(self, stream: FrameStream) -> None:
        descriptor = stream.connection.fileno()
        self._streams[descriptor] = stream
        self._epoll.register(descriptor, select.EPOLLIN)

    def want(self, stream: FrameStream) -> None:
        """Watch for room to write, until all that leaves is written."""
        descriptor = stream.connection.fileno()
        if descriptor not in self._writing:
            self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)
            self._writing.add(descriptor)

    def forget(self, stream: FrameStream) -> None:
        descriptor = stream.connection.fileno()
        if descriptor in self._streams:
            self._writing.discard(descriptor)
            with contextlib.suppress(OSError):  # an exception came right after an earlier time
                self._epoll.unregister(descriptor)
            self._streams.pop(descriptor, None)

    def progress(self) -> None:
        with self.lock:
            for descriptor, events in self._epoll.poll(0):
                stream = self._streams.get(descriptor)
                if stream is None:
                    continue
                if events & select.EPOLLOUT:
                    stream.write()
                    if stream.flushed and descriptor in self._streams:
                        self._writing.discard(descriptor)
                        self._epoll.modify(descriptor, select.EPOLLIN)
                if events & ~select.EPOLLOUT:
                    stream.read()

    def wait(self, seconds: float) -> None:
        if self._epoll.fileno() < _SELECTABLE:
            select.select([self._epoll], (), (), seconds)
        else:  # `epoll.poll` waits for whole milliseconds
            time.sleep(seconds)

    def forked(self) -> None:
        """Close the epoll instance of a forked process, whose parent's threads held the lock."""
        self.lock = threading.RLock()
        self.close()

    def close(self) -> None:
        self._epoll.close()
