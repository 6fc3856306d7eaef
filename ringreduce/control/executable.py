"""Executables: plans that can be run, and the functions of the engine that they use.

`ringreduce.messages.executor.MessageExecutable` sends messages,
`ringreduce.shm.executable.ShmExecutable` runs a compiled program.  The engine chooses one for each
kind of call and then treats both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Note = tuple[int, str, int, int]
"""(step, ``"send"`` or ``"recv"``, peer, bytes of data)."""


class LoggedMessage(NamedTuple):
    """A message of a run that this rank has started: its call, slice and step, and its peer."""

    call: int
    slice: int
    step: int
    direction: str
    """``"send"`` or ``"recv"``."""
    peer: int
    nbytes: int
    """Bytes of data, without the signature."""


@dataclass(frozen=True)
class Control:
    """The engine's functions for a running executable."""

    wait_until: Callable[[Callable[[], bool]], None]
    """Poll a test until it is true.  Raises an Interrupt if the call cannot complete."""
    wait_for: Callable[[Executable], None]
    """Test an executable until its run is complete.  Raises as `wait_until` does."""
    report_mismatch: Callable[[int, bytes], None]
    """Report a peer's header that differs from this call's.  Raises an Interrupt."""
    log: Callable[[int, Iterable[Note]], None] | None = None
    """Record the messages of a slice that are sent; None if no record is kept."""
    log_rounds: Callable[[int, Iterable[Note]], None] | None = None
    """Log the messages of a slice that a program exchanges; None if there is no log of messages."""


class Executable(Protocol):
    """A plan that can be run any number of times, on arrays of its shapes and dtype.

    Between `start` and the `test` that returns True the executable is *running*.  An exception out
    of any method leaves it running: `withdraw` and then `reset` end it.  What an executable
    inherits serves one that sends no messages, and whose memory is freed with it.
    """

    moved: bool
    """Whether the latest `test` made progress."""

    def run(self, header: bytes, source: Any, target: Any) -> None: ...

    def start(self, header: bytes, source: Any, target: Any) -> None:
        """Begin to run the plan from `source` into `target`, without waiting for any rank.

        Args:
            header: this call's header; a message with another header is a mismatch.
            source, target: arrays of the plan's input and output shapes, with any strides.
                `target` may be `source` itself.
        """

    def test(self) -> bool:
        """Continue as far as possible without waiting; return whether the run is complete."""

    def bind(self, source: Any, target: Any) -> None:
        """Bind the plan to these arrays, if that saves work: every later run uses them."""
        return

    def replan(self, plan: Any) -> bool:
        """Take a plan of the same schedule, on chunks of other lengths, if that is cheap.

        The executable is not running.  Returns whether it has the new plan now.
        """
        return False

    def where(self) -> tuple[int, list[int]]:
        """Return the step of the schedule that the run is at, and the peers that it waits for."""

    def withdraw(self) -> bool:
        """Withdraw the posted receives; False if it must be called again to withdraw all."""
        return True

    def tally(self) -> None:
        """Count the messages of the run so far.  Every receive is withdrawn by now."""
        return

    def sends_done(self) -> bool:
        """Return whether every send that was started is complete."""
        return True

    def reset(self) -> None:
        """Forget the run, of which no message is under way any more."""

    def free(self) -> None:
        """Free messages and memory.  The executable is not running; it may be started again."""
        return
