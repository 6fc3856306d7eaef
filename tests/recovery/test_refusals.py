"""Inside an update of a State a thread makes no calls; other threads do."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.shm.functions import is_available

REFUSED = "communication inside an update of a State"
X = np.arange(4.0)
CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "a list": lambda comm: comm.all_reduce([X, X]),
    "async": lambda comm: comm.all_reduce(X, async_op=True),
    "reduce_scatter": lambda comm: comm.reduce_scatter(X),
    "all_gather": lambda comm: comm.all_gather(X),
    "all_gather, unknown": lambda comm: comm.all_gather(X[: comm.rank + 1], counts=None),
    "broadcast": lambda comm: comm.broadcast(X, root=0),
    "reduce": lambda comm: comm.reduce(X, root=0),
    "gather": lambda comm: comm.gather(X, root=0),
    "scatter": lambda comm: comm.scatter(X if comm.rank == 0 else None, root=0),
    "all_to_all": lambda comm: comm.all_to_all(X),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "exchange": lambda comm: comm.exchange({1 - comm.rank: X}, {1 - comm.rank: np.empty(4)}),
    "close": lambda comm: comm.close(),
}
if is_available():  # shared arrays need compiled code
    CALLS["shared"] = lambda comm: comm.shared(3, np.float32)


def ping(comm: rr.Communicator) -> None:
    if comm.rank == 0:
        comm.send(X, peer=1)
        comm.recv(np.empty(4), peer=1)
    else:
        comm.recv(np.empty(4), peer=0)
        comm.send(X, peer=0)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_an_update_is_refused_also_where_it_was_made_before(name, shared_memory):
    call, ends = CALLS[name], name == "close"

    def program(comm: rr.Communicator) -> None:
        state = rr.State({"x": np.zeros(1)})
        for _ in range(0 if ends else 3):
            call(comm)
        for _ in range(2):
            with pytest.raises(ValueError, match=REFUSED), state.update():
                call(comm)
        assert state.step == 0
        call(comm)

    rr.spawn(program, 2, config=rr.Config(shared_memory=shared_memory))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_messages_inside_an_update_are_refused(shared_memory):
    def program(comm: rr.Communicator) -> None:
        state = rr.State({"x": np.zeros(1)})
        for _ in range(3):
            ping(comm)
        with pytest.raises(ValueError, match=REFUSED), state.update():
            ping(comm)
        ping(comm)

    rr.spawn(program, 2, config=rr.Config(shared_memory=shared_memory))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_planned_call_inside_an_update_is_refused(shared_memory):
    def program(comm: rr.Communicator) -> list[float]:
        state, x = rr.State({"x": np.zeros(1)}), np.ones(2)
        planned = comm.plan("all_reduce", x)
        planned()
        with pytest.raises(ValueError, match=REFUSED), state.update():
            planned()
        return planned().tolist()

    assert rr.spawn(program, 2, config=rr.Config(shared_memory=shared_memory)) == [[2, 2]] * 2


def test_an_asynchronous_call_may_be_waited_for_inside():
    def program(comm: rr.Communicator) -> float:
        state = rr.State({"x": np.zeros(1)})
        works = [comm.all_reduce(np.ones(1), async_op=True) for _ in range(3)]
        with state.update():
            for work in works:
                state["x"] += work.wait()
        return state["x"].item()

    assert rr.spawn(program, 2) == [6, 6]


def test_the_end_of_the_outer_of_two_updates_allows_calls():
    def program(comm: rr.Communicator) -> None:
        outer, inner = (rr.State({"x": np.zeros(1)}) for _ in range(2))
        with outer.update():
            with inner.update():
                pass
            with pytest.raises(ValueError, match=REFUSED):
                comm.barrier()
        comm.barrier()

    rr.spawn(program, 2)


def test_calls_of_another_thread_go_on():
    def program(comm: rr.Communicator) -> list[float]:
        state, found = rr.State({"x": np.zeros(1)}), []
        comm.all_reduce(X)
        with state.update():
            thread = threading.Thread(target=lambda: found.append(comm.all_reduce(X)))
            thread.start()
            thread.join()
        return found[0].tolist()

    assert rr.spawn(program, 2) == [[0, 2, 4, 6]] * 2
