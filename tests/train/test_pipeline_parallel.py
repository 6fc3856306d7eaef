"""PipelineParallel: gradients bitwise those of one process, activations as proven, and misuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.train import PipelineParallel, mlp
from ringreduce.train.data import part
from ringreduce.train.layers import backward_all, forward_all

CLASSES = 3
SIZES = (5, 4, 7, 6, 3, 8, 5, 4, CLASSES)
"""Eight layers: a stage each for 4 ranks with 2 stages."""


def weights_last(ranks, rank, splits, virtual):
    """All forwards, the gradients of all inputs in descending order, then those of all weights."""
    yield from (f"{rank}F{number}" for number in range(splits))
    yield from (f"{rank}I{number}" for number in reversed(range(splits)))
    yield from (f"{rank}W{number}" for number in range(splits))


rr.pipeline.register("weights_last", weights_last)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "sequential", "weights_last")


class Eager:
    """A layer that computes the gradient of its weights at once, in the array that it gets."""

    def __init__(self, layer):
        self.layer = layer
        self.parameters, self.forward = layer.parameters, layer.forward

    def backward(self, kept, gradient, into):
        of_input, pairs = self.layer.backward(kept, gradient, into)
        return of_input, list(pairs)


def network(dtype="float64", sizes=SIZES, eager=False) -> list:
    layers = mlp.layers(mlp.views(mlp.init_params(sizes, 1, dtype), sizes))
    return [Eager(layer) for layer in layers] if eager else layers


def batch_of(rows: int, dtype="float64", seed=0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((seed, rows))
    return rng.standard_normal((rows, SIZES[0])).astype(dtype), rng.integers(0, CLASSES, rows)


def of_one_process(layers, x, labels, count, splits):
    """Loss and gradients of the microbatches, one after another."""
    loss, sums = 0.0, {}
    for number in range(splits):
        rows = part(len(x), number, splits)
        y, kept = forward_all(layers, x[rows])
        more, gradient = mlp.cross_entropy(y, labels[rows], count)
        loss += float(more)
        for _, pairs in backward_all(layers, kept, gradient, {}):
            for name, array in pairs:
                if name in sums:
                    sums[name] += array
                else:
                    sums[name] = array.copy()
    return loss, sums


def bits(gradients) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in gradients.items()}


def bits_of_all(found) -> dict[str, bytes]:
    """The gradients of all ranks together; no two ranks have the same parameter."""
    together = {name: array for gradients in found for name, array in gradients.items()}
    assert len(together) == sum(map(len, found))
    return bits(together)


def copied(gradients) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in gradients.items()}


@st.composite
def pipelines(draw) -> dict:
    ranks, name = draw(st.integers(1, 4)), draw(st.sampled_from(SCHEDULES))
    splits = draw(st.integers(1, 8))
    interleaved = name == "interleaved"
    virtual = draw(st.integers(1, 2)) if interleaved else 1
    stages = ranks * virtual
    borders = sorted(draw(st.permutations(range(1, len(SIZES) - 1)))[: stages - 1])
    cut = [b - a for a, b in zip([0, *borders], [*borders, len(SIZES) - 1], strict=True)]
    return {
        "ranks": ranks,
        "splits": -(-splits // ranks) * ranks if interleaved else splits,
        "schedule": name,
        "virtual": virtual,
        "cut": draw(st.sampled_from(["balanced", cut])),
    }


@pytest.mark.slow
@given(
    how=pipelines(),
    batches=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "float64"]),
    eager=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_gradients_are_bitwise_those_of_one_process(how, batches, dtype, eager):
    ranks, splits = how.pop("ranks"), how["splits"]

    def program(comm):
        pipe = PipelineParallel(comm, network(dtype, eager=eager), **how)
        found = []
        for rows in batches:
            loss = pipe.step(*batch_of(rows, dtype), count=31)
            found.append((loss, copied(pipe.gradients), pipe.held, pipe.proof.held[comm.rank]))
        return found

    for rows, *found in zip(batches, *rr.spawn(program, ranks, timeout_s=30), strict=True):
        wanted = of_one_process(network(dtype), *batch_of(rows, dtype), 31, splits)
        losses, gradients, held, proven = zip(*found, strict=True)
        assert set(losses) == {wanted[0]}
        assert bits_of_all(gradients) == bits(wanted[1])
        assert held == proven
