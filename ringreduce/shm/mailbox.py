"""Mailboxes: memory through which one rank sends messages to another rank of its host.

Every rank has one mailbox for each peer, in its own segment.  Only its owner writes a mailbox.  The
mailbox of rank a for rank b has

- the offers of messages from a to b, in a ring of `OFFERS`.  An offer has the tag, the dtype and
  the shape of the message.  Short data are in the offer; otherwise it has the location of the data.
- the answers of a to offers of b, in a ring of `ANSWERS`: the receiver has copied the data of a
  message, or has dropped the message, and why.
- two counts: how many offers and how many answers of b this rank has taken.  They free the places
  of these offers and answers.

**The memory order.**  Offers and answers have sequence numbers, from 1.  The writer stores the
number last, with release order, and the reader loads it with acquire order: so the reader sees all
of the offer or answer.  A place of a ring is written again only after the reader's count shows that
the reader has taken what was there.  The reader stores a count with release order, after its last
read of that place.  The sender keeps the data of a message unchanged until it reads the answer,
which the receiver writes after its last read of the data.

A receiver may take an offer before it has a receive for it.  It copies the offer, with short data,
to memory of its own.
"""

from __future__ import annotations

from ringreduce.compiler.interpreter import (
    enter_interpreter,
    integer,
    leave_interpreter,
    number_of,
)
from ringreduce.compiler.memory import copy, fence, load, read_process, yield_core
from ringreduce.compiler.records import (
    Address,
    Record,
    Word,
    address_of,
    compilable,
    load_acquire,
    record,
    size_of,
    store_release,
)
from ringreduce.shm.layout import WORD, MemoryRange
from ringreduce.shm.stores import stream

OFFERS, ANSWERS = 16, 32
"""Places in the rings of a mailbox."""
TEXT_BYTES = 128
"""The longest description of dtype and shape, in bytes."""
EAGER_BYTES = 4 << 10
"""The longest data that are copied into an offer.

One read through the kernel copies longer data sooner, where cores are far from each other, than two
copies through the offer.
"""
REASON_BYTES = 1024
"""The longest reason for which a rank accepts no more messages."""
_LINE = 64
"""Bytes of a cache line."""

INLINE, IN_SEGMENT, IN_PROCESS = range(3)
"""The place of a message's data: in the offer, in the sender's segment, in the sender's process."""
PENDING, TAKEN, DIFFERENT, REFUSED, OTHER = range(5)
"""Results.

PENDING: nothing has happened yet.
TAKEN: the receiver has copied the data.
DIFFERENT: dtype or shape differ from those of the receive, so the message was dropped.
REFUSED: the receiver posts no more receives, so the message was dropped.
OTHER: the next offer or answer is for Python to handle.
"""
NOBODY, UNKNOWN = -1, -2
"""Results of `look`: no rank offers a message; Python has to look."""


@record
class RankState(Record):
    """The state of a rank, at the beginning of its mail; the text of the reason follows it."""

    # One of the states of `point_to_point.road`, 0 at first; written last.
    state: Word
    reason_bytes: Word


@record
class Counts(Record):
    """The numbers of the peer's offers and answers that the owner of a mailbox has taken."""

    offers: Word
    answers: Word
    # 1: the owner has given up a message, and makes no more messages with this peer.
    broken: Word


@record
class DtypeAndShapeRecord(Record):
    """A dtype and a shape; their description follows."""

    digest_low: Word
    digest_high: Word
    # Bytes of an array of this dtype and shape.
    nbytes: Word
    # Length of the description in bytes, up to TEXT_BYTES.
    text_bytes: Word


@record
class Offer(Record):
    """A message that a rank offers; its description and its short data follow."""

    # Number of the message among those of this pair of ranks, from 1; written last.
    sequence: Word
    tag: Word
    digest_low: Word
    digest_high: Word
    nbytes: Word
    # INLINE, IN_SEGMENT or IN_PROCESS.
    place: Word
    # Offset in bytes in the sender's segment, or address in the sender's process.
    address: Address
    text_bytes: Word


