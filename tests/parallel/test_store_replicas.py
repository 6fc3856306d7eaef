"""Replicas of a parameter store: bits, bytes, and losses, of threads and of processes."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import ParameterStore
from tests.parallel.test_parameter_store import count, leave, one, spawned, value
from tests.support.mpi import MpiJobs

COUNT = 24
by_replicas = pytest.mark.parametrize(("servers", "replicas"), [(2, 2), (3, 2), (3, 3)])


def equal_replicas(of_servers) -> bool:
    """Whether the replicas of each shard are equal: shard -> its parameters, of some servers."""
    held = [(shard, bytes(each)) for found in of_servers for shard, each in found.items()]
    return len(set(held)) == len({shard for shard, _ in held})


@by_replicas
@pytest.mark.parametrize("staleness", [0, None])
def test_replicas_change_no_bit_and_no_gradient_is_sent_twice(servers, replicas, staleness):
    start = {"w": np.linspace(0, 1, 3_000), "v": np.linspace(2, 3, 700)}

    def update(parameters, slots, gradient, staleness, number):
        slots[0][...] = 0.9 * slots[0] + gradient
        parameters -= 0.1 * slots[0]

    def work(comm, store):
        for step in range(3):
            slopes = {name: np.sin(step + array) * (comm.rank + 1) for name, array in start.items()}
            store.push(slopes, samples=comm.rank + 1)
            found = {name: array.copy() for name, array in store.pull(slots=True).items()}
        return found, store.stats.sent_bytes

    how = {"update": update, "start": start, "slots": ["m"], "staleness": staleness}
    workers = 1 if staleness is None else 2
    ((wanted, sent), *_), _ = spawned(work, workers, servers, **how)
    for found, bytes_now in spawned(work, workers, servers, replicas=replicas, **how)[0]:
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in wanted.items()
        }
        assert bytes_now < 1.1 * sent


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_gradient_that_other_servers_get_is_read_only(replicas):
    seen = []

    def update(parameters, slots, gradient, staleness, number):
        seen.append(gradient.flags.writeable)

    spawned(lambda comm, store: store.push(one(0)), 1, 2, update=update, replicas=replicas)
    assert set(seen) == {replicas == 1}


MODES = [{"staleness": 0}, {"staleness": 0, "backup_workers": 1}, {"staleness": 1}]
LOSSES = [(2,), (3,), (4,), (2, 3), (3, 4), (1, 2), (0, 4)]


@pytest.mark.parametrize("mode", [{"staleness": None}, *MODES], ids=str)
@pytest.mark.parametrize("lost", LOSSES)
def test_each_number_counts_once_whatever_ranks_are_lost(mode, lost):
    """Ranks 0 and 1 are workers, 2 to 4 servers."""
    found = {}

    def program(comm):
        calls = itertools.count(3 * comm.rank)

        def update(parameters, slots, gradient, staleness, number):
            if comm.rank in lost and next(calls) == 18:
                leave(comm)
            count(parameters, slots, gradient, staleness, number)

        how = {"servers": 3, "replicas": 3, **mode}
        with ParameterStore(comm, {"w": np.zeros(COUNT)}, update, **how) as store:
            if store.is_server:
                store.serve()
                replicas = store._server.replicas
                found[comm.rank] = {s: each._parameters["w"] for s, each in replicas.items()}
                return
            for number in store.steps(COUNT):
                store.pull()
                if comm.rank in lost and next(calls) == 6:
                    leave(comm)
                store.push({"w": np.eye(1, COUNT, number)[0]})
            found[comm.rank] = value(store), store.stats.lost

    with pytest.raises(KeyError, match="gone"):
        rr.spawn(program, 5, timeout_s=120)
    assert found.keys() == {*range(5)} - {*lost}
    of_workers = [found.pop(rank) for rank in (0, 1) if rank in found]
    assert of_workers == [([1] * COUNT, lost)] * len(of_workers)
    assert equal_replicas(found.values())


def test_a_server_whose_program_catches_its_exception_is_lost_to_the_others():
    def program(comm):
        def update(parameters, slots, gradient, staleness, number):
            if comm.rank == 2 and number == 5:
                raise OSError("server 0 ends")
            parameters += gradient

        how = {"servers": 2, "replicas": 2, "staleness": None}
        try:
            with ParameterStore(comm, {"w": np.zeros(1)}, update, **how) as store:
                if store.is_server:
                    return store.serve()
                for _ in store.steps(20):
                    store.push({"w": np.ones(1)})
                return value(store), store.stats.lost
        except OSError as error:
            return str(error)

    assert rr.spawn(program, 4) == [([20.0], (2,)), ([20.0], (2,)), "server 0 ends", None]


@pytest.mark.parametrize("staleness", [0, None])
def test_a_shard_whose_servers_are_all_lost_is_named(staleness):
    found = []

    def program(comm):
        def update(parameters, slots, gradient, staleness, number):
            leave(comm)

        start = {"w": np.zeros(4), "v": np.zeros(2)}
        how = {"servers": 3, "replicas": 2, "staleness": staleness}
        with ParameterStore(comm, start, update, **how) as store:
            try:
                store.serve() if store.is_server else store.push(start)
                store.pull()
            except rr.PeerLostError as error:
                found.append((error.ranks, str(error)))

    with pytest.raises(KeyError, match="gone"):
        rr.spawn(program, 5, timeout_s=120)
    assert len(found) >= 2
    for ranks, text in found:
        assert text.startswith(f"rank {ranks[0]}, a server, is lost, and with it its part of")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "victims"),
    [(None, {0: 0.1}), (None, {3: ["update", 25]}), (0, {2: ["update", 25]})],
    ids=["a worker", "a head", "the deciding server"],
)
def test_a_job_without_mpi_goes_on_when_a_rank_is_killed(tmp_path, staleness, victims):
    jobs = MpiJobs(tmp_path, without_mpi=True)
    how = {"servers": 2, "replicas": 2, "staleness": staleness, "count": 60, "victims": victims}
    done = jobs.finish(jobs.start("servers", 4, json.dumps(how)))
    assert done.returncode == 0, done.output
    (killed,) = victims
    living = [found for rank, found in enumerate(done.results) if rank != killed]
    assert "killed_at" in done.results[killed]
    assert all(found["lost"] == [killed] for found in living)
    assert all(found.get("wrong", []) == [] for found in living)


def test_a_server_that_receives_nothing_is_named_and_not_one_that_waits_for_it():
    class Late:
        def __init__(self, x=None, peer=0, tag=0, async_op=True):
            self.ranks = (peer,)

        def wait(self):
            raise rr.PeerTimeoutError("late", self.ranks)

    Late.send = Late.recv = Late

    store, message = ParameterStore.__new__(ParameterStore), np.zeros(1)
    store._comm = Late
    with pytest.raises(rr.PeerTimeoutError) as seen:
        store._together([(message, 4, 0)], [(message, 3, 0)])
    assert seen.value.ranks == (3,)


def test_a_rank_that_closes_after_a_loss_is_not_lost_itself():
    closed, found = threading.Event(), []

    def program(comm):
        comm.survive_losses(True)
        if comm.rank == 2:
            leave(comm)
        elif comm.rank == 0:
            comm.close()
            closed.set()
        else:
            closed.wait(120)
            found.append(comm.lost_peers())

    with pytest.raises(KeyError, match="gone"):
        rr.spawn(program, 3, timeout_s=120)
    assert found == [{2}]
