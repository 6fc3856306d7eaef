"""When a rank polls at once, yields its core, or sleeps, by a clock that the test moves."""

from __future__ import annotations

import pytest

from ringreduce.transports.yielding import YIELDS, Yielding


class Core:
    """A core on which each yield takes `yield_s`, and the sleeps of the rank."""

    def __init__(self, crowded: bool) -> None:
        self.now, self.yield_s, self.yields = 0.0, 1e-6, 0
        self.slept: list[float] = []
        self.yielding = Yielding(crowded, lambda: self.now, self._yield)

    def _yield(self) -> None:
        self.now += self.yield_s
        self.yields += 1

    def pause(self, idle: int = 1, times: int = 1) -> int:
        for _ in range(times):
            self.yielding.pause(idle, YIELDS, self.slept.append)
        return self.yielding.spins


@pytest.mark.parametrize(("crowded", "polls"), [(False, 200), (True, 0)])
def test_a_rank_with_a_core_polls_200_times_before_it_yields(crowded: bool, polls: int) -> None:
    assert Core(crowded).pause(times=10_000) == polls


def test_a_long_yield_makes_a_rank_yield_at_each_poll_until_thousands_are_short_in_a_row() -> None:
    core = Core(crowded=False)
    for core.yield_s, times in ((4e-6, 1), (1e-6, 2000), (4e-6, 1), (1e-6, 2000)):
        assert core.pause(times=times) == 0
    assert core.pause(times=3000) == 200


@pytest.mark.parametrize(("idle", "slept"), [(YIELDS - 1, []), (YIELDS, [5e-5]), (10**6, [1e-3])])
def test_a_rank_that_waits_long_sleeps(idle: int, slept: list[float]) -> None:
    core = Core(crowded=False)
    core.pause(idle)
    assert (core.slept, core.yields) == (slept, not slept)
