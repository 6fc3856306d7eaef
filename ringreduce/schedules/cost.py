"""Price a schedule: the seconds that it takes, predicted from what links and cores can do.

The model is alpha-beta-gamma, simulated event by event with the steps' own meaning:

- A message starts when its sender and its receiver are both in their steps.  It occupies a port of
  each for a while of its own and for beta a byte; then the sender is done with it, and alpha later
  it is delivered.
- Inside a node each rank has one port out and one port in.  Between nodes all ranks of a node share
  the node's one port out and one port in.  Messages from one rank to one other follow each other;
  those of several pairs of ranks share a port equally, as TCP connections do.
- Once all messages of a step are complete, the rank folds what came to be reduced, at gamma a byte.
- A sliced array is several flows through the same schedule.  Each rank starts them in order, with
  at most `in_flight` unfinished; they share its ports and its one fold engine.

For one slice this gives the published formulas exactly.
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
    """What one message costs: `alpha_s` until it is there, `beta_s_per_byte` for each of its bytes.

    For `message_s` it keeps its two ranks busy, so that many at once cost more than one: the
    overhead of the LogP model, which the published formulas leave out.
    """

    alpha_s: float
    beta_s_per_byte: float
    message_s: float = 0.0


@dataclass(frozen=True)
class Profile:
    """What links and cores can do.

    The defaults are no measurements: they are the round numbers of messages in a node (1 µs,
    8 GB/s), of 10 Gbit/s Ethernet (20 µs), of 1 or 2 µs to make a message, and of a core that folds
    8 GB/s; of an exchange through shared memory (0.5 µs, 20 GB/s, folds in the cache at 50 GB/s)
    and of a turn of all ranks where they outnumber the cores (5 µs).  `ringreduce tune` measures.
    """

    in_node: Link = Link(1e-6, 1 / 8e9, message_s=1e-6)
    between_nodes: Link = Link(20e-6, 8 / 10e9, message_s=2e-6)
    gamma_s_per_byte: float = 1 / 8e9
    in_memory: Link = Link(0.5e-6, 1 / 20e9)
    gamma_in_memory_s_per_byte: float = 1 / 50e9
    crowded_s: float = 5e-6

    def of_memory(self, crowded: bool) -> Profile:
        """Of ranks of one node that share memory; `crowded` if they are more than its cores."""
        alpha_s = self.in_memory.alpha_s + (self.crowded_s if crowded else 0.0)
        link = replace(self.in_memory, alpha_s=alpha_s)
        return replace(self, in_node=link, gamma_s_per_byte=self.gamma_in_memory_s_per_byte)

    def also_in_memory(self) -> Profile:
        """With the links and folds of a node for shared memory as well."""
        return replace(
            self,
            in_memory=self.in_node,
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
    """The seconds until the last rank is done with `nbytes`, all of the array's bytes.

    `nodes` lists the ranks of each node, every rank once.  Raises ScheduleError when the schedule
    cannot finish, and ValueError when the nodes do not list its ranks.

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
    """What a message costs by itself, and the two ports that it occupies."""

    sender: int
    receiver: int
    transfer_s: float
    alpha_s: float
    ports: tuple[int, int]


class _Wiring:
    """A schedule laid out on nodes, for one slice: all that does not change as time goes by."""

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
        """Of each rank's steps the wires, as indices."""
        self.fold_s = [
            [folds * profile.gamma_s_per_byte for folds in _folded_copies(steps, chunk_bytes)]
            for steps in ranks
        ]
        for number, message in enumerate(match(ranks)):
            message_bytes = sum(chunk_bytes[chunk_of(chunk)] for chunk in message.chunks)
            self.wires.append(self._wire(message, message_bytes))
            for rank, step in (message.sender, message.receiver):
                self.posted[rank][step].append(number)
            if message.reduce:
                rank, step = message.receiver
                self.fold_s[rank][step] += message_bytes * profile.gamma_s_per_byte

    def _wire(self, message: Message, message_bytes: float) -> _Wire:
        """Ports 0 and up are the ranks', then come the nodes'; even ones go out, odd ones in."""
        sender, receiver = message.sender.rank, message.receiver.rank
        source, target = self._node_of[sender], self._node_of[receiver]
        if source == target:
            link, ports = self._profile.in_node, (2 * sender, 2 * receiver + 1)
        else:
            link = self._profile.between_nodes
            ports = (2 * (self.size + source), 2 * (self.size + target) + 1)
        transfer_s = link.message_s + message_bytes * link.beta_s_per_byte
        return _Wire(sender, receiver, transfer_s, link.alpha_s, ports)


def _folded_copies(steps: Sequence[Step], chunk_bytes: Sequence[float]) -> Iterator[float]:
    """The bytes of copies that each of a rank's steps folds."""
    kept: Counter[int] = Counter()
    for step in steps:
        names = (name for recv in step.recvs for name in recv.chunks)
        kept.update(chunk_of(name) for name in names if source_of(name) is not None)
        yield sum(kept.pop(chunk, 0) * chunk_bytes[chunk] for chunk in step.folds)


@dataclass(eq=False, slots=True)
class _Strand:
    """One rank's way through one flow."""

    flow: int
    rank: int
    step: int = -1
    incomplete: int = 0
    """Messages of this step that are under way."""


@dataclass(eq=False, slots=True)
class _Transfer:
    """A message whose ranks are ready.  `left_s` is what it still takes with ports of its own."""

    wire: _Wire
    flow: int
    left_s: float
    since_s: float = 0.0
    sharers: int = 0
    ends_s: float = inf


class _Simulation:
    """Slices going through a schedule: a queue of events, and who occupies which port."""

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
        """Go from event to event; what happens at one moment is seen by all of it together."""
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
        """Give each transfer its share of the fuller of its two ports, where that has changed."""
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
            return  # its share has changed since this event was written down
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
        """One message less; after the last one fold, when the rank's fold engine is free."""
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
