"""The road through shared memory: mailboxes, see `ringreduce.shm.mailbox`."""

from __future__ import annotations

import ctypes
import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringreduce.compiler.records import address_of, array_address, offset_of, size_of
from ringreduce.point_to_point.road import OPEN, Answered, Arrival, DtypeAndShape, PeerState, Road
from ringreduce.shm import functions, mailbox
from ringreduce.shm.layout import SEGMENT_BYTES, WORD
from ringreduce.shm.mail_entry import ENTRY_WORDS, KNOWN_WORDS, WAYS, MailEntry
from ringreduce.shm.mailbox import Answer, Counts, MailboxPair, Offer, RankState
from ringreduce.shm.segments import Segments
from ringreduce.system.proc import start_of

_SPINS_AND_YIELDS, _CROWDED_SPINS_AND_YIELDS = (20_000, 2), (20, 4)
"""(polls, further polls after a yield of the core each) until a function returns to Python.

The first pair is for ranks with a core each, the second for ranks that share cores.
"""
_MOST_KINDS = 1024
"""Kinds of arrays that compiled code may know."""
_OFFER_HEAD, _ANSWER_HEAD, _KIND_HEAD = map(size_of, (Offer, Answer, mailbox.DtypeAndShapeRecord))
_STATE_HEAD = size_of(RankState)