@record
class Answer(Record):
    """The end of a message; the description of the receive follows."""

    # Number of the answer among those of this pair of ranks, from 1; written last.
    sequence: Word
    message: Word
    # TAKEN, DIFFERENT or REFUSED.
    status: Word
    text_bytes: Word


@record
class MailboxPair(Record):
    """The two mailboxes between this rank and a peer, as this rank sees them.  Not shared."""

    # This rank's mailbox for the peer.
    mine: Address
    # The peer's mailbox for this rank.
    theirs: Address
    peer_state: Address
    segment: Address
    segment_bytes: Word
    peer_segment: Address
    # Number of the peer's process; 0: this process.
    process: Word
    # Messages offered to the peer.
    offered: Word
    # Of these, messages that the peer is known to have taken from the ring.
    known_taken: Word
    # Offers of the peer that this rank has taken.
    taken: Word
    # Answers of the peer that this rank has taken.
    answers_taken: Word
    # Answers to the peer.
    answered: Word
    # Polls before this rank yields its core.
    spins: Word
    # Polls after a yield of the core each, before a function returns PENDING.
    yields: Word
    # 1: nothing is under way with the peer, so compiled code may make a message.
    quiet: Word
    # 1: compiled code makes a message, with the interpreter's lock released.
    busy: Word
    # The message that compiled code has offered and Python does not wait for yet; 0: none.
    unadopted: Word
    local: MemoryRange
    remote: MemoryRange


_OFFER_HEAD, _ANSWER_HEAD, _KIND_HEAD = (
    size_of(Offer),
    size_of(Answer),
    size_of(DtypeAndShapeRecord),
)
_CHANNEL_BYTES = size_of(MailboxPair)
DATA_OFFSET = _OFFER_HEAD + TEXT_BYTES
"""Bytes from the beginning of an offer to its short data."""
OFFER_BYTES = DATA_OFFSET + EAGER_BYTES
ANSWER_BYTES = 3 * _LINE
_ANSWERS_OFFSET = _LINE + OFFERS * OFFER_BYTES
MAILBOX_BYTES = _ANSWERS_OFFSET + ANSWERS * ANSWER_BYTES
MAILBOXES_OFFSET = _LINE + REASON_BYTES
"""Bytes from the beginning of a rank's mail to its first mailbox."""
_BYTES_A_YIELD_LOG = 12
"""Log2 of the bytes of data that add one poll."""
_STREAMED_BYTES = 4 << 20
"""Longer data in the sender's segment are copied by streaming stores: no cache holds them."""
_WINDOW_BYTES = 1 << 30
"""The most bytes that are read from a process at a time."""


def mail_bytes(ranks: int) -> int:
    return MAILBOXES_OFFSET + ranks * MAILBOX_BYTES


# --- the parts of a mailbox -----------------------------------------------------------------------


@compilable
def offer_of(mailbox: Address, sequence: int) -> Offer:
    return Offer(mailbox + _LINE + ((sequence - 1) & (OFFERS - 1)) * OFFER_BYTES)


@compilable
def answer_of(mailbox: Address, sequence: int) -> Answer:
    at = ((sequence - 1) & (ANSWERS - 1)) * ANSWER_BYTES
    return Answer(mailbox + _ANSWERS_OFFSET + at)


# --- sending --------------------------------------------------------------------------------------


@compilable
def offer(channel: MailboxPair, kind: DtypeAndShapeRecord, tag: int, data: Address) -> int:
    """Offer a message; return its number, or 0 if the ring of offers is full."""
    if channel.offered - channel.known_taken >= OFFERS:
        channel.known_taken = load_acquire(Counts(channel.theirs), "offers")
        if channel.offered - channel.known_taken >= OFFERS:
            return 0
    number = channel.offered + 1
    into = offer_of(channel.mine, number)
    nbytes, offset = kind.nbytes, data - channel.segment
    into.tag, into.nbytes = tag, nbytes
    into.digest_low, into.digest_high = kind.digest_low, kind.digest_high
    if nbytes <= EAGER_BYTES:
        into.place = INLINE
        copy(address_of(into) + DATA_OFFSET, data, nbytes)
    elif 0 <= offset < channel.segment_bytes:
        into.place, into.address = IN_SEGMENT, offset
    else:
        into.place, into.address = IN_PROCESS, data
    into.text_bytes = kind.text_bytes
    copy(address_of(into) + _OFFER_HEAD, address_of(kind) + _KIND_HEAD, kind.text_bytes)
    store_release(into, "sequence", number)
    channel.offered = number
    return number


