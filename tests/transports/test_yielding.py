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


def test_a_rank_with_a_core_polls_200_times_before_it_yields() -> None:
    assert Core(crowded=False).pause(times=10_000) == 200


def test_a_long_yield_makes_a_rank_yield_at_each_poll() -> None:
    core = Core(crowded=False)
    core.yield_s = 4e-6
    assert core.pause() == 0
    core.yield_s = 1e-6
    assert core.pause(times=1000) == 0


def test_a_rank_polls_again_after_some_thousand_short_yields_in_a_row() -> None:
    core = Core(crowded=False)
    for yield_s in (4e-6, 1e-6, 4e-6):  # the second long yield begins the count anew
        core.yield_s = yield_s
        assert core.pause(times=2000 if yield_s < 3e-6 else 1) == 0
    core.yield_s = 1e-6
    assert core.pause(times=2000) == 0
    assert core.pause(times=3000) == 200


def test_a_rank_that_shares_its_core_with_ranks_always_yields() -> None:
    assert Core(crowded=True).pause(times=10_000) == 0


@pytest.mark.parametrize(("idle", "slept"), [(YIELDS - 1, []), (YIELDS, [5e-5]), (10**6, [1e-3])])
def test_a_rank_that_waits_long_sleeps(idle: int, slept: list[float]) -> None:
    core = Core(crowded=False)
    core.pause(idle)
    assert (core.slept, core.yields) == (slept, not slept)
