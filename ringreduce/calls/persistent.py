"""A call on the same arrays, again and again, with everything checked and bound once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from ringreduce.calls.call import Call
from ringreduce.calls.compound import move
from ringreduce.calls.engine import Engine

Again = Callable[[], Any]
"""Makes a call once, and returns its result: the same array each time."""


class PersistentCall:
    """What `Communicator.plan` makes.  Every rank calls it as it would make the call itself.

    What is checked once: types, shapes, memory.  What still travels with each call: its signature.
    The arrays are read and written in place, so keep using them and do not resize them.
    """

    def __init__(
        self,
        engine: Engine,
        call: Call,
        source: np.ndarray,
        target: np.ndarray,
        result: Any,
        timeout_s: float | None,
    ) -> None:
        self._engine, self._queue = engine, engine.queue
        self._call, self._result = call, result
        self._source, self._target, self._timeout_s = source, target, timeout_s
        if not call.converts:
            with nullcontext() if call.stream is None else call.stream.selected():
                engine.executor.store.bind_for_good(call.prepared, source, target)
        self._alone: Callable[[bytes], None] | None = None
        """Runs the call, if it can be done by messages between its arrays alone."""
        if call.prepared.bound is not None and call.stream is None:
            self._alone = engine.executor.alone(call.prepared.bound)

    def __del__(self) -> None:
        self._engine.executor.store.discard(self._call.prepared)

    def __call__(self) -> Any:
        """Make the call once, and return its result: the same array each time."""
        with self._queue.lock:
            self._carry_out()
        return self._result

    def on_fast_path(self) -> Again:
        """A compiled function that makes the call and keeps this object alive, or this object."""
        bound = self._call.prepared.bound
        if self._alone is None or bound is None:
            return self
        planned = self._engine.planned(self._call, bound, self._timeout_s, self._result, self)
        return planned or self

    def _carry_out(self) -> None:
        engine = self._engine
        engine.check_usable()
        if self._alone is None or self._queue.works:
            engine.run(self._call, self._body, self._timeout_s, stream=self._call.stream)
        else:
            engine.carry_out(self._call, self._timeout_s, self._alone)

    def _body(self, header: bytes) -> Any:
        executor = self._engine.executor
        yield from move(executor, self._call, self._source, self._target, header)
