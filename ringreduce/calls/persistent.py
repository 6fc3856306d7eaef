"""Planned calls: repeated on the same arrays, checked and bound once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from ringreduce.calls.call import Call
from ringreduce.calls.compound import move
from ringreduce.calls.refusals import refuse_copy
from ringreduce.calls.runner import Runner

Again = Callable[[], Any]
"""Makes one call, and returns the result: the same array each time."""


class PersistentCall:
    """A planned call, made by `Communicator.plan`.  Collective, as the planned collective is.

    Types, shapes and memory are checked once.  The signature is still compared in each call.  Each
    call reads and writes the same memory, so the caller must not resize the arrays.
    """

    __reduce__ = refuse_copy

    def __init__(
        self,
        comm: Runner,
        call: Call,
        source: np.ndarray,
        target: np.ndarray,
        result: Any,
        timeout_s: float | None,
    ) -> None:
        engine = comm._engine
        self._comm, self._engine, self._queue = comm, engine, engine.queue
        self._call, self._result = call, result
        self._source, self._target, self._timeout_s = source, target, timeout_s
        self._is_one_plan = not call.converts and call.stream is None
        if not call.converts:
            engine.free_if_idle()
            with nullcontext() if call.stream is None else call.stream.selected():
                engine.executables.of(call).bind(source, target)

    def __del__(self) -> None:
        self._engine.discard(self._call)

    def __call__(self) -> Any:
        """Make one call, and return the result: the same array each time."""
        call, engine = self._call, self._engine
        with self._queue.lock:
            engine.check_usable()
            if self._is_one_plan and not self._queue.busy:
                engine.run_now(call, self._source, self._target, self._timeout_s)
            else:
                engine.run(call, self._body, self._timeout_s, stream=call.stream)
        return self._result

    def on_fast_path(self) -> Again:
        """Return a compiled function that makes the call; this object if there is none.

        The function keeps this object alive.
        """
        how = self._call, self._timeout_s, self._result, self
        return self._engine.executables.planned(*how) or self

    def _body(self, header: bytes) -> Any:
        yield from move(self._engine, self._call, self._source, self._target, header)
