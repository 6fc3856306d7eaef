"""Price a schedule: predict its seconds from the speed of links and cores.

The model is alpha-beta-gamma, simulated event by event with the exact meaning of a step:

- A message starts when both its sender and its receiver have entered their steps.  It occupies one
  port of each for `message_s`, and for beta a byte.  Then the message is complete for the sender;
  alpha later it is delivered.
- Inside a node each rank has one port out and one port in.  Between nodes all ranks of a node share
  the node's one port out and one port in.  Messages of one ordered pair of ranks are sent one after
  another; messages of several pairs share a port equally, as TCP connections do.
- Through shared memory the receiver copies.  So a message occupies a port of the receiver alone,
  and many ranks read from one rank in the time of one.
- When all messages of a step are complete, the rank reduces the received data, at gamma a byte.
- A sliced array is several flows through the same schedule.  Each rank starts its flows in order,
  with at most `in_flight` unfinished.  The flows of a rank share its ports, and it reduces for one
  of them at a time.

For one slice, and a `message_s` of 0, this gives the published formulas exactly.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from ringreduce.errors import ScheduleError
from ringreduce.schedules.matching import Message, match
from ringreduce.schedules.schedule import Schedule, Step, chunk_of, source_of


@dataclass(frozen=True)
class Link:
    """The cost of one message."""

    alpha_s: float
    """Latency, in seconds."""
    beta_s_per_byte: float
    """Seconds for each byte."""
    message_s: float = 0.0
    """Seconds for which a message occupies its two ranks, besides its bytes.

    With it, many messages at once cost more than one.  It is the overhead of the LogP model; the
    published formulas leave it out.
    """
    receiver_copies: bool = False
    """Whether a message leaves its sender's port to others."""


@dataclass(frozen=True)
class Profile:
    """The speed of links and cores.  The defaults are round numbers, not measurements."""

    in_node: Link = Link(1e-6, 1 / 8e9, message_s=1e-6)
    """Messages inside a node: 1 µs, 8 GB/s, and 1 µs for each message."""
    between_nodes: Link = Link(20e-6, 8 / 10e9, message_s=2e-6)
    """Messages between nodes: 20 µs, Ethernet of 10 Gbit/s, and 2 µs for each message."""
    gamma_s_per_byte: float = 1 / 8e9
    """Seconds for each byte that a core reduces."""
    in_memory: Link = Link(0.5e-6, 1 / 20e9, receiver_copies=True)
    """Rounds through shared memory: 0.5 µs, 20 GB/s."""
    gamma_in_memory_s_per_byte: float = 1 / 50e9
    """Seconds for each byte reduced through shared memory: it is in the cache."""
    crowded_s: float = 5e-6
    """Seconds added to the latency of shared memory where ranks outnumber the cores."""

    def of_memory(self, crowded: bool) -> Profile:
        """Return the profile of ranks that share memory; `crowded`: more ranks than cores."""
        alpha_s = self.in_memory.alpha_s + (self.crowded_s if crowded else 0.0)
        link = replace(self.in_memory, alpha_s=alpha_s)
        return replace(self, in_node=link, gamma_s_per_byte=self.gamma_in_memory_s_per_byte)

    def also_in_memory(self) -> Profile:
        """Return this profile with the link and gamma of a node for shared memory as well."""
        return replace(
            self,
            in_memory=replace(self.in_node, receiver_copies=True),
            gamma_in_memory_s_per_byte=self.gamma_s_per_byte,
            crowded_s=0.0,
        )


