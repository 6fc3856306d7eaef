"""What the engine asks of a plan that can be run, and what that plan asks of the engine.

There are two kinds of executables, `ringreduce.messages.executor.Executable` and
`ringreduce.shm.executable.Executable`.  The engine chooses one for each kind of call and then
treats both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Note = tuple[int, str, int, int]
"""(step, ``"send"`` or ``"recv"``, peer, bytes of data)."""


class LoggedMessage(NamedTuple):
    """A message that this rank has started: its call, slice and step, and its peer."""

    call: int
    """The number of the call."""
    slice: int
    step: int
    direction: str
    """``"send"`` or ``"recv"``."""
    peer: int
    nbytes: int
    """Bytes of data, without the signature."""


@dataclass(frozen=True)
class Control:
    """What a running executable asks of the control protocol."""

    wait_until: Callable[[Callable[[], bool]], None]
    """Poll a test until it is true.  Raises an Interrupt when the call cannot go on."""
    wait_for: Callable[[Executable], None]
    """Test an executable until its run is complete.  Raises as `wait_until` does."""
    report_mismatch: Callable[[int, bytes], None]
    """Report a peer's header that differs from this call's.  Raises an Interrupt."""
    log: Callable[[int, Iterable[Note]], None] | None = None
    """Record the messages of a slice; None if no record is kept."""


class Executable(Protocol):
    """One plan, ready to be run again and again on arrays of its shapes and dtype.

    Between `start` and the `test` that returns True the executable is *running*.  An exception out
    of any method leaves it running: `withdraw` and then `reset` end it.
    """

    moved: bool
    """Whether the latest `test` got any further."""

    def run(self, header: bytes, source: Any, target: Any) -> None:
        """Run the plan to its end.  Arguments: those of `start`."""

    def start(self, header: bytes, source: Any, target: Any) -> None:
        """Begin to run the plan from `source` into `target`, without waiting for any rank.

        Args:
            header: this call's header; a message with another header is a mismatch.
            source, target: arrays of the plan's input and output shapes, with any strides.
                `target` may be `source` itself.
        """

    def test(self) -> bool:
        """Go on as far as possible without waiting; return whether the run is complete."""

    def bind(self, source: Any, target: Any) -> bool:
        """Promise that only these arrays will ever be used; return whether that saves work."""

    def where(self) -> tuple[int, list[int]]:
        """Return the step of the schedule that the run is at, and the peers that it waits for."""

    def withdraw(self) -> bool:
        """Take back the posted receives.  False: ask again, some are neither free nor taken."""

    def tally(self) -> None:
        """Count the messages of the run so far.  Every receive is withdrawn by now."""

    def sends_done(self) -> bool:
        """Return whether every send that was started is complete."""

    def reset(self) -> None:
        """Forget the run: no message of it is under way any more."""

    def free(self) -> None:
        """Free messages and memory.  The executable is not running; it may be started again."""
