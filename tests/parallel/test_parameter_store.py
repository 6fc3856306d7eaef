"""ParameterStore: placement, bits of synchronous steps, bounds, numbers, losses; and misuse."""

from __future__ import annotations

import contextlib
import re
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.parallel.store_messages import place
from ringreduce.train import ParameterStore

by_servers = pytest.mark.parametrize("servers", [1, 2])


def count(parameters, slots, gradient, staleness, number) -> None:
    """Count in each number the updates in which its gradient was not 0."""
    parameters += gradient != 0


def spawned(work, workers=2, servers=1, *, start=None, caught=(), error=None, **how):
    """Return what `work` returns, or the error that is `caught`, on workers, and servers' stats."""
    found, start = [None] * (workers + servers), start or {"w": np.zeros(6)}

    def program(comm):
        mine = {name: np.full_like(a, 7) if comm.rank else a for name, a in start.items()}
        try:
            with ParameterStore(comm, mine, servers=servers, **({"update": count} | how)) as store:
                result = store.serve() if store.is_server else work(comm, store)
                found[comm.rank] = store.stats if store.is_server else result
        except caught as problem:
            found[comm.rank] = problem

    with pytest.raises(error) if error else contextlib.nullcontext():
        rr.spawn(program, workers + servers, timeout_s=120)
    return found[:workers], found[workers:]


def one(index: int) -> dict[str, np.ndarray]:
    return {"w": np.eye(1, 6, index)[0]}


def value(store) -> list[float]:
    return store.pull()["w"].tolist()


def text_of(error, do, *arguments) -> str:
    with pytest.raises(error) as seen:
        do(*arguments)
    return str(seen.value)


def leave(comm) -> None:
    comm.leave("gone")
    raise KeyError("gone")


class Events(dict):
    """Name -> event; two threads that name the same one at once get one."""

    def __missing__(self, name: str) -> threading.Event:
        return self.setdefault(name, threading.Event())


def set_when_asked(event: threading.Event, comm) -> None:
    """Set the event when the rank waits for an answer, so that a server has its request."""
    receive = comm.recv
    comm.recv = lambda *given, **named: event.set() or receive(*given, **named)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), servers=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_the_largest_variable_lies_on_the_least_full_server_or_is_cut_evenly(sizes, servers):
    placement, full = place(dict(enumerate(sizes)), servers), [0] * servers
    for name in sorted(placement, key=lambda name: -sizes[name]):
        pieces = placement[name]
        assert [n for _, *ends in pieces for n in range(*ends)] == [*range(sizes[name])]
        if sizes[name] > sum(sizes) / servers:
            lengths = [stop - start for _, start, stop in pieces] + [0] * (servers - len(pieces))
            assert max(lengths) - min(lengths) <= 1
        else:
            assert [server for server, _, _ in pieces] == [full.index(min(full))][: sizes[name]]
        for server, start, stop in pieces:
            full[server] += stop - start


DTYPES = "float16", ml_dtypes.bfloat16, "float32", "float64"
STARTS = [{"w": np.full(1, 5.0)}, {t: np.ones(3, t) for t in DTYPES}]
STARTS.append({"none": np.zeros((0, 3)), "number": np.array(2.0), "one": np.ones((1, 1))})


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("staleness", "pushed"), [(0, 1.5 + 3), (None, 3 + 6)])
@pytest.mark.parametrize("start", STARTS, ids=["one number", "dtypes", "shapes"])
def test_arrays_of_any_shape_and_dtype_which_a_pull_overwrites(start, staleness, pushed, servers):
    def work(comm, store):
        found = store.pull()
        for push in (1, 2):  # without a pull between
            store.push({n: np.full_like(a, push * (comm.rank + 1)) for n, a in start.items()})
        assert [*store.steps(0)] == []  # both have pushed
        assert all(array is found[name] for name, array in store.pull().items())
        return {name: array.copy() for name, array in found.items()}

    how = {"update": lambda mine, _, slope, *__: np.add(mine, slope, out=mine), "start": start}
    for found in spawned(work, 2, servers, staleness=staleness, **how)[0]:
        for name, array in start.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert (found[name] == array + array.dtype.type(pushed)).all()


SAMPLES = [1, 1, 2]
MODEL = {"w": np.linspace(-1, 1, 35).reshape(7, 5), "b": np.linspace(2, 3, 3)}


def momentum(parameters, slots, gradient, staleness, number) -> None:
    slots[0][...] = 0.9 * slots[0] + gradient
    parameters -= 0.1 * slots[0]


def slope(rank: int, step: int, arrays) -> dict[str, np.ndarray]:
    """Return gradients; those of "b" on three ranks have the mean 1, in reversed order 0."""
    w = np.sin((rank + 2) * arrays["w"] + step)
    return {"w": w, "b": np.full(3, [2.0**56, -(2.0**56), 2.0][rank])}


