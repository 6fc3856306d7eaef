"""Simulate ranks that go through their steps, event by event: the seconds until all have finished.

- A rank enters a step, and posts its sends.  It has posted the receives of its steps up to `ahead`
  steps later.
- A message starts when both its ends are posted.  It occupies one port of its sender and one of its
  receiver for `transfer_s`.  Then the message is complete for the sender; `alpha_s` later it is
  delivered.
- Messages of one ordered pair of ranks are sent one after another; messages of several pairs share
  a port equally, as TCP connections do.
- When the messages of a step are complete, the rank works for the seconds that follow the step.
  Then it enters the next step.
- A sliced array is several flows through the same steps.  Each rank starts its flows in order, with
  at most `in_flight` unfinished.  The flows of a rank share its ports, and it works for one of them
  at a time.

The cost models of collectives and of pipelines give the seconds of messages and work.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from ringreduce.errors import ScheduleError
from ringreduce.schedules.matching import Message, RankStep, posted_in


@dataclass(frozen=True, slots=True)
class Wire:
    message: Message
    transfer_s: float
    """Seconds on ports that it shares with no other message."""
    alpha_s: float
    """Seconds from the end of the transfer to delivery."""
    ports: tuple[int, int]
    """Out of the sender or its node or for the pair alone, into the receiver or its node."""
    nbytes: float = 0.0
    """Bytes of its data, where that is known."""


@dataclass(frozen=True)
class Workload:
    """The messages and the work of all ranks, for one slice: what a simulation does not change."""

    wires: Sequence[Wire]
    work_s: Sequence[Sequence[float]]
    """Rank, step -> seconds of work after the messages of the step."""
    ahead: int = 0
    """The number of steps by which receives are posted ahead."""
    waits_for_sends: bool = True
    """Whether a step lasts until its sends are complete, or until its receives are."""


def simulate(
    workload: Workload,
    slices: int = 1,
    in_flight: int = 1,
    watch: Callable[[RankStep, float], None] = lambda place, time_s: None,
    on_message: Callable[[Wire, float, float], None] = lambda wire, begin_s, end_s: None,
) -> float:
    """Return the seconds until the last rank has finished all slices.

    `watch` is called with each step, and the time at which the work after the step begins.
    `on_message` is called with each message, the time at which both its ends are posted, and the
    time of its delivery.
    Raises ScheduleError if the ranks cannot finish.
    """
    return _Simulation(workload, slices, in_flight, watch, on_message).run()


@dataclass(eq=False, slots=True)
class _Strand:
    flow: int
    rank: int
    step: int = -1
    incomplete: int = 0
    early: dict[int, int] = field(default_factory=dict)
    """Later step -> its messages that are complete already."""


@dataclass(eq=False, slots=True)
class _Transfer:
    wire: Wire
    flow: int
    posted_s: float
    left_s: float
    """Seconds of transfer left at time `since_s`, if it had its ports alone."""
    since_s: float = 0.0
    """When its share of the ports last changed."""
    sharers: int = 0
    """Transfers on the fuller of its two ports; 0 before it starts."""
    ends_s: float = inf


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        slices: int,
        in_flight: int,
        watch: Callable[[RankStep, float], None],
        on_message: Callable[[Wire, float, float], None],
    ) -> None:
        self._workload, self._slices, self._in_flight = workload, slices, in_flight
        self._watch, self._on_message = watch, on_message
        self._size = size = len(workload.work_s)
        self._begin: list[list[list[int]]] = [[[] for _ in steps] for steps in workload.work_s]
        """Rank, step -> indices of the wires whose end the rank posts when it enters the step."""
        self._awaited = [[0] * len(steps) for steps in workload.work_s]
        for number, wire in enumerate(workload.wires):
            message = wire.message
            for end in (message.sender, message.receiver):
                begin = posted_in(message, end, workload.ahead)
                self._begin[end.rank][begin].append(number)
                if end == message.receiver or workload.waits_for_sends:
                    self._awaited[end.rank][end.step] += 1
        self._now_s = self._end_s = 0.0
        self._ended = self._order = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._strands = [[_Strand(flow, rank) for rank in range(size)] for flow in range(slices)]
        self._started = [0] * size
        self._free_s = [0.0] * size
        self._half_posted: set[tuple[int, int]] = set()
        self._connections: dict[tuple[int, int], deque[_Transfer]] = defaultdict(deque)
        self._ports: dict[int, dict[_Transfer, None]] = {
            port: {} for wire in workload.wires for port in wire.ports
        }
        self._changed: dict[int, None] = {}

    def run(self) -> float:
        """Return the seconds until the last event; ports are shared anew after all of one time."""
        for rank in range(self._size):
            for _ in range(min(self._in_flight, self._slices)):
                self._start_next_flow(rank)
        self._share_ports()
        while self._events:
            self._now_s = self._events[0][0]
            while self._events and self._events[0][0] == self._now_s:
                _, _, action, subject = heappop(self._events)
                action(*subject)
            self._share_ports()
        if self._ended < self._size * self._slices:
            raise ScheduleError("the schedule cannot finish; its proof says why")
        return self._end_s

    def _at(self, time_s: float, action: Callable[..., None], *subject: object) -> None:
        self._order += 1
        heappush(self._events, (time_s, self._order, action, subject))

    def _start_next_flow(self, rank: int) -> None:
        if self._started[rank] < self._slices:
            self._started[rank] += 1
            self._go_on(self._strands[self._started[rank] - 1][rank])

    def _go_on(self, strand: _Strand) -> None:
        """Enter the strand's next steps, up to one that waits or is followed by work, or end it."""
        begin, awaited = self._begin[strand.rank], self._awaited[strand.rank]
        while True:
            strand.step += 1
            if strand.step == len(begin):
                self._ended += 1
                self._end_s = self._now_s
                self._at(self._now_s, self._start_next_flow, strand.rank)
                return
            for number in begin[strand.step]:
                self._post(strand.flow, number)
            strand.incomplete = awaited[strand.step] - strand.early.pop(strand.step, 0)
            if strand.incomplete or self._works(strand):
                return

    def _post(self, flow: int, number: int) -> None:
        """Post an end of a message; with its second end the message can start."""
        if (flow, number) in self._half_posted:
            self._half_posted.remove((flow, number))
            self._queue(flow, self._workload.wires[number])
        else:
            self._half_posted.add((flow, number))

    def _queue(self, flow: int, wire: Wire) -> None:
        connection = self._connections[_pair(wire)]
        connection.append(_Transfer(wire, flow, self._now_s, left_s=wire.transfer_s))
        if len(connection) == 1:
            self._begin_transfer(connection[0])

    def _begin_transfer(self, transfer: _Transfer) -> None:
        for port in transfer.wire.ports:
            self._ports[port][transfer] = None
            self._changed[port] = None

    def _share_ports(self) -> None:
        """Update each transfer whose share has changed: its share of the fuller of its ports."""
        for port in self._changed:
            for transfer in self._ports[port]:
                out, into = transfer.wire.ports
                sharers = max(len(self._ports[out]), len(self._ports[into]))
                if sharers == transfer.sharers:
                    continue
                if transfer.sharers:
                    elapsed_s = self._now_s - transfer.since_s
                    transfer.left_s = max(0.0, transfer.left_s - elapsed_s / transfer.sharers)
                transfer.sharers, transfer.since_s = sharers, self._now_s
                transfer.ends_s = self._now_s + transfer.left_s * sharers
                self._at(transfer.ends_s, self._finish, transfer)
        self._changed.clear()

    def _finish(self, transfer: _Transfer) -> None:
        if transfer.ends_s != self._now_s:
            return  # its share has changed since this event was queued
        transfer.ends_s = inf
        wire = transfer.wire
        for port in wire.ports:
            del self._ports[port][transfer]
            self._changed[port] = None
        connection = self._connections[_pair(wire)]
        connection.popleft()
        if connection:
            self._begin_transfer(connection[0])
        sender, receiver = wire.message.sender, wire.message.receiver
        delivered_s = self._now_s + wire.alpha_s
        self._at(delivered_s, self._complete, transfer.flow, receiver)
        self._on_message(wire, transfer.posted_s, delivered_s)
        if self._workload.waits_for_sends:
            self._complete(transfer.flow, sender)

    def _complete(self, flow: int, end: RankStep) -> None:
        """Count one message as complete; after the last of a step, work."""
        strand = self._strands[flow][end.rank]
        if end.step > strand.step:
            strand.early[end.step] = strand.early.get(end.step, 0) + 1
            return
        strand.incomplete -= 1
        if not strand.incomplete and not self._works(strand):
            self._go_on(strand)

    def _works(self, strand: _Strand) -> bool:
        """Begin the work after the strand's step, once the rank is free; False if there is none."""
        work_s = self._workload.work_s[strand.rank][strand.step]
        begin_s = max(self._now_s, self._free_s[strand.rank]) if work_s else self._now_s
        self._watch(RankStep(strand.rank, strand.step), begin_s)
        if work_s:
            self._free_s[strand.rank] = begin_s + work_s
            self._at(begin_s + work_s, self._go_on, strand)
        return work_s > 0


def _pair(wire: Wire) -> tuple[int, int]:
    return wire.message.sender.rank, wire.message.receiver.rank
