"""Runs a plan through shared memory: a compiled program for each slice, one after another."""

from __future__ import annotations

from typing import Any

from ringreduce.control.executable import Control
from ringreduce.control.signature import DIGEST_BYTES
from ringreduce.devices.base import Device
from ringreduce.planning.plan import Plan
from ringreduce.planning.shm_instructions import Instructions
from ringreduce.shm.program import SharedMemory, SliceProgram


class Executable:
    """A plan that is run through shared memory; see `ringreduce.control.executable.Executable`."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        op: str | None,
        dtype: Any,
        first: Instructions,
        shared_memory: SharedMemory,
        control: Control,
    ) -> None:
        self._plan, self._device, self._op, self._dtype = plan, device, op, dtype
        self._first, self._shared_memory, self._control = first, shared_memory, control
        self.moved = False
        """Whether the latest `test` has completed a slice."""
        self._programs: list[SliceProgram] = []
        """The programs of the first slices: each is made when its slice is first run."""
        self._current: SliceProgram | None = None
        """The program under way; None if the run is complete."""
        self._slice = 0
        """The slice that it runs."""
        self._header = b""
        self._digest = b""
        """The digest that the program's header has between runs; empty: any."""
        self._arrays = 0, 0
        """Input and output of this run, as `SliceProgram.enter` takes them."""
        self._named = True
        """Whether the current program knows the arrays of this run."""
        self._bound: tuple[Any, Any] | None = None
        """Input and output, flat, if the plan is bound to them."""
        self._copy_out: tuple[Any, Any] | None = None
        """A flat result, and the target that it is copied to at the end of this run."""
        self.held: tuple[Any, ...] = ()
        """The arrays of this run: kept alive while peers may read and write them."""

    @property
    def program(self) -> SliceProgram | None:
        """The program that is the whole plan; None if the plan has several slices."""
        return self._program(0) if self._plan.slices == 1 else None

    @property
    def is_bound(self) -> bool:
        """Whether the plan is bound to its arrays."""
        return self._bound is not None

    def sign(self, digest: bytes) -> None:
        """Let compiled code run the program: it sets only the number of the program's header.

        A run by Python may have the header of another call, as the gather behind an exchange of
        counts has.  So the digest is written again after each run.
        """
        self._digest = digest
        self._program(0).header[:DIGEST_BYTES] = digest

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
        flat_target = device.flat(target)
        flat_source = flat_target if source is target else device.flat(source)
        addresses = device.address(flat_source), device.address(flat_target)
        self.start_at(header, *addresses, (source, target, flat_source, flat_target))
        if not device.overlap(flat_target, target):
            self._copy_out = flat_target, target

    def start_at(self, header: bytes, source: int, target: int, held: tuple[Any, ...]) -> None:
        """Begin a run on arrays that `SliceProgram.enter` takes; `held` keeps them alive."""
        self._header, self._arrays, self.held = header, (source, target), held
        self._begin(0)

    def adopt(self, held: tuple[Any, ...]) -> None:
        """Take over a run that compiled code has begun; `held` keeps its arrays alive."""
        self._slice, self._current, self._named, self.held = 0, self._program(0), True, held

    def test(self) -> bool:
        self.moved = False
        while self._current is not None:
            arrays = (0, 0) if self._named else self._arrays
            self._named = True
            if not self._current.enter(*arrays):
                return False
            self.moved = True
            following = self._slice + 1
            if following < self._plan.slices:
                self._begin(following)
            else:
                self._finish()
        return True

    def _begin(self, index: int) -> None:
        """Let the next `enter` begin with this slice."""
        self._slice, program = index, self._program(index)
        program.header[:] = self._header
        if self._control.log is not None:
            self._control.log(index, program.notes)
        self._current, self._named = program, False

    def _finish(self) -> None:
        """Copy the result to its place, if the target is not contiguous, and release the arrays."""
        self._end()
        if self._copy_out is not None:
            flat_target, target = self._copy_out
            target[...] = flat_target.reshape(target.shape)
            self._copy_out = None
        self.held = ()

    def _end(self) -> None:
        self._current = None
        if self._digest:
            self._program(0).header[:DIGEST_BYTES] = self._digest

    def _program(self, index: int) -> SliceProgram:
        plan, device = self._plan, self._device
        for following in range(len(self._programs), index + 1):
            instructions = self._first
            if following:
                other = self._shared_memory.instructions(
                    plan, following, device, self._op, self._dtype
                )
                assert other is not None, "what one slice can do, all can"
                instructions = other
            made = self._shared_memory.program(instructions, plan, device, self._op, self._dtype)
            self._programs.append(made)
        return self._programs[index]

    def bind(self, source: Any, target: Any) -> bool:
        device = self._device
        flat = device.flat(source), device.flat(target)
        pairs = zip(flat, (source, target), strict=True)
        direct = all(one.size == 0 or device.overlap(one, other) for one, other in pairs)
        if self._plan.slices != 1 or not direct:
            return False
        self._bound = flat[0], flat[0] if target is source else flat[1]
        self._program(0).bind(*map(device.address, self._bound))
        return True

    # --- what is under way, and how to take it back ---

    def where(self) -> tuple[int, list[int]]:
        return (0, []) if self._current is None else self._current.where()

    def withdraw(self) -> bool:
        return True  # nothing is received that was not read

    def tally(self) -> None:
        """Count nothing: no message is sent."""

    def sends_done(self) -> bool:
        return True

    def reset(self) -> None:
        for program in self._programs:
            program.reset()
        self._end()
        self._copy_out, self.held = None, ()

    def free(self) -> None:
        """Do nothing: the memory is freed with this object, which the fast path may still use."""