@pytest.mark.parametrize("slots", [["m"], {"m": MODEL}], ids=["zeros", "given"])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_synchronous_steps_equal_one_process(workers, servers, slots):
    """In a step the gradient of the last rank arrives first."""
    events = Events()

    def work(comm, store):
        for step in range(3):
            gradients = slope(comm.rank, step, store.pull())
            if comm.rank < workers - 1:
                events[f"{comm.rank + 1} in {step}"].wait(120)
            store.push(gradients, SAMPLES[comm.rank])
            events[f"{comm.rank} in {step}"].set()
        return {name: array.copy() for name, array in store.pull(slots=True).items()}

    wanted = {name: array.copy() for name, array in MODEL.items()}
    wanted |= {f"m/{n}": a * isinstance(slots, dict) for n, a in MODEL.items()}
    for step in range(3):
        slopes = [slope(rank, step, wanted) for rank in range(workers)]
        for name in MODEL:
            mean = np.average([part[name] for part in slopes], 0, SAMPLES[:workers])
            momentum(wanted[name], [wanted[f"m/{name}"]], mean, 0, step)
    for found in spawned(work, workers, servers, update=momentum, slots=slots, start=MODEL)[0]:
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("mode", [(0, 0), (0, 1), (1, 0), (2, 0), (None, 0)])
def test_each_number_is_in_the_parameters_exactly_once_and_its_worker_sees_it(mode, servers):
    turns = [6, 0, 4]
    wanted = np.cumsum([[n < each for n in range(6)] for each in turns], axis=0)

    def update(parameters, slots, gradient, staleness, number):
        parameters += gradient != 0
        assert servers > 1 or number == max(np.flatnonzero(gradient))

    def work(comm, store):
        dealt = 0
        for each, least in zip(turns, wanted, strict=True):
            for number in store.steps(each):
                dropped = store.stats.discarded
                dealt += 1
                store.push(one(number))
                if comm.rank != 1:  # rank 1 pulls only at the end
                    sees = store.pull()["w"][number] == least[number]
                    assert sees or store.stats.discarded > dropped
            assert (store.pull()["w"] >= least).all()  # others may have begun the next loop
        return dealt, value(store), store.stats.discarded

    how = {"update": update, "staleness": mode[0], "backup_workers": mode[1]}
    dealt, found, dropped = zip(*spawned(work, 3, servers, **how)[0], strict=True)
    assert [*found] == [wanted[-1].tolist()] * 3
    assert sum(dealt) == sum(turns) + sum(dropped)


@by_servers
@pytest.mark.parametrize(("bound", "pushes"), [(0, 1), (1, 2), (2, 3), (None, 4)])
def test_a_bound_is_reached_and_not_exceeded(bound, pushes, servers):
    """The server has the request of worker 0 before worker 1 pulls, and then pushes."""
    events = Events()

    def work(comm, store):
        if comm.rank:
            events["asked"].wait(120)
            store.pull()
            return store.push(one(5))
        seen = []
        for push in range(pushes):
            store.push(one(0))
            if push == bound:
                set_when_asked(events["asked"], comm)
            seen.append(value(store)[5])
        events["asked"].set()
        return seen

    seen, _ = spawned(work, 2, servers, staleness=bound)[0]
    assert seen == [0] * (pushes - 1) + [bound is not None]


@by_servers
def test_a_late_gradient_of_a_backup_worker_is_dropped_and_its_number_dealt_again(servers):
    events = Events()

    def work(comm, store):
        for number in store.steps(2):
            events[f"dealt to {comm.rank}"].set()
            events["step 0 has closed" if comm.rank else "dealt to 1"].wait(120)
            store.push(one(number))
            store.pull()
            events["step 0 has closed"].set()
        return value(store), store.stats.discarded

    workers, of_servers = spawned(work, 2, servers, backup_workers=1)
    assert workers == [([1, 1, 0, 0, 0, 0], dropped) for dropped in (0, 1)]
    assert [(stats.pushes, stats.discarded) for stats in of_servers] == [(2, 1)] * servers