def price(
    schedule: Schedule,
    nodes: Sequence[Sequence[int]],
    nbytes: float,
    profile: Profile,
    *,
    slices: int = 1,
    in_flight: int = 4,
) -> float:
    """Predict the seconds until the last rank has finished an array of `nbytes`.

    `nodes` lists the ranks of each node, every rank once.  The array is divided into `slices`, of
    which `in_flight` are under way at once.  Raises ScheduleError if the schedule cannot finish,
    and ValueError if the nodes do not list its ranks.

    >>> from ringreduce.algorithms import build
    >>> link = Link(alpha_s=1.0, beta_s_per_byte=0.5)
    >>> ring = build("all_gather", "ring", nodes=[[0, 1, 2]])
    >>> price(ring, [[0, 1, 2]], 6, Profile(in_node=link))
    4.0
    """
    if sorted(rank for node in nodes for rank in node) != list(range(schedule.size)):
        raise ValueError(f"price: nodes {nodes} do not list ranks 0 to {schedule.size - 1} once")
    if slices < 1 or in_flight < 1:
        raise ValueError(f"price: slices {slices} and in_flight {in_flight} must be at least 1")
    simulation = _Simulation(_Wiring(schedule, nodes, nbytes / slices, profile), slices, in_flight)
    return simulation.run()


@dataclass(frozen=True, slots=True)
class _Wire:
    """The cost of one message of the schedule on its own, and the two ports that it occupies."""

    sender: int
    """Rank."""
    receiver: int
    """Rank."""
    transfer_s: float
    """Seconds on ports that it shares with no other message."""
    alpha_s: float
    """Seconds from the end of the transfer to delivery."""
    ports: tuple[int, int]
    """Out of the sender or its node or for the pair alone, into the receiver or its node."""


class _Wiring:
    """A schedule on nodes, for one slice: the part of the simulation that does not change."""

    def __init__(
        self, schedule: Schedule, nodes: Sequence[Sequence[int]], nbytes: float, profile: Profile
    ) -> None:
        self.size = schedule.size
        self._node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        self._profile = profile
        scale = nbytes / (sum(schedule.weights) or 1)
        chunk_bytes = [weight * scale for weight in schedule.weights]
        ranks = [list(schedule.steps(rank)) for rank in range(self.size)]
        self.wires: list[_Wire] = []
        self.posted: list[list[list[int]]] = [[[] for _ in steps] for steps in ranks]
        """Rank, step -> indices of its wires."""
        self.fold_s = [
            [folds * profile.gamma_s_per_byte for folds in _folded_copies(steps, chunk_bytes)]
            for steps in ranks
        ]
        """Rank, step -> seconds that it reduces."""
        for number, message in enumerate(match(ranks)):
            message_bytes = sum(chunk_bytes[chunk_of(chunk)] for chunk in message.chunks)
            self.wires.append(self._wire(message, message_bytes))
            for rank, step in (message.sender, message.receiver):
                self.posted[rank][step].append(number)
            if message.reduce:
                rank, step = message.receiver
                self.fold_s[rank][step] += message_bytes * profile.gamma_s_per_byte

    def _wire(self, message: Message, message_bytes: float) -> _Wire:
        """Make the wire of a message.

        Ports are numbered: two for each rank, then two for each node.  Even ports lead out, odd
        ports lead in.  Where the receiver copies, each pair of ranks has a port out of its own.
        """
        sender, receiver = message.sender.rank, message.receiver.rank
        source, target = self._node_of[sender], self._node_of[receiver]
        if source == target:
            link, out = self._profile.in_node, 2 * sender
            if link.receiver_copies:
                out = -1 - (sender * self.size + receiver)
            ports = (out, 2 * receiver + 1)
        else:
            link = self._profile.between_nodes
            ports = (2 * (self.size + source), 2 * (self.size + target) + 1)
        transfer_s = link.message_s + message_bytes * link.beta_s_per_byte
        return _Wire(sender, receiver, transfer_s, link.alpha_s, ports)


def _folded_copies(steps: Sequence[Step], chunk_bytes: Sequence[float]) -> Iterator[float]:
    """Yield, for each step of a rank, the bytes of the copies that it folds."""
    kept: Counter[int] = Counter()
    for step in steps:
        names = (name for recv in step.recvs for name in recv.chunks)
        kept.update(chunk_of(name) for name in names if source_of(name) is not None)
        yield sum(kept.pop(chunk, 0) * chunk_bytes[chunk] for chunk in step.folds)


@dataclass(eq=False, slots=True)
class _Strand:
    """The progress of one rank in one flow."""

    flow: int
    rank: int
    step: int = -1
    incomplete: int = 0
    """Messages of this step that are not complete."""


