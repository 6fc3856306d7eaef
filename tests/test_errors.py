"""Texts of errors name types, and print no array."""

from __future__ import annotations

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.errors import shown

LONG = [np.zeros(900) for _ in range(100)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (2.5, "2.5"),
        ("mean", "'mean'"),
        ((1, "a"), "(1, 'a')"),
        (LONG, "list"),
        (list(range(10_000)), "list"),
        (np.zeros(3), "ndarray"),
        ({"w": 1}, "dict"),
        (len, "the function 'len'"),
        (int, "the type 'int'"),
        ("x" * 5000, "'" + "x" * 99 + "…"),
    ],
)
def test_a_wrong_value_is_shown_in_short(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    "use",
    [
        lambda c: rr.train.DataParallel(c, {"w": np.zeros(3)}, bucket_bytes=LONG),
        lambda c: rr.train.DataParallel(c, {"w": np.zeros(3)}, op=LONG),
        lambda c: rr.train.DataParallel(c, {"w": np.zeros(3)}).ready("w", LONG),
        lambda c: rr.train.ShardedParallel(c, {"w": np.zeros(3)}, stage=LONG),
        lambda c: rr.train.Sampler(LONG, 3),
        lambda c: rr.train.PipelineParallel(c, LONG),
        lambda c: rr.train.strategies.Zero(LONG),
        lambda c: rr.State(LONG),
        lambda c: rr.elastic(lambda comm, state: None, {"w": LONG}),
        lambda c: c.all_gather(np.zeros(3), counts=LONG),
        lambda c: c.empty(LONG, float),
        lambda c: rr.Config(slice_bytes=LONG),
        lambda c: rr.spawn(lambda comm: None, 2, nodes=LONG),
        lambda c: rr.pipeline.balance([1, 2], LONG),
    ],
)
def test_no_text_prints_an_array(use):
    with pytest.raises((TypeError, ValueError), match=r".") as raised:
        rr.spawn(use, 1)
    assert len(str(raised.value)) < 250
