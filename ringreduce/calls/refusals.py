"""Calls that a thread may not make for a while, such as inside an update of a `State`."""

from __future__ import annotations

import threading
from typing import NoReturn

import numpy as np


def refuse_copy(owned: object) -> NoReturn:
    """Refuse to copy or to pickle what belongs to this process: the `__reduce__` of its class."""
    kind = type(owned)
    public = [each.__name__ for each in kind.__mro__ if each.__module__ == "ringreduce"]
    raise TypeError(
        f"a {[*public, kind.__name__][0]} cannot be copied or pickled, as it belongs to this "
        "process; leave it out, and pass it to what needs it"
    )


class Refusals:
    """Refuses calls of one thread on its communicators, or keeps them from the fast path."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        memory = np.zeros(1, np.int64)
        self._depth = memory.data
        """Number of open `refuse` and `keep_general`."""
        self._refused = 0
        """Number of open `refuse`."""
        self._reason = ""
        self.address: int = memory.ctypes.data
        """Address of the depth.  Compiled code makes no call while it is not 0."""

    def refuse(self, reason: str) -> None:
        """Have calls raise ValueError with `reason` until `allow`.  Pairs of the two may nest.

        Asynchronous calls that began before go on.  Calls of other threads are not affected.
        """
        self._reason = reason
        self._refused += 1
        self._depth[0] += 1

    def allow(self) -> None:
        """End one `refuse`."""
        self._refused -= 1
        self._depth[0] -= 1

    def keep_general(self) -> None:
        """Have calls take the general path until `end_general`.  Pairs of the two may nest."""
        self._depth[0] += 1

    def end_general(self) -> None:
        """End one `keep_general`."""
        self._depth[0] -= 1

    def check(self) -> None:
        """Raise ValueError if the thread that calls this is this one, and its calls are refused."""
        if self._refused and threading.get_ident() == self._thread:
            raise ValueError(self._reason)


_of_thread = threading.local()


def refusals_here() -> Refusals:
    """Return the `Refusals` of this thread."""
    try:
        here: Refusals = _of_thread.refusals
    except AttributeError:
        here = _of_thread.refusals = Refusals()
    return here