@compilable
def next_answer(channel: MailboxPair) -> Address:
    """The address of the peer's next answer; 0 if there is none yet."""
    sequence = channel.answers_taken + 1
    answer = answer_of(channel.theirs, sequence)
    return address_of(answer) if load_acquire(answer, "sequence") == sequence else 0


@compilable
def take_answer(channel: MailboxPair) -> None:
    """Free the place of the peer's next answer, which this rank has read."""
    channel.answers_taken = channel.answers_taken + 1
    store_release(Counts(channel.mine), "answers", channel.answers_taken)


# --- receiving ------------------------------------------------------------------------------------


@compilable
def next_offer(channel: MailboxPair) -> Address:
    """The address of the peer's next offer; 0 if there is none yet."""
    sequence = channel.taken + 1
    found = offer_of(channel.theirs, sequence)
    return address_of(found) if load_acquire(found, "sequence") == sequence else 0


@compilable
def take_offer(channel: MailboxPair) -> None:
    """Free the place of the peer's next offer, which this rank has read."""
    channel.taken = channel.taken + 1
    store_release(Counts(channel.mine), "offers", channel.taken)


@compilable
def read_data(channel: MailboxPair, source: Offer, into: Address) -> bool:
    """Copy the data of an offer.

    Returns False if the sender's process cannot be read, or if the sender has given the message
    up, and may have changed the data.
    """
    nbytes = source.nbytes
    if source.place == INLINE:
        copy(into, address_of(source) + DATA_OFFSET, nbytes)
        return True
    if source.place == IN_SEGMENT:
        mapped = channel.peer_segment + source.address
        if nbytes > _STREAMED_BYTES:
            stream(into, mapped, nbytes)
        else:
            copy(into, mapped, nbytes)
    elif channel.process == 0:
        copy(into, source.address, nbytes)
    elif not read_from_process(channel, into, source.address, nbytes):
        return False
    fence()
    return Counts(channel.theirs).broken == 0


@compilable
def read_from_process(channel: MailboxPair, into: Address, source: Address, nbytes: int) -> bool:
    done = 0
    while done < nbytes:
        length = min(nbytes - done, _WINDOW_BYTES)
        channel.local.address, channel.local.nbytes = into + done, length
        channel.remote.address, channel.remote.nbytes = source + done, length
        read = read_process(channel.process, address_of(channel.local))
        if read <= 0:
            return False
        done += read
    return True


@compilable
def answer(channel: MailboxPair, message: int, status: int, kind: Address) -> bool:
    """Answer a message, with the description of `kind` if not 0; False if the ring is full."""
    if channel.answered - load_acquire(Counts(channel.theirs), "answers") >= ANSWERS:
        return False
    sequence = channel.answered + 1
    into = answer_of(channel.mine, sequence)
    into.message, into.status, into.text_bytes = message, status, 0
    if kind:
        into.text_bytes = DtypeAndShapeRecord(kind).text_bytes
        copy(address_of(into) + _ANSWER_HEAD, kind + _KIND_HEAD, into.text_bytes)
    store_release(into, "sequence", sequence)
    channel.answered = sequence
    return True


# --- a message while no other is under way --------------------------------------------------------


@compilable
def _polls(channel: MailboxPair, kind: DtypeAndShapeRecord) -> int:
    """Return how often to poll before a return to Python: longer for long data.

    A poll after a yield takes 0.3 us at least, in which the peer copies 4 KiB.
    """
    return channel.spins + channel.yields + (kind.nbytes >> _BYTES_A_YIELD_LOG)