class MailboxRoad(Road):
    """One rank's mailboxes.

    While the word at the address `refused` is not 0, compiled code makes no messages.
    """

    name = "shared memory"

    def __init__(self, segments: Segments, rank: int, crowded: bool, refused: int) -> None:
        mail = functions.python_function("mail")
        assert mail is not None
        self._mail: Callable[..., int] = mail
        self._segments, self._rank, self._refused = segments, rank, refused
        size = len(segments.addresses)
        self._memory = np.zeros((size, size_of(MailboxPair) // WORD), np.int64)
        self.channels = [self._channel(peer, crowded) for peer in range(size)]
        self._addresses = [address_of(channel) for channel in self.channels]
        self._kinds: dict[bytes, np.ndarray] = {}
        self._likes: dict[bytes, np.ndarray] = {}
        """Arrays of kinds that compiled code knows, without memory of their own."""
        self._known: dict[str, np.ndarray] = {}
        """The known kinds of `send` and `recv`, by peer."""
        self._latest: dict[tuple[str, int], DtypeAndShape] = {}
        """The kind that was made known or used last, of `send` or `recv` and a peer."""
        self._entries: list[MailEntry] = []
        self._unsent: list[deque[tuple[int, int, DtypeAndShape | None]]] = [
            deque() for _ in range(size)
        ]
        """By peer: message, status and kind of the answers that found no place."""
        self._started = [start_of(process) if process else None for process in segments.processes]
        """When each peer's process started; None for threads of this process."""

    def _channel(self, peer: int, crowded: bool) -> MailboxPair:
        segments = self._segments
        channel = MailboxPair(self._memory[peer].ctypes.data)
        channel.mine = self._mail_of(self._rank) + _mailbox_at(peer)
        channel.theirs = self._mail_of(peer) + _mailbox_at(self._rank)
        channel.segment, channel.segment_bytes = segments.addresses[self._rank], segments.nbytes
        channel.peer_segment = segments.addresses[peer]
        channel.peer_state, channel.process = self._mail_of(peer), segments.processes[peer]
        channel.spins, channel.yields = _CROWDED_SPINS_AND_YIELDS if crowded else _SPINS_AND_YIELDS
        return channel

    def _mail_of(self, rank: int) -> int:
        return self._segments.addresses[rank] + SEGMENT_BYTES

    # --- messages ---

    def offer(self, peer: int, kind: DtypeAndShape, tag: int, data: np.ndarray) -> int:
        record = self.record_of(kind)
        address = array_address(data)
        return self._mail(mailbox.OFFER, self._addresses[peer], array_address(record), tag, address)

    def answers(self, peer: int) -> Iterator[Answered]:
        channel = self._addresses[peer]
        while at := self._mail(mailbox.NEXT_ANSWER, channel, 0, 0, 0):
            answer = Answer(at)
            text = _text(at + _ANSWER_HEAD, answer.text_bytes)
            taken = Answered(answer.message, answer.status, text)
            self._mail(mailbox.TAKE_ANSWER, channel, 0, 0, 0)
            yield taken

    def arrivals(self, peer: int) -> Iterator[Arrival]:
        self._flush(peer)
        channel = self._addresses[peer]
        while at := self._mail(mailbox.NEXT_OFFER, channel, 0, 0, 0):
            offer = Offer(at)
            eager = offer.nbytes if offer.place == mailbox.INLINE else 0
            # A copy frees the place for the next offers, however late the receive is.
            kept = _bytes(at, mailbox.DATA_OFFSET + eager).copy()
            self._mail(mailbox.TAKE_OFFER, channel, 0, 0, 0)
            mine = Offer(array_address(kept))
            digest = kept[offset_of(Offer, "digest_low") :][:16].tobytes()
            text = _text(array_address(kept) + _OFFER_HEAD, mine.text_bytes)
            yield Arrival(mine.sequence, mine.tag, digest, text, kept)

    def read(self, peer: int, arrival: Arrival, into: np.ndarray) -> bool | None:
        kept, channel = array_address(arrival.place), self._addresses[peer]
        return bool(self._mail(mailbox.READ_DATA, channel, kept, array_address(into), 0))

    def answer(
        self, peer: int, arrival: Arrival, status: int, kind: DtypeAndShape | None = None
    ) -> None:
        self._unsent[peer].append((arrival.number, status, kind))
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        unsent = self._unsent[peer]
        while unsent:
            message, status, kind = unsent[0]
            record = 0 if kind is None else array_address(self.record_of(kind))
            if not self._mail(mailbox.ANSWER, self._addresses[peer], message, status, record):
                return
            unsent.popleft()

    def has_unsent(self, peer: int) -> bool:
        return bool(self._unsent[peer])

    def record_of(self, kind: DtypeAndShape) -> np.ndarray:
        """Return the record of a kind and its description, as the compiled functions read it."""
        found = self._kinds.get(kind.digest)
        if found is None:
            text = np.frombuffer(kind.text.encode(), np.uint8)
            found = np.zeros(_KIND_HEAD + mailbox.TEXT_BYTES, np.uint8)
            record = mailbox.DtypeAndShapeRecord(array_address(found))
            record.nbytes, record.text_bytes = kind.nbytes, len(text)
            found[: len(kind.digest)] = np.frombuffer(kind.digest, np.uint8)
            found[_KIND_HEAD : _KIND_HEAD + len(text)] = text
            if len(self._kinds) < _MOST_KINDS:
                self._kinds[kind.digest] = found
        return found

    # --- messages that compiled code makes ---

    def entry(
        self, name: str, general: Callable[..., Any], adopt: Callable[..., Any]
    ) -> Callable[..., Any]:
        size = len(self.channels)
        words = np.zeros(ENTRY_WORDS + size * WAYS * KNOWN_WORDS, np.int64)
        self._known[name] = words[ENTRY_WORDS:].reshape(size, WAYS, KNOWN_WORDS)
        entry = MailEntry(array_address(words))
        entry.sends, entry.probes = name == "send", name == "probe"
        entry.rank, entry.ranks = self._rank, size
        entry.idle, entry.refused = True, self._refused
        self._entries.append(entry)
        entry.channels = self._addresses[0]
        named = {
            "general": general,
            "adopt": adopt,
            "array_type": np.ndarray,
            "int_type": int,
            "none": None,
            "name_peer": "peer",
            "name_tag": "tag",
        }
        for field, value in named.items():
            setattr(entry, field, id(value))
        function = functions.python_function(
            "message", (words, *named.values(), self), inspect.getdoc(general), name
        )
        assert function is not None
        return function

    def offers(self, peer: int, tag: int) -> bool | None:
        found = self._mail(mailbox.LOOK, self._addresses[peer], tag, 0, 0)
        return None if found == mailbox.UNKNOWN else found != mailbox.NOBODY

    def admit(self, name: str, peer: int, array: np.ndarray, kind: DtypeAndShape) -> None:
        if self._latest.get((name, peer)) is kind:
            return
        known, record = self._known.get(name), self.record_of(kind)
        if known is None or type(array) is not np.ndarray or kind.digest not in self._kinds:
            return
        like = self._likes.get(kind.digest)
        if like is None:
            like = np.broadcast_to(np.empty((), array.dtype), array.shape)
            self._likes[kind.digest] = like
        wanted = id(like), array_address(record)
        if like.dtype is array.dtype:
            if wanted not in map(tuple, known[peer]):
                known[peer] = np.roll(known[peer], 1, axis=0)
                known[peer, 0] = wanted
            self._latest[name, peer] = kind

    def set_quiet(self, peer: int, quiet: bool) -> None:
        channel = self.channels[peer]
        channel.quiet = quiet and not channel.unadopted
        while not quiet and channel.busy:
            time.sleep(0)

    def set_idle(self, idle: bool) -> None:
        for entry in self._entries:
            entry.idle = idle

    def forked(self) -> None:
        for channel in self.channels:
            channel.quiet = channel.busy = 0

    def unadopted(self, peer: int) -> int:
        return self.channels[peer].unadopted

    def adopted(self, peer: int) -> None:
        self.channels[peer].unadopted = 0

    # --- states ---

    def announce(self, state: int, reason: str = "") -> None:
        at = self._mail_of(self._rank)
        text = np.frombuffer(reason.encode(errors="replace")[: mailbox.REASON_BYTES], np.uint8)
        mine = RankState(at)
        mine.reason_bytes = len(text)
        _bytes(at + _STATE_HEAD, len(text))[:] = text
        mine.state = state

    def give_up(self, peer: int) -> None:
        Counts(self.channels[peer].mine).broken = 1

    def has_given_up(self, peer: int) -> bool:
        return bool(Counts(self.channels[peer].mine).broken)

    def state_of(self, peer: int) -> PeerState:
        at = self._mail_of(peer)
        theirs = RankState(at)
        broken = bool(Counts(self.channels[peer].theirs).broken)
        if theirs.state == OPEN:
            return PeerState(OPEN, "", broken)
        return PeerState(theirs.state, _text(at + _STATE_HEAD, theirs.reason_bytes), broken)

    def lost(self, peer: int) -> str:
        started, process = self._started[peer], self._segments.processes[peer]
        ended = started is not None and start_of(process) != started
        return "its process has ended" if ended else ""


def _mailbox_at(peer: int) -> int:
    return mailbox.MAILBOXES_OFFSET + peer * mailbox.MAILBOX_BYTES


def _bytes(address: int, nbytes: int) -> np.ndarray:
    """View memory that outlives the view's use."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _text(address: int, nbytes: int) -> str:
    return ctypes.string_at(address, nbytes).decode(errors="replace")
