"""Every strategy keeps its arrays on the device: shown with a stand-in for CuPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train.strategies import (
    CentralStorage,
    Hybrid,
    Mirrored,
    Pipeline,
    Strategy,
    Tensor,
    Zero,
)
from tests.support.strict_arrays import MODULE, DeviceArray, Ranks

SETTINGS = rr.train.Settings(
    hidden=(12, 8, 9),
    epochs=1,
    batch=64,
    dtype="float64",
    clip=0.3,
    optimizer="adam",
    check_every=9,
)
STRATEGIES: list[tuple[Strategy, int, bool]] = [
    (Mirrored(), 2, True),
    (Zero(1), 2, True),
    (Zero(2), 2, False),
    (Zero(3), 2, True),
    (CentralStorage(), 2, True),
    (Pipeline(), 2, False),
    (Pipeline(schedule="zero_bubble", splits=3), 2, False),
    (Tensor(), 2, True),
    (Hybrid(2, 2, 1), 4, False),
    (Hybrid(1, 2, 2), 4, False),
]
"""Strategy, ranks, whether batches are normalised."""


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "normalises"), STRATEGIES, ids=str)
def test_a_strategy_mixes_no_arrays_of_the_device_with_those_of_the_host(
    strategy, ranks, normalises
):
    chosen, split = replace(SETTINGS, batch_norm=normalises), rr.train.load(SETTINGS)

    def program(comm, xp):
        comm = Ranks(comm) if xp is MODULE else comm
        result = rr.train.train(comm, split, chosen, xp=xp, strategy=strategy)
        return result.digest, type(result.parameters)

    found = rr.spawn(program, ranks, MODULE, timeout_s=60)
    wanted = rr.spawn(program, ranks, np, timeout_s=60)
    assert {digest for digest, _ in found} == {digest for digest, _ in wanted}
    assert {kind for _, kind in found} == {DeviceArray}


def test_the_stand_in_refuses_arrays_of_the_host():
    own, foreign = MODULE.ones(3), np.ones(3)
    for call in (
        lambda: own + foreign,
        lambda: MODULE.isfinite(foreign),
        lambda: MODULE.concatenate([own, foreign]),
        lambda: own.__setitem__(slice(None), foreign),
    ):
        with pytest.raises(TypeError, match=r"Unsupported type numpy\.ndarray"):
            call()
    assert type(own + own) is DeviceArray