def test_stats_have_bytes_time_and_the_largest_staleness_over_servers():
    """Worker 0 pulls when the push of worker 1 is applied on server 1, and not on server 0."""
    events, seen = Events(), ([], [])

    def update(parameters, slots, gradient, staleness, number):
        server = int(parameters[0])
        seen[server].append((staleness, number))
        events[f"applied on server {server}"].set()

    def work(comm, store):
        send = comm.send

        def held(message, peer, tag, **how):
            if comm.rank == 1 and peer == 2:
                events["pulled"].wait(120)
            return send(message, peer, tag, **how)

        comm.send = held
        if comm.rank == 0:
            events["applied on server 1"].wait(120)
            store.pull()
            events["pulled"].set()
            events["pushed"].wait(120)
        store.push(start)
        events["pushed"].set()
        store.pull()
        return store.stats

    start = {"w": np.zeros(3_000), "v": np.ones(3_000)}
    workers, of_servers = spawned(work, 2, 2, update=update, start=start, staleness=None)
    assert seen == ([(0, 0), (1, 1)], [(0, 0), (0, 1)])
    figures = [(1, {1: 1}, 2, 4), (1, {0: 1}, 2, 4), (2, {0: 1, 1: 1}, 3, 3), (2, {0: 2}, 3, 3)]
    for stats, (pushes, staleness, sent, held) in zip(workers + of_servers, figures, strict=True):
        assert (stats.pushes, stats.staleness, stats.lost) == (pushes, staleness, ())
        assert 24_000 * sent < stats.sent_bytes < 28_000 * sent
        assert 24_000 * held < stats.held_bytes < 28_000 * held
        assert stats.waited_s > 0


# --- turns that fail, losses, and misuse ----------------------------------------------------------

FAULTS = {
    "break": ("the loop was left in the turn of number", None),
    "no push": ("made no push; wanted one", lambda *_: None),
    "pushes": ("the second push in", lambda _, store, k: [store.push(one(k)) for _ in "12"]),
    "steps": ("has not ended", lambda _, store, k: next(store.steps(6))),
    "close": ("the store is closed", lambda _, store, k: (store.push(one(k)), store.close())),
    "error": ("gone", lambda *_: {}["gone"]),
    "lost": ("gone", lambda comm, *_: leave(comm)),
}


@by_servers
@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_end_when_a_turn_fails_and_each_number_counts_once(fault, staleness, servers):
    """Worker 0 has pushed before; in synchronous steps it waits for worker 1."""
    events = Events()

    def work(comm, store):
        for number in store.steps(6):
            if comm.rank == 1:
                events["dealt"].set()
                events["asked"].wait(120)
                if fault == "break":
                    break
                FAULTS[fault][1](comm, store, number)
            else:
                events["dealt"].wait(120)
                store.push(one(number))
                set_when_asked(events["asked"], comm)
        return value(store), store.stats.lost

    caught = {"caught": (ValueError, KeyError), "staleness": staleness}
    (first, failed, last), of_servers = spawned(work, 3, servers, **caught)
    assert FAULTS[fault][0] in str(failed)
    lost = (1,) if fault == "lost" else ()
    assert first == last == ([1] * 6, lost)
    assert [stats.lost for stats in of_servers] == [lost] * servers


def test_a_worker_that_left_a_loop_may_be_one_loop_behind():
    events = Events()

    def work(comm, store):
        if comm.rank:
            next(store.steps(6))
            events["left"].set()
            assert "the loop was left" in text_of(ValueError, store.pull)
            events["second loop"].wait(120)
        for number in store.steps(6):
            events["left"].wait(120)
            store.push(one(number))
        events[f"{comm.rank} has ended it"].set()
        for number in store.steps(4):
            events["second loop"].set()
            events["1 has ended it"].wait(120)
            store.push(one(number))
        return store.meeting, value(store)

    assert spawned(work, staleness=None)[0] == [(2, [2, 2, 2, 2, 1, 1])] * 2


def test_a_worker_that_has_closed_is_not_lost_when_the_last_one_is():
    def work(comm, store):
        while comm.rank and 0 not in comm.lost_peers(closed=True):
            pass
        if comm.rank:
            leave(comm)

    assert spawned(work, caught=KeyError)[1][0].lost == (1,)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_server_whose_update_raises_is_named_with_its_variables_on_all_ranks(lost):
    def update(parameters, slots, gradient, staleness, number):
        if parameters[0] == lost:
            raise ZeroDivisionError

    def work(comm, store):
        for _ in store.steps(9):
            store.push(start)

    start = {f"v{server}": np.full(2, float(server)) for server in range(3)}
    how = {"update": update, "start": start, "caught": rr.PeerLostError}
    workers, of_servers = spawned(work, 2, 3, error=ZeroDivisionError, **how)
    assert of_servers.pop(lost) is None
    text = f"rank {2 + lost}, a server, is lost, and with it its part of 'v{lost}'"
    found = [(str(error), error.ranks) for error in workers + of_servers]
    assert found == [(text, (2 + lost,))] * 4


