"""The functions of mailboxes themselves, uncompiled, beside queues that do the same."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.compiler.records import address_of, size_of
from ringreduce.shm import mailbox
from ringreduce.shm.layout import WORD
from ringreduce.shm.mailbox import (
    ANSWERS,
    DIFFERENT,
    EAGER_BYTES,
    IN_PROCESS,
    IN_SEGMENT,
    INLINE,
    MAILBOX_BYTES,
    NOBODY,
    OFFERS,
    OTHER,
    PENDING,
    TAKEN,
    UNKNOWN,
    Answer,
    Counts,
    DtypeAndShapeRecord,
    MailboxPair,
    Offer,
    RankState,
)


class Two:
    """Two ranks of one process, each with a mailbox for the other."""

    def __init__(self) -> None:
        self.memory = np.zeros((2, MAILBOX_BYTES), np.uint8)
        self.words = np.zeros((2, size_of(MailboxPair) // WORD), np.int64)
        self.channels = [MailboxPair(words.ctypes.data) for words in self.words]
        for rank, channel in enumerate(self.channels):
            channel.mine = self.memory[rank].ctypes.data
            channel.theirs = self.memory[1 - rank].ctypes.data
            channel.segment, channel.segment_bytes = channel.mine, MAILBOX_BYTES
            channel.peer_segment = channel.theirs
            channel.spins = 3


def kind_of(
    nbytes: int, digest: int = 1, text: bytes = b"uint8[?]"
) -> tuple[DtypeAndShapeRecord, np.ndarray]:
    memory = np.zeros(size_of(DtypeAndShapeRecord) + mailbox.TEXT_BYTES, np.uint8)
    kind = DtypeAndShapeRecord(memory.ctypes.data)
    kind.digest_low, kind.digest_high, kind.nbytes, kind.text_bytes = digest, 7, nbytes, len(text)
    memory[size_of(DtypeAndShapeRecord) :][: len(text)] = np.frombuffer(text, np.uint8)
    return kind, memory


def data(nbytes: int, seed: int) -> np.ndarray:
    return (np.arange(nbytes) * 3 + seed).astype(np.uint8)


actions = st.lists(
    st.tuples(
        st.sampled_from(["offer", "take", "answer", "take_answer"]),
        st.sampled_from([0, 1, 100, EAGER_BYTES, EAGER_BYTES + 1]),
    ),
    max_size=150,
)


@given(actions=actions)
def test_offers_and_answers_come_in_order_and_are_never_overwritten(actions):
    two = Two()
    sender, receiver = two.channels
    offered, untaken, unanswered, answers = 0, deque(), deque(), deque()
    for action, nbytes in actions:
        if action == "offer":
            sent, (kind, _kept) = data(nbytes, offered), kind_of(nbytes)
            number = mailbox.offer(sender, kind, offered % 5, sent.ctypes.data)
            assert number == (offered + 1 if len(untaken) < OFFERS else 0)
            if number:
                offered += 1
                untaken.append((number, sent))
        elif action == "take":
            at = mailbox.next_offer(receiver)
            assert bool(at) == bool(untaken)
            if at:
                number, sent = untaken.popleft()
                offer, out = Offer(at), np.zeros(sent.size, np.uint8)
                assert (offer.sequence, offer.tag) == (number, (number - 1) % 5)
                assert mailbox.read_data(receiver, offer, out.ctypes.data)
                assert np.array_equal(out, sent)
                mailbox.take_offer(receiver)
                unanswered.append(number)
        elif action == "answer" and unanswered:
            done = mailbox.answer(receiver, unanswered[0], TAKEN, 0)
            assert done == (len(answers) < ANSWERS)
            if done:
                answers.append(unanswered.popleft())
        elif action == "take_answer":
            at = mailbox.next_answer(sender)
            assert bool(at) == bool(answers)
            if at:
                assert Answer(at).message == answers.popleft()
                mailbox.take_answer(sender)


@pytest.mark.parametrize(
    ("nbytes", "registered", "place"),
    [
        (EAGER_BYTES, False, INLINE),
        (EAGER_BYTES + 1, False, IN_PROCESS),
        (EAGER_BYTES + 1, True, IN_SEGMENT),
    ],
)
def test_short_data_are_in_the_offer_and_long_data_where_they_are(nbytes, registered, place):
    two, (kind, _kept) = Two(), kind_of(nbytes)
    sender, receiver = two.channels
    array = two.memory[0][-nbytes:] if registered else data(nbytes, 0)
    mailbox.offer(sender, kind, 0, array.ctypes.data)
    assert Offer(mailbox.next_offer(receiver)).place == place


def test_a_message_that_both_ranks_wait_for_is_taken():
    two, (kind, _kept) = Two(), kind_of(100)
    sender, receiver = two.channels
    sent, out = data(100, 5), np.zeros(100, np.uint8)
    assert mailbox.send(sender, kind, 3, sent.ctypes.data) == PENDING
    assert mailbox.receive(receiver, kind, 3, out.ctypes.data) == TAKEN
    assert np.array_equal(out, sent)
    assert Answer(mailbox.next_answer(sender)).status == TAKEN
    assert mailbox.receive(receiver, kind, 3, out.ctypes.data) == PENDING


@pytest.mark.parametrize("wrong", ["tag", "digest_low", "digest_high"])
def test_a_message_of_another_tag_or_kind_is_left_to_python(wrong):
    two, (kind, _kept) = Two(), kind_of(4)
    sender, receiver = two.channels
    out, other = np.zeros(4, np.uint8), kind_of(4)
    if wrong != "tag":
        setattr(other[0], wrong, 99)
    mailbox.send(sender, kind, 3, data(4, 5).ctypes.data)
    tag = 4 if wrong == "tag" else 3
    assert mailbox.receive(receiver, other[0], tag, out.ctypes.data) == OTHER
    assert not out.any()
    assert mailbox.next_offer(receiver)


def test_an_answer_other_than_taken_is_left_to_python():
    two, (kind, _kept) = Two(), kind_of(4)
    sender, receiver = two.channels
    mailbox.answer(receiver, 1, DIFFERENT, address_of(kind))
    assert mailbox.send(sender, kind, 3, data(4, 5).ctypes.data) == PENDING
    answer = Answer(mailbox.next_answer(sender))
    assert (answer.message, answer.status, answer.text_bytes) == (1, DIFFERENT, len(b"uint8[?]"))


def test_data_of_a_sender_that_has_given_up_are_not_taken():
    two, (kind, _kept) = Two(), kind_of(EAGER_BYTES + 1)
    sender, receiver = two.channels
    sent, out = data(EAGER_BYTES + 1, 1), np.zeros(EAGER_BYTES + 1, np.uint8)
    mailbox.offer(sender, kind, 0, sent.ctypes.data)
    Counts(sender.mine).broken = 1
    offer = Offer(mailbox.next_offer(receiver))
    assert not mailbox.read_data(receiver, offer, out.ctypes.data)


class Several:
    """The channels of rank 1 with three peers and itself, and the peers' channels with it."""

    def __init__(self) -> None:
        self.memory = np.zeros((2, 4, MAILBOX_BYTES), np.uint8)
        self.words = np.zeros(
            (3, 4, max(size_of(MailboxPair), size_of(RankState)) // WORD), np.int64
        )
        mine, theirs = ([box.ctypes.data for box in boxes] for boxes in self.memory)
        theirs[1] = mine[1]
        at = [[words.ctypes.data for words in records] for records in self.words]
        self.here, self.there = [[MailboxPair(each) for each in channels] for channels in at[:2]]
        self.states = [RankState(each) for each in at[2]]
        for peer, (here, there) in enumerate(zip(self.here, self.there, strict=True)):
            here.mine, here.theirs, here.peer_state = mine[peer], theirs[peer], at[2][peer]
            here.quiet, here.spins = peer != 1, 3
            there.mine, there.theirs = theirs[peer], mine[peer]

    def offer(self, peer: int, tag: int) -> None:
        kind, _kept = kind_of(1)
        assert mailbox.offer(self.there[peer], kind, tag, data(1, peer).ctypes.data)

    def look(self, tag: int, polls: int = 1) -> int:
        return mailbox.look(self.here[0], len(self.here), tag, polls)


changes_of_peers = st.lists(
    st.tuples(
        st.sampled_from([0, 2, 3]),
        st.sampled_from([5, 6, "take", "quiet", "busy", "broken", "closed"]),
    ),
    max_size=12,
)


@given(changes=changes_of_peers)
@settings(max_examples=20)
def test_a_look_finds_the_lowest_rank_whose_next_message_has_the_tag(changes):
    several, tags, unclear = Several(), {peer: deque() for peer in (0, 2, 3)}, set()
    for peer, change in changes:
        here = several.here[peer]
        if change in (5, 6):
            tags[peer].append(change)
            several.offer(peer, change)
        elif change == "take" and tags[peer]:
            assert Offer(mailbox.next_offer(here)).tag == tags[peer].popleft()
            mailbox.take_offer(here)
        elif change in ("quiet", "busy"):
            here.quiet = change == "quiet"
        elif change == "broken":
            Counts(several.there[peer].mine).broken = 1
        elif change == "closed":
            several.states[peer].state = 3
        ended = Counts(here.theirs).broken or several.states[peer].state
        unclear = unclear - {peer} if here.quiet and not ended else unclear | {peer}
        first = next((each for each in tags if tags[each] or each in unclear), None)
        for tag in (5, 6, 7):
            found = NOBODY
            if first is not None:
                fits = first not in unclear and tags[first][0] == tag
                found = first if fits else UNKNOWN
            assert several.look(tag) == found


def test_a_look_polls_and_yields_until_a_message_arrives(monkeypatch):
    several, yields = Several(), []

    def yield_core():
        yields.append(None)
        if len(yields) == 2:
            several.offer(2, 5)

    monkeypatch.setattr(mailbox, "yield_core", yield_core)
    assert several.look(5, polls=4) == NOBODY
    assert several.look(5, polls=9) == 2
    assert len(yields) == 2
