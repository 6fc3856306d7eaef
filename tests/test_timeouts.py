"""Timeouts: numbers of any type, above 0, in every place that takes seconds."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.config import as_seconds

ENDLESS = [math.inf, 3e11, 10**400, Decimal("inf"), np.float32(np.inf)]
WRONG = [math.nan, 0, -1, True, np.True_, np.float32("nan"), "3", 1j, np.timedelta64(3, "s")]


@pytest.mark.parametrize("value", [Fraction(5, 2), Decimal("2.5"), np.float16(2.5), np.array(2.5)])
def test_a_number_of_any_type_is_taken(value):
    assert as_seconds("call", value) == 2.5


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"^call: timeout_s is .*; pass seconds, above 0$"):
        as_seconds("call", value)


@pytest.mark.parametrize("endless", ENDLESS, ids=lambda value: type(value).__name__)
def test_calls_take_a_timeout_without_a_limit(endless, tmp_path):
    def program(whole):
        part, x, other = whole.split(0), np.ones(3), 1 - whole.rank
        work = part.all_reduce(x, async_op=True, timeout_s=endless)
        part.send(x, other, timeout_s=endless, async_op=True)
        assert part.probe(timeout_s=endless) == other
        part.recv(x.copy(), other, timeout_s=endless)
        whole.plan("all_reduce", x, timeout_s=endless)()
        rr.wait_any([work], endless)
        total = work.wait(endless)[0]
        part.close(timeout_s=endless)
        return total

    assert rr.spawn(program, 2, timeout_s=endless) == [2, 2]
    how = {"rendezvous": f"file://{tmp_path}/meeting", "rank": 0, "size": 1}
    with rr.init(timeout_s=endless, **how) as comm:
        assert comm.split(0).size == 1
