"""Call a training function in a job that goes on after ranks are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from threading import current_thread, main_thread
from typing import Any, TypeVar

import numpy as np

from ringreduce.calls.communicator import Communicator
from ringreduce.errors import PeerLostError, PeerTimeoutError, shown
from ringreduce.recovery.change import Change
from ringreduce.recovery.saving import RegularSaver, Saving
from ringreduce.recovery.slots import Slots
from ringreduce.recovery.state import State
from ringreduce.recovery.wire import ELASTIC, Connection, WireMessage, to_launcher
from ringreduce.start.init import init
from ringreduce.start.process_exit import skip_finalize

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

    Under ``ringreduce run --elastic`` a job that loses a rank continues, with the arrays of the
    last update of any rank.  The ranks that are left call `train` again: in the same process, or in
    a new one, which begins the program again.  `train` must therefore begin at ``state.step``.
    Without ``--elastic`` this is one call of `train`.

    All ranks begin with the arrays and the step of rank 0, or with those of the last update.  No
    rank returns before all have finished `train`.

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
        raise TypeError(f"elastic: train is {shown(train)}; pass a function train(comm, state)")
    launcher, call = to_launcher(), next(_calls)
    if launcher is not None and _answer(launcher, "join").kind == "member":
        return _Member(launcher, call).run(train, state)
    with init() as comm:
        made = _made(state, comm)
        _begin_alike(comm, made)
        return train(comm, made)


def _made(state: State | Callable[[Communicator], State], comm: Communicator) -> State:
    made = state(comm) if callable(state) else state
    _check_state(made)
    return made


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(
            f"elastic: state is {shown(state)}; pass rr.State(...) of the arrays that steps change"
        )


class _Member:
    """A rank of a generation, and of those that follow while its process lives."""

    def __init__(self, launcher: Connection, call: int) -> None:
        self._launcher, self._call = launcher, call
        self._answer: WireMessage
        self._is_held = False
        self._has_stepped = False
        self._saver: RegularSaver | None = None
        """On rank 0, if the launcher has a folder for states."""
        self._pace: ComputeTimer | None = None

    def run(
        self,
        train: Callable[[Communicator, State], Result],
        make: State | Callable[[Communicator], State],
    ) -> Result:
        comm, state = self._begin(make)
        with _notices(self._launcher):  # not before: MPI may wait for a rank that is gone
            return self._train(comm, state, train)

    def _train(
        self,
        comm: Communicator,
        state: State,
        train: Callable[[Communicator, State], Result],
    ) -> Result:
        while True:
            try:
                self._start(comm, state)
                result = train(comm, state)
                if self._saver is not None:
                    self._save(state)
                    self._saver.wait()
                if self._ask("finished").kind == "done":
                    break
            except (PeerLostError, PeerTimeoutError) as error:
                if self._suspect(error).kind == "raise":
                    comm.leave(_text_of(error))
                    raise
            except _Leaves as leaves:
                if leaves.alone:
                    skip_finalize()
                else:
                    self._end(comm)
                raise
            except BaseException as error:
                comm.leave(_text_of(error))
                raise
            finally:
                if self._pace is not None:
                    self._pace.close()
            comm = self._shrunk(comm)
        self._end(comm)
        return result

    def _end(self, comm: Communicator) -> None:
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        with suppress(PeerLostError, PeerTimeoutError):  # ranks that are lost now miss nothing
            comm._ending.close("the call of elastic")

    def _begin(self, make: State | Callable[[Communicator], State]) -> tuple[Communicator, State]:
        try:
            comm = init()
            try:
                state = _made(make, comm)
                # The earlier generation may train until this question is answered.
                self._answer = self._ask("ready", call=self._call)
                if not self._restore(state):
                    _begin_alike(comm, state)
            except BaseException as error:
                comm.leave(_text_of(error))
                raise
        except (PeerLostError, PeerTimeoutError) as error:
            self._suspect(error)
            raise
        return comm, state

    def _start(self, comm: Communicator, state: State) -> None:
        generation, speaks = self._answer.fields["generation"], comm.rank == 0
        self._has_stepped = False
        if not self._is_held:
            state.begin_generation(generation)
            self._launcher.send("state", (state.file,), call=self._call)
            self._is_held = True
            if speaks and state.saving is not None:
                self._launcher.send("saving", call=self._call, **asdict(state.saving))
        else:
            if self._answer.files:  # a lost rank has made the most steps
                self._restore(state)
            _catch_up(comm, state)
        if speaks and state.saving is None:
            self._saver = self._regular_saver(generation)
        self._pace = ComputeTimer(comm, self._tell_pace)
        state.join(generation, self._after_update, self._unsaved)
        comm.barrier()  # the launcher has all states before it counts the first step
        if speaks:
            self._launcher.send("started", step=state.step)
        change: dict[str, Any] | None = self._answer.fields["change"]
        if change is not None:
            state.resized(Change(**{**change, "lost": tuple(change["lost"])}))

    def _shrunk(self, comm: Communicator) -> Communicator:
        """Return a communicator of the ranks that are left, made again if another rank is lost."""
        while True:
            made: Communicator | None = None
            try:
                made = comm.shrink()
            except (PeerLostError, PeerTimeoutError):
                answer = self._ask("shrunk", size=0)
            except Exception as error:  # the supervisor starts a new job
                answer = self._ask("unable", text=str(error))
            else:
                answer = self._ask("shrunk", size=made.size)
            if answer.kind == "member":
                assert made is not None
                made._engine.transport.replace_world()
                skip_finalize()
                fields = {**self._answer.fields, **answer.fields}
                self._answer = WireMessage(answer.kind, fields, answer.files)
                return made

    def _restore(self, state: State) -> bool:
        """Copy the state of the generation before; return False if there is none."""
        if not self._answer.files:
            return False
        source = Slots.from_file(self._answer.files[0])
        self._answer = WireMessage(self._answer.kind, self._answer.fields)
        try:
            state.restore({name: source.committed(name) for name in source.entries}, source.step)
        finally:
            source.close()
        return True

    # --- what the launcher is told ---

    def _ask(self, kind: str, **fields: Any) -> WireMessage:
        """Ask the launcher.  Raises PeerLostError if another rank never asks."""
        answer = _answer(self._launcher, kind, **fields)
        if answer.kind == "raise" and (text := answer.fields["text"]):
            raise PeerLostError(text)
        return answer

    def _suspect(self, error: PeerLostError | PeerTimeoutError) -> WireMessage:
        """Report the missing ranks, and return what follows.

        If a rank is lost, the supervisor kills this process, or this rank shrinks its
        communicator.  Otherwise the error is a bug: "raise".
        """
        stopped = isinstance(error, PeerTimeoutError)
        return self._ask("suspect", ranks=list(error.job_ranks), stopped=stopped)

    def _after_update(self, state: State, pauses: bool) -> None:
        step = state.step
        if not self._has_stepped:
            self._has_stepped = True
            self._launcher.send("stepped", step=step, facts=state.described)
        if self._saver is not None and self._saver.is_due:
            self._save(state)
        assert self._pace is not None
        self._pace.after(step)
        if pauses:
            self._pause(step)

    def _tell_pace(self, step: int, seconds: float) -> None:
        self._launcher.send("pace", step=step, seconds=seconds)

    def _pause(self, step: int) -> None:
        """Wait for the other ranks after a step; raise SystemExit if this rank has no place now."""
        answer = self._ask("paused", step=step, call=self._call)
        if answer.kind == "leave":
            raise _Leaves(bool(answer.fields["alone"]))

    # --- regular checkpoints ---

    def _regular_saver(self, generation: int) -> RegularSaver | None:
        """Return a saver for regular checkpoints; None if the launcher has no folder for them."""
        folder, every_s = self._answer.fields["folder"], self._answer.fields["every_s"]
        if self._saver is not None:
            self._saver.close()
        if folder is None:
            return None
        try:
            return RegularSaver(Saving(folder, {}), every_s, generation, self._unsaved)
        except (OSError, ValueError) as error:
            self._unsaved(f"no checkpoints: {error}")
            return None

    def _save(self, state: State) -> None:
        assert self._saver is not None
        self._saver.save(state.step, {name: state[name] for name in state})

    def _unsaved(self, text: str) -> None:
        self._launcher.send("unsaved", text=text)


class _Leaves(SystemExit):
    """This rank leaves the job, as planned; `alone`: other ranks stay."""

    def __init__(self, alone: bool) -> None:
        super().__init__(0)
        self.alone = alone


@contextmanager
def _notices(launcher: Connection) -> Iterator[None]:
    """Tell the launcher of SIGTERM in place of ending at once, unless the program handles it."""
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    pid = os.getpid()

    def told(number: int, _: object) -> None:
        if os.getpid() != pid or not launcher.send("notice") or launcher.peer_ends:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _catch_up(comm: Communicator, state: State) -> None:
    """Give the ranks that have made fewer steps the arrays of one that has made the most."""
    steps = comm.all_gather(np.array([state.step])).tolist()
    if min(steps) < max(steps):
        ahead = steps.index(max(steps))
        arrays = _arrays_of(ahead, comm, state)
        if state.step < max(steps):
            state.restore(arrays, max(steps))


def _answer(launcher: Connection, kind: str, **fields: Any) -> WireMessage:
    """Ask the launcher; end this process if it is gone, or refuses ranks of this generation."""
    answer = launcher.ask(kind, **fields)
    if answer is None:
        os._exit(1)  # this rank has no lease any more
    return answer


def _begin_alike(comm: Communicator, state: State) -> None:
    """Give all ranks the arrays of rank 0, and its number of steps."""
    step = int(comm.broadcast(np.array([state.step]), root=0)[0])
    state.restore(_arrays_of(0, comm, state), step)


def _arrays_of(root: int, comm: Communicator, state: State) -> dict[str, np.ndarray]:
    return {name: comm.broadcast(state[name], root=root) for name in state}


_EVERY = 53
"""One step in `_EVERY` is measured: a prime number, as other work is done every 50 or 100 steps."""


class ComputeTimer:
    """Measures the seconds of a step that this rank does not spend in calls of `comm`."""

    def __init__(self, comm: Communicator, tell: Callable[[int, float], None]) -> None:
        """Call ``tell(step, seconds)`` after each step that was measured."""
        self._queue, self._tell = comm._engine.queue, tell
        self._since: float | None = None
        """When the measured step began."""

    def after(self, step: int) -> None:
        """Begin or end a measurement, after number `step`, when one is due."""
        if self._since is not None:
            seconds = time.perf_counter() - self._since
            self._since = None
            self._tell(step, max(0.0, seconds - self._queue.end_meter()))
        elif step % _EVERY == 0:
            self._queue.begin_meter()
            self._since = time.perf_counter()

    def close(self) -> None:
        if self._since is not None:
            self._since = None
            self._queue.end_meter()
