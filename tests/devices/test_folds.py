"""Folds of many arrays at once have the same bits as NumPy's, for any place of the result."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

from ringreduce.devices import compiled
from ringreduce.devices.cpu import CpuDevice
from tests.support.case_strategies import DTYPES, OPS

SOME = ("int16", "float32", "float16", "bfloat16", "bool")
"""Dtypes that are tested with every operation; each fold takes a while to compile."""
PAIRS = [(op, d) for d in DTYPES for op in OPS[d] if d in SOME or op in ("sum", "mean")]
COUNTS = (1, 7, 2048, 5001)
NONE = {("prod", "complex64"), ("prod", "complex128")}
pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled"
)


def values(dtype: str, ranks: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    drawn = rng.integers(-9, 10, (ranks, count)).astype(np.float64) / 4
    if dtype.startswith(("float", "bfloat", "complex")):
        drawn[:, ::5] *= 1e4
        drawn[0, ::7] = np.inf
        drawn[-1, ::11] = np.nan
        drawn[:, ::13] = -0.0
    with np.errstate(all="ignore"):
        return list(drawn.astype(dtype))


def folded(op: str, sources: list[np.ndarray], into: np.ndarray) -> None:
    address = compiled.fold(op, into.dtype)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(address)
    places = np.array([s.__array_interface__["data"][0] for s in sources])
    memory = np.empty(compiled.FOLD_BYTES, np.uint8)
    count = into.size * (2 if into.dtype.kind == "c" else 1)
    by = len(sources) if op == "mean" else 0
    target = into.__array_interface__["data"][0]
    function(target, places.ctypes.data, len(sources), count, by, memory.ctypes.data)


def wanted(op: str, sources: list[np.ndarray]) -> np.ndarray:
    device, into = CpuDevice(), np.empty_like(sources[0])
    if len(sources) == 2:
        device.fold(op, into.dtype)(*sources, into)
    else:
        device.fold_many(op, into.dtype)(sources, into)
    if op == "mean":
        device.divide(into, len(sources))
    return into


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_the_bits_are_those_of_numpy(op, dtype):
    if compiled.fold(op, np.dtype(dtype)) is None:
        assert (op, dtype) in NONE or dtype == "longdouble"
        return
    for ranks in (2, 3, 5):
        for count in COUNTS:
            sources = values(dtype, ranks, count)
            right = wanted(op, sources).tobytes()
            into = np.empty_like(sources[0])
            folded(op, sources, into)
            assert into.tobytes() == right
            for place in range(ranks):
                mine = [source.copy() for source in sources]
                folded(op, mine, mine[place])
                assert mine[place].tobytes() == right, (ranks, count, place)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_any_16_bits(op, dtype):
    """Every pattern is reduced with some others: ties, NaNs of all kinds, subnormals."""
    rng = np.random.default_rng(1)
    bits = np.arange(1 << 16, dtype=np.uint16)
    near = bits ^ rng.integers(0, 1 << 9, bits.size, np.uint16)
    sources = [each.view(dtype) for each in (bits, near, rng.permutation(bits))]
    for ranks in (2, 3):
        into = np.empty_like(sources[0])
        folded(op, sources[:ranks], into)
        assert into.tobytes() == wanted(op, sources[:ranks]).tobytes()


def test_what_has_no_fold():
    assert compiled.fold("sum", np.dtype("longdouble")) is None
    assert compiled.fold("prod", np.dtype("complex64")) is None


_ONE = """
import sys, numpy as np
from ringreduce.devices import compiled
assert compiled.fold(sys.argv[1], np.dtype("int16")) is not None
"""
_BOTH = """
import numpy as np
from tests.devices.test_folds import folded
left, right, into = np.array([2, 7], "i2"), np.array([3, 5], "i2"), np.zeros(2, "i2")
for op, wanted in (("max", [3, 7]), ("prod", [6, 35])):
    folded(op, [left, right], into)
    assert into.tolist() == wanted, (op, into)
"""


@pytest.mark.slow
def test_code_that_two_processes_have_kept_is_told_apart_by_a_third(tmp_path):
    """Each fold was the first that its process compiled."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for program in ([_ONE, "prod"], [_ONE, "max"], [_BOTH]):
        subprocess.run([sys.executable, "-c", *program], env=environment, check=True)
