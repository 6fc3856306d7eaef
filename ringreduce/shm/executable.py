"""Run a plan through shared memory: a compiled program for each slice, one after another."""

from __future__ import annotations

from typing import Any

from ringreduce.control.executable import Control
from ringreduce.control.signature import DIGEST_BYTES
from ringreduce.devices.base import Device, flat_pair, shares_memory
from ringreduce.planning.plan import Plan
from ringreduce.planning.shm_instructions import Instructions
from ringreduce.shm.program import SharedMemory, SliceProgram


class Executable:
    """A plan that shared memory runs; see `ringreduce.control.executable.Executable`."""

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
        """Whether the latest `test` completed a slice."""
        self._programs: list[SliceProgram] = []
        """The programs of the first slices; each is made before its slice first runs."""
        self._current: SliceProgram | None = None
        """The program that runs; None between runs."""
        self._slice = 0
        """Index of the slice that runs."""
        self._header = b""
        """The header of this run's call."""
        self._digest = b""
        """The digest in the program's header between runs; empty: any digest."""
        self._arrays = 0, 0
        """Input and output of this run, as `SliceProgram.enter` takes them."""
        self._passed = True
        """Whether the current program has the input and output of this run."""
        self._bound: tuple[Any, Any] | None = None
        """The flat input and output that the plan is bound to; None: it is not bound."""
        self._copy_out: tuple[Any, Any] | None = None
        """(flat result, target): at the end of this run the result is copied to the target."""
        self.held: tuple[Any, ...] = ()
        """The arrays of this run, kept alive while peers may read and write them."""

    @property
    def program(self) -> SliceProgram | None:
        """The program of the whole plan; None if the plan has several slices."""
        return self._program(0) if self._plan.slices == 1 else None

    @property
    def is_bound(self) -> bool:
        """Whether the plan is bound to its arrays."""
        return self._bound is not None

    def sign(self, digest: bytes) -> None:
        """Write the digest of the signature to the program's header, so compiled code may run it.

        Compiled code sets only the call number of the header.  A run by Python may leave another
        digest there: a gather after an exchange of counts has the digest of the exchange.  So each
        run writes the digest again at its end.
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
        flat_source, flat_target = flat_pair(device, source, target)
        addresses = device.address(flat_source), device.address(flat_target)
        self.start_at(header, *addresses, (source, target, flat_source, flat_target))
        if not shares_memory(device, flat_target, target):
            self._copy_out = flat_target, target

    def start_at(self, header: bytes, source: int, target: int, held: tuple[Any, ...]) -> None:
        """Begin a run; `source` and `target` as `SliceProgram.enter` takes them.

        `held` keeps the arrays alive.
        """
        self._header, self._arrays, self.held = header, (source, target), held
        self._begin(0)

    def adopt(self, held: tuple[Any, ...]) -> None:
        """Continue a run that compiled code has begun; `held` keeps its arrays alive."""
        self._slice, self._current, self._passed, self.held = 0, self._program(0), True, held

    def test(self) -> bool:
        self.moved = False
        while self._current is not None:
            arrays = (0, 0) if self._passed else self._arrays
            self._passed = True
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
        """Prepare slice `index`, which the next `enter` begins."""
        self._slice, program = index, self._program(index)
        program.header[:] = self._header
        if self._control.log is not None:
            self._control.log(index, program.notes)
        self._current, self._passed = program, False

    def _finish(self) -> None:
        """Copy the result to a target that is not contiguous, and release the arrays."""
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
                assert other is not None, "shared memory runs all slices of a plan or none"
                instructions = other
            made = self._shared_memory.program(instructions, plan, device, self._op, self._dtype)
            self._programs.append(made)
        return self._programs[index]

    def bind(self, source: Any, target: Any) -> None:
        device = self._device
        flat = flat_pair(device, source, target)
        pairs = zip(flat, (source, target), strict=True)
        if self._plan.slices == 1 and all(shares_memory(device, *pair) for pair in pairs):
            self._bound = flat
            self._program(0).bind(*map(device.address, flat))

    # --- the run under way ---

    def where(self) -> tuple[int, list[int]]:
        return (0, []) if self._current is None else self._current.where()

    def withdraw(self) -> bool:
        return True  # no receive is posted

    def tally(self) -> None:
        """Do nothing: no message is sent."""

    def sends_done(self) -> bool:
        return True

    def reset(self) -> None:
        for program in self._programs:
            program.reset()
        self._end()
        self._copy_out, self.held = None, ()

    def free(self) -> None:
        """Do nothing: the memory is freed with this object, and the fast path may still use it."""
