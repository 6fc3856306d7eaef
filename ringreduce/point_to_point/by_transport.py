"""The road by messages of the transport: short data travel with the offer, long data after it.

A rank offers a message in an envelope.  The envelope holds data up to `EAGER_BYTES`.  For longer
data the receiver posts a receive and answers `_READY`; then the sender sends the data.  So no data
arrive before their receive is posted.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringreduce.errors import RingReduceError
from ringreduce.point_to_point.road import OPEN, Answered, Arrival, DtypeAndShape, PeerState, Road
from ringreduce.shm.mailbox import EAGER_BYTES, TAKEN
from ringreduce.transports.base import Channel

_FLOWS = 1 << 13
"""Flows of long data: message number n has flow n modulo this."""
_LAST_S = 1.0
"""The most seconds for which a rank that gives a message up waits for MPI to send the data."""
_READY = 0
"""An answer: the receiver has posted the receive for long data.  Others are those of `mailbox`."""
_OFFER, _ANSWER, _STATE, _BROKEN = b"oasb"
"""Kinds of envelopes."""
_OFFER_HEAD = struct.Struct("<Bqqqq16sq")
"""Kind, number, tag, bytes of the data, whether they follow, digest, length of the description."""
_ANSWER_HEAD = struct.Struct("<Bqq")
"""Kind, number of the message, status; the description of the receive follows."""
_STATE_HEAD = struct.Struct("<Bq")
"""Kind, state; the reason follows."""
_AT_FIRST = PeerState(OPEN, "", broken=False)


@dataclass(eq=False)
class _Long:
    number: int
    buffer: Any
    request: Any = None
    """The request of the transport; None: not started yet."""
    over: bool = False


@dataclass(eq=False)
class _Peer:
    offered: int = 0
    arrivals: deque[Arrival] = field(default_factory=deque)
    answers: deque[Answered] = field(default_factory=deque)
    state: PeerState = _AT_FIRST
    lost: str = ""
    unsent: dict[int, _Long] = field(default_factory=dict)
    """Long data that the peer is not ready for, by number of the message."""
    sending: list[_Long] = field(default_factory=list)
    receiving: dict[int, _Long] = field(default_factory=dict)


class TransportRoad(Road):
    name = "messages"

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._peers: defaultdict[int, _Peer] = defaultdict(_Peer)
        self._size = channel.size

    # --- messages ---

    def offer(self, peer: int, kind: DtypeAndShape, tag: int, data: np.ndarray) -> int:
        known = self._peers[peer]
        known.offered += 1
        number, text = known.offered, kind.text.encode()
        eager = kind.nbytes <= EAGER_BYTES
        head = _OFFER_HEAD.pack(_OFFER, number, tag, kind.nbytes, eager, kind.digest, len(text))
        self._post(peer, head + text + (data.tobytes() if eager else b""))
        if not eager:
            known.unsent[number] = _Long(number, _bytes_of(data))
        return number

    def answers(self, peer: int) -> Iterator[Answered]:
        known = self._peers[peer]
        self._poll(peer, known)
        for long in [each for each in known.sending if self._is_over(known, each)]:
            known.sending.remove(long)
            known.answers.append(Answered(long.number, TAKEN, ""))
        while known.answers:
            yield known.answers.popleft()

    def arrivals(self, peer: int) -> Iterator[Arrival]:
        known = self._peers[peer]
        self._poll(peer, known)
        while known.arrivals:
            yield known.arrivals.popleft()

    def read(self, peer: int, arrival: Arrival, into: np.ndarray) -> bool | None:
        known = self._peers[peer]
        data = _bytes_of(into)
        if arrival.place is not None:
            data[:] = arrival.place
            return True
        long = known.receiving.get(arrival.number)
        if long is None:
            request = self._channel.receiver(peer, arrival.number % _FLOWS, data)
            request.Start()
            known.receiving[arrival.number] = _Long(arrival.number, data, request)
            self._post(peer, _ANSWER_HEAD.pack(_ANSWER, arrival.number, _READY))
        elif self._is_over(known, long):
            del known.receiving[arrival.number]
            self._poll(peer, known)
            # A sender that has given the message up may have changed the data meanwhile.
            return not known.state.broken
        return False if known.lost else None

    def answer(
        self, peer: int, arrival: Arrival, status: int, kind: DtypeAndShape | None = None
    ) -> None:
        if status == TAKEN and arrival.place is None:
            return  # the sender's own request tells it
        text = "" if kind is None else kind.text
        head = _ANSWER_HEAD.pack(_ANSWER, arrival.number, status)
        self._post(peer, head + text.encode(errors="replace"))

    # --- states ---

    def announce(self, state: int, reason: str = "") -> None:
        for peer in range(self._size):
            if peer != self._channel.rank:
                self._post(peer, _STATE_HEAD.pack(_STATE, state) + reason.encode(errors="replace"))

    def give_up(self, peer: int) -> None:
        self._post(peer, bytes((_BROKEN,)))
        # MPI cannot cancel a send, and the caller may change the data as soon as this returns.
        known, end, idle = self._peers[peer], time.monotonic() + _LAST_S, 0
        while known.sending and not known.lost and time.monotonic() < end:
            known.sending = [long for long in known.sending if not self._is_over(known, long)]
            idle += 1
            self._channel.pause(idle)

    def state_of(self, peer: int) -> PeerState:
        known = self._peers[peer]
        self._poll(peer, known)
        return known.state

    def lost(self, peer: int) -> str:
        return self._peers[peer].lost

    def close(self) -> None:
        self._channel.close()

    # --- implementation ---

    def _post(self, peer: int, envelope: bytes) -> None:
        known = self._peers[peer]
        if not known.lost:
            with self._losing(known):
                self._channel.post(peer, envelope)

    def _is_over(self, known: _Peer, long: _Long) -> bool:
        """Return whether long data have arrived, or are sent; then free their request."""
        if long.over:
            return True
        with self._losing(known):
            long.over = bool(long.request.Test())
        if long.over:
            long.request.Free()
        return long.over

    @contextmanager
    def _losing(self, known: _Peer) -> Iterator[None]:
        """Note that a peer is lost if the transport raises PeerLostError, or an error of MPI."""
        try:
            yield
        except Exception as raised:
            error = self._channel.translate(raised)
            if not isinstance(error, RingReduceError):  # of a signal handler
                raise
            known.lost = str(error)

    def _poll(self, peer: int, known: _Peer) -> None:
        if known.lost:
            return
        envelopes: Iterable[bytes] = ()
        with self._losing(known):
            envelopes = self._channel.poll(peer)
        for envelope in envelopes:
            kind = envelope[0]
            if kind == _OFFER:
                known.arrivals.append(_arrival(envelope))
            elif kind == _ANSWER:
                self._take_answer(peer, known, envelope)
            elif kind == _BROKEN:
                known.state = known.state._replace(broken=True)
            else:
                _, state = _STATE_HEAD.unpack_from(envelope)
                reason = envelope[_STATE_HEAD.size :].decode()
                known.state = known.state._replace(state=state, reason=reason)

    def _take_answer(self, peer: int, known: _Peer, envelope: bytes) -> None:
        _, number, status = _ANSWER_HEAD.unpack_from(envelope)
        long = known.unsent.pop(number, None)
        if status != _READY:
            text = envelope[_ANSWER_HEAD.size :].decode()
            known.answers.append(Answered(number, status, text))
            return
        assert long is not None
        long.request = self._channel.sender(peer, number % _FLOWS, long.buffer)
        known.sending.append(long)  # before a signal handler can raise
        with self._losing(known):
            long.request.Start()
        if known.lost:  # a request that has not started would look complete
            known.sending.remove(long)


def _bytes_of(array: np.ndarray) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _arrival(envelope: bytes) -> Arrival:
    _, number, tag, _, eager, digest, length = _OFFER_HEAD.unpack_from(envelope)
    end = _OFFER_HEAD.size + length
    text = envelope[_OFFER_HEAD.size : end].decode()
    return Arrival(number, tag, digest, text, envelope[end:] if eager else None)
