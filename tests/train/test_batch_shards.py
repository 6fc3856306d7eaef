"""Parameters with the same bits for any number of ranks, and any history."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import Settings, strategies
from ringreduce.train.loop import Trainer

SETTINGS = Settings(epochs=2, hidden=(24, 16), batch=200, batch_shards=6, check_every=0)


def digest(ranks: int, settings: Settings) -> str:
    def program(comm):
        return Trainer(comm, rr.train.load(settings), settings).run().digest

    return rr.spawn(program, ranks)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"optimizer": "adam", "lr": 0.003},
        {"clip": 0.5},
        {"dtype": "float64"},
        {"first_bucket_bytes": 1, "bucket_bytes": 2000},
        {"batch": 359, "batch_shards": 5},
    ],
)
def test_the_bits_are_those_of_one_rank(more):
    settings = dataclasses.replace(SETTINGS, epochs=1, **more)
    assert len({digest(ranks, settings) for ranks in (1, 2, 3, 5)}) == 1


def test_without_shards_the_bits_depend_on_the_ranks():
    settings = dataclasses.replace(SETTINGS, batch_shards=0)
    assert len({digest(ranks, settings) for ranks in (1, 2, 3)}) > 1


def test_shards_train_as_well():
    settings = dataclasses.replace(SETTINGS, epochs=5)

    def program(comm):
        split = rr.train.load(settings)
        results = [
            Trainer(comm, split, each).run()
            for each in (settings, dataclasses.replace(settings, batch_shards=0))
        ]
        return [result.loss for result in results]

    exact, other = rr.spawn(program, 2)[0]
    assert exact == pytest.approx(other, rel=1e-3)


def test_a_trainer_of_other_ranks_goes_on_with_the_same_bits():
    whole = digest(1, SETTINGS)
    stored = {}

    def first(comm):
        trainer = Trainer(comm, rr.train.load(SETTINGS), SETTINGS, elastic=True)
        for _ in range(9):
            trainer._make_step()
        stored["arrays"] = {name: np.array(trainer.store[name]) for name in trainer.store}

    def second(comm):
        trainer = Trainer(comm, rr.train.load(SETTINGS), SETTINGS, elastic=True)
        trainer.store.restore(stored["arrays"], 9)
        return trainer.run().digest

    rr.spawn(first, 4)
    assert set(rr.spawn(second, 3)) == {whole}


def test_more_ranks_than_shards_and_divided_models_are_refused():
    settings = dataclasses.replace(SETTINGS, batch_shards=2)

    def program(comm):
        split = rr.train.load(settings)
        with pytest.raises(ValueError, match="batch_shards is 2; wanted at least as many as ranks"):
            Trainer(comm, split, settings)
        with pytest.raises(ValueError, match=r"strategy zero divides the model .*; batch_shards"):
            Trainer(comm, split, settings, strategy=strategies.Zero(1))

    rr.spawn(program, 3)
