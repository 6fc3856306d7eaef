"""ParameterStore: placement, the bits of synchronous steps, bounds, numbers, losses; and misuse."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import defaultdict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.parallel.store_messages import place
from ringreduce.train import ParameterStore

MODES = {
    "synchronous": {"staleness": 0},
    "backup": {"staleness": 0, "backup_workers": 1},
    "bound 1": {"staleness": 1},
    "bound 2": {"staleness": 2},
    "no bound": {"staleness": None},
}
by_mode = pytest.mark.parametrize("mode", MODES)
by_servers = pytest.mark.parametrize("servers", [1, 2])


def count(parameters, slots, gradient, staleness, number) -> None:
    """Count in each number the updates in which its gradient was not 0."""
    parameters += gradient != 0


def spawned(work, workers=2, servers=1, *, start=None, caught=(), error=None, **how):
    """Return what ``work(comm, store)`` returns on workers, and stats of servers.

    Errors that are `caught` are results; `error` is that of the program.
    """
    found = [None] * (workers + servers)

    def program(comm):
        mine = {"w": np.zeros(6)} if start is None else start
        try:
            with ParameterStore(comm, mine, servers=servers, **({"update": count} | how)) as store:
                if store.is_server:
                    store.serve()
                found[comm.rank] = store.stats if store.is_server else work(comm, store)
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


class Events:
    """Events by name."""

    def __init__(self) -> None:
        self._events = defaultdict(threading.Event)

    def set(self, name: str) -> None:
        self._events[name].set()

    def wait(self, name: str) -> None:
        assert self._events[name].wait(120), name

    def set_when_received(self, name: str, comm) -> None:
        """Set the event when this rank waits for an answer, so that a server has its request."""
        receive = comm.recv

        def recv(*arguments, **named):
            self.set(name)
            return receive(*arguments, **named)

        comm.recv = recv


# --- where ----------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), servers=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_the_largest_variable_lies_on_the_least_full_server_or_is_cut_evenly(sizes, servers):
    placement, full = place(dict(enumerate(sizes)), servers), [0] * servers
    assert [*placement] == [*range(len(sizes))]
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


STARTS = {
    "one number": {"w": np.full(1, 5.0)},
    "no numbers": {"w": np.zeros((0, 3)), "v": np.full((2, 3), 3.0)},
    "0-d": {"w": np.array(2.0), "v": np.array([[1.0]])},
    "dtypes": {t: np.ones(3, t) for t in ("float16", ml_dtypes.bfloat16, "float32", "float64")},
}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_arrays_of_any_shape_and_dtype_which_the_next_pull_overwrites(start, staleness, servers):
    def update(parameters, slots, gradient, staleness, number):
        parameters += gradient

    def work(comm, store):
        store.push({name: np.full_like(a, comm.rank + 1) for name, a in start.items()})
        found = store.pull()
        assert store.placement.keys() == found.keys() == start.keys()
        assert [*store.steps(0)] == []  # both have pushed
        assert all(array is found[name] for name, array in store.pull().items())
        return {name: array.copy() for name, array in found.items()}

    pushed = 1.5 if staleness == 0 else 3
    for found in spawned(work, 2, servers, update=update, start=start, staleness=staleness)[0]:
        for name, array in start.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert (found[name] == array + array.dtype.type(pushed)).all()


# --- synchronous steps ----------------------------------------------------------------------------

SAMPLES = [3, 1, 4]
MODEL = {"w": np.random.default_rng(1).normal(size=(7, 5)), "b": np.linspace(-1, 1, 3)}


def momentum(parameters, slots, gradient, staleness, number) -> None:
    slots[0][...] = 0.9 * slots[0] + gradient
    parameters -= 0.1 * slots[0]


def slope(rank: int, step: int, arrays) -> dict[str, np.ndarray]:
    """Return gradients that depend on the parameters."""
    rng = np.random.default_rng([rank, step])
    return {name: arrays[name] * rng.normal(size=a.shape) + rank for name, a in MODEL.items()}


def one_process(workers: int) -> dict[str, np.ndarray]:
    """Return the arrays of one process that computes the gradients of all workers."""
    arrays = {name: array.copy() for name, array in MODEL.items()}
    arrays |= {f"velocity/{name}": np.zeros_like(array) for name, array in MODEL.items()}
    for step in range(3):
        slopes = [slope(rank, step, arrays) for rank in range(workers)]
        for name in MODEL:
            mean = np.average([part[name] for part in slopes], 0, SAMPLES[:workers])
            momentum(arrays[name], [arrays[f"velocity/{name}"]], mean, 0, step)
    return arrays


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_synchronous_steps_equal_one_process(workers, servers):
    def work(comm, store):
        for step in range(3):
            store.push(slope(comm.rank, step, store.pull()), SAMPLES[comm.rank])
        return {name: array.copy() for name, array in store.pull(slots=True).items()}

    wanted = one_process(workers)
    how = {"update": momentum, "slots": ["velocity"], "start": MODEL}
    for found in spawned(work, workers, servers, **how)[0]:
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        (np.array([3e16, 3.0, -3e16]), 0.0),  # in another order 1
        (np.array([1, 2**-11, 2**-11], "float16"), np.float16(0.33366)),  # in float16 0.33333
    ],
)
def test_gradients_are_added_up_in_the_order_of_ranks_and_in_32_bits_or_more(parts, mean):
    """The gradient of the last rank arrives first."""
    events, received = Events(), []

    def update(parameters, slots, gradient, staleness, number):
        received.append(gradient.item())

    def work(comm, store):
        if comm.rank < 2:
            events.wait(f"{comm.rank + 1} has pushed")
        store.push({"w": parts[comm.rank : comm.rank + 1]})
        events.set(f"{comm.rank} has pushed")

    spawned(work, 3, update=update, start={"w": parts[:1]})
    assert received == [mean]


@by_servers
def test_slots_may_begin_with_arrays_of_rank_0(servers):
    def program(comm):
        slots = {"m": {"w": np.arange(6) + comm.rank}, "v": {"w": np.full(6, comm.rank + 5)}}
        with ParameterStore(comm, {"w": np.ones(6)}, count, slots=slots, servers=servers) as store:
            return store.serve() if store.is_server else store.pull(slots=True)

    found = rr.spawn(program, 2 + servers, timeout_s=120)[1]
    wanted = {"w": [1] * 6, "m/w": [*range(6)], "v/w": [5] * 6}
    assert {name: array.tolist() for name, array in found.items()} == wanted


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3])
@by_mode
def test_each_number_is_in_the_parameters_exactly_once(mode, servers):
    turns = [6, 0, 4]

    def work(comm, store):
        dealt, found = [], []
        for each in turns:
            for number in store.steps(each):
                dealt.append(number)
                if comm.rank != 1:  # rank 1 pulls only at the end
                    store.pull()
                store.push(one(number))
            found.append(value(store))  # others may have begun the next loop
        return dealt, found, store.stats.discarded

    workers, _ = spawned(work, 3, servers, **MODES[mode])
    wanted = np.cumsum([[n < each for n in range(6)] for each in turns], axis=0)
    for _, found, _ in workers:
        assert (np.array(found) >= wanted).all()
        assert found[-1] == wanted[-1].tolist()
    dealt = [number for numbers, _, _ in workers for number in numbers]
    assert len(dealt) == sum(turns) + sum(discarded for _, _, discarded in workers)


@pytest.mark.parametrize(
    ("staleness", "wanted"), [(None, [(n, [n]) for n in range(4)]), (0, [(1, [0, 1]), (3, [2, 3])])]
)
def test_update_gets_the_largest_number_of_its_gradients(staleness, wanted):
    seen, both = [], threading.Barrier(2)

    def work(comm, store):
        for number in store.steps(4):
            both.wait(120)
            store.push(one(number))

    def update(parameters, slots, gradient, staleness, number):
        seen.append((number, np.flatnonzero(gradient).tolist()))

    spawned(work, 2, update=update, staleness=staleness)
    assert sorted(seen) == wanted


# --- who waits for whom ---------------------------------------------------------------------------


@by_servers
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_bound_is_reached_and_not_exceeded(bound, servers):
    """The server has the request of worker 0 before worker 1 pulls, and then pushes."""
    events = Events()

    def work(comm, store):
        if comm.rank:
            events.wait("asked")
            store.pull()
            return store.push(one(5))
        seen = []
        for pushes in range(bound + 1):
            store.push(one(0))
            if pushes == bound:
                events.set_when_received("asked", comm)
            seen.append(value(store)[5])
        return seen

    assert spawned(work, 2, servers, staleness=bound)[0][0] == [0] * bound + [1]


@pytest.mark.parametrize(
    ("bound", "how"), [(0, "closes"), (1, "closes"), (0, "steps"), (1, "steps"), (None, "waits")]
)
def test_nobody_waits_for_a_worker_that_takes_no_part_or_without_a_bound(bound, how):
    events = Events()

    def work(comm, store):
        if comm.rank and how == "waits":
            events.wait("done")
        for _ in range(0 if comm.rank else 4):
            store.push(one(0))
            found = value(store)[0]
        events.set("done")
        assert how != "steps" or [*store.steps(0)] == []
        return None if comm.rank else found

    assert spawned(work, 2, staleness=bound)[0] == [4, None]


@by_servers
@by_mode
def test_a_worker_sees_its_own_pushes(mode, servers):
    def work(comm, store):
        for pushes in range(1, 5):
            store.push(one(comm.rank))
            if pushes != 2:  # two pushes without a pull
                assert value(store)[comm.rank] == pushes - store.stats.discarded

    spawned(work, 3, servers, **MODES[mode])


@by_servers
def test_a_late_gradient_of_a_backup_worker_is_dropped_and_its_number_dealt_again(servers):
    events, both = Events(), threading.Barrier(2)

    def work(comm, store):
        dealt = []
        for number in store.steps(2):
            dealt.append(number)
            if len(dealt) == 1:
                both.wait(120)
                if comm.rank:
                    events.wait("closed")
            store.push(one(number))
            store.pull()
            events.set("closed")
        return dealt, value(store), store.stats.discarded

    (first, second), of_servers = spawned(work, 2, servers, backup_workers=1)
    assert sorted(first[0] + second[0]) == sorted([0, 1, second[0][0]])
    assert first[1:] == ([1, 1, 0, 0, 0, 0], 0)
    assert second[1:] == ([1, 1, 0, 0, 0, 0], 1)
    assert [(stats.pushes, stats.discarded) for stats in of_servers] == [(2, 1)] * servers


def test_staleness_is_the_number_of_updates_since_the_pull_the_largest_over_servers():
    """Worker 0 pulls when the push of worker 1 is applied on server 1, and not on server 0."""
    events, seen = Events(), ([], [])

    def update(parameters, slots, gradient, staleness, number):
        server = int(parameters[0])
        seen[server].append((staleness, number))
        events.set(f"applied on server {server}")

    def work(comm, store):
        send = comm.send

        def held(message, peer, tag, **how):
            if peer == 2:
                events.wait("pulled")
            return send(message, peer, tag, **how)

        if comm.rank:
            comm.send = held
        else:
            events.wait("applied on server 1")
            store.pull()
            events.set("pulled")
            events.wait("pushed")
        store.push({"w": np.ones(3), "v": np.ones(3)})
        events.set("pushed")
        store.pull()
        return store.stats.staleness

    start = {"w": np.zeros(3), "v": np.ones(3)}
    workers, of_servers = spawned(work, 2, 2, update=update, start=start, staleness=None)
    assert seen == ([(0, 0), (1, 1)], [(0, 0), (0, 1)])
    assert workers == [{1: 1}, {0: 1}]
    assert [stats.staleness for stats in of_servers] == [{0: 1, 1: 1}, {0: 2}]


@by_servers
def test_stats(servers):
    def work(comm, store):
        for _ in range(3):
            store.push(one(comm.rank))
            store.pull()
        return store.stats

    workers, of_servers = spawned(work, 2, servers, staleness=None)
    assert [stats.pushes for stats in workers + of_servers] == [3] * 2 + [6] * servers
    for stats, sent, held in [(each, 3, 2) for each in workers] + [
        (each, 6 / servers, 3 / servers) for each in of_servers
    ]:
        assert sent * 48 < stats.sent_bytes < 100 * sent * 48
        assert held * 48 < stats.held_bytes < 100 * held * 48
        assert (stats.waited_s > 0, stats.discarded, stats.lost) == (True, 0, ())


# --- turns that fail, and losses ------------------------------------------------------------------

FAULTS = {
    "break": "steps: the loop was left in the turn of number",
    "no push": "made no push; wanted one",
    "two pushes": "push: this is the second push in the turn of number",
    "a loop within": "has not ended",
    "close": "steps: the store is closed",
    "error": "mine",
    "lost": "mine",
}


@by_servers
@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_end_when_a_turn_fails_and_each_number_counts_once(fault, staleness, servers):
    events = Events()

    def fail(comm, store, number):
        if fault in ("two pushes", "close"):
            store.push(one(number))
        if fault == "two pushes":
            store.push(one(number))
        elif fault == "a loop within":
            next(store.steps(6))
        elif fault == "close":
            store.close()
        elif fault == "lost":
            comm.leave("gone")
        if fault in ("error", "lost"):
            raise KeyError("mine")

    def work(comm, store):
        for number in store.steps(6):
            events.set(f"dealt to {comm.rank}")
            if comm.rank != 1:
                events.wait("dealt to 1")
                store.push(one(number))
            elif fault == "break":
                break
            else:
                fail(comm, store, number)
        return value(store), store.stats.lost

    caught = {"caught": (ValueError, KeyError), "staleness": staleness}
    (first, failed, last), _ = spawned(work, 3, servers, **caught)
    assert FAULTS[fault] in str(failed)
    assert first == last == ([1] * 6, (1,) if fault == "lost" else ())


def test_a_worker_that_left_a_loop_may_be_one_loop_behind():
    events = Events()

    def work(comm, store):
        for number in store.steps(6):
            events.set(f"dealt to {comm.rank}")
            if comm.rank:
                break
            events.wait("dealt to 1")
            store.push(one(number))
        if comm.rank:
            assert "the loop was left" in text_of(ValueError, store.pull)
            events.wait("second loop")
            assert [*store.steps(6)] == []
        for number in store.steps(4):
            events.set("second loop")
            store.push(one(number))
        return store.meeting, value(store)

    assert spawned(work, staleness=None)[0] == [(2, [2, 2, 2, 2, 1, 1])] * 2


@by_servers
def test_counts_of_steps_that_differ_are_a_mismatch_on_all(servers):
    def work(comm, store):
        for number in store.steps(4 + (comm.rank == 1)):
            store.push(one(number))

    texts = {str(error) for error in spawned(work, 3, servers, caught=rr.MismatchError)[0]}
    assert len(texts) == 1
    assert re.search("steps: rank . passes [45] where rank . passes [45]; every", texts.pop())


@by_servers
def test_a_synchronous_step_goes_on_without_a_worker_that_is_lost(servers):
    events = Events()

    def work(comm, store):
        if comm.rank:
            events.wait("asked")
            comm.leave("gone")
            raise KeyError("mine")
        store.push(one(0))
        events.set_when_received("asked", comm)
        return value(store), store.stats.lost

    (first, _), of_servers = spawned(work, 2, servers, caught=KeyError)
    assert first == ([1, 0, 0, 0, 0, 0], (1,))
    assert [stats.lost for stats in of_servers] == [(1,)] * servers


def test_a_worker_that_has_closed_is_not_lost_when_the_last_one_is():
    def work(comm, store):
        while comm.rank and 0 not in comm.lost_peers(closed=True):
            time.sleep(1e-3)
        if comm.rank:
            comm.leave("gone")
            raise KeyError("mine")

    assert spawned(work, caught=KeyError)[1][0].lost == (1,)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_server_that_is_lost_is_named_with_its_variables(lost):
    def update(parameters, slots, gradient, staleness, number):
        if parameters[0] == lost:
            raise ZeroDivisionError

    def work(comm, store):
        for _ in store.steps(9):
            store.pull()
            store.push(start)

    start = {f"v{server}": np.full(2, float(server)) for server in range(3)}
    how = {"update": update, "start": start, "caught": rr.PeerLostError}
    workers, of_servers = spawned(work, 2, 3, error=ZeroDivisionError, **how)
    assert of_servers.pop(lost) is None
    text = f"rank {2 + lost}, a server, is lost, and with it its part of 'v{lost}'"
    assert [str(error) for error in workers + of_servers] == [text] * 4
    assert {error.ranks for error in workers + of_servers} == {(2 + lost,)}


# --- misuse ---------------------------------------------------------------------------------------

GOOD = {"weight": np.ones(2), "b": np.ones(1)}


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        (GOOD | {"weigth": np.ones(2)}, "no variable 'weigth'; did you mean 'weight'?"),
        ({"weight": np.ones(2)}, "the gradient of 'b' is missing"),
        (GOOD | {"b": None}, "the gradient of 'b' is None"),
        (GOOD | {"b": "1"}, "the gradient of 'b' is str"),
        (GOOD | {"weight": np.ones(3)}, "'weight' is float64[3]; wanted float64[2]"),
        (GOOD | {"b": np.ones(1, "float32")}, "'b' is float32[1]; wanted float64[1]"),
    ],
)
def test_a_wrong_gradient_is_named_and_the_store_goes_on(gradients, words):
    def work(comm, store):
        text = text_of((ValueError, TypeError), store.push, gradients)
        store.push(GOOD)
        return words in text, store.pull()["weight"].tolist()

    assert spawned(work, 1, start={n: np.zeros_like(a) for n, a in GOOD.items()})[0] == [
        (True, [1, 1])
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"servers": 3}, "servers is 3; 3 ranks leave no worker"),
        ({"servers": 0}, "servers is 0; wanted at least 1"),
        ({"replicas": 2}, "replicas is 2; wanted at most servers, 1"),
        ({"replicas": 0}, "replicas is 0; wanted at least 1"),
        ({"staleness": -1}, "staleness is -1; wanted at least 0"),
        ({"staleness": 1.5}, "staleness is 1.5; wanted a whole number or None"),
        ({"backup_workers": 2}, "backup_workers is 2; 2 workers allow at most 1"),
        ({"backup_workers": 1, "staleness": 2}, "backup_workers is 1 and staleness is 2"),
        ({"update": 3}, "update is 3; pass a function"),
        ({"slots": {"m": {"w": np.ones(3)}}}, "slots has no m/w; pass an array of shape (6,)"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(how, words):
    def program(comm):
        comm.all_gather = comm.broadcast = comm.send = None
        with pytest.raises((ValueError, TypeError), match=re.escape(f"ParameterStore: {words}")):
            ParameterStore(comm, {"w": np.zeros(6)}, **({"update": count} | how))

    rr.spawn(program, 3, timeout_s=120)


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("servers", 1, 2),
        ("staleness", 0, None),
        ("backup_workers", 0, 1),
        ("slots", ["m"], ["v"]),
        ("slots", ["m"], {"m": {"w": np.ones(6)}}),
    ],
)
def test_arguments_that_differ_are_a_mismatch_on_all(name, value, other):
    def program(comm):
        how = {name: other if comm.rank == 1 else value}
        return text_of(rr.MismatchError, lambda: ParameterStore(comm, one(0), count, **how))

    texts = set(rr.spawn(program, 3, timeout_s=120))
    assert len(texts) == 1
    assert f"ParameterStore: rank 1 passes " in (text := texts.pop()) and name in text


def test_calls_on_a_rank_of_the_other_kind_and_after_close_are_refused():
    def program(comm):
        with ParameterStore(comm, one(0), count) as store:
            calls = (store.pull, lambda: store.push(one(0)), lambda: store.steps(1))
            texts = [text_of(ValueError, call) for call in (calls if store.is_server else [])]
            if store.is_server:
                store.serve()
            else:
                texts.append(text_of(ValueError, store.serve))
                store.close()
                texts += [text_of(ValueError, call) for call in calls]
        return texts

    of_worker, of_server = rr.spawn(program, 2, timeout_s=120)
    assert of_server == [
        f"{name}: rank 1 is a server; servers call serve" for name in ("pull", "push", "steps")
    ]
    assert of_worker[0] == "serve: rank 0 is a worker; servers call serve"
    assert of_worker[1:] == [f"{name}: the store is closed" for name in ("pull", "push", "steps")]


def over_mpi(comm) -> None:
    """Check that two servers have each number of two workers exactly once."""
    start = {"w": np.zeros(90_000), "v": np.zeros(3)}
    with ParameterStore(comm, start, count, servers=2, staleness=1) as store:
        if store.is_server:
            return store.serve()
        for number in store.steps(9):
            store.pull()
            store.push({"w": np.eye(1, 90_000, 10_000 * number)[0], "v": np.ones(3)})
        found = store.pull()
        assert np.flatnonzero(found["w"]).tolist() == [*range(0, 90_000, 10_000)]
        assert (found["w"].sum(), found["v"].tolist()) == (9, [9] * 3)
