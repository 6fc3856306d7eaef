"""Run a plan through shared memory, by a compiled program, and by its messages to other hosts."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ringreduce.control import executable
from ringreduce.control.executable import Control
from ringreduce.control.signature import DIGEST_BYTES
from ringreduce.devices.base import Device, flat_pair, shares_memory
from ringreduce.planning.plan import Plan
from ringreduce.shm.host_messages import place_of
from ringreduce.shm.layout import OVER, UNDER_WAY, WANTED, WITHDRAWN, HostMessageRecord
from ringreduce.shm.program import PlanProgram
from ringreduce.trace.recorder import MESSAGE, RECORDERS
from ringreduce.transports.base import Request, Transport

_POLLS = 20
"""Tests of a message before the program yields, while the rank seems to have a core of its own."""


class ShmExecutable(executable.Executable):
    """A plan that shared memory runs."""

    def __init__(self, program: PlanProgram, device: Device, control: Control) -> None:
        self.program, self._device, self._control = program, device, control
        self.moved = False
        """Whether the latest `test` made progress; not defined after the last one of a run."""
        self._running = False
        self._digest = b""
        """The digest in the program's header between runs; empty: any digest."""
        self._arrays = 0, 0
        """Input and output that the next `enter` takes; 0: the program has them."""
        self._bound: tuple[Any, Any] | None = None
        """The flat input and output that the plan is bound to; None: it is not bound."""
        self._copy_out: tuple[Any, Any] | None = None
        """(flat result, target): at the end of this run the result is copied to the target."""
        self.held: tuple[Any, ...] = ()

    @property
    def is_bound(self) -> bool:
        return self._bound is not None

    def sign(self, digest: bytes) -> None:
        """Write the digest of the signature to the program's header, so compiled code may run it.

        Compiled code sets only the call number of the header; a run by Python may leave
        another digest there, as a gather after an exchange of counts.  So each run writes
        the digest again at its end.
        """
        self._digest = digest
        self.program.header[:DIGEST_BYTES] = digest

    # --- running ---

    def run(self, header: bytes, source: Any, target: Any) -> None:
        self.start(header, source, target)
        if not self.test():
            self._control.wait_for(self)

    def start(self, header: bytes, source: Any, target: Any) -> None:
        if self._bound is not None:
            self.start_at(header, 0, 0, (source, target))
            return
        device = self._device
        flat_source, flat_target = flat_pair(device, source, target)
        addresses = device.address(flat_source), device.address(flat_target)
        self.start_at(header, *addresses, (source, target, flat_source, flat_target))
        if not shares_memory(device, flat_target, target):
            self._copy_out = flat_target, target

    def start_at(self, header: bytes, source: int, target: int, held: tuple[Any, ...]) -> None:
        """Begin a run with arrays as for `PlanProgram.enter`; `held` keeps them alive."""
        self._running, self._arrays, self.held = True, (source, target), held
        self.program.header[:] = header
        if self._control.log_rounds is not None:
            for index, notes in enumerate(self.program.notes):
                self._control.log_rounds(index, notes)

    def adopt(self, held: tuple[Any, ...]) -> None:
        self._running, self._arrays, self.held = True, (0, 0), held

    def test(self) -> bool:
        if not self._running:
            return True
        arrays, self._arrays = self._arrays, (0, 0)
        done = self.program.enter(*arrays)
        self.moved = self.program.moved
        if done:
            self._finish()
        return done

    def _finish(self) -> None:
        self._end()
        if self._copy_out is not None:
            flat_target, target = self._copy_out
            target[...] = flat_target.reshape(target.shape)
            self._copy_out = None
        self.held = ()

    def _end(self) -> None:
        self._running = False
        if self._digest:
            self.program.header[:DIGEST_BYTES] = self._digest

    def bind(self, source: Any, target: Any) -> None:
        device = self._device
        flat = flat_pair(device, source, target)
        pairs = zip(flat, (source, target), strict=True)
        if all(shares_memory(device, *pair) for pair in pairs):
            self._bound = flat
            self.program.bind(*map(device.address, flat))

    def replan(self, plan: Plan) -> bool:
        return not self._running and self._bound is None and self.program.rewrite(plan)

    # --- the run under way ---

    def where(self) -> tuple[int, list[int]]:
        return self.program.where() if self._running else (0, [])

    def reset(self) -> None:
        self.program.reset()
        self._end()
        self._copy_out, self.held = None, ()


