"""Keeps plans bound to memory and messages, so that a call made again only starts them.

A small plan gets memory of its own; a persistent one is bound to its arrays for good; all others
are bound by the addresses of the caller's arrays, and those used longest ago make room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ringreduce.config import Config
from ringreduce.devices.base import Device
from ringreduce.messages.binding import Arithmetic, Flow, bind
from ringreduce.messages.device_staging import Blocks, bind_staging
from ringreduce.planning.plan import Plan
from ringreduce.planning.shm_instructions import Instructions
from ringreduce.shm.program import Exchange
from ringreduce.shm.segments import Segments
from ringreduce.transports.base import Transport


@dataclass(eq=False)
class Prepared:
    """A plan with what it does with values, and where its messages are while it is in use."""

    plan: Plan
    device: Device
    """Where its arrays live."""
    dtype: Any
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Of input and output."""
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    in_flight: int = 4
    """Slices under way at once."""
    staged: Flow | None = None
    """The only flow of a small plan, bound to `staging`."""
    staging: tuple[Any, Any] = (None, None)
    """The small plan's own memory, in the shapes of input and output."""
    bound: Flow | None = None
    """Its only flow, bound to the only arrays that it is ever run on."""
    shares: bool = True
    """Whether it may go through shared memory, on all ranks alike."""
    rows: dict[int, Instructions | None] = field(default_factory=dict)
    """Of slices, for shared memory."""
    last_run: int = 0
    """When it was last run, counted in runs; the store keeps what ran last."""

    @property
    def nbytes(self) -> int:
        """The longer of its input and output."""
        return max(self.plan.input_count, self.plan.output_count) * self.plan.itemsize


Place = tuple[Prepared, int, int]
"""A plan and the addresses of the input and output that its flows are bound to."""


