"""Settings, data and arguments that cannot work: refused by name, before anything is sent."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from ringreduce import spawn, train
from ringreduce.train import (
    CentralParallel,
    DataParallel,
    Mesh,
    Sampler,
    Settings,
    ShardedParallel,
    strategies,
)
from ringreduce.train.settings import Outputs

T, V = TypeError, ValueError
SQUARE = {"w": np.zeros((2, 3))}
ONES, X = np.ones(2), np.ones((3, 2))
WEIGHTS = [("nan", math.nan), ("inf", 10**400), ("1e+308", 1e308), ("-1", -1)]
WEIGHTS += [("'3'", "3"), ("True", True)]
NO_NUMBERS = [None, "abc", {"w": "abc"}, [ONES, None], np.array([1, "a"], object), object()]


def of(kind, **given):
    """Make a value without a communicator."""
    return lambda comm: kind(**given)


def parallel(params=SQUARE, stage=0, **how):
    kind = partial(ShardedParallel, stage=stage) if stage else DataParallel
    return lambda comm: kind(comm, params, **how)


def normalised(*given):
    return lambda comm: train.batch_norm(comm, *given)


REFUSED = [
    # --- settings ---
    (of(Settings, lr_schedule="cosine"), V, 'lr_schedule is "cosine"; wanted one of linear'),
    (of(Settings, optimizer="adamw"), V, "wanted one of sgd, adam; did you mean 'adam'?"),
    (of(Settings, wire="int8"), V, 'wire is "int8"; wanted one of none, bfloat16, float16'),
    (of(Settings, data="mnist-no"), V, "data is mnist-no; wanted digits, synthetic, or a folder"),
    (of(Settings, data="digit"), V, "did you mean 'digits'?"),
    (of(Settings, hidden=64), V, "hidden is 64; wanted a list of whole numbers, such as [64]"),
    (of(Settings, hidden=(64.0,)), V, "wanted a list of whole numbers"),
    (of(Settings, lr="0.1"), V, 'lr is "0.1"; wanted a number, without quotes'),
    (of(Settings, lr=np.zeros(9999)), V, "lr is ndarray; wanted a number"),
    (of(Settings, epochs=2.5), V, "epochs is 2.5; wanted a whole number"),
    (of(Settings, epochs=True), V, "epochs is true; wanted a whole number"),
    (of(Settings, batch_norm=1), V, "batch_norm is 1; wanted true or false"),
    (of(Settings, batch_norm=True, batch=1), V, "batch is 1; batch_norm takes at least two"),
    (of(Settings, batch_shards=6, batch_norm=True), V, "batch_norm cannot be combined with"),
    (of(Settings, batch_shards=6, wire="float16"), V, "wire cannot be combined with batch_shards"),
    (of(Settings, batch_shards=6, batch_per_rank=4), V, "batch_per_rank cannot be combined with"),
    (of(Settings, batch_shards=-1), V, "batch_shards is -1; wanted at least 0"),
    (of(Settings, ramp_steps=3), V, "ramp_steps is 3; it is for batch_per_rank"),
    (of(Outputs, device="gpu"), V, 'device is "gpu"; wanted one of cpu, cuda'),
    (of(strategies.Pipeline, schedule="1f1"), V, "unknown pipeline schedule '1f1'"),
    (of(strategies.Hybrid, data=2, pipeline=2, schedule="1f1"), V, "did you mean '1f1b'?"),
    # --- data ---
    (of(Sampler, samples=0, batch=1), V, "samples is 0; wanted at least 1"),
    (of(Sampler, samples=5, batch=0), V, "batch is 0; wanted at least 1"),
    (of(Sampler, samples=5, batch=6), V, "batch is 6; there are 5 samples"),
    (of(Sampler, samples=5, batch=2.5), T, "batch is 2.5; wanted a whole number"),
    (of(Sampler, samples=5, batch=2, seed=-1), V, "seed is -1; wanted at least 0"),
    (lambda c: Sampler(5, 2).epoch_of(-1), V, "step is -1; wanted at least 0"),
    (lambda c: Sampler(5, 2).batch_of(-1), V, "step is -1; wanted at least 0"),
    (lambda c: Sampler(5, 2).steps(-1), V, "epochs is -1; wanted at least 0"),
    (lambda c: train.shard(6.0, c, 0), T, "shard: n is 6.0; wanted a whole number"),
    (lambda c: train.shard(6, c, 0, -1), V, "shard: seed is -1; wanted at least 0"),
    (lambda c: train.shard(6, c, -1), V, "shard: epoch is -1"),
    (lambda c: train.shard(c, 10, 0), T, "shard: n is Communicator; wanted"),
    (lambda c: train.shard(10, 10, 0), T, "shard: comm is int; pass the communicator"),
    (lambda c: train.load("digits"), T, "load: got 'digits'; pass rr.train.Settings"),
    (lambda c: train.train(c, Settings(), 1), T, "train: got Settings for a Split; pass comm"),
    (
        lambda c: train.train(c, train.load_split(), Settings(batch_norm=True, batch=479)),
        V,  # 1,438 samples are 3 x 479 and one
        "batch is 479; of 1438 training samples the last batch has one sample",
    ),
    (
        lambda c: train.train(c, train.load_split(), Settings(batch_per_rank=2000)),
        V,
        "batch_per_rank is 2000: 1 rank makes a batch of 2000, and there are 1438",
    ),
    # --- parameters and gradients ---
    (parallel([np.zeros(9999)]), T, "params is list; wanted a dict of names and arrays"),
    (parallel({}), T, "params is an empty dict; wanted a dict of names and arrays"),
    (parallel({"w": [1.0] * 9999}), T, "'w' is list; wanted an array of numbers"),
    (parallel({"w": np.float64(1)}), V, "'w' is read-only"),
    (parallel({"w": np.array([None])}), T, "'w' is an array of object"),
    (parallel({"w": np.zeros(2, int)}), T, "DataParallel: 'w' is int64; wanted an array of floats"),
    (parallel({"w": np.broadcast_to(0.0, 3)}), V, "'w' is read-only"),
    (parallel(algorithm="quick"), V, "unknown algorithm 'quick'"),
    (parallel(wire="int8"), V, "wire"),
    (parallel(op="max"), V, "DataParallel: op is 'max'; wanted mean or sum"),
    (parallel(first_bucket_bytes=0), V, "DataParallel: first_bucket_bytes is 0; wanted at least 1"),
    (parallel(bucket_bytes=0), V, "DataParallel: bucket_bytes is 0; wanted at least 1"),
    (parallel(stage=4), V, "ShardedParallel: stage is 4; wanted 1, 2 or 3"),
    (parallel(stage=1, op="max"), V, "ShardedParallel: op is 'max'; wanted mean or sum"),
    (parallel(stage=1, algorithm="tree"), V, "algorithm is 'tree'; wanted one of 'auto'"),
    (parallel(stage=2, bucket_bytes=0), V, "ShardedParallel: bucket_bytes is 0; wanted at least 1"),
    (parallel({"w": np.zeros((7, 5)).T}, stage=2), V, "ShardedParallel: 'w' is not C-contiguous"),
    (lambda c: CentralParallel(c, SQUARE, op="max"), V, "CentralParallel: op is 'max'; wanted"),
    (lambda c: CentralParallel(c, SQUARE, algorithm="x"), V, "CentralParallel: algorithm is 'x'"),
    (lambda c: CentralParallel(c, {}), T, "CentralParallel: params is an empty dict"),
    (lambda c: Mesh(c, 0, 1, 1), V, "Mesh: data is 0; pass an int of at least 1"),
    (lambda c: Mesh(c, 1, -2, -1), V, "Mesh: pipeline is -2; pass"),
    (lambda c: Mesh(c, 1, 1, 2.0), V, "Mesh: tensor is 2.0; pass"),
    (lambda c: Mesh(c, 1, 1, None), V, "Mesh: tensor is None; pass"),
    *(
        (partial(use, n), T if n in ("3", True) else V, f"{where} {said} samples; wanted")
        for said, n in WEIGHTS
        for where, use in (
            ("weigh:", lambda samples, c: parallel()(c).weigh(samples)),
            ("a batch has", lambda samples, c: [*parallel()(c).join([1], lambda _: samples)]),
        )
    ),
    # --- helpers ---
    (lambda c: train.check_equal(ONES, c), T, "check_equal: comm is ndarray"),
    (lambda c: train.clip([ONES], 2.0, -1.0), V, "clip: longest is -1.0"),
    (lambda c: train.clip([ONES], "2", 1.0), T, "clip: norm is '2'; wanted a number"),
    (lambda c: train.clip([np.ones(2, int)], 2.0, 1.0), T, "clip: array 0 is int64; wanted an"),
    (lambda c: train.clip([np.broadcast_to(1.0, 2)], 2.0, 1.0), V, "clip: array 0 is read-only"),
    *(
        (partial(helper, given), T, "wanted an array of numbers")
        for helper in (
            lambda given, comm: train.check_equal(comm, given),
            train.global_norm,
            lambda given, comm: train.clip(given, 2.0, 1.0),
        )
        for given in NO_NUMBERS
    ),
    (normalised([[1.0]], ONES, ONES), V, "x is list; wanted floats of shape (samples, columns)"),
    (normalised(np.ones(3), ONES, ONES), V, "x is float64[3]; wanted floats of shape"),
    (normalised(X.astype(int), ONES, ONES), V, "x is int64[3, 2]; wanted floats"),
    (normalised(X, np.ones(3), ONES), V, "scale is float64[3]; wanted float64[2], one number"),
    (normalised(X, ONES, np.ones(2, "f4")), V, "shift is float32[2]; wanted float64[2]"),
    (normalised(X, 1.0, ONES), V, "scale is float; wanted float64[2]"),
]


@pytest.mark.parametrize(("use", "error", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_work_is_refused_by_name(use, error, words):
    with pytest.raises(error) as raised:
        spawn(use, 1)
    assert words in str(raised.value)
    assert len(str(raised.value)) < 250


def test_numbers_of_numpy_and_paths_are_taken(tmp_path):
    made = Settings(
        hidden=[np.int64(8)], lr=np.float32(0.5), epochs=np.int16(2), noise=0, data=tmp_path
    )
    assert made == Settings(hidden=(8,), lr=0.5, epochs=2, noise=0.0, data=str(tmp_path))
    assert type(made.epochs) is int
