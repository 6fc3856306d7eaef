"""The sampler: every sample of an epoch is in one batch, and in the part of one rank."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.parallel import sampler
from ringreduce.train import Sampler


def ranks(size):
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


def parts(sampler, step, size):
    return [sampler.indices(step, comm) for comm in ranks(size)]


@given(
    samples=st.integers(1, 60),
    share=st.integers(1, 60),
    seed=st.integers(0, 5),
    epochs=st.integers(1, 3),
    sizes=st.data(),
)
def test_each_sample_of_an_epoch_counts_once_for_ranks_that_come_and_go(
    samples, share, seed, epochs, sizes
):
    sampler = Sampler(samples, min(share, samples), seed)
    counts = np.zeros((epochs, samples), int)
    for step in range(sampler.steps(epochs)):
        size = sizes.draw(st.integers(1, 9))
        found = parts(sampler, step, size)
        assert max(map(len, found)) - min(map(len, found)) <= 1
        batch = sampler.batch_of(step)
        assert np.array_equal(np.concatenate(found), batch)
        assert len(batch) == sampler.batch or (step + 1) % sampler.epoch_steps == 0
        counts[sampler.epoch_of(step) - 1, batch] += 1
    assert (counts == 1).all()


def test_the_batches_are_those_of_any_other_sampler_and_any_order_of_calls():
    first, second = Sampler(20, 6, seed=3), Sampler(20, 6, seed=3)
    forwards = [first.batch_of(step).tolist() for step in range(12)]
    backwards = [second.batch_of(step).tolist() for step in reversed(range(12))]
    assert forwards == backwards[::-1]
    assert [*chain(*forwards[:4])] == sampler.order(20, seed=3, epoch=1).tolist()
    assert forwards[:4] != forwards[4:8]
    assert forwards != [Sampler(20, 6, seed=4).batch_of(step).tolist() for step in range(12)]
