"""Price a schedule: predict its seconds from the speed of links and cores.

The model is alpha-beta-gamma, simulated with the exact meaning of a step (see `simulation`):

- A message starts when both its ranks have entered their steps.  It occupies a port of each for
  `message_s`, and for beta a byte.  Alpha later it is delivered.
- Inside a node each rank has one port out and one port in.  Between nodes all ranks of a node share
  the node's one port out and one port in.
- Through shared memory the receiver copies.  So a message occupies a port of the receiver alone,
  and many ranks read from one rank in the time of one.
- When all messages of a step are complete, the rank reduces the received data, at gamma a byte.

For one slice, and a `message_s` of 0, this gives the published formulas exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ringreduce.schedules.matching import Message, match
from ringreduce.schedules.schedule import Schedule, Step, chunk_of, source_of
from ringreduce.schedules.simulation import Wire, Workload, simulate

OnMessage = Callable[[Wire, float, float], None]


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
    between_nodes: Link = Link(10e-6, 8 / 10e9, message_s=2e-6)
    """Messages between nodes: 10 µs, Ethernet of 10 Gbit/s, and 2 µs for each message."""
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
        """Return this profile with the link and gamma of a node for shared memory, too."""
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
    on_message: OnMessage = lambda wire, begin_s, end_s: None,
) -> float:
    """Predict the seconds until the last rank has finished an array of `nbytes`.

    `nodes` lists the ranks of each node, every rank once.  The array is divided into `slices`, of
    which `in_flight` are under way at once.  `on_message` is as for `simulate`.  Raises
    ScheduleError if the schedule cannot finish, and ValueError if the nodes do not list its ranks.

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
    workload = _workload(schedule, nodes, nbytes / slices, profile)
    return simulate(workload, slices, in_flight, on_message=on_message)


def bytes_of_chunks(schedule: Schedule, nbytes: float) -> list[float]:
    """Return the bytes of each chunk of an array of `nbytes`."""
    scale = nbytes / (sum(schedule.weights) or 1)
    return [weight * scale for weight in schedule.weights]


def _workload(
    schedule: Schedule, nodes: Sequence[Sequence[int]], nbytes: float, profile: Profile
) -> Workload:
    chunk_bytes = bytes_of_chunks(schedule, nbytes)
    ranks = [list(schedule.steps(rank)) for rank in range(schedule.size)]
    fold_s = [
        [folds * profile.gamma_s_per_byte for folds in _folded_copies(steps, chunk_bytes)]
        for steps in ranks
    ]
    links, wires = Links(nodes, profile), []
    for message in match(ranks):
        message_bytes = sum(chunk_bytes[chunk_of(chunk)] for chunk in message.chunks)
        wires.append(links.wire(message, message_bytes))
        if message.reduce:
            rank, step = message.receiver
            fold_s[rank][step] += message_bytes * profile.gamma_s_per_byte
    return Workload(wires, fold_s)


class Links:
    """The links between ranks placed on `nodes`.

    Ports: two for each rank, then two for each node; even ones lead out, odd ones in.  Where
    the receiver copies, each pair of ranks has a port out of its own.
    """

    def __init__(self, nodes: Sequence[Sequence[int]], profile: Profile) -> None:
        self._node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        self._profile = profile

    def wire(self, message: Message, nbytes: float) -> Wire:
        size, sender, receiver = len(self._node_of), message.sender.rank, message.receiver.rank
        source, target = self._node_of[sender], self._node_of[receiver]
        if source == target:
            link, out = self._profile.in_node, 2 * sender
            if link.receiver_copies:
                out = -1 - (sender * size + receiver)
            ports = (out, 2 * receiver + 1)
        else:
            link = self._profile.between_nodes
            ports = (2 * (size + source), 2 * (size + target) + 1)
        transfer_s = link.message_s + nbytes * link.beta_s_per_byte
        return Wire(message, transfer_s, link.alpha_s, ports, nbytes)


def _folded_copies(steps: Sequence[Step], chunk_bytes: Sequence[float]) -> Iterator[float]:
    kept: Counter[int] = Counter()
    for step in steps:
        names = (name for recv in step.recvs for name in recv.chunks)
        kept.update(chunk_of(name) for name in names if source_of(name) is not None)
        yield sum(kept.pop(chunk, 0) * chunk_bytes[chunk] for chunk in step.folds)
