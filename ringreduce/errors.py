"""The errors that a collective can end in.

Misuse that one rank can see alone raises plain ``TypeError`` or ``ValueError`` before anything is
sent.  The errors below need more than one rank to find; all ranks raise the same one with the same
text.
"""

from __future__ import annotations


class RingReduceError(Exception):
    """Base of every error that is ringreduce's own."""


class MismatchError(RingReduceError, ValueError):
    """Ranks made different calls.  All dropped the call; the communicator stays usable.

    `speaks` is True on the lowest of the ranks that made the same call: where the error ends the
    program, that rank prints the error for all of them.
    """

    def __init__(self, text: str, speaks: bool = True) -> None:
        super().__init__(text)
        self.speaks = speaks


class PeerTimeoutError(RingReduceError, TimeoutError):
    """A rank stopped answering.  The communicator is broken: later calls raise this again.

    `ranks` are the ranks that did not answer.
    """

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks


class PeerLostError(RingReduceError, ConnectionError):
    """A rank is gone: it died, raised, or left.  The communicator is broken."""


class ScheduleError(RingReduceError):
    """A schedule is wrong, or its text does not parse."""
