"""The fixed part of a call on one array, or on a list of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.control.executable import Executable
from ringreduce.control.signature import Signature
from ringreduce.devices.base import Device, Stream
from ringreduce.planning.plan import Plan
from ringreduce.schedules.schedule import Schedule

Shape = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Call:
    """The part of a call that is fixed: signature, plan, shapes, dtypes and executable."""

    signature: Signature
    plan: Plan
    device: Device
    """The device of the arrays."""
    shapes: tuple[Shape, Shape]
    """Shapes of the plan's input and output on this rank."""
    shape: Shape | None
    """Shape of the result; None if this rank gets no result."""
    dtype: np.dtype[Any]
    """Dtype of the caller's arrays."""
    wire_dtype: np.dtype[Any]
    """Dtype of the elements that are sent and reduced."""
    op: str | None = None
    """Name of the op; None if the call reduces nothing."""
    counts: tuple[tuple[int, ...], ...] | None = None
    """The counts of an all-to-all, by sender; None: equal pieces, or another collective."""
    in_place: bool = False
    """Whether ``out=x`` is allowed."""
    takes_out: bool = False
    """Whether this rank has no input, and `out` stands for it: in a scatter, all but the root."""
    part_begin: int | None = None
    """The index of the first element of this rank's shard, if the call has shards; else None.

    The smaller one of ``x`` and ``out`` may be this shard of the other."""
    in_flight: int = 1
    """The most slices under way at once, if messages run the plan."""
    staged_bytes: int = 16 << 10
    """The longest array that is copied to memory that messages are bound to, in bytes."""
    pieces: tuple[tuple[Plan, int], ...] = ()
    """Plans of pieces of an array on a GPU, each with the number of its pieces.

    Shared memory runs these plans on copies of the pieces; the last piece has the last plan.
    Empty: messages run the call."""
    shares: bool = False
    """Whether shared memory may run the plan: the same on all ranks."""
    executable: Executable | None = None
    """The executable that runs the plan; None before the engine makes it, and after it is freed."""
    last_use: int = 0
    """Number of the latest use, counted over all calls of `Calls`."""

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def sent_bytes(self) -> int:
        """Bytes of data that this rank sends."""
        if self.pieces:
            return sum(plan.sent_bytes * times for plan, times in self.pieces)
        return self.plan.sent_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of the plan, in the caller's dtype."""
        plans = self.pieces or ((self.plan, 1),)
        return self.dtype.itemsize * sum(plan.count * times for plan, times in plans)

    @property
    def converts(self) -> bool:
        """Whether messages have another dtype than the caller's arrays."""
        return self.wire_dtype != self.dtype

    @property
    def stream(self) -> Stream | None:
        """The stream of the arrays' device; None if the device has no stream."""
        return self.device.stream


@dataclass(slots=True, eq=False)
class Fused:
    """A call on a list of arrays: arrays of one dtype are concatenated and reduced together.

    If ranks share memory, a long list is cut into batches.
    """

    signature: Signature
    groups: list[tuple[Call, list[int]]]
    """The call on each concatenated array, and the ascending indices of its members."""
    last_use: int = 0

    @property
    def calls(self) -> list[Call]:
        return [call for call, _ in self.groups]

    @property
    def schedule(self) -> Schedule:
        return self.groups[0][0].schedule

    @property
    def nbytes(self) -> int:
        return sum(call.nbytes for call in self.calls)
