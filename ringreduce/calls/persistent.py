"""Planned calls: repeated on the same arrays, checked and bound once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from ringreduce.calls.arguments import as_counts, as_row_or_matrix, at_least_1d, check_selectors
from ringreduce.calls.arrays import as_array
from ringreduce.calls.cache import Calls
from ringreduce.calls.call import Call
from ringreduce.calls.collectives import ARGUMENTS
from ringreduce.calls.ops import op_name
from ringreduce.calls.refusals import refuse_copy
from ringreduce.calls.runner import Runner, move
from ringreduce.calls.views import forbid_resizing
from ringreduce.calls.work import Polled
from ringreduce.config import as_seconds
from ringreduce.errors import did_you_mean, shown
from ringreduce.schedules.collectives import COLLECTIVES

Again = Callable[[], Any]
"""Makes one call, and returns the result: the same array each time."""


def plan(runner: Runner, collective: str, x: Any, out: Any, arguments: dict[str, Any]) -> Again:
    """Check and bind a call, as `Communicator.plan`, which takes these arguments."""
    timeout_s = arguments.pop("timeout_s", None)
    if type(collective) is str and collective == "scatter":
        array = runner.counted_to_scatter(x, arguments.get("root", 0), out)
    else:
        array = as_array("plan", x)
    with runner.engine.queue.lock:
        runner.engine.check_usable()
        call = planned_call(runner.calls_on(array), collective, array, arguments)
        array, target = runner.placed(call, array, out)
        for bound in (x, out):
            forbid_resizing(bound)
        timeout_s = as_seconds(collective, timeout_s)
        result = None if call.shape is None else target if out is None else out
        return PersistentCall(runner, call, array, target, result, timeout_s).on_fast_path()


def planned_call(
    calls: Calls, collective: str, array: np.ndarray, arguments: dict[str, Any]
) -> Call:
    """Return a new call of `collective`, which is not cached: its caller owns it.

    Raises ValueError for a collective that needs several plans, TypeError for arguments that the
    collective does not have.
    """
    check_selectors("plan", collective=collective)
    defaults = ARGUMENTS.get(collective)
    if defaults is None:
        meant = "" if collective in COLLECTIVES else did_you_mean(collective, ARGUMENTS)
        raise ValueError(
            f"plan: cannot plan {shown(collective)}; "
            f"choose one of {', '.join(map(repr, ARGUMENTS))}{meant}"
        )
    for name in arguments:
        if name not in defaults:
            takes = ", ".join((*defaults, "out", "timeout_s"))
            raise TypeError(f"plan: {collective} has no argument {name!r} here; it takes {takes}")
    given = {**defaults, **arguments}
    if "counts" in given:
        given["counts"] = _planned_counts(collective, given["counts"])
    if "op" in given:
        given["op"] = op_name(collective, (array,), given["op"])
    check_selectors(collective, **{name: given[name] for name in given if name != "counts"})
    if given.get("counts") is not None:
        array = at_least_1d(array)
    return calls.make(collective, array, given)


def _planned_counts(collective: str, counts: Any) -> Any:
    """Return the counts of a planned call as ints.  Raises TypeError if they are not all known."""
    if collective == "all_to_all" and counts is None:
        return None
    if counts is None:
        raise TypeError(
            f"plan: {collective} without counts; "
            "pass counts=, a list of the first dimension of each rank's array"
        )
    if collective != "all_to_all":
        return as_counts(collective, counts)
    _, matrix = as_row_or_matrix(collective, counts)
    if matrix is None:
        raise TypeError(
            "plan: all_to_all with the counts of one rank; pass counts=, one such list of each rank"
        )
    return matrix


class PersistentCall:
    """A planned call, made by `Communicator.plan`.  Collective, as the planned collective is.

    Types, shapes and memory are checked once.  The signature is still compared in each call.  Each
    call reads and writes the same memory, so the caller must not resize the arrays.
    """

    __reduce__ = refuse_copy

    def __init__(
        self,
        runner: Runner,
        call: Call,
        source: np.ndarray,
        target: np.ndarray,
        result: Any,
        timeout_s: float | None,
    ) -> None:
        engine = runner.engine
        self._runner, self._engine, self._queue = runner, engine, engine.queue
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
        path, how = self._engine.fast_path, (self._call, self._timeout_s, self._result, self)
        if path is None:
            return self
        return self._engine.executables.planned(path, *how) or self

    def _body(self, header: bytes) -> Polled:
        yield from move(self._engine, self._call, self._source, self._target, header)
