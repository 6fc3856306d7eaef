"""Call a training function in a job that goes on after ranks are lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any, TypeVar

from ringreduce.bootstrap import init
from ringreduce.calls.communicator import Communicator
from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.recovery.change import Change
from ringreduce.recovery.saving import RegularSaver, Saving
from ringreduce.recovery.slots import Slots
from ringreduce.recovery.state import State
from ringreduce.recovery.wire import ELASTIC, Connection, Message, to_launcher

Result = TypeVar("Result")
_calls = count(1)
"""The numbers of the calls of `elastic` in this process."""


def is_elastic() -> bool:
    """Return whether this job goes on after ranks are lost.

    Returns:
        True under ``ringreduce run --elastic`` and ``ringreduce train --elastic``.

    Example:
        >>> rr.is_elastic()
        False
    """
    return os.environ.get(ELASTIC) == "1"


def elastic(
    train: Callable[[Communicator, State], Result],
    state: State | Callable[[Communicator], State],
) -> Result:
    """Call ``train(comm, state)`` so that training goes on after ranks are lost.  Collective.

    Under ``ringreduce run --elastic`` a job that loses a rank continues: its ranks begin the
    program again, and here `state` gets the arrays of the last update of any rank.  `train` must
    therefore begin at ``state.step``.  Without ``--elastic`` this is one call of `train`.

    All ranks begin with the arrays of rank 0, or with those of the last update.

    Args:
        train: a function that makes steps: it computes a rank's part, reduces it over `comm`, and
            changes `state` inside ``with state.update():``.
        state: the arrays that the steps change; or a function that makes them on each rank, from
            its communicator.

    Returns:
        What `train` returns.

    Raises:
        TypeError: `state` is no `State` and makes none, or `train` cannot be called.
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
    if not callable(state):
        _check_state(state)
    if not callable(train):
        raise TypeError(f"elastic: train is {train!r}; pass a function train(comm, state)")
    launcher, call = to_launcher(), next(_calls)
    if launcher is not None:
        answer = _answer(launcher, "join", call=call)
        if answer.kind == "member":
            return _Member(launcher, call, answer).run(train, state)
    with init() as comm:
        made = _made(state, comm)
        _begin_alike(comm, made)
        return train(comm, made)


def _made(state: State | Callable[[Communicator], State], comm: Communicator) -> State:
    """Return the State, or the one that the function makes."""
    made = state(comm) if callable(state) else state
    _check_state(made)
    return made


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(
            f"elastic: state is {state!r}; pass rr.State(...) of the arrays that steps change"
        )


class _Member:
    """A rank of a generation."""

    def __init__(self, launcher: Connection, call: int, answer: Message) -> None:
        self._launcher, self._call, self._answer = launcher, call, answer
        self._generation: int = answer.fields["generation"]
        change: dict[str, Any] | None = answer.fields["change"]
        self._change: Change | None = None
        if change is not None:
            self._change = Change(**{**change, "lost": tuple(change["lost"])})
        self._has_stepped = False
        self._saver: RegularSaver | None = None
        """On rank 0, if the launcher has a folder for states."""

    def run(
        self,
        train: Callable[[Communicator, State], Result],
        state: State | Callable[[Communicator], State],
    ) -> Result:
        """Call `train` in this generation."""
        try:
            with init() as comm:
                made = _made(state, comm)
                if not self._restore(made):
                    _begin_alike(comm, made)
                if comm.rank == 0 and made.saving is None:
                    self._saver = self._regular_saver()
                made.join(self._generation, self._after_update)
                self._launcher.send("state", (made.file,), call=self._call)
                if comm.rank == 0 and made.saving is not None:
                    self._launcher.send("saving", call=self._call, **asdict(made.saving))
                comm.barrier()  # the launcher has all states before it counts the first step
                if comm.rank == 0:
                    self._launcher.send("started")
                if self._change is not None:
                    made.resized(self._change)
                result = train(comm, made)
                if self._saver is not None:
                    self._saver.save(made.step, {name: made[name] for name in made})
                    self._saver.close()
                return result
        except (PeerLostError, PeerTimeoutError) as error:
            self._suspect(error)
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

    def _after_update(self, state: State) -> bool:
        """Tell the launcher of the first step, and save regularly."""
        if not self._has_stepped:
            self._has_stepped = True
            self._launcher.send("stepped", step=state.step)
        if self._saver is None:
            return False
        if self._saver.is_due:
            self._saver.save(state.step, {name: state[name] for name in state})
        return True

    def _regular_saver(self) -> RegularSaver | None:
        """Return what saves regularly; None if nothing does."""
        folder, every_s = self._answer.fields["folder"], self._answer.fields["every_s"]
        if folder is None:
            return None
        try:
            return RegularSaver(Saving(folder, {}), every_s, self._generation, self._unsaved)
        except (OSError, ValueError) as error:
            self._unsaved(f"no checkpoints: {error}")
            return None

    def _unsaved(self, text: str) -> None:
        self._launcher.send("unsaved", text=text)

    def _suspect(self, error: PeerLostError | PeerTimeoutError) -> None:
        """Report the ranks that are missing.  Returns if no rank is lost: the error is a bug.

        If a rank is lost, the supervisor kills this process, and the next generation goes on.
        """
        stopped = isinstance(error, PeerTimeoutError)
        _answer(self._launcher, "suspect", ranks=list(error.ranks), stopped=stopped)


def _answer(launcher: Connection, kind: str, **fields: Any) -> Message:
    """Ask the launcher; end this process if it is gone, or refuses ranks of this generation."""
    answer = launcher.ask(kind, **fields)
    if answer is None:
        os._exit(1)  # this rank has no lease any more
    return answer


def _begin_alike(comm: Communicator, state: State) -> None:
    """Give all ranks the arrays of rank 0."""
    state.restore({name: comm.broadcast(state[name], root=0) for name in state}, state.step)
