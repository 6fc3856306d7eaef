"""Calls that are checked and planned once, and kept for the next time they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.agreement import Signature
from ringreduce.algorithms import build
from ringreduce.arguments import array_text, check_movable, check_reduction, check_root
from ringreduce.config import Config
from ringreduce.devices.base import Device
from ringreduce.devices.cpu import OPS
from ringreduce.executor import Executor, Prepared
from ringreduce.plan import Plan, plan_parts, plan_whole, shard_counts
from ringreduce.schedule import Schedule
from ringreduce.select import resolve, slice_count, slices_in_flight
from ringreduce.topology import Topology


@dataclass(slots=True, eq=False)
class Call:
    """Everything about a call that is the same each time it is made."""

    signature: Signature
    schedule: Schedule
    prepared: Prepared
    shape: tuple[int, ...]
    """Of the result."""
    dtype: np.dtype[Any]
    in_place: bool
    """Whether ``out=x`` makes sense."""
    last_use: int = 0
    """When it was last asked for, counted in calls."""


class Calls:
    """One communicator's calls, by what makes them different; the longest unused goes first.

    Each method raises TypeError or ValueError for arguments that can never be right, before
    anything is sent.
    """

    def __init__(
        self, topology: Topology, device: Device, config: Config, executor: Executor
    ) -> None:
        self.nodes, self.rank = topology.nodes, topology.rank
        self.size = sum(map(len, topology.nodes))
        self.config, self._device, self._executor = config, device, executor
        self._kept: dict[Any, Call] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget all calls."""
        for key in list(self._kept):
            self._forget(key)

    def _get(self, key: Any, make: Callable[..., Call], *arguments: Any) -> Call:
        call = self._kept.get(key)
        if call is None:
            call = make(*arguments)
            while len(self._kept) >= self.config.kept_plans:
                self._forget(min(self._kept, key=lambda kept: self._kept[kept].last_use))
            self._kept[key] = call
        self._uses += 1
        call.last_use = self._uses
        return call

    def _forget(self, key: Any) -> None:
        self._executor.forget(self._kept.pop(key).prepared)

    # --- one method a collective ---

    def all_reduce(self, array: np.ndarray, op: str, algorithm: str) -> Call:
        key = ("all_reduce", array.dtype, array.shape, op, algorithm)
        return self._get(key, self._all_reduce, array, op, algorithm)

    def _all_reduce(self, array: np.ndarray, op: str, algorithm: str) -> Call:
        check_reduction("all_reduce", array.dtype, op, OPS)
        schedule, slices = self._schedule("all_reduce", algorithm, array.nbytes)
        plan = plan_whole(
            schedule, self.rank, array.size, array.itemsize, slices, self.config.segment_bytes
        )
        signature = _signature("all_reduce", array_text(array), algorithm, op=repr(op))
        return self._call(signature, plan, array, array.shape, op, in_place=True)

    def reduce_scatter(self, array: np.ndarray, op: str, algorithm: str) -> Call:
        key = ("reduce_scatter", array.dtype, array.shape, op, algorithm)
        return self._get(key, self._reduce_scatter, array, op, algorithm)

    def _reduce_scatter(self, array: np.ndarray, op: str, algorithm: str) -> Call:
        check_reduction("reduce_scatter", array.dtype, op, OPS)
        schedule, slices = self._schedule("reduce_scatter", algorithm, array.nbytes)
        counts = shard_counts(array.size, self.size)
        plan = plan_parts(
            schedule, self.rank, counts, array.itemsize, slices, self.config.segment_bytes
        )
        signature = _signature("reduce_scatter", array_text(array), algorithm, op=repr(op))
        return self._call(signature, plan, array, (counts[self.rank],), op)

    def broadcast(self, array: np.ndarray, root: int, algorithm: str) -> Call:
        key = ("broadcast", array.dtype, array.shape, root, algorithm)
        return self._get(key, self._broadcast, array, root, algorithm)

    def _broadcast(self, array: np.ndarray, root: int, algorithm: str) -> Call:
        check_movable("broadcast", array.dtype)
        check_root("broadcast", root, self.size)
        schedule, slices = self._schedule("broadcast", algorithm, array.nbytes, root)
        plan = plan_whole(
            schedule, self.rank, array.size, array.itemsize, slices, self.config.segment_bytes
        )
        signature = _signature("broadcast", array_text(array), algorithm, root=str(root))
        return self._call(signature, plan, array, array.shape, in_place=True)

    def all_gather(self, array: np.ndarray, counts: tuple[int, ...], algorithm: str) -> Call:
        """`counts` are the first dimensions of all ranks' arrays."""
        key = ("all_gather", array.dtype, array.shape, counts, algorithm)
        return self._get(key, self._all_gather, array, counts, algorithm)

    def _all_gather(self, array: np.ndarray, counts: tuple[int, ...], algorithm: str) -> Call:
        check_movable("all_gather", array.dtype)
        _check_counts(array, counts, self.rank, self.size)
        row = int(np.prod(array.shape[1:], dtype=np.int64))
        total_bytes = sum(counts) * row * array.itemsize
        schedule, slices = self._schedule("all_gather", algorithm, total_bytes)
        in_chunks = [count * row for count in counts]
        plan = plan_parts(
            schedule, self.rank, in_chunks, array.itemsize, slices, self.config.segment_bytes
        )
        text = array_text(array, first=False)
        signature = _signature("all_gather", text, algorithm, counts=str(counts))
        return self._call(signature, plan, array, (sum(counts), *array.shape[1:]))

    def exchange(self, array: np.ndarray, algorithm: str) -> Call:
        """The all-gather before an all-gather of unknown counts: two integers from every rank.

        It carries the signature of the all-gather that it opens.
        """
        key = ("exchange", array.dtype, array.shape[1:], algorithm)
        return self._get(key, self._exchange, array, algorithm)

    def _exchange(self, array: np.ndarray, algorithm: str) -> Call:
        check_movable("all_gather", array.dtype)
        resolve("all_gather", algorithm, self.nodes, array.nbytes, self.config)
        integers = np.empty(2, np.int64)
        schedule, _ = self._schedule("all_gather", "auto", integers.nbytes)
        plan = plan_parts(schedule, self.rank, [2] * self.size, integers.itemsize, slices=1)
        text = array_text(array, first=False)
        signature = _signature("all_gather", text, algorithm, counts="None")
        return self._call(signature, plan, integers, (self.size, 2))

    def meeting(self, name: str, arguments: tuple[tuple[str, str], ...]) -> Call:
        """A barrier under a name of its own: it moves nothing but its signature."""
        return self._get(name, self._meeting, name, arguments)

    def _meeting(self, name: str, arguments: tuple[tuple[str, str], ...]) -> Call:
        schedule, _ = self._schedule("barrier", "auto", 0)
        plan = plan_whole(schedule, self.rank, count=0, itemsize=1, slices=1)
        return self._call(Signature(name, arguments), plan, np.empty(0, np.uint8), (0,))

    # --- what they share ---

    def _schedule(
        self, collective: str, algorithm: str, nbytes: int, root: int = 0
    ) -> tuple[Schedule, int]:
        """The schedule to run, and into how many slices the array is cut."""
        name = resolve(collective, algorithm, self.nodes, nbytes, self.config)
        return build(collective, name, self.nodes, root), slice_count(
            nbytes, self.nodes, self.config
        )

    def _call(
        self,
        signature: Signature,
        plan: Plan,
        array: np.ndarray,
        shape: tuple[int, ...],
        op: str | None = None,
        in_place: bool = False,
    ) -> Call:
        fold = None if op is None else self._device.fold(op)
        divide_by = self.size if op == "mean" else None
        shapes = (array.shape, shape)
        in_flight = slices_in_flight(self.nodes, self.config)
        prepared = self._executor.prepare(plan, array.dtype, shapes, fold, divide_by, in_flight)
        return Call(signature, plan.schedule, prepared, shape, array.dtype, in_place)


def _signature(collective: str, array: str, algorithm: str, **arguments: str) -> Signature:
    return Signature(
        collective, (("array", array), *arguments.items(), ("algorithm", repr(algorithm)))
    )


def _check_counts(array: np.ndarray, counts: tuple[int, ...], rank: int, size: int) -> None:
    if len(counts) != size or any(count < 0 for count in counts):
        raise ValueError(
            f"all_gather: counts={counts}; pass one count of at least 0 for each of {size} ranks"
        )
    if counts[rank] != array.shape[0]:
        raise ValueError(
            f"all_gather: counts[{rank}] is {counts[rank]}, but this rank passes an array of "
            f"first dimension {array.shape[0]}"
        )
