"""Settings, strategies and data are checked when they are made."""

from __future__ import annotations

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import Settings, strategies
from ringreduce.train.settings import Outputs


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr_schedule": "cosine"}, 'lr_schedule is "cosine"; wanted one of linear, constant'),
        ({"optimizer": "adamw"}, "wanted one of sgd, adam; did you mean 'adam'?"),
        ({"wire": "int8"}, 'wire is "int8"; wanted one of none, bfloat16, float16'),
        ({"data": "mnist-nowhere"}, "data is mnist-nowhere; wanted digits, synthetic, or a folder"),
        ({"data": "digit"}, "did you mean 'digits'?"),
        ({"hidden": 64}, "hidden is 64; wanted a list of whole numbers, such as [64]"),
        ({"hidden": (64.0,)}, "wanted a list of whole numbers"),
        ({"lr": "0.1"}, 'lr is "0.1"; wanted a number, without quotes'),
        ({"lr": np.zeros(9999)}, "lr is ndarray; wanted a number"),
        ({"epochs": 2.5}, "epochs is 2.5; wanted a whole number"),
        ({"epochs": True}, "epochs is true; wanted a whole number"),
        ({"batch_norm": 1}, "batch_norm is 1; wanted true or false"),
        ({"batch_norm": True, "batch": 1}, "batch is 1; batch_norm takes at least two samples"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_made(given, words):
    with pytest.raises(ValueError, match=r".") as raised:
        Settings(**given)
    assert words in str(raised.value)


def test_numbers_of_numpy_and_paths_are_taken(tmp_path):
    made = Settings(
        hidden=[np.int64(8)], lr=np.float32(0.5), epochs=np.int16(2), noise=0, data=tmp_path
    )
    assert made == Settings(hidden=(8,), lr=0.5, epochs=2, noise=0.0, data=str(tmp_path))
    assert type(made.epochs) is int


def test_the_device_is_checked_too():
    with pytest.raises(ValueError, match=r'device is "gpu"; wanted one of cpu, cuda'):
        Outputs(device="gpu")


def test_a_schedule_is_checked_when_the_strategy_is_made():
    for make in (strategies.Pipeline, lambda schedule: strategies.Hybrid(2, 2, schedule=schedule)):
        with pytest.raises(ValueError, match=r"unknown pipeline schedule '1f1'; .*'1f1b'"):
            make(schedule="1f1")


def test_a_last_batch_of_one_sample_is_refused_before_the_first_step():
    settings = Settings(batch_norm=True, batch=479, hidden=(4,))  # 1,438 samples: 3 x 479 and one
    with pytest.raises(ValueError, match=r"batch is 479; .* the last batch has one sample"):
        rr.spawn(lambda comm: rr.train.train(comm, rr.train.load(settings), settings), 1)


def test_arguments_in_another_order_are_named():
    settings = Settings()
    with pytest.raises(TypeError, match="train: got Settings for a Split; pass comm, the split"):
        rr.spawn(lambda comm: rr.train.train(comm, settings, rr.train.load(settings)), 1)
    with pytest.raises(TypeError, match=r"load: got 'digits'; pass rr\.train\.Settings"):
        rr.train.load("digits")
