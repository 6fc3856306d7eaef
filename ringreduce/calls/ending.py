"""The end of a communicator without an error: it is closed, left, superseded, or dropped.

The ranks of a communicator that their programs drop without `close` close it together, in an
exchange of their parent.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ringreduce.calls.call import Call
from ringreduce.calls.engine import NOTHING, Engine, LeavingError
from ringreduce.errors import PeerLostError, RingReduceError

_LEAVING_S = 1.0
"""Seconds that a call under way may take to notice that this rank leaves."""


class Ending:
    """The end of one communicator.  It does not keep the communicator alive."""

    def __init__(self, engine: Engine, meeting: Call) -> None:
        """End the calls of `engine`; in `meeting` all ranks close the communicator."""
        self.engine, self._meeting = engine, meeting
        self.before_close: Callable[[], None] | None = None
        """Makes the last calls of this rank, in `close`."""
        self.has_survived = False
        """Whether the communicator was closed although a rank was lost: MPI_Finalize may hang."""
        self._is_superseded = False
        """Whether the ranks that are left have shrunk the communicator."""
        self.parts = Parts(engine.transport.rank)
        """The communicators that `Communicator.split` has made."""
        self.to_close = [self]
        """A list of this object, which `close` empties.  Others keep the list, not the object."""

    @property
    def closed(self) -> bool:
        """Whether the communicator was closed, and not broken before."""
        return self.engine.ended is not None and not self.engine.broken

    @property
    def is_busy(self) -> bool:
        """Whether an asynchronous call or message of this rank is not over."""
        return self.engine.queue.busy or self.engine.endpoint.is_busy

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way, and no error awaits its report."""
        return not (self.is_busy or self.engine.broken) and self._unseen_error() is None

    def close(self, end_of: str = "", timeout_s: float | None = None) -> None:
        """Complete the queued calls, meet the other ranks, and free everything.

        `end_of` is for error texts: the place whose end this rank has reached, or empty if the user
        closes.  `timeout_s`: seconds to wait for messages, and then for the meeting; None: those of
        the communicator.  Raises the error of a Work that was never waited for.
        """
        engine = self.engine
        before, self.before_close = self.before_close, None
        if before is not None and engine.ended is None:
            before()
        with engine.queue.lock:
            if engine.ended is None:
                engine.refusals.check()
            engine.agreement.end_of = end_of
            engine.queue.drain()
            if engine.ended is None:
                engine.endpoint.close(None if timeout_s is None else time.monotonic() + timeout_s)
            unseen = self._unseen_error()
            engine.queue.failed, engine.endpoint.works = [], []
            if engine.ended is None:
                try:
                    self._meet(timeout_s)
                finally:
                    if engine.broken:
                        engine.queue.close()
            engine.queue.close()
            if engine.fast_path is not None:
                engine.fast_path.forget()
            if unseen is not None:
                raise unseen.with_traceback(None)

    def _meet(self, timeout_s: float | None) -> None:
        """Make the last call, in which all ranks are, and free everything."""
        engine = self.engine
        engine.check_usable()
        survives_losses = engine.endpoint.survives_losses
        if survives_losses:
            engine.endpoint.end(_closed())  # it has announced a close in good order
        try:
            engine.run_now(self._meeting, NOTHING, NOTHING, timeout_s)
            engine.part(self._meeting)
        except PeerLostError:
            if not survives_losses:
                raise
            engine.ended = _closed()  # the living ranks need not meet
            self.has_survived = True
        else:
            engine.free_discarded()
            engine.executables.close()
            engine.ended = _closed()
            self.to_close.clear()
            engine.endpoint.end(engine.ended)
            engine.transport.close()

    def _unseen_error(self) -> BaseException | None:
        """Return the first error of a work that was never waited for."""
        works = [*reversed(self.engine.queue.failed), *self.engine.endpoint.works]
        return next((work.unseen_error for work in works if work.unseen_error), None)

    def leave(self, reason: str) -> None:
        """Leave without the other ranks; their next call raises PeerLostError with `reason`."""
        engine = self.engine
        if engine.ended is None:
            if engine.queue.works:
                engine.queue.interrupt(LeavingError(reason), _LEAVING_S)
            elif engine.running and not _is_within_call():
                self._end_call_of_other_thread(LeavingError(reason))
            if engine.ended is None:
                engine.break_off(LeavingError(reason), reason)
            engine.queue.close()

    def _end_call_of_other_thread(self, error: LeavingError) -> None:
        """Have the call of another thread raise `error`; wait for that `_LEAVING_S` at most."""
        engine = self.engine
        engine.agreement.interrupt = error
        end = time.monotonic() + _LEAVING_S
        while engine.running and engine.ended is None and time.monotonic() < end:
            time.sleep(1e-3)
        engine.agreement.interrupt = None

    def farewell(self, seconds: float) -> None:
        """Wait `seconds` at most until the other living ranks call `farewell` too."""
        self.engine.agreement.farewell(seconds)

    def flush(self, seconds: float) -> None:
        """Wait `seconds` at most until all control messages are on their way, if this rank left."""
        with contextlib.suppress(RingReduceError):  # a rank that is lost needs no message
            if self.engine.broken:
                self.engine.agreement.flush(seconds)

    def check_shrinkable(self) -> None:
        """Raise ValueError if the communicator is closed, or this thread's calls are refused."""
        self.engine.refusals.check()
        ended = self.engine.ended
        if isinstance(ended, ValueError) and not self._is_superseded:
            raise ended.with_traceback(None)

    def supersede(self) -> None:
        """End the communicator, whose ranks have another one.  Nothing is sent."""
        engine = self.engine
        if self._is_superseded:
            return
        self._is_superseded = True
        ended = ValueError("the communicator is superseded; use that of shrink()")
        if engine.ended is None:
            engine.ended = ended
            engine.endpoint.end(ended)
            engine.executables.abandon()
        engine.ended = ended
        if engine.fast_path is not None:
            engine.fast_path.disable()
        engine.queue.close()


