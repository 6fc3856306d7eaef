"""The steps of a run whose global batch may follow the number of ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.parallel.sampler import Sampler
from ringreduce.train import Settings, optimizers
from ringreduce.train.loop import Trainer
from ringreduce.train.steps import Course, Stretch

FOLLOWS = Settings(batch_per_rank=1, ramp_steps=4, lr=0.5, lr_schedule="constant", seed=5)


@given(
    samples=st.integers(1, 40),
    changes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=6),
    epochs=st.integers(1, 3),
)
def test_each_epoch_has_each_sample_once_whatever_the_batches(samples, changes, epochs):
    settings = dataclasses.replace(FOLLOWS, epochs=epochs)
    course = Course(samples, settings, Stretch.new(min(3, samples)))
    counts, step = np.zeros((epochs, samples), int), 0
    for steps, batch in [*changes, (10**6, 0)]:
        for _ in range(min(steps, course.steps - step)):
            counts[course.epoch_of(step) - 1, course.batch_of(step)] += 1
            step += 1
            ended = counts[course.epochs(step) - 1].all() if course.epochs(step) else False
            assert course.ends_epoch(step - 1) == (ended and course.place(step)[1] == 0)
        if step < course.steps and batch:
            stored = course.following(step, min(batch, samples)).stretch.numbers
            course = Course(samples, settings, Stretch.of(stored))
    assert (counts == 1).all()
    assert course.epochs(step) == epochs


@given(samples=st.integers(1, 30), batch=st.integers(1, 30), seed=st.integers(0, 5))
def test_a_fixed_batch_has_the_steps_of_a_sampler(samples, batch, seed):
    settings = Settings(epochs=2, batch=batch, seed=seed, lr_batch=8, warm_up=2)
    batch = min(batch, samples)
    course, sampler = Course(samples, settings, Stretch.new(batch)), Sampler(samples, batch, seed)
    assert course.steps == sampler.steps(2)
    for step in range(course.steps):
        assert course.batch_of(step).tolist() == sampler.batch_of(step).tolist()
        assert course.epoch_of(step) == sampler.epoch_of(step)
        assert course.number_in_epoch(step) == step % sampler.epoch_steps
        assert course.ends_epoch(step) == ((step + 1) % sampler.epoch_steps == 0)
        expected = optimizers.learning_rate(settings, step, course.steps)
        assert course.learning_rate(step) == expected


def test_the_learning_rate_follows_the_batch_evenly():
    course = Course(100, FOLLOWS, Stretch.new(2))
    assert course.learning_rate(7) == 0.5
    course = course.following(8, 4)
    assert [course.learning_rate(step) for step in range(8, 14)] == [
        *(0.625, 0.75, 0.875, 1.0, 1.0, 1.0)
    ]
    course = course.following(10, 2)
    assert [course.learning_rate(step) for step in range(10, 14)] == [0.6875, 0.625, 0.5625, 0.5]


def test_without_a_ramp_the_learning_rate_follows_at_once():
    course = Course(100, dataclasses.replace(FOLLOWS, ramp_steps=0), Stretch.new(2))
    assert course.following(8, 6).learning_rate(8) == 1.5


def test_a_learning_rate_may_be_meant_for_a_batch():
    settings = dataclasses.replace(FOLLOWS, lr_batch=8)
    assert Course(100, settings, Stretch.new(2)).learning_rate(0) == 0.125


def test_a_falling_learning_rate_reaches_the_end_whatever_the_batches():
    settings = dataclasses.replace(FOLLOWS, lr_schedule="linear", epochs=2, ramp_steps=0)
    course = Course(10, settings, Stretch.new(2))
    assert course.learning_rate(0) == 0.5
    assert course.following(5, 4).learning_rate(5) == 0.5  # half of it, for twice the batch
    last = course.following(5, 4)
    assert last.learning_rate(last.steps - 1) == pytest.approx(0.5 * 2 * 2 / 20)


SETTINGS = Settings(epochs=2, hidden=(8,), batch_per_rank=100, check_every=0)


def test_a_batch_of_the_ranks_changes_no_bit():
    def program(comm):
        split = rr.train.load(SETTINGS)
        follows = dataclasses.replace(SETTINGS, lr_schedule="constant")
        fixed = dataclasses.replace(follows, batch_per_rank=0, batch=200)
        trainers = [Trainer(comm, split, each) for each in (follows, fixed)]
        batches = [trainer.settings.batch for trainer in trainers]
        return batches, [trainer.run().digest for trainer in trainers]

    for batches, (follows, fixed) in rr.spawn(program, 2):
        assert batches == [200, 200]
        assert follows == fixed


def test_a_batch_that_has_more_samples_than_there_are_is_refused():
    settings = dataclasses.replace(SETTINGS, batch_per_rank=1000)

    def program(comm):
        with pytest.raises(ValueError, match="2 ranks make a batch of 2000, and there are 1438"):
            Trainer(comm, rr.train.load(settings), settings)

    rr.spawn(program, 2)


@pytest.mark.parametrize("cut", [5, 8, 12])
def test_a_run_continues_with_other_ranks_where_it_was(cut):
    """A trainer of three ranks goes on with the store of one of two."""
    split = rr.train.load(SETTINGS)
    stored = {}

    def first(comm):
        trainer = Trainer(comm, split, SETTINGS, elastic=True)
        for _ in range(cut):
            trainer._make_step()
        stored["step"] = trainer.store.step
        stored["arrays"] = {name: trainer.store[name].copy() for name in trainer.store}

    def second(comm):
        trainer = Trainer(comm, split, SETTINGS, elastic=True)
        trainer.store.restore(stored["arrays"], stored["step"])
        seen = Samples()
        trainer.run([seen])
        return seen.of_epochs

    rr.spawn(first, 2)
    assert rr.spawn(second, 3)[0] == {1: 1438, 2: 1438}


class Samples:
    """A watcher that counts the samples of epochs."""

    def __init__(self) -> None:
        self.of_epochs: dict[int, int] = {}

    def steps(self, steps):
        for step in steps:
            self.of_epochs[step.epoch] = self.of_epochs.get(step.epoch, 0) + step.samples

    def epoch(self, epoch):
        pass
