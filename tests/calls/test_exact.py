"""Sums with the same bits for any number of ranks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.devices import fixed_point


def summed(addends: np.ndarray, ranks: int, order: list[int] | None = None) -> np.ndarray:
    """The sum on each of some ranks, which have the addends in some order."""
    ordered = addends if order is None else np.ascontiguousarray(addends[order])

    def program(comm):
        ends = [len(ordered) * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
        (total,) = rr.ExactSum(comm).sum([ordered[ends[0] : ends[1]]])
        return total.copy()

    found = rr.spawn(program, ranks)
    assert len({total.tobytes() for total in found}) == 1
    return found[0]


numbers = {
    "float32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "float64": st.floats(allow_nan=False, allow_infinity=False),
}


@given(data=st.data(), dtype=st.sampled_from(sorted(numbers)))
def test_the_bits_do_not_depend_on_ranks_or_order_and_the_error_is_bounded(data, dtype):
    count, length = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 9))
    rows = st.lists(numbers[dtype], min_size=length, max_size=length)
    addends = np.array(data.draw(st.lists(rows, min_size=count, max_size=count)), dtype)
    order = data.draw(st.permutations(range(count)))
    with np.errstate(over="ignore"):
        alone = summed(addends, 1)
        assert summed(addends, data.draw(st.integers(2, 4)), order).tobytes() == alone.tobytes()
    most = Fraction(float(np.abs(addends).max(initial=0)))
    bound = count**2 * most / 2**61
    for column, found in zip(addends.T, alone, strict=True):
        exact = sum(map(Fraction, column.tolist()), Fraction(0))
        if np.isfinite(found):
            bits, least = np.finfo(dtype).nmant, Fraction(float(np.finfo(dtype).smallest_subnormal))
            assert abs(Fraction(float(found)) - exact) <= bound + abs(exact) / 2**bits + least


def test_numbers_that_floats_would_lose_are_kept():
    addends = np.array([[1e8], [1.0], [-1e8], [1.0]], np.float32)
    assert summed(addends, 3).tolist() == [2.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_makes_its_group_nan(bad):
    def program(comm):
        groups = [np.ones((1, 2), np.float32), np.ones((1, 2), np.float32)]
        if comm.rank == 1:
            groups[0][0, 1] = bad
        return [total.tolist() for total in rr.ExactSum(comm).sum(groups)]

    first, second = rr.spawn(program, 2)[0]
    assert np.isnan(first).all()
    assert second == [2.0, 2.0]


def test_ranks_may_have_different_numbers_of_addends():
    def program(comm):
        mine = np.full((comm.rank, 2, 3), 1.0)
        (total,) = rr.ExactSum(comm).sum([mine])
        return total.shape, total.sum()

    assert rr.spawn(program, 3) == [((2, 3), 18.0)] * 3


def test_the_largest_numbers_do_not_overflow():
    largest = np.finfo(np.float64).max
    assert summed(np.full((1000, 1), largest / 1024), 4)[0] == pytest.approx(largest / 1.024)
    assert summed(np.array([[largest], [-largest]]), 2).tolist() == [0.0]


def test_the_smallest_numbers_are_kept():
    smallest = np.finfo(np.float32).smallest_subnormal
    assert summed(np.full((3, 1), smallest, np.float32), 3).tolist() == [3 * float(smallest)]


def test_without_compiled_loops_the_bits_are_the_same(monkeypatch):
    addends = np.random.default_rng(1).normal(size=(5, 100)).astype(np.float32)
    compiled = summed(addends, 2).tobytes()
    known = fixed_point._functions(addends.dtype)
    monkeypatch.setattr(fixed_point, "_functions", lambda dtype: (*known[:2], None, None, None))
    assert summed(addends, 2).tobytes() == compiled


@pytest.mark.parametrize(
    ("addends", "error", "text"),
    [
        ([], ValueError, "addends is empty"),
        ([[]], ValueError, "a group is empty"),
        ([np.array(1.0)], ValueError, "a group is one number"),
        ([[np.ones(2, int)]], TypeError, "an addend is int64; wanted a contiguous array"),
        ([[[1.0]]], TypeError, "an addend is list"),
        ([[np.ones((2, 2))[:, 0]]], TypeError, "wanted a contiguous array"),
        ([[np.ones(2), np.ones(3)]], ValueError, r"float64\[2\] and float64\[3\]"),
        ([[np.ones(2)], [np.ones(2, np.float32)]], ValueError, "groups of float32, float64"),
        ([[np.ones(2)], [np.ones(2)] * 2], ValueError, "different numbers of addends"),
    ],
)
def test_wrong_addends_are_refused_before_anything_is_sent(addends, error, text):
    def program(comm):
        with pytest.raises(error, match=text):
            rr.ExactSum(comm).sum(addends)
        return comm.all_reduce(1).item()

    assert rr.spawn(program, 2) == [2, 2]


def test_ranks_with_different_groups_get_an_error():
    def program(comm):
        with pytest.raises(rr.MismatchError):
            rr.ExactSum(comm).sum([np.ones((1, 2 + comm.rank))])

    rr.spawn(program, 2)


def test_a_call_reuses_the_memory_of_the_call_before():
    def program(comm):
        exact = rr.ExactSum(comm)
        (first,) = exact.sum([np.ones((1, 4))])
        (second,) = exact.sum([np.full((1, 4), 2.0)])
        (other,) = exact.sum([np.full((1, 3), 2.0, np.float32)])
        return np.shares_memory(first, second), second.tolist(), other.dtype.name

    assert rr.spawn(program, 2) == [(True, [4.0] * 4, "float32")] * 2
