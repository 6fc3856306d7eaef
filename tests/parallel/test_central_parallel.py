"""CentralParallel: the bits of replicas in one memory, its bytes, when it changes; and misuse."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import CentralParallel
from tests.parallel.test_sharded_parallel import (
    SHAPES,
    SMALL,
    Run,
    backward,
    descend,
    equal,
    params,
    same_bits,
)

DTYPES = {
    "0.a": "float32",
    "0.b": "float64",
    "1.a": "float16",
    "1.b": ml_dtypes.bfloat16,
    "1.c": "float32",
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("optimizer", "algorithm"), [("sgd", "ring"), ("adam", "two_shot")])
def test_parameters_are_bitwise_those_of_data_parallel(ranks, optimizer, algorithm):
    run, how = Run(SHAPES, optimizer, "float64"), SMALL | {"algorithm": algorithm}

    def central(comm):
        made = CentralParallel(comm, params(comm.rank), slots=run.slots, **how)
        for step in range(run.steps):
            for name in reversed(SHAPES):
                gradient = run.gradient(comm, step, name, made.parameters[name])
                made.ready(name, gradient)
            made.finish()
            made.step(lambda p, own, g, step=step: run.update((p, *own), g, 0.1, step, (p, *own)))
        whole = made.arrays()
        assert all(same_bits(whole[name], array) for name, array in made.parameters.items())
        return made.parameters

    references = rr.spawn(run.replicated, ranks, how)
    assert equal(rr.spawn(central, ranks), references)


def test_all_ranks_have_the_parameters_of_rank_0_in_one_memory():
    given = {
        name: np.arange(7.0 + 2 * number).astype(dtype)
        for number, (name, dtype) in enumerate(DTYPES.items())
    }

    def program(comm):
        mine = {name: array + comm.rank for name, array in given.items()}
        made = CentralParallel(comm, mine)
        started = all(same_bits(made.parameters[name], array) for name, array in given.items())
        comm.barrier()
        if comm.rank == 1:
            for array in made.parameters.values():
                array[...] = 5
        comm.barrier()
        return started, [set(array.tolist()) for array in made.parameters.values()]

    assert rr.spawn(program, 3) == [(True, [{5.0}] * len(DTYPES))] * 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_sends_half_of_an_all_reduce_and_rank_0_counts_the_parameters(ranks):
    """Four parameters, of 64 numbers each, are a bucket each; there is one slot."""
    shapes = {f"{k}.w": (8, 8) for k in range(4)}

    def program(comm):
        how = {"first_bucket_bytes": 1, "bucket_bytes": 1, "slots": ["v"], "algorithm": "ring"}
        made = CentralParallel(comm, params(comm.rank, shapes), **how)
        backward(made, params(comm.rank, shapes))
        made.finish()
        made.step(descend)
        return made.held_bytes, made.sent_bytes

    whole, share = 4 * 64 * 8, 4 * 64 * 8 // ranks
    for rank, (held, sent) in enumerate(rr.spawn(program, ranks)):
        assert held == whole * (rank == 0) + 2 * share + 2 * 64 * 8
        assert sent == whole - share


def test_parameters_change_only_while_all_ranks_are_in_step():
    updated = threading.Event()

    def update(parameters, slots, gradient):
        parameters += 1
        updated.set()

    def program(comm):
        made = CentralParallel(comm, {"w": np.zeros(6)})
        made.ready("w", np.ones(6))
        made.finish()
        if comm.rank == 1:
            early = updated.wait(0.1)  # rank 0 is in `step` by now, or comes later
            before = made.parameters["w"].tolist()
        made.step(update)
        after = made.parameters["w"].tolist()
        return (early, before, after) if comm.rank == 1 else after

    zeros, ones = [0.0] * 6, [1.0] * 6
    assert rr.spawn(program, 2) == [ones, (False, zeros, ones)]


def test_arrays_of_a_sharded_model_can_be_loaded():
    wanted = params(1) | {f"v/{name}": array for name, array in params(2).items()}

    def sharded(comm):
        made = rr.train.ShardedParallel(comm, params(0), stage=3, slots=["v"])
        made.load(wanted)
        return made.arrays()

    def central(comm, arrays):
        made = CentralParallel(comm, params(0), slots=["v"])
        made.load(arrays if comm.rank == 0 else None)
        return made.arrays()

    (arrays,) = rr.spawn(sharded, 1)
    assert equal(rr.spawn(central, 3, arrays), [wanted] * 3)


def test_parameters_may_have_any_strides():
    given = np.arange(12.0).reshape(3, 4).T

    def program(comm):
        return CentralParallel(comm, {"w": given.copy(order="K")}).parameters["w"]

    assert all(np.array_equal(array, given) for array in rr.spawn(program, 2))


def test_ranks_of_several_nodes_are_refused():
    def program(comm):
        CentralParallel(comm, {"w": np.zeros(3)})

    with pytest.raises(ValueError, match="shared: the ranks are on 2 nodes"):
        rr.spawn(program, 2, nodes=((0,), (1,)))


def test_parameters_that_differ_are_named_on_all_ranks():
    def program(comm):
        text = r"CentralParallel: rank 1 has w: float64\[4\] where rank 0 has w: float64\[3\]"
        with pytest.raises(rr.MismatchError, match=text):
            CentralParallel(comm, {"w": np.zeros(3 + comm.rank)})

    rr.spawn(program, 2)