def _closed() -> ValueError:
    text = "the communicator is closed; call before close(), or make another communicator"
    return ValueError(text)


_CALLING_CODE = {each.__code__ for each in (Engine.run_now, Engine.finish, Engine.run)}
"""The code of the methods that run calls."""


def _is_within_call() -> bool:
    """Return whether this thread is in a call: a signal handler has interrupted the call."""
    frame = sys._getframe()
    while frame is not None and frame.f_code not in _CALLING_CODE:
        frame = frame.f_back  # type: ignore[assignment]  # None above the outermost frame
    return frame is not None


# --- communicators that a program drops ---


_ANNOUNCED = 6
"""The most communicators that a rank announces in one exchange."""


class _Part(NamedTuple):
    """A communicator, and the ranks that have not announced it."""

    to_close: list[Ending]
    """`Ending.to_close`."""
    parts: Parts
    held: weakref.ref[object]
    left: set[int]

    def is_dropped(self) -> bool:
        """Return whether this rank makes no more calls on the communicator and its parts."""
        is_held = self.held() is not None
        if any(is_held or not each.is_at_rest for each in self.to_close):
            return False
        return all(part.is_dropped() for part in self.parts.made.values())

    def close(self) -> None:
        for part in self.parts.made.values():
            part.close()
        with contextlib.suppress(RingReduceError):  # the end of the program reports a lost rank
            for each in list(self.to_close):
                each.close()


class Parts:
    """The communicators that a parent has made: at most one in each exchange of all its ranks.

    In an exchange a rank announces which of them its program has dropped.  The ranks of a
    communicator close it in the exchange in which the last of them announces it.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self.exchanges = rank, 0
        self.made: dict[int, _Part] = {}
        """The communicators by the number of the exchange; ranks are numbered as in the parent."""

    def add(self, ending: Ending, held: object, ranks: Iterable[int]) -> None:
        """Add the communicator that `ranks` have made in the latest exchange.

        `held` lives as long as this rank makes calls on the communicator.
        """
        part = _Part(ending.to_close, ending.parts, weakref.ref(held), set(ranks))
        self.made[self.exchanges] = part

    def dropped(self) -> list[int]:
        """Return the numbers that this rank announces, with zeros behind them."""
        made = self.made.items()
        new = [n for n, part in made if self._rank in part.left and part.is_dropped()]
        return [*new, *[0] * _ANNOUNCED][:_ANNOUNCED]

    def close_dropped(self, announced: Sequence[Sequence[int]]) -> None:
        """End an exchange in which each rank has `announced` the numbers in its row."""
        self.exchanges += 1
        for number, part in list(self.made.items()):
            part.left.difference_update([r for r in part.left if number in announced[r]])
            if not part.left:
                self.made.pop(number).close()