class HostsExecutable(ShmExecutable):
    """A plan that ranks of several hosts run, each host by its program."""

    def __init__(
        self,
        program: PlanProgram,
        device: Device,
        control: Control,
        transport: Transport,
        counts: tuple[Counter[int], Counter[int]],
        on_free: Callable[[HostsExecutable], None],
    ) -> None:
        """`counts`: the messages ever sent to and received from each peer, as `tally` adds them."""
        super().__init__(program, device, control)
        self._transport, self._counts, self._on_free = transport, counts, on_free
        self._by_python = program.mpi.isend == 0
        self._requests: dict[int, Request] = {}
        """Requests by the index of their message: of a broken run, or those that Python tests."""
        self._places: dict[int, int] = {}
        """The addresses of the messages to which these requests are bound."""

    def test(self) -> bool:
        if not self._by_python:
            self.program.mpi.polls = _POLLS if self._transport.yielding.spins else 0
        elif self.program.is_under_way:
            self._exchange()
        return super().test()

    def _exchange(self) -> None:
        """Start the messages that the program wants, and note which are over."""
        for index, message in enumerate(self.program.messages):
            if message.state == WANTED:
                self._bind_message(index, message)
                message.began_ns = time.perf_counter_ns() if message.words else 0
                message.state = UNDER_WAY  # before `Start`: a signal handler may raise
                self._requests[index].Start()
            if message.state == UNDER_WAY and self._requests[index].Test():
                message.state = OVER
                if message.words:
                    name, way = ("recv", "from") if message.receives else ("send", "to")
                    words = message.data_bytes, f"{way} {message.peer}"
                    RECORDERS[0].add(MESSAGE, name, message.began_ns, *words)

    def _bind_message(self, index: int, message: HostMessageRecord) -> None:
        """Bind a request to a message, unless the one of an earlier run has the same memory."""
        place = place_of(message)
        if index not in self._requests or self._places[index] != place:
            memory = memoryview((ctypes.c_char * message.nbytes).from_address(place)).cast("B")
            bind = self._transport.receiver if message.receives else self._transport.sender
            self._requests[index] = bind(message.peer, 0, memory)
            self._places[index] = place

    def replan(self, plan: Plan) -> bool:
        return False  # messages have their lengths

    def _request(self, index: int, message: HostMessageRecord) -> Request:
        if index not in self._requests:
            native = self._transport.native()
            assert native is not None
            self._requests[index] = native.request(message.request)
        return self._requests[index]

    def withdraw(self) -> bool:
        """Withdraw the posted receives, the latest first: see `Executable.withdraw`."""
        for index, message in reversed([*enumerate(self.program.messages)]):
            if self._running and message.receives and message.state == UNDER_WAY:
                untouched = self._transport.withdraw(self._request(index, message))
                if untouched is None:
                    return False
                message.state = WITHDRAWN if untouched else OVER
        return True

    def tally(self) -> None:
        if self._running:
            self._count(
                message
                for message in self.program.messages
                if message.state == OVER or (message.state == UNDER_WAY and not message.receives)
            )

    def count_runs(self) -> None:
        """Count the messages of the complete runs since the latest call."""
        runs = self.program.take_runs()
        self._count(self.program.messages, runs)

    def _count(self, messages: Iterable[HostMessageRecord], times: int = 1) -> None:
        for message in messages:
            self._counts[message.receives][message.peer] += times

    def sends_done(self) -> bool:
        for index, message in enumerate(self.program.messages):
            if self._running and not message.receives and message.state == UNDER_WAY:
                if not self._request(index, message).Test():
                    return False
                message.state = OVER
        return True

    def reset(self) -> None:
        self._requests.clear()
        super().reset()

    def free(self) -> None:
        self.count_runs()
        self._on_free(self)
