"""Keras on several ranks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

BACKENDS = [name for name in ("torch", "jax", "tensorflow") if find_spec(name)]


@pytest.mark.keras
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_facts(mpi, backend, ranks):
    facts, quiet = "tests.support.keras_facts:facts", {"TF_CPP_MIN_LOG_LEVEL": "2"}
    for found in mpi.run_ok("call", ranks, facts, KERAS_BACKEND=backend, **quiet):
        assert set(found.values()) == {"ok"}, "\n".join(map(": ".join, found.items()))


@pytest.mark.keras
@pytest.mark.jax
@pytest.mark.parametrize("threads", ["", pytest.param("1", marks=pytest.mark.long)])
def test_one_core_for_each_rank_is_enough_for_jax(mpi, threads):
    train, given = "tests.support.keras_pinned:train", {"KERAS_BACKEND": "jax", "NPROC": threads}
    assert mpi.run_ok("call", 2, train, **given) == ["trained"] * 2