class FlowCache:
    """The flows of one communicator.  One call at a time uses it."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        foreign: Callable[[int, bytes], None],
        segments: Segments | None = None,
    ) -> None:
        self._transport, self._config = transport, config
        self.exchange: Exchange | None = None
        if config.memory is not None:
            assert segments is not None
            self.exchange = Exchange(segments, transport.rank, config, foreign)
        self._runs = 0
        self._staged: list[Prepared] = []
        self._for_good: list[Prepared] = []
        """Plans with a flow that is bound to the only arrays that they are run on."""
        self._discarded: deque[Prepared] = deque()
        self._bound: OrderedDict[Place, list[Flow]] = OrderedDict()
        """Flows bound to the caller's memory, that used longest ago first."""
        self._bound_count = 0
        self._scratch: dict[tuple[Device, int], Any] = {}
        """By device and slot."""
        self._blocks: dict[tuple[Device, int], Blocks] = {}
        """Pinned memory of devices that have a stream, by device and slot."""
        self.sent: Counter[int] = Counter()
        """Messages ever sent to each peer, as far as they have been counted."""
        self.received: Counter[int] = Counter()

    # --- small plans ---

    def staged(self, prepared: Prepared) -> Flow | None:
        """The flow of a small plan, in memory of its own; None for one that is not small."""
        flow = prepared.staged
        if flow is None:
            if prepared.nbytes > self._config.staged_bytes or prepared.plan.slices != 1:
                return None
            flow = self._stage(prepared)
        self.use(prepared)
        return flow

    def use(self, prepared: Prepared) -> None:
        """The flow of a small plan is about to run."""
        self._runs = prepared.last_run = self._runs + 1

    def _stage(self, prepared: Prepared) -> Flow:
        while len(self._staged) >= self._config.kept_plans:
            self.forget(min(self._staged, key=lambda kept: kept.last_run))
        plan, empty = prepared.plan, prepared.device.empty
        # Apart, so that folds are not in place: NumPy takes twice as long where one element is.
        source, target = (empty(n, prepared.dtype) for n in (plan.input_count, plan.output_count))
        scratch = empty(self._scratch_count(prepared, 0), prepared.dtype)
        prepared.staging = source.reshape(prepared.shapes[0]), target.reshape(prepared.shapes[1])
        flow = prepared.staged = self._bind(prepared, (source, target, scratch), index=0)
        self._staged.append(prepared)
        return flow

    def unbound(self, prepared: Prepared) -> Flow | None:
        """A flow that is told at each call where its arrays lie, contiguous; None without one."""
        rows = self._rows(prepared, 0) if prepared.plan.slices == 1 else None
        if rows is None:
            return None
        device, dtype = prepared.device, prepared.dtype
        nothing = device.empty(0, dtype)
        scratch = self._scratch_slot(device, 0, rows.scratch, dtype)
        return self._bind(prepared, (nothing, nothing, scratch), index=0)

    # --- plans that are only run on one pair of arrays ---

    def bind_for_good(self, prepared: Prepared, source: Any, target: Any) -> None:
        """Promise that the plan will only ever be run on these arrays, which it keeps alive.

        Without effect on what is not contiguous or is cut in slices.  Until `discard`.
        """
        self.free_discarded()
        device = prepared.device
        flat = [device.flat(array) for array in (source, target)]
        pairs = zip(flat, (source, target), strict=True)
        direct = all(one.size == 0 or device.overlap(one, other) for one, other in pairs)
        if prepared.plan.slices == 1 and direct:
            count = self._scratch_count(prepared, 0)
            scratch = device.scratch(count * prepared.dtype.itemsize)
            memory = (
                flat[0],
                flat[0] if target is source else flat[1],
                scratch.view(prepared.dtype),
            )
            prepared.bound = self._bind(prepared, memory, index=0)
            self._for_good.append(prepared)

    def discard(self, prepared: Prepared) -> None:
        """The plan will not be run again: let go of it soon.  From any thread at any time."""
        self._discarded.append(prepared)

    def free_discarded(self) -> None:
        """Let go of the plans that were discarded; nothing is under way."""
        while self._discarded:
            self.forget(self._discarded.popleft())

    # --- letting go ---

    def forget(self, prepared: Prepared) -> None:
        """Let go of a prepared plan's messages and memory; it is not running, and may run again."""
        if prepared.bound is not None:
            self._for_good.remove(prepared)
            self._free(prepared.bound)
            prepared.bound = None
        if prepared.staged is not None:
            self._staged.remove(prepared)
            self._free(prepared.staged)
            prepared.staged, prepared.staging = None, (None, None)
        for place in [place for place in self._bound if place[0] is prepared]:
            self._unbind(place)

    def close(self) -> None:
        """Let go of all messages and memory; nothing is under way."""
        for prepared in [*self._staged, *self._for_good]:
            self.forget(prepared)
        for place in list(self._bound):
            self._unbind(place)
        self._scratch.clear()
        for device in {device for device, _ in self._blocks}:
            if device.stream is not None:
                device.stream.close()
        self._blocks.clear()

    # --- the caller's arrays ---

    def flows(self, prepared: Prepared, source: Any, target: Any) -> Iterator[Flow]:
        """The flows of a plan on flat contiguous arrays, each bound when its first turn comes.

        They are kept by address, without keeping the arrays: an address is only ever used while
        the caller's array of that size lies there.
        """
        plan, device, in_flight = prepared.plan, prepared.device, self.in_flight(prepared)
        place = (prepared, device.address(source), device.address(target))
        flows = self._bound.setdefault(place, [])
        self._bound.move_to_end(place)
        yield from flows
        if len(flows) == plan.slices:
            return
        unowned = device.unowned(source)
        memory = (unowned, unowned if target is source else device.unowned(target))
        for index in range(len(flows), plan.slices):
            slot, count = index % in_flight, self._scratch_count(prepared, index)
            scratch = self._scratch_slot(device, slot, count, prepared.dtype)
            flow = self._bind(prepared, (*memory, scratch), index, slot)
            self._make_room(flow.size)
            flows.append(flow)
            self._bound_count += flow.size
            yield flow

    def in_flight(self, prepared: Prepared) -> int:
        """How many slices are under way at once: one, where they go through shared memory."""
        return 1 if self._rows(prepared, 0) is not None else prepared.in_flight

    def _bind(
        self, prepared: Prepared, memory: tuple[Any, Any, Any], index: int, slot: int = 0
    ) -> Flow:
        """A flow of slice `index` in this INPUT, OUTPUT and SCRATCH."""
        device, arithmetic = prepared.device, prepared.arithmetic
        rows = self._rows(prepared, index)
        if rows is not None:
            assert self.exchange is not None
            plan = prepared.plan
            sizes = plan.input_count * plan.itemsize, plan.output_count * plan.itemsize
            op, in_place = arithmetic.op, plan.in_place
            return self.exchange.flow(rows, memory, device, op, index, slot, sizes, in_place)
        planned, itemsize = prepared.plan.slice(index), prepared.plan.itemsize
        bound_to = (planned, memory, itemsize, self._transport, device, arithmetic)
        if device.stream is None:
            return bind(*bound_to, index, slot)
        blocks = self._blocks.get((device, slot))
        if blocks is None:
            blocks = self._blocks[device, slot] = Blocks(device.stream)
        return bind_staging(*bound_to, blocks, index, slot)

    def _rows(self, prepared: Prepared, index: int) -> Instructions | None:
        """What shared memory makes of a slice; None where messages do it."""
        if (
            self.exchange is None
            or not prepared.shares
            or (index and self._rows(prepared, 0) is None)
        ):
            return None
        if index not in prepared.rows:
            prepared.rows[index] = self.exchange.rows(
                prepared.plan, index, prepared.device, prepared.arithmetic.op, prepared.dtype
            )
        return prepared.rows[index]

    def _scratch_count(self, prepared: Prepared, index: int) -> int:
        """Elements of scratch that a slice needs."""
        rows = self._rows(prepared, index)
        return prepared.plan.slice(index).scratch if rows is None else rows.scratch

    def _make_room(self, messages: int) -> None:
        """Unbind what is unused for longest, until there is room for so many messages more."""
        most = self._config.kept_messages - messages
        while len(self._bound) > 1 and self._bound_count > most:
            self._unbind(next(iter(self._bound)))

    def _unbind(self, place: Place) -> None:
        for flow in self._bound.pop(place):
            self._bound_count -= flow.size
            self._free(flow)

    def _scratch_slot(self, device: Device, slot: int, count: int, dtype: Any) -> Any:
        """Scratch of one flow in flight: kept, and replaced when a call needs more.

        By twice as much at least, since flows bound earlier keep what they are bound to.
        """
        nbytes = count * dtype.itemsize
        kept = self._scratch.get((device, slot))
        if kept is None or kept.nbytes < nbytes:
            larger = nbytes if kept is None else max(nbytes, 2 * kept.nbytes)
            kept = self._scratch[device, slot] = device.scratch(larger)
        return kept[:nbytes].view(dtype)

    # --- how many messages they were ---

    def _free(self, flow: Flow) -> None:
        self.count(flow, len(flow.steps), flow.runs)
        flow.free()

    def count(self, flow: Flow, steps: int, times: int = 1) -> None:
        """Count the messages of a flow's first `steps` steps, so many times."""
        for total, messages in zip((self.sent, self.received), flow.messages(steps), strict=True):
            for peer, count in messages.items():
                total[peer] += count * times

    def count_all(self) -> None:
        """Count the messages of all flows that have run to their end."""
        alone = [flow for kept in self._staged if (flow := kept.staged) is not None]
        alone += [flow for kept in self._for_good if (flow := kept.bound) is not None]
        for flow in chain(alone, *self._bound.values()):
            self.count(flow, len(flow.steps), flow.runs)
            flow.runs = 0

    def count_afresh(self) -> None:
        """Forget the counts."""
        self.sent.clear()
        self.received.clear()