@dataclass(eq=False, slots=True)
class _Transfer:
    """A message that both its ranks have posted."""

    wire: _Wire
    flow: int
    left_s: float
    """Seconds of transfer left at time `since_s`, if it had its ports alone."""
    since_s: float = 0.0
    """When its share of the ports last changed."""
    sharers: int = 0
    """Transfers on the fuller of its two ports; 0 before it starts."""
    ends_s: float = inf
    """When it ends with this share."""


class _Simulation:
    """Simulates the slices on their way through a schedule, by a queue of events."""

    def __init__(self, wiring: _Wiring, slices: int, in_flight: int) -> None:
        size = wiring.size
        self._wiring, self._slices, self._in_flight = wiring, slices, in_flight
        self._now_s = self._end_s = 0.0
        self._ended = self._order = 0
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._strands = [[_Strand(flow, rank) for rank in range(size)] for flow in range(slices)]
        self._started = [0] * size
        self._fold_free_s = [0.0] * size
        self._half_posted: set[tuple[int, int]] = set()
        self._connections: dict[tuple[int, int], deque[_Transfer]] = defaultdict(deque)
        self._ports: dict[int, dict[_Transfer, None]] = {
            port: {} for wire in wiring.wires for port in wire.ports
        }
        self._changed: dict[int, None] = {}

    def run(self) -> float:
        """Return the seconds until the last event; ports are shared anew after all of one time."""
        for rank in range(self._wiring.size):
            for _ in range(min(self._in_flight, self._slices)):
                self._start_next_flow(rank)
        self._share_ports()
        while self._events:
            self._now_s = self._events[0][0]
            while self._events and self._events[0][0] == self._now_s:
                _, _, action, subject = heappop(self._events)
                action(subject)
            self._share_ports()
        if self._ended < self._wiring.size * self._slices:
            raise ScheduleError("the schedule cannot finish; ringreduce.schedules.check says why")
        return self._end_s

    def _at(self, time_s: float, action: Callable[..., None], subject: object) -> None:
        self._order += 1
        heappush(self._events, (time_s, self._order, action, subject))

    def _start_next_flow(self, rank: int) -> None:
        if self._started[rank] < self._slices:
            self._started[rank] += 1
            self._go_on(self._strands[self._started[rank] - 1][rank])

    def _go_on(self, strand: _Strand) -> None:
        """Enter the strand's next step that has messages, or end the strand."""
        steps = self._wiring.posted[strand.rank]
        while not strand.incomplete:
            strand.step += 1
            if strand.step == len(steps):
                self._ended += 1
                self._end_s = self._now_s
                self._at(self._now_s, self._start_next_flow, strand.rank)
                return
            strand.incomplete = len(steps[strand.step])
        for number in steps[strand.step]:
            if (strand.flow, number) in self._half_posted:
                self._half_posted.remove((strand.flow, number))
                self._queue(strand.flow, self._wiring.wires[number])
            else:
                self._half_posted.add((strand.flow, number))

    def _queue(self, flow: int, wire: _Wire) -> None:
        connection = self._connections[wire.sender, wire.receiver]
        connection.append(_Transfer(wire, flow, left_s=wire.transfer_s))
        if len(connection) == 1:
            self._begin(connection[0])

    def _begin(self, transfer: _Transfer) -> None:
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
        connection = self._connections[wire.sender, wire.receiver]
        connection.popleft()
        if connection:
            self._begin(connection[0])
        strands = self._strands[transfer.flow]
        self._at(self._now_s + wire.alpha_s, self._complete, strands[wire.receiver])
        self._complete(strands[wire.sender])

    def _complete(self, strand: _Strand) -> None:
        """Count one message as complete; after the last, reduce as soon as the rank is free."""
        strand.incomplete -= 1
        if strand.incomplete:
            return
        fold_s = self._wiring.fold_s[strand.rank][strand.step]
        if fold_s:
            free_s = max(self._now_s, self._fold_free_s[strand.rank]) + fold_s
            self._fold_free_s[strand.rank] = free_s
            self._at(free_s, self._go_on, strand)
        else:
            self._go_on(strand)