@by_servers
def test_counts_of_steps_that_differ_are_a_mismatch_on_all(servers):
    events = Events()

    def work(comm, store):
        set_when_asked(events["asked"], comm) if comm.rank == 1 else events["asked"].wait(120)
        for number in store.steps(4 + (comm.rank == 1)):
            store.push(one(number))

    (text,) = {str(error) for error in spawned(work, 3, servers, caught=rr.MismatchError)[0]}
    assert re.search("steps: rank [02] passes 4 where rank 1 passes 5; every", text)


GOOD = {"weight": np.ones(2), "b": np.ones(1)}


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        (GOOD | {"weigth": np.ones(2)}, "no variable 'weigth'; did you mean 'weight'?"),
        ({"weight": np.ones(2)}, "the gradient of 'b' is missing"),
        (GOOD | {"b": None}, "the gradient of 'b' is None"),
        (GOOD | {"weight": np.ones(3)}, "'weight' is float64[3]; wanted float64[2]"),
        (GOOD | {"b": np.ones(1, "float32")}, "'b' is float32[1]; wanted float64[1]"),
    ],
)
def test_a_wrong_gradient_is_named_and_the_store_goes_on(gradients, words):
    def work(comm, store):
        assert words in text_of((ValueError, TypeError), store.push, gradients)
        store.push(GOOD)
        assert store.pull()["weight"].tolist() == [2, 2]

    spawned(work, 1, start=GOOD)


def test_nan_in_a_gradient_is_applied_as_it_is():
    def update(parameters, slots, gradient, staleness, number):
        parameters += gradient

    def work(comm, store):
        store.push({"w": np.array([np.nan, 1.0])})
        return value(store)

    (pulled,), _ = spawned(work, 1, start={"w": np.zeros(2)}, update=update)
    assert np.isnan(pulled[0])
    assert pulled[1] == 1.0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"servers": 0}, "servers is 0; wanted at least 1"),
        ({"servers": 3}, "servers is 3; of 3 ranks that leaves no worker"),
        ({"servers": 2, "replicas": 3}, "replicas is 3; wanted at most servers, 2"),
        ({"staleness": -1}, "staleness is -1; wanted at least 0"),
        ({"staleness": 1.5}, "staleness is 1.5; wanted a whole number or None"),
        ({"backup_workers": 2}, "backup_workers is 2; wanted fewer than workers, 2"),
        ({"backup_workers": 1, "staleness": 2}, "backup workers are for staleness 0"),
        ({"update": 7}, "update is 7; pass a function"),
        ({"slots": {"velocity": {}}}, "slots has no velocity/w; pass an array of shape (6,)"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_on_every_rank_before_anything_is_sent(given, text):
    def program(comm):
        how = {"update": count} | given
        return text_of((ValueError, TypeError), lambda: ParameterStore(comm, one(0), **how))

    assert [text in said for said in rr.spawn(program, 3, timeout_s=120)] == [True] * 3


@pytest.mark.parametrize("what", ["w", "name", "dtype", "servers", "staleness", "slots"])
def test_ranks_that_make_different_stores_learn_it(what):
    def program(comm):
        other = comm.rank == 1
        params = {"v" if what == "name" and other else "w": np.zeros(6 - (what == "w" and other))}
        if what == "dtype" and other:
            params = {"w": np.zeros(6, np.float32)}
        changed = {"servers": 2, "staleness": 1, "slots": ["velocity"]}
        how = {what: changed[what]} if other and what in changed else {}
        return text_of(rr.MismatchError, lambda: ParameterStore(comm, params, count, **how))

    assert len({*rr.spawn(program, 3, timeout_s=120)}) == 1


def test_calls_on_a_rank_of_the_other_kind_and_after_close_are_refused():
    def program(comm):
        with ParameterStore(comm, one(0), count) as store:
            calls = [store.serve, store.pull, lambda: store.push(one(0)), lambda: store.steps(1)]
            store.serve() if store.is_server else store.close()
            return [text_of(ValueError, call) for call in calls[store.is_server :]]

    (serve, *closed), wrong = rr.spawn(program, 2, timeout_s=120)
    assert serve == "serve: rank 0 is a worker; servers call serve"
    assert closed == [f"{name}: the store is closed" for name in ("pull", "push", "steps")]
    assert {text.partition(": ")[2] for text in wrong} == {"rank 1 is a server; servers call serve"}


def over_mpi(comm) -> None:
    """Check on 4 ranks that 2 servers have each number exactly once."""
    with ParameterStore(comm, {"w": np.zeros(90_000)}, count, servers=2, staleness=1) as store:
        if store.is_server:
            store.serve()
            return
        for number in store.steps(9):
            store.pull()
            store.push({"w": np.eye(1, 90_000, 10_000 * number)[0]})
        assert store.pull()["w"][::10_000].tolist() == [1] * 9
