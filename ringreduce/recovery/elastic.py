"""Run a training function with each communicator of a job in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ringreduce.bootstrap import init
from ringreduce.calls.communicator import Communicator
from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.recovery.slots import Slots
from ringreduce.recovery.state import Change, State
from ringreduce.recovery.wire import Connection, Message, to_launcher

Result = TypeVar("Result")
_KILLED_S = 60.0
"""Seconds in which the supervisor kills a rank that it does not answer."""

_calls = [0]
"""How many calls of `elastic` this process has made."""


def elastic(train: Callable[[Communicator, State], Result], state: State) -> Result:
    """Call ``train(comm, state)`` so that training goes on after ranks are lost.  Collective.

    Under ``ringreduce run --elastic`` a job that loses a rank continues: its ranks begin the
    program again, and here `state` gets the arrays of the last update of any rank.  `train` must
    therefore begin at ``state.step``.  Without ``--elastic`` this is one call of `train`.

    All ranks begin with the arrays of rank 0, or with those of the last update.

    Args:
        train: a function that makes steps: it computes a rank's part, reduces it over `comm`, and
            changes `state` inside ``with state.update():``.
        state: the arrays that the steps change.

    Returns:
        What `train` returns.

    Raises:
        TypeError: `state` is no `State`, or `train` cannot be called.
        ValueError: the arrays are others than before the loss.
        MismatchError, PeerTimeoutError, PeerLostError: as for `Communicator.all_reduce`, if the
            job cannot go on.

    Example:
        >>> def train(comm, state):
        ...     while state.step < 3:
        ...         gradient = comm.all_reduce(state["w"] - 1, op="mean")
        ...         with state.update():
        ...             state["w"] -= 0.5 * gradient
        ...     return state["w"].item()
        >>> rr.elastic(train, rr.State({"w": np.zeros(1)}))
        0.875
    """
    if not isinstance(state, State):
        raise TypeError(
            f"elastic: state is {state!r}; pass rr.State(...) of the arrays that steps change"
        )
    if not callable(train):
        raise TypeError(f"elastic: train is {train!r}; pass a function train(comm, state)")
    _calls[0] += 1
    launcher, call = to_launcher(), _calls[0]
    answer = None if launcher is None else launcher.ask("join", call=call)
    if launcher is None or answer is None or answer.say == "alone":
        with init() as comm:
            _begin_alike(comm, state)
            return train(comm, state)
    return _Member(launcher, call, answer).run(train, state)


class _Member:
    """A rank of a generation."""

    def __init__(self, launcher: Connection, call: int, answer: Message) -> None:
        self._launcher, self._call, self._answer = launcher, call, answer
        self.generation: int = answer.fields["generation"]
        self._change: Mapping[str, Any] | None = answer.fields["change"]

    def run(self, train: Callable[[Communicator, State], Result], state: State) -> Result:
        """Call `train` in this generation."""
        try:
            goes_on = self._restore(state)
            with init() as comm:
                if not goes_on:
                    _begin_alike(comm, state)
                state.join(self.generation, self._stepped)
                self._launcher.send("state", (state.file,), call=self._call)
                comm.barrier()  # the launcher has all states before it counts the first step
                if comm.rank == 0:
                    self._launcher.send("started")
                if self._change is not None:
                    fields = {name: self._change[name] for name in Change.__dataclass_fields__}
                    fields["lost"] = tuple(fields["lost"])
                    state.resized(Change(**fields))
                return train(comm, state)
        except (PeerLostError, PeerTimeoutError) as error:
            self._wait_for_verdict(error)
            raise

    def _restore(self, state: State) -> bool:
        """Copy the state of the generation before.  Returns False if there is none."""
        if not self._answer.files:
            return False
        source = Slots.from_file(self._answer.files[0])
        try:
            state.restore({name: source.committed(name) for name in source.entries}, source.step)
        finally:
            source.close()
        return True

    def _stepped(self, step: int) -> None:
        self._launcher.send("stepped", step=step)

    def _wait_for_verdict(self, error: PeerLostError | PeerTimeoutError) -> None:
        """Report who is missing.  Returns if nothing follows from it but the error.

        Otherwise the supervisor kills this process, and the next generation goes on.
        """
        stopped = isinstance(error, PeerTimeoutError)
        answer = self._launcher.ask("miss", ranks=list(error.ranks), stopped=stopped)
        if answer is None:  # the launcher is gone, and this rank has no lease any more
            time.sleep(_KILLED_S)
            os._exit(1)


def _begin_alike(comm: Communicator, state: State) -> None:
    """Give all ranks the arrays of rank 0."""
    state.restore({name: comm.broadcast(state[name], root=0) for name in state}, state.step)
