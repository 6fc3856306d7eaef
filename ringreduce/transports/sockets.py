"""Messages between processes by Unix sockets on one host and by TCP between hosts, without MPI.

Each pair of ranks has one connection (`streams`).  A connection that ends without a farewell means
that its rank is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ringreduce.system.memory_files import map_file, new_file
from ringreduce.system.topology import Nodes
from ringreduce.transports.base import NativeMessages, Transport, lost, not_assembled
from ringreduce.transports.mesh import SocketMesh, connect
from ringreduce.transports.streams import Events, FrameReceive, FrameSend, FrameStream, FrameType
from ringreduce.transports.yielding import LONGEST_SLEEP_S, Yielding

_YIELDS = 200
"""Idle polls after each of which a rank only yields the core; after later polls it sleeps, until
a frame arrives."""


class SocketTransport(Transport):
    threads = True
    one_process = False

    def __init__(self, mesh: SocketMesh, timeout_s: float = 600.0) -> None:
        self.rank, self.size = mesh.rank, len(mesh.streams)
        self.job_ranks: Sequence[int] = range(self.size)
        self.name = "sockets" if len(mesh.nodes) == 1 else "tcp"
        self._nodes, self._way = mesh.nodes, mesh.way
        ranks_here = next(len(node) for node in mesh.nodes if self.rank in node)
        self.yielding = Yielding(crowded=ranks_here > mesh.cores)
        self._timeout_s = timeout_s
        self._events = Events()
        self._streams = {
            peer: FrameStream(peer, connection, self._events)
            for peer, connection in enumerate(mesh.streams)
            if connection is not None
        }
        for stream in self._streams.values():
            self._events.add(stream)
        self._channel: SocketChannel | None = None

    # --- data ---

    def sender(self, peer: int, flow: int, buffer: memoryview) -> FrameSend:
        return FrameSend(self._streams[peer], FrameType.DATA, flow, buffer)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> FrameReceive:
        return FrameReceive(self._streams[peer].data, flow, buffer)

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
        self._streams[peer].post(FrameType.CONTROL, message)

    def control_sent(self, peers: Iterable[int]) -> bool:
        self._events.progress()
        return all(self._streams[peer].flushed for peer in peers if peer != self.rank)

    def poll_control(self) -> list[tuple[int, bytes]]:
        # Another thread must not read the end of a connection between the two looks.
        with self._events.lock:
            self._events.progress()
            arrived = []
            for peer, stream in self._streams.items():
                while stream.control:
                    arrived.append((peer, stream.control.popleft()))
            if not arrived and (
                gone := [peer for peer, stream in self._streams.items() if stream.is_lost]
            ):
                raise lost(gone)
            return arrived

    def channel(self) -> SocketChannel:
        if self._channel is None:
            self._channel = SocketChannel(self, self._streams, self._events)
        return self._channel

    # --- waiting, topology ---

    def pause(self, idle: int) -> None:
        self.yielding.pause(idle, _YIELDS, self._events.wait)

    def nodes(self) -> Nodes:
        return self._nodes

    # --- before the first call ---

    def collect(self, mine: bytes, patience_s: float = 0.0) -> bytes:
        timeout_s = self._timeout_s + patience_s
        return b"".join(self._exchange(mine, range(self.size), 0, timeout_s))

    def _exchange(
        self, mine: bytes, members: Sequence[int], number: int, timeout_s: float
    ) -> list[bytes]:
        peers = [peer for peer in members if peer != self.rank]
        for peer in peers:
            self._streams[peer].check()
            self._streams[peer].post(FrameType.COLLECT, mine, number)
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
            self._events.wait(LONGEST_SLEEP_S)
            self._events.progress()

    def allocate_shared(self, nbytes: int) -> Sequence[Any] | None:
        """See `Transport.allocate_shared`: rank 0 makes a memory file, and sends its descriptor."""
        if len(self._nodes) > 1:
            return None
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
        whole = memoryview(map_file(descriptor, nbytes * self.size))
        os.close(descriptor)
        return [whole[rank * nbytes : (rank + 1) * nbytes] for rank in range(self.size)]

    def native(self) -> NativeMessages:
        return NativeMessages.by_python()

    def _unflushed(self) -> list[int]:
        return [peer for peer, stream in self._streams.items() if not stream.flushed]

    # --- other transports, end ---

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> SocketTransport:
        one_host = any(set(members) <= set(node) for node in self._nodes)
        mesh = connect(
            lambda mine: self._exchange(mine, members, number + 1, timeout_s),
            members.index(self.rank),
            len(members),
            timeout_s,
            "split",
            replace(self._way, one_host=one_host, mpi_rank=None),
        )
        return SocketTransport(mesh, timeout_s)

    def shrunk(self, timeout_s: float) -> SocketTransport:
        raise NotImplementedError(
            "shrink: ranks that were started without MPI end after a loss; "
            "use Open MPI 5, with `mpiexec --with-ft ulfm`"
        )

    def close(self) -> None:
        """See `Transport.close`.  A rank leaves once all others have said farewell."""
        try:
            for stream in self._streams.values():
                if not stream.ended:
                    stream.post(FrameType.BYE, b"")
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
        for stream in self._streams.values():
            stream.close()
        self._events.close()

    def forked(self) -> None:
        # The parent watches the connections by the same epoll instance: nothing is unregistered.
        for stream in self._streams.values():
            stream.ended = True
            stream.connection.close()
        self._events.forked()


class SocketChannel:
    def __init__(
        self, transport: SocketTransport, streams: dict[int, FrameStream], events: Events
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.translate, self.pause = transport.translate, transport.pause
        self._streams, self._events = streams, events

    def post(self, peer: int, envelope: bytes) -> None:
        stream = self._streams[peer]
        stream.check()
        stream.post(FrameType.ENVELOPE, envelope)

    def poll(self, peer: int) -> list[bytes]:
        with self._events.lock:
            self._events.progress()
            stream = self._streams[peer]
            arrived = list(stream.envelopes)
            stream.envelopes.clear()
            if not arrived:
                stream.check()
            return arrived

    def sender(self, peer: int, flow: int, buffer: memoryview) -> FrameSend:
        return FrameSend(self._streams[peer], FrameType.CHANNEL_DATA, flow, buffer)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> FrameReceive:
        return FrameReceive(self._streams[peer].channel_data, flow, buffer)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.envelopes.clear()


def _new_file(nbytes: int) -> int | None:
    try:
        descriptor = new_file()
    except (AttributeError, OSError):
        return None
    os.ftruncate(descriptor, nbytes)
    return descriptor
