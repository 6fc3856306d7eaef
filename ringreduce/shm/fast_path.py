"""A communicator's lock, and the way past it for calls that were made before.

Whoever holds the lock has shut the gate.  It is opened when the lock is let go of and nothing is
under way or wrong; then compiled code makes calls that were made before, without the lock, one at a
time, and counts them (`shm.fast_entry`).  What they have done is accounted for when the gate is
shut again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ringreduce.compiler import pyobjects
from ringreduce.control.agreement import Agreement
from ringreduce.shm import functions

_BETWEEN_LOOKS_S = 2e-5


class Lock(Protocol):
    """One that its owner may take again."""

    def acquire(self) -> Any: ...
    def release(self) -> None: ...


Finish = Callable[..., Any]
"""Waits for a call that passed and is not over; its result."""


class Gate:
    """Stands for `lock`; `is_quiet` says whether calls may pass without it.

    A call that waits is put into `running`.  `lost` is called when one was begun and nothing
    answers for it: a signal's handler raised before what finishes it could.
    """

    def __init__(
        self,
        lock: Lock,
        is_quiet: Callable[[], bool],
        agreement: Agreement,
        running: list[Any],
        lost: Callable[[], None],
    ) -> None:
        self._take: Callable[[], Any] = lock.acquire
        self._give: Callable[[], None] = lock.release
        self._is_quiet, self._agreement, self._lost = is_quiet, agreement, lost
        self._depth = 0
        self._waiting: list[None] = []
        """As many as there are threads that want the lock."""
        self._words = np.zeros(
            pyobjects.GATE_WORDS + pyobjects.ENTRIES * pyobjects.ENTRY_WORDS, np.int64
        )
        self._view = self._words.data
        self._table = self._words[pyobjects.GATE_WORDS :].reshape(pyobjects.ENTRIES, -1)
        self._kept: list[Any] = [None] * pyobjects.ENTRIES
        """The objects that an entry names by their addresses."""
        self._named = {
            pyobjects.REMEMBER: agreement.remember,
            pyobjects.BEGUN: running.append,
            pyobjects.EMPTY: np.empty,
            pyobjects.OUT: "out",
            pyobjects.OP: "op",
            pyobjects.DEFAULT_OP: "sum",
        }
        for place, named in self._named.items():
            self._words[place] = id(named)
        self._words[[pyobjects.NONE, pyobjects.ARRAY]] = id(None), id(np.ndarray)
        self._words[pyobjects.ACCOUNTED] = 1
        me = (self._words,)
        self._shut, self._reopen = self._opened("shut", me), self._opened("reopen", me)
        self._place = self._opened("place", None)

    @staticmethod
    def _opened(name: str, me: Any, doc: str | None = None) -> Callable[..., Any]:
        function = functions.python_function(name, me, doc)
        assert function is not None
        return function

    # --- the lock ---

    def acquire(self) -> None:
        """Take the lock, and shut the gate."""
        self._waiting.append(None)
        try:
            while True:
                self._take()
                self._depth += 1
                try:
                    if self._shut() >= 0:
                        break
                except BaseException:  # a signal's handler may raise anywhere
                    self._leave()
                    raise
                self._leave()
                time.sleep(_BETWEEN_LOOKS_S)
        finally:
            self._waiting.pop()
        self._settle()
        if self._view[pyobjects.LOST]:
            self._view[pyobjects.LOST] = 0
            self._lost()

    def release(self) -> None:
        """Let go of the lock; open the gate, if nothing is under way or wrong.

        Nor if another thread waits: it would find a call under way each time that it looks.
        """
        try:
            if self._depth == 1 and not self._waiting and self._is_quiet():
                self._reopen(self._agreement.completed)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._depth -= 1
        self._give()

    def _settle(self) -> None:
        """Account for the calls that have passed.  Nothing in it lets a signal's handler run."""
        view, agreement = self._view, self._agreement
        if not view[pyobjects.ACCOUNTED]:
            agreement.completed, agreement.number = (
                view[pyobjects.NEXT],
                view[pyobjects.NEXT] - 1,
            )
            view[pyobjects.ACCOUNTED] = 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def shut(self) -> None:
        """Let no more calls pass, whoever has the lock."""
        self._view[pyobjects.OPEN] = 0
        self._settle()

    def take_over(self) -> None:
        """What finishes a call says so: from now on it answers for that."""
        self._view[pyobjects.TAKEN_OVER] = 1

    def forget(self) -> None:
        """Let nothing pass any more, and let go of what was kept for it."""
        self.shut()
        self._table[:, pyobjects.ENTRY_PROGRAM] = 0
        self._kept = [None] * pyobjects.ENTRIES

    def forked(self) -> None:
        """In a child process, which makes no calls, and where nobody holds the lock."""
        self._view[pyobjects.OPEN] = self._view[pyobjects.BUSY] = 0
        lock = threading.RLock()
        self._take, self._give, self._depth = lock.acquire, lock.release, 0

    # --- who passes ---

    def all_reduce(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is called as `usual` is, and calls it if a call may not pass."""
        self._words[pyobjects.USUAL_WAY] = id(usual)
        return self._opened("all_reduce", (self._words, usual), _DOC.format(usual.__doc__ or ""))

    def again(
        self,
        flow: Any,
        program: int,
        signature: Any,
        finish: Finish,
        result: Any,
        usual: Callable[[], Any],
    ) -> Callable[[], Any]:
        """A function that makes a persistent call; it calls `usual` if a call may not pass."""
        me = (self._words, program, signature, finish, flow, result, usual)
        return self._opened("again", me, _DOC_OF_AGAIN)

    def admit(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        op: str,
        flow: Any,
        program: int,
        signature: Any,
        finish: Finish,
    ) -> None:
        """Let all-reduces of such arrays pass from now on.  `finish` keeps the program alive."""
        if len(shape) > pyobjects.MOST_DIMENSIONS or type(op) is not str:
            return
        op = sys.intern(op)
        like = np.broadcast_to(np.empty((), dtype), shape)
        entry = np.zeros(pyobjects.ENTRY_WORDS, np.int64)
        first = pyobjects.ENTRY_SHAPE
        entry[first : first + len(shape)] = shape
        for place, value in (
            (pyobjects.ENTRY_PROGRAM, program),
            (pyobjects.ENTRY_DIMENSIONS, len(shape)),
            (pyobjects.ENTRY_DTYPE, id(dtype)),
            (pyobjects.ENTRY_OP, id(op)),
            (pyobjects.ENTRY_SIGNATURE, id(signature)),
            (pyobjects.ENTRY_LIKE, id(like)),
            (pyobjects.ENTRY_SHAPE_TUPLE, id(shape)),
            (pyobjects.ENTRY_FINISH, id(finish)),
            (pyobjects.ENTRY_FLOW, id(flow)),
        ):
            entry[place] = value
        place = self._place(like, op)
        self._table[place, pyobjects.ENTRY_PROGRAM] = 0
        self._kept[place] = (dtype, shape, op, signature, like, finish, flow)
        self._table[place] = entry


_DOC_OF_AGAIN = """again($self)
--

Make the call once, and return its result: the same array each time."""
_DOC = """all_reduce($self, x, op='sum', *, out=None, algorithm='auto', wire=None, async_op=False, \
timeout_s=None)
--

{}"""
