"""Match each send with its receive, and find the order in which ranks can enter their steps.

The checker and the cost model both combine the steps of all ranks this way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringreduce.errors import ScheduleError
from ringreduce.schedules.schedule import Chunks, Recv, Send, Step, chunk_text


class Place(NamedTuple):
    """A step of a rank."""

    rank: int
    step: int


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """A send and the receive that matches it."""

    sender: Place
    """The step that sends."""
    receiver: Place
    """The step that receives."""
    chunks: Chunks
    reduce: bool
    """Whether the receiver reduces the chunks into its own values."""


Posted = dict[Place, list[Message]]
"""Step -> its messages, sent and received, if it has any."""


def match(ranks: Sequence[Sequence[Step]]) -> list[Message]:
    """Match every send with its receive: first in, first out for each ordered pair of ranks.

    Raises ScheduleError if a send or a receive is left over, or a pair names different chunks.
    """
    sends: dict[tuple[int, int], list[tuple[Place, Send]]] = defaultdict(list)
    recvs: dict[tuple[int, int], list[tuple[Place, Recv]]] = defaultdict(list)
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            for send in step.sends:
                sends[rank, send.peer].append((Place(rank, number), send))
            for recv in step.recvs:
                recvs[recv.peer, rank].append((Place(rank, number), recv))

    messages = []
    for pair in sorted(sends.keys() | recvs.keys()):
        sent, received = sends[pair], recvs[pair]
        for (sender, send), (receiver, recv) in zip(sent, received, strict=False):
            if send.chunks != recv.chunks:
                raise ScheduleError(
                    f"step {sender.step}: rank {sender.rank} sends {chunks_text(send.chunks)} to "
                    f"rank {receiver.rank}, whose receive in step {receiver.step} wants "
                    f"{chunks_text(recv.chunks)}"
                )
            messages.append(Message(sender, receiver, send.chunks, recv.reduce))
        if len(sent) > len(received):
            raise ScheduleError(_left_over(*sent[len(received)]))
        if len(received) > len(sent):
            raise ScheduleError(_left_over(*received[len(sent)]))
    return messages


def progress(ranks: Sequence[Sequence[Step]], posted: Posted) -> Iterator[Place]:
    """Yield each step when its rank enters it; at a rank's end, the place after its last step.

    A message is complete once both its ranks have entered the steps that send and receive it.  A
    step ends when all its messages are complete.  Raises ScheduleError on deadlock, naming the
    ranks that wait for each other.
    """
    unfinished = {place: len(here) for place, here in posted.items()}
    entered = [-1] * len(ranks)
    free = deque(range(len(ranks)))
    while free:
        rank = free.popleft()
        entered[rank] += 1
        place = Place(rank, entered[rank])
        yield place
        if place not in posted and place.step < len(ranks[rank]):
            free.append(rank)
        for message in posted.get(place, ()):
            if entered[other_end(message, rank).rank] < other_end(message, rank).step:
                continue
            for end in (message.sender, message.receiver):
                unfinished[end] -= 1
                if not unfinished[end]:
                    free.append(end.rank)
    if any(at < len(steps) for at, steps in zip(entered, ranks, strict=True)):
        raise ScheduleError(_deadlock(entered, posted))


def _deadlock(entered: Sequence[int], posted: Posted) -> str:
    """Follow the waiting ranks, from a rank that cannot continue, until a rank repeats."""
    waits: dict[int, tuple[int, str]] = {}
    for rank, step in enumerate(entered):
        for message in posted.get(Place(rank, step), ()):
            other = other_end(message, rank)
            if entered[other.rank] < other.step:
                does = "send" if other == message.sender else "receive"
                waits[rank] = (
                    other.rank,
                    f"rank {rank} in step {step} waits for rank {other.rank} to {does} "
                    f"{chunks_text(message.chunks)}, which it does in step {other.step}",
                )
                break
    rank, path = next(iter(waits)), []
    while rank not in path:
        path.append(rank)
        rank = waits[rank][0]
    circle = path[path.index(rank) :]
    return "deadlock: " + "; ".join(waits[rank][1] for rank in circle)


def other_end(message: Message, rank: int) -> Place:
    """Return the step at the end of a message that is not `rank`'s."""
    return message.receiver if message.sender.rank == rank else message.sender


def _left_over(place: Place, message: Send | Recv) -> str:
    does, lacks = ("sends", "receive") if isinstance(message, Send) else ("receives", "send")
    way = "to" if does == "sends" else "from"
    return (
        f"step {place.step}: rank {place.rank} {does} {chunks_text(message.chunks)} {way} "
        f"rank {message.peer}, which has no {lacks} left for it"
    )


def chunks_text(chunks: Sequence[int]) -> str:
    numbers = ", ".join(map(chunk_text, chunks))
    return f"chunk{'s' * (len(chunks) > 1)} {numbers}" if chunks else "no chunks"