@compilable
def send(channel: MailboxPair, kind: DtypeAndShapeRecord, tag: int, data: Address) -> int:
    """Offer a message and poll for its answer; no other message to the peer is without an answer.

    Returns TAKEN; PENDING if the message is offered; OTHER if the ring of offers is full, or if
    Python has to read the answer.
    """
    if offer(channel, kind, tag, data) == 0:
        return OTHER
    spins, polls = channel.spins, _polls(channel, kind)
    for poll in range(polls):
        if poll >= spins:
            yield_core()
        found = next_answer(channel)
        if found:
            if Answer(found).status != TAKEN:
                return PENDING
            take_answer(channel)
            return TAKEN
    return PENDING


@compilable
def receive(channel: MailboxPair, kind: DtypeAndShapeRecord, tag: int, into: Address) -> int:
    """Poll for the peer's next offer, and copy its data if the message is the wanted one.

    Returns TAKEN, PENDING if there is no offer, or OTHER if Python has to take the offer.
    """
    spins, polls = channel.spins, _polls(channel, kind)
    for poll in range(polls):
        if poll >= spins:
            yield_core()
        found = next_offer(channel)
        if found:
            source = Offer(found)
            differs = (source.digest_low ^ kind.digest_low) | (
                source.digest_high ^ kind.digest_high
            )
            if source.tag != tag or differs:
                return OTHER
            if channel.answered - Counts(channel.theirs).answers >= ANSWERS:
                return OTHER
            if not read_data(channel, source, into):
                return OTHER
            answer(channel, source.sequence, TAKEN, 0)
            take_offer(channel)
            return TAKEN
    return PENDING


@compilable
def look(first: MailboxPair, ranks: int, tag: int, polls: int) -> int:
    """Poll for the lowest rank whose next message has `tag`; the message stays in its mailbox.

    `first` is the pair with rank 0; the others follow.  Returns the rank, NOBODY, or UNKNOWN: a
    lower rank offers another tag first, makes no more messages, or has a pair that is not
    quiet.
    """
    for poll in range(polls):
        if poll >= first.spins:
            yield_core()
        for peer in range(ranks):
            channel = MailboxPair(address_of(first) + peer * _CHANNEL_BYTES)
            if channel.mine == channel.theirs:  # this rank's own
                continue
            ended = RankState(channel.peer_state).state or Counts(channel.theirs).broken
            if ended or not channel.quiet:
                return UNKNOWN
            found = next_offer(channel)
            if found:
                return peer if Offer(found).tag == tag else UNKNOWN
    return NOBODY


# --- the function that Python calls ---------------------------------------------------------------

OFFER, NEXT_ANSWER, TAKE_ANSWER, NEXT_OFFER, TAKE_OFFER, READ_DATA, ANSWER, LOOK = range(8)
"""The functions above, for `mail`."""


@compilable
def do(what: int, channel: MailboxPair, a: int, b: int, c: int) -> int:
    if what == OFFER:
        return offer(channel, DtypeAndShapeRecord(a), b, c)
    if what == NEXT_ANSWER:
        return next_answer(channel)
    if what == NEXT_OFFER:
        return next_offer(channel)
    if what == LOOK:
        return look(channel, 1, a, 1)
    if what == READ_DATA:
        return int(read_data(channel, Offer(a), b))
    if what == ANSWER:
        return int(answer(channel, a, b, c))
    if what == TAKE_ANSWER:
        take_answer(channel)
    else:
        take_offer(channel)
    return 0


def mail(_: Address, args: Address, nargs: int) -> Address:
    """``mail(what, channel, a, b, c)``, without the interpreter's lock while it runs."""
    what, channel = number_of(load(args)), number_of(load(args + WORD))
    a, b = number_of(load(args + 2 * WORD)), number_of(load(args + 3 * WORD))
    c = number_of(load(args + 4 * WORD))
    state = leave_interpreter()
    result = do(what, MailboxPair(channel), a, b, c)
    enter_interpreter(state)
    return integer(result)
