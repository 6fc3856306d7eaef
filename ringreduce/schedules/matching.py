"""Match each send with its receive, and find the order in which ranks can enter their steps.

The checker and the cost model both combine the steps of all ranks this way, for collectives and for
pipelines.  The two kinds of schedule differ in their `Vocabulary`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringreduce.errors import ScheduleError
from ringreduce.schedules.schedule import Chunks, Recv, Send, Step, chunk_text


class RankStep(NamedTuple):
    rank: int
    step: int


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """A send and the receive that matches it."""

    sender: RankStep
    receiver: RankStep
    chunks: Chunks
    reduce: bool
    """Whether the receiver reduces the chunks into its own values."""


Posted = dict[RankStep, list[Message]]


def chunks_text(chunks: Sequence[int]) -> str:
    """Return text such as chunks 3, 4, or no chunks."""
    numbers = ", ".join(map(chunk_text, chunks))
    return f"chunk{'s' * (len(chunks) > 1)} {numbers}" if chunks else "no chunks"


@dataclass(frozen=True)
class Vocabulary:
    """The flows of the messages of a kind of schedule, and the words of its errors.

    The defaults are those of a collective: all messages of its schedule belong to one flow.
    """

    flow: Callable[[Chunks], int] = lambda chunks: 0
    chunks: Callable[[Chunks], str] = chunks_text
    when: Callable[[RankStep, bool], str] = lambda place, sends: f"in step {place.step}"
    """Step, and whether it sends or receives there -> when that is."""
    subject: Callable[[RankStep, bool], str] = lambda place, sends: (
        f"step {place.step}: rank {place.rank}"
    )
    """Step, and whether it sends or receives there -> the rank, as the beginning of a sentence."""
    mark: Callable[[RankStep, bool], RankStep] = lambda place, sends: place
    """Step, and whether it sends or receives there -> the place that an error marks."""


COLLECTIVE = Vocabulary()


def match(ranks: Sequence[Sequence[Step]], vocabulary: Vocabulary = COLLECTIVE) -> list[Message]:
    """Match every send with its receive: first in, first out for each ordered pair and flow.

    Raises ScheduleError if a send or a receive is left over, or a pair names different chunks.
    """
    sends: dict[tuple[int, int, int], list[tuple[RankStep, Send]]] = defaultdict(list)
    recvs: dict[tuple[int, int, int], list[tuple[RankStep, Recv]]] = defaultdict(list)
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            for send in step.sends:
                flow = vocabulary.flow(send.chunks)
                sends[rank, send.peer, flow].append((RankStep(rank, number), send))
            for recv in step.recvs:
                flow = vocabulary.flow(recv.chunks)
                recvs[recv.peer, rank, flow].append((RankStep(rank, number), recv))

    messages = []
    for pair in sorted(sends.keys() | recvs.keys()):
        sent, received = sends[pair], recvs[pair]
        for (sender, send), (receiver, recv) in zip(sent, received, strict=False):
            if send.chunks != recv.chunks:
                raise ScheduleError(
                    f"{vocabulary.subject(sender, True)} sends {vocabulary.chunks(send.chunks)} to "
                    f"rank {receiver.rank}, whose receive {vocabulary.when(receiver, False)} wants "
                    f"{vocabulary.chunks(recv.chunks)}",
                    [vocabulary.mark(sender, True), vocabulary.mark(receiver, False)],
                )
            messages.append(Message(sender, receiver, send.chunks, recv.reduce))
        if len(sent) > len(received):
            raise _left_over(*sent[len(received)], vocabulary)
        if len(received) > len(sent):
            raise _left_over(*received[len(sent)], vocabulary)
    return messages


def posts(messages: Iterable[Message]) -> Posted:
    posted: Posted = defaultdict(list)
    for message in messages:
        posted[message.sender].append(message)
        posted[message.receiver].append(message)
    return posted


def progress(
    ranks: Sequence[Sequence[Step]],
    posted: Posted,
    ahead: int = 0,
    vocabulary: Vocabulary = COLLECTIVE,
) -> Iterator[RankStep]:
    """Yield each step when its rank enters it; at a rank's end, the place after its last step.

    A rank in step i has posted the receives of its steps up to i + `ahead`, and the sends up to
    step i.  A message is complete once both its ends are posted.  A step ends when all its messages
    are complete.  Raises ScheduleError on deadlock, naming the ranks that wait for each other.
    """
    unfinished = {place: len(here) for place, here in posted.items()}
    entered = [-1] * len(ranks)
    begin = _begin(posted, ahead) if ahead else posted
    free = deque(range(len(ranks)))
    while free:
        rank = free.popleft()
        entered[rank] += 1
        place = RankStep(rank, entered[rank])
        yield place
        if not unfinished.get(place) and place.step < len(ranks[rank]):
            free.append(rank)
        for message in begin.get(place, ()):
            if not _is_posted(message, other_end(message, rank), entered, ahead):
                continue
            for end in (message.sender, message.receiver):
                unfinished[end] -= 1
                if not unfinished[end] and end.step == entered[end.rank]:
                    free.append(end.rank)
    if any(at < len(steps) for at, steps in zip(entered, ranks, strict=True)):
        raise _deadlock(entered, posted, ahead, vocabulary)


def posted_in(message: Message, end: RankStep, ahead: int) -> int:
    return max(0, end.step - ahead) if end == message.receiver else end.step


def _is_posted(message: Message, end: RankStep, entered: Sequence[int], ahead: int) -> bool:
    return entered[end.rank] >= posted_in(message, end, ahead)


def _begin(posted: Posted, ahead: int) -> Posted:
    begin: Posted = defaultdict(list)
    for place, messages in posted.items():
        for message in messages:
            begin[RankStep(place.rank, posted_in(message, place, ahead))].append(message)
    return begin


def _deadlock(
    entered: Sequence[int], posted: Posted, ahead: int, vocabulary: Vocabulary
) -> ScheduleError:
    """Follow the waiting ranks, from a rank that cannot continue, until a rank repeats."""
    waits: dict[int, tuple[int, str, RankStep]] = {}
    for rank, step in enumerate(entered):
        here = RankStep(rank, step)
        for message in posted.get(here, ()):
            other = other_end(message, rank)
            if not _is_posted(message, other, entered, ahead):
                sends = other == message.sender
                does = f"{'send' if sends else 'receive'} {vocabulary.chunks(message.chunks)}"
                waits[rank] = (
                    other.rank,
                    f"rank {rank} {vocabulary.when(here, not sends)} waits for rank {other.rank} "
                    f"to {does}, which it does {vocabulary.when(other, sends)}",
                    vocabulary.mark(here, not sends),
                )
                break
    rank, path = next(iter(waits)), []
    while rank not in path:
        path.append(rank)
        rank = waits[rank][0]
    circle = path[path.index(rank) :]
    return ScheduleError(
        "deadlock: " + "; ".join(waits[rank][1] for rank in circle),
        [waits[rank][2] for rank in circle],
    )


def other_end(message: Message, rank: int) -> RankStep:
    return message.receiver if message.sender.rank == rank else message.sender


def _left_over(place: RankStep, message: Send | Recv, vocabulary: Vocabulary) -> ScheduleError:
    sends = isinstance(message, Send)
    does, way, lacks = ("sends", "to", "receive") if sends else ("receives", "from", "send")
    return ScheduleError(
        f"{vocabulary.subject(place, sends)} {does} {vocabulary.chunks(message.chunks)} {way} "
        f"rank {message.peer}, which has no {lacks} left for it",
        [vocabulary.mark(place, sends)],
    )
