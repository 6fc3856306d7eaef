"""The executables of a communicator: each runs a call, and is broken off after an error.

A call on arrays of ranks that share memory is one compiled program, and so is a call of one slice
on ranks of several hosts.  Any other call is a plan whose messages a transport carries.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringreduce.calls.call import Call, Fused, Shape
from ringreduce.config import Config
from ringreduce.control.executable import Control, Executable
from ringreduce.devices.base import Device
from ringreduce.messages.binding import Arithmetic
from ringreduce.messages.executor import MessageExecutable
from ringreduce.messages.flows import FlowCache, Task
from ringreduce.planning.plan import Plan
from ringreduce.shm.allocator import Arena
from ringreduce.shm.executable import HostsExecutable, ShmExecutable
from ringreduce.shm.fast_path import SCATTER_TO_OUT, CompiledCall, FastPath, key_of
from ringreduce.shm.gpu_staging import GpuExecutable, PinnedPieces
from ringreduce.shm.list_table import ListTable
from ringreduce.shm.program import SharedMemory
from ringreduce.shm.segments import Segments
from ringreduce.transports.base import ABANDONED, Transport

_WITHDRAWING_S = 0.05
"""Seconds that a broken communicator tries to withdraw its receives."""


class Executables:
    """Makes the executables of one communicator, and breaks off the one that is running."""

    def __init__(
        self,
        transport: Transport,
        host: Device,
        config: Config,
        control: Control,
        segments: Segments | None,
    ) -> None:
        self._transport, self._host, self._config = transport, host, config
        self._control = control
        self._flows = FlowCache(transport, config)
        self._one_host = config.node_memory is None
        self.arena = Arena(segments.arena) if segments is not None and self._one_host else None
        """Allocates arrays that the other ranks reach.  None: the ranks share no memory, or a rank
        is lost: one that was stopped may go on, and write to the memory of its peers."""
        self._blocks: dict[Device, PinnedPieces] = {}
        """Pinned host memory for calls on a GPU, by device."""
        self._shared_memory: SharedMemory | None = None
        """The memory that the ranks of this host share; None if they share none."""
        if config.memory is not None or not self._one_host:
            assert segments is not None
            native = None if self._one_host else transport.native()
            how = transport.rank, config, control.report_mismatch, native
            self._shared_memory = SharedMemory(segments, *how)
        self._of_hosts: set[HostsExecutable] = set()
        """Those that are not freed: their messages are counted."""
        self.running: list[Executable] = []
        """The executable that is running; empty between calls."""

    # --- making ---

    def of(self, call: Call) -> Executable:
        """Return the executable of a call; make it first if needed."""
        if call.executable is None:
            call.executable = self._through_shared_memory(call) or self._by_messages(call)
        return call.executable

    def _through_shared_memory(self, call: Call) -> Executable | None:
        """Return the executable of a program; None if `call` goes by messages on this host."""
        if call.pieces:
            return self._by_pieces(call)
        return self._by_program(call.plan, call) if call.shares else None

    def _by_program(self, plan: Plan, call: Call) -> ShmExecutable | None:
        """As `_through_shared_memory`, for one plan of a call in host memory."""
        assert self._shared_memory is not None
        op, dtype = call.op, call.wire_dtype
        instructions = self._shared_memory.instructions(plan, op, dtype)
        if instructions is None:
            return None
        program = self._shared_memory.program(instructions, plan, self._host, op, dtype)
        if self._one_host:
            return ShmExecutable(program, self._host, self._control)
        counts = self._flows.sent, self._flows.received
        how = self._host, self._control, self._transport, counts
        made = HostsExecutable(program, *how, self._of_hosts.discard)
        self._of_hosts.add(made)
        return made

    def _by_pieces(self, call: Call) -> Executable | None:
        """As `_through_shared_memory`, for an all-reduce on a GPU."""
        assert call.stream is not None
        pieces = []
        for plan, _ in call.pieces:
            piece = self._by_program(plan, call)
            if piece is None:
                return None
            pieces.append(piece)
        call.plan = call.pieces[0][0]  # errors show its schedule
        blocks = self._blocks.get(call.device)
        if blocks is None:
            blocks = self._blocks[call.device] = PinnedPieces(self.reachable, call.stream)
        return GpuExecutable(pieces, call.device, call.wire_dtype, blocks)

    def reachable(self, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array in this rank's segment, or a private array without space there."""
        array = None if self.arena is None else self.arena.empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def pages(self, nbytes: int) -> np.ndarray | None:
        """Return whole pages of this rank's segment, whose kernel object other processes map.

        Returns None without such memory, or without space in it.
        """
        if self.arena is None or self._transport.one_process:
            return None
        return self.arena.empty((nbytes,), np.dtype(np.uint8))

    def _by_messages(self, call: Call) -> Executable:
        device, op, dtype = call.device, call.op, call.wire_dtype
        size = self._transport.size
        arithmetic = Arithmetic()
        if op is not None:
            arithmetic = Arithmetic(
                device.fold(op, dtype),
                device.fold_many(op, dtype) if size > 2 else None,
                partial(device.divide, by=size) if op == "mean" else None,
            )
        how = arithmetic, call.in_flight, call.staged_bytes
        task = Task(call.plan, device, dtype, call.shapes, *how)
        return MessageExecutable(task, self._flows, self._control)

    def close(self) -> None:
        """Free all memory.  No executable is used any more."""
        self._flows.close()
        for blocks in self._blocks.values():
            blocks.close()

    # --- the fast path, while no call is queued ---

    def admit(
        self,
        path: FastPath,
        collective: str,
        call: Call,
        array: np.ndarray,
        arguments: Mapping[str, Any],
    ) -> None:
        """Admit a call to the fast path after the general path has made it on `array`."""
        if call.takes_out:
            collective = SCATTER_TO_OUT
        key = key_of(collective, array.dtype, [array.shape], arguments)
        if key is not None and path.call_of(key) is None:
            admitted = self._compiled_call(call, [call])
            if admitted is not None:
                path.admit(key, admitted, call.shape)

    def admit_list(
        self,
        path: FastPath,
        fused: Fused,
        arrays: Sequence[np.ndarray],
        arguments: Mapping[str, Any],
    ) -> None:
        """Admit an all-reduce of a list to the fast path after the general path has made it."""
        if self._config.memory is None or not any(array.size for array in arrays):
            return
        dtype, shapes = arrays[0].dtype, [array.shape for array in arrays]
        key = key_of("all_reduce", dtype, shapes, arguments, is_list=True)
        if key is None or any(array.dtype != dtype for array in arrays):
            return
        known = path.call_of(key)
        if known is not None and known.engine_call is fused:
            return
        admitted = self._compiled_call(fused, fused.calls)
        if admitted is not None:
            batches = [[shapes[index] for index in members] for _, members in fused.groups]
            admitted.table = ListTable(batches, dtype, self._config.single_copy_from)
            path.admit(key, admitted, tuple(shapes))

    def admit_barrier(self, path: FastPath, call: Call) -> None:
        """Admit a barrier to the fast path after the general path has made it."""
        if not path.has_barrier:
            admitted = self._compiled_call(call, [call])
            if admitted is not None:
                path.admit_barrier(admitted)

    def planned(
        self,
        path: FastPath,
        call: Call,
        timeout_s: float | None,
        result: Any,
        general: Callable[[], Any],
    ) -> Callable[[], Any] | None:
        """Return a compiled function that makes a call on the arrays its executable is bound to.

        The function returns `result`.  It calls `general` if the call is not eligible for the fast
        path at that time.  Returns None if the call is not one compiled program.
        """
        admitted = self._compiled_call(call, [call])
        if admitted is None or not admitted.executables[0].is_bound:
            return None
        admitted.timeout_s = timeout_s
        return path.planned(admitted, result, general)

    def _compiled_call(self, call: Call | Fused, batches: Sequence[Call]) -> CompiledCall | None:
        """Return `call` with the compiled program of each batch; None if a batch has none."""
        if self._config.log_messages or any(batch.converts for batch in batches):
            return None
        executables = []
        for batch in batches:
            executable = self.of(batch)
            if not isinstance(executable, ShmExecutable):
                return None
            executable.sign(call.signature.digest)
            executables.append(executable)
        return CompiledCall(call, executables)

    # --- after an error ---

    def where(self) -> tuple[int | None, list[int]]:
        """Return the step of the running executable, and the peers that it waits for."""
        return self.running[0].where() if self.running else (None, [])

    def withdraw(self) -> bool:
        """Withdraw the receives under way; False if this has to be called again."""
        return all(executable.withdraw() for executable in self.running)

    def tally(self) -> tuple[Counter[int], Counter[int]]:
        """Return the messages ever sent to and received from each peer.

        All receives are withdrawn before.
        """
        self._flows.count_all()
        for each in list(self._of_hosts):  # another thread may plan a call meanwhile
            each.count_runs()
        for executable in self.running:
            executable.tally()
        return self._flows.sent, self._flows.received

    def sends_done(self) -> bool:
        """Whether every send that was started is complete."""
        return all(executable.sends_done() for executable in self.running)

    @property
    def rounds(self) -> int:
        """Number of rounds through shared memory that this rank has begun."""
        return 0 if self._shared_memory is None else self._shared_memory.rounds

    def start_afresh(self, rounds: int) -> None:
        """Forget the call under way, whose messages are all withdrawn, drained or complete.

        Rounds are counted from `rounds` on: the most that any rank has begun.
        """
        for executable in self.running:
            executable.reset()
        if self._shared_memory is not None:
            self._shared_memory.go_on_from(rounds)
        self.running.clear()
        self._flows.forget_counts()

    def abandon(self) -> None:
        """Withdraw the receives under way, for `_WITHDRAWING_S` at most.

        Peers may still read or write the memory of the other messages, and a peer that is stopped
        may go on to write to the arrays of the call.  So all these are kept until the process ends.
        """
        self.arena = None
        if self._shared_memory is not None:
            self._shared_memory.leave()
        end = time.monotonic() + _WITHDRAWING_S
        with contextlib.suppress(Exception):  # an error of MPI changes nothing now
            while not self.withdraw() and time.monotonic() < end:
                self._transport.pause(1)
        ABANDONED.extend(self.running)
