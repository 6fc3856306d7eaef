"""A rank kills itself at planned points of a training step and of the recovery.

A plan is a file with a JSON list of ``[rank, point]``.  They are made one after another: for each
one that is made there is a file beside the plan, in the folder ``deaths``.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringreduce as rr
from ringreduce.recovery import elastic
from ringreduce.recovery.wire import Connection
from ringreduce.system.place import RANK_VARIABLES

CALLS = ("all_reduce of a list", "all_reduce", "barrier")
OF_A_STEP = (
    *(f"{moment} {call}" for call in CALLS for moment in ("before", "in", "after")),
    *("update begun", "update half written", "update written", "update committed"),
)
"""Points of a training step."""
OF_RECOVERY = (
    "import of ringreduce",
    *("before join", "after join", "before init", "after init", "before state", "after state"),
    *("before started", "before stepped", "after stepped"),
)
"""Points between the begin of a process and the first step of its generation."""
OF_LIVE_RECOVERY = (
    *("before suspect", "before shrink", "after shrink", "before shrunk", "before catching up"),
    *("before started", "before stepped", "after stepped"),
)
"""Points between a loss and the next step of a rank that goes on."""
OF_RANK_0 = {"before started"}
"""Points that rank 0 alone comes to."""
OF_THE_FIRST = "after started"
"""A point of rank 0 in the first generation: in a later one the same step would be lost again."""
_IN_A_CALL_S = 1e-3
"""Seconds from the begin of a call until the rank dies in it; the others come later."""
_MESSAGES = {
    *("join", "ready", "state", "started", "stepped", "paused", "suspect", "shrunk"),
}


class Deaths:
    """The deaths of this rank.  Without a plan there are none."""

    def __init__(self, plan: Path | None) -> None:
        self._plan = [] if plan is None else [tuple(each) for each in json.loads(plan.read_text())]
        self._made = Path() if plan is None else plan.parent / "deaths"
        self._rank = next(int(os.environ[n]) for n in RANK_VARIABLES if n in os.environ)
        self._state: rr.State | None = None
        self._first = 0
        """The step with which this generation begins."""
        if plan is not None:
            self.at("import of ringreduce")
            _wrap_messages(self.at)
            _wrap(elastic, "init", self.at, "init")
            _wrap(rr.Communicator, "shrink", self.at, "shrink")
            _wrap(elastic, "_catch_up", self.at, "catching up")

    def begin(self, comm: rr.Communicator, state: rr.State) -> None:
        """Come to points before, in and after each call of a step, from the second step on.

        In the first step of a generation nobody dies: a step that is lost twice ends the job.
        """
        if self._plan:
            self._state, self._first = state, state.step
            make, barrier = comm.all_reduce, comm.barrier
            names = {True: CALLS[0], False: CALLS[1]}
            around: Any = self._around
            methods: Any = comm
            methods.all_reduce = lambda x: around(names[isinstance(x, list)], make, x)
            methods.barrier = lambda: around(CALLS[2], barrier)

    def at(self, point: str) -> None:
        """Die if this point is the next one of the plan."""
        if self._is_next(point):
            os.kill(os.getpid(), signal.SIGKILL)

    def _around(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        self.at(f"before {name}")
        if self._is_next(f"in {name}"):
            threading.Timer(_IN_A_CALL_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            self._let_another_wait(f"in {name}")
        result = call(*args)
        self.at(f"after {name}")
        return result

    def _let_another_wait(self, point: str) -> None:
        """Come late to a call in which another rank is about to die."""
        number = len(os.listdir(self._made))
        near = self._plan[max(0, number - 1) : number + 1]
        if any(planned == point and rank != self._rank for rank, planned in near):
            time.sleep(3 * _IN_A_CALL_S)

    def _is_next(self, point: str) -> bool:
        if not self._plan or (point in OF_A_STEP and self._is_first_step):
            return False
        number = len(os.listdir(self._made))
        if number >= len(self._plan) or self._plan[number] != (self._rank, point):
            return False
        (self._made / str(number)).touch()
        return True

    @property
    def _is_first_step(self) -> bool:
        return self._state is None or self._state.step == self._first


def _wrap_messages(at: Callable[[str], None]) -> None:
    send = Connection.send

    def dying(self: Connection, kind: str, *args: Any, **fields: Any) -> bool:
        if kind not in _MESSAGES:
            return send(self, kind, *args, **fields)
        at(f"before {kind}")
        sent = send(self, kind, *args, **fields)
        at(f"after {kind}")
        return sent

    Connection.send = dying  # type: ignore[method-assign]


def _wrap(owner: Any, name: str, at: Callable[[str], None], words: str) -> None:
    """Come to a point before and after each call of a function."""
    function = getattr(owner, name)

    def dying(*args: Any) -> Any:
        at(f"before {words}")
        result = function(*args)
        at(f"after {words}")
        return result

    setattr(owner, name, dying)
