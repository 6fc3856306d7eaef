"""The flows of one communicator, the memory that they share, and the messages that they have sent.

A flow is bound to memory once; running it again only starts its messages.  Flows that are bound to
the caller's arrays are kept by the arrays' addresses.  `Config.kept_messages` limits their
messages: the flows that were used longest ago are freed first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ringreduce.config import Config
from ringreduce.devices.base import Device
from ringreduce.messages.binding import Arithmetic, Flow, bind
from ringreduce.messages.device_staging import PinnedBuffers, bind_staging
from ringreduce.planning.plan import Plan
from ringreduce.transports.base import Transport


@dataclass(frozen=True, eq=False)
class Task:
    """A plan, the device of its arrays, and the functions that reduce values."""

    plan: Plan
    device: Device
    dtype: Any
    """Dtype of the elements of messages."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    in_flight: int = 4
    """Slices that are under way at once."""
    staged_bytes: int = 16 << 10
    """Arrays up to this size, in bytes, are copied to memory that messages are bound to once."""

    @property
    def nbytes(self) -> int:
        return max(self.plan.input_count, self.plan.output_count) * self.plan.itemsize


BoundTo = tuple[Task, int, int]
"""A task, and the addresses of the input and the output that its flows are bound to."""


class FlowCache:
    """The flows of one communicator.  One call at a time uses it."""

    def __init__(self, transport: Transport, config: Config) -> None:
        self.transport, self.config = transport, config
        self._flows: set[Flow] = set()
        self._by_address: OrderedDict[BoundTo, list[Flow]] = OrderedDict()
        """Flows that are bound to the caller's arrays, the least recently used first."""
        self._kept_messages = 0
        """Messages of the flows in `_by_address`."""
        self._scratch: dict[tuple[Device, int], Any] = {}
        """Scratch memory by device and slot."""
        self._blocks: dict[tuple[Device, int], PinnedBuffers] = {}
        """Pinned host memory by device and slot, for devices that have a stream."""
        self.sent: Counter[int] = Counter()
        """Messages ever sent to each peer, as far as they have been counted."""
        self.received: Counter[int] = Counter()
        """Messages ever received from each peer, as far as they have been counted."""

    # --- flows ---

    def bind(self, task: Task, memory: tuple[Any, Any, Any], index: int, slot: int = 0) -> Flow:
        planned, device = task.plan.slice(index), task.device
        bound_to = (planned, memory, task.plan.itemsize, self.transport, device, task.arithmetic)
        if device.stream is None:
            flow = bind(*bound_to, index, slot)
        else:
            blocks = self._blocks.get((device, slot))
            if blocks is None:
                blocks = self._blocks[device, slot] = PinnedBuffers(device.stream)
            flow = bind_staging(*bound_to, blocks, index, slot)
        self._flows.add(flow)
        return flow

    def by_address(self, task: Task, source: Any, target: Any) -> list[Flow]:
        """Return the flows bound to these flat arrays so far; the caller binds the others.

        The flows do not keep the arrays alive.  An address is only used while the caller's array
        of the same size is at that address.
        """
        bound_to = (task, task.device.address(source), task.device.address(target))
        flows = self._by_address.setdefault(bound_to, [])
        self._by_address.move_to_end(bound_to)
        return flows

    def bind_next(self, flows: list[Flow], task: Task, source: Any, target: Any) -> Flow:
        device, index = task.device, len(flows)
        slot = index % task.in_flight
        unowned = device.unowned(source)
        memory = (unowned, unowned if target is source else device.unowned(target))
        count = task.plan.slice(index).scratch
        flow = self.bind(task, (*memory, self.scratch(task, slot, count)), index, slot)
        self._limit(flow.size)
        flows.append(flow)
        self._kept_messages += flow.size
        return flow

    def scratch(self, task: Task, slot: int, count: int) -> Any:
        """Return scratch memory of `count` elements for the flow in this slot.

        If a call needs more, the memory is replaced by one twice as long or longer; flows
        that were bound before keep theirs.
        """
        nbytes, place = count * task.dtype.itemsize, (task.device, slot)
        kept = self._scratch.get(place)
        if kept is None or kept.nbytes < nbytes:
            larger = nbytes if kept is None else max(nbytes, 2 * kept.nbytes)
            kept = self._scratch[place] = task.device.scratch(larger)
        return kept[:nbytes].view(task.dtype)

    # --- freeing ---

    def free(self, flow: Flow) -> None:
        """Free a flow that is not under way; its messages stay counted."""
        self.count(flow, len(flow.steps), flow.runs)
        self._flows.discard(flow)
        flow.free()

    def free_task(self, task: Task) -> None:
        for bound_to in [bound_to for bound_to in self._by_address if bound_to[0] is task]:
            self._unbind(bound_to)

    def close(self) -> None:
        """Free all flows and all memory; nothing is under way."""
        self._by_address.clear()
        for flow in list(self._flows):
            self.free(flow)
        self._scratch.clear()
        for device in {device for device, _ in self._blocks}:
            if device.stream is not None:
                device.stream.close()
        self._blocks.clear()

    def _limit(self, messages: int) -> None:
        """Free the flows that were used longest ago until `messages` more may be kept."""
        most = self.config.kept_messages - messages
        while len(self._by_address) > 1 and self._kept_messages > most:
            self._unbind(next(iter(self._by_address)))

    def _unbind(self, bound_to: BoundTo) -> None:
        for flow in self._by_address.pop(bound_to):
            self._kept_messages -= flow.size
            self.free(flow)

    # --- how many messages were sent and received ---

    def count(self, flow: Flow, steps: int, times: int = 1) -> None:
        for total, messages in zip((self.sent, self.received), flow.messages(steps), strict=True):
            for peer, count in messages.items():
                total[peer] += count * times

    def count_all(self) -> None:
        """Count the messages of all complete runs of all flows."""
        for flow in list(self._flows):  # another thread may plan a call meanwhile
            self.count(flow, len(flow.steps), flow.runs)
            flow.runs = 0

    def forget_counts(self) -> None:
        self.sent.clear()
        self.received.clear()
