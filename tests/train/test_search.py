"""The search: its candidates, prices, rounds, refusals, and the command that it prints."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import math
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.launch import cli
from ringreduce.picture.style import PAPER
from ringreduce.train import configuration, strategies
from ringreduce.train.configuration import Given
from ringreduce.train.search import options, prices, report
from ringreduce.train.search.__main__ import main
from ringreduce.train.search.candidates import KINDS, Candidate, Site, cuts, fitting
from ringreduce.train.search.finding import choose, find
from ringreduce.train.search.halving import halve
from ringreduce.train.search.measuring import Bench
from ringreduce.train.search.options import read
from ringreduce.train.search.report import CandidateRow
from ringreduce.train.settings import Settings
from ringreduce.train.strategies import Hybrid, Pipeline
from tests.support.mpi import ROOT, environment
from tests.support.pictures import parse
from tests.support.trainer import command

DEEP = (64, 32, 32, 32, 10)
"""The widths of a network of four layers."""


def place_of(ranks: int, sizes: tuple[int, ...] = DEEP, samples: int = 1000) -> Site:
    return Site([range(ranks)], sizes, samples)


def found(kind: str, ranks: int, *, sizes: tuple[int, ...] = DEEP, **values):
    """The candidates for a network of these widths, if `values` are given."""
    strategy = KINDS[kind].strategy
    named = {"strategy": strategy} if strategy else {}
    given = Given({**named, "hidden": sizes[1:-1], **values})
    return [*fitting(kind, given, place_of(ranks, sizes))]


# --- candidates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 64, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_split_size_makes_a_schedule_for_all_ranks(ranks, batch):
    for each in found("split_size", ranks, batch=batch):
        pipeline = each.strategy
        splits = -(-batch // pipeline.split_size)
        rr.pipeline.prove(rr.pipeline.schedule(pipeline.schedule, ranks, splits, pipeline.virtual))
        assert sum(pipeline.cut) == len(DEEP) - 1
        assert len(pipeline.cut) == ranks * pipeline.virtual


def test_split_sizes_are_the_batch_halved_again_and_again():
    sizes = [each.strategy.split_size for each in found("split_size", 2, batch=40)]
    assert list(dict.fromkeys(sizes)) == [40, 20, 10, 5, 3, 2, 1]


def test_all_schedules_and_cuts_are_there_for_a_split_size():
    pairs = [
        (each.strategy.schedule, each.strategy.cut)
        for each in found("split_size", 2, batch=32, hidden=DEEP[1:-1])
        if each.strategy.split_size == 8
    ]
    # 2080, 1056, 1056 and 330 parameters.
    assert pairs == [
        *(("1f1b", cut) for cut in [(1, 3), (2, 2)]),
        *(("gpipe", cut) for cut in [(1, 3), (2, 2)]),
        ("interleaved", (1, 1, 1, 1)),
        *(("zero_bubble", cut) for cut in [(1, 3), (2, 2)]),
    ]


def test_equal_actions_are_one_candidate():
    """With one microbatch gpipe does what 1f1b does."""
    whole = [each for each in found("split_size", 2, batch=32) if each.strategy.split_size == 32]
    assert {each.strategy.schedule for each in whole} == {"1f1b", "zero_bubble"}


@pytest.mark.parametrize(
    ("kind", "values", "attribute"),
    [
        ("split_size", {"schedule": "gpipe"}, "schedule"),
        ("split_size", {"cut": (1, 3)}, "cut"),
        ("split_size", {"virtual": 2, "schedule": "interleaved"}, "virtual"),
        ("mesh", {"tensor": 2}, "tensor"),
        ("mesh", {"data_parallel": 1}, "data"),
        ("mesh", {"stages": 2}, "pipeline"),
        ("mesh", {"splits": 3, "stages": 2}, "splits"),
        ("mesh", {"schedule": "gpipe"}, "schedule"),
    ],
)
def test_a_given_option_stays_as_it_is(kind, values, attribute):
    ((_, wanted), *_) = values.items()
    candidates = found(kind, 2, **values)
    assert {getattr(each.strategy, attribute) for each in candidates} == {wanted}


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_meshes_have_all_ranks_and_a_layer_for_each_stage(ranks):
    meshes = {each.strategy.sizes(ranks) for each in found("mesh", ranks)}
    assert meshes == {
        (data, pipeline, ranks // data // pipeline)
        for data in range(1, ranks + 1)
        for pipeline in range(1, len(DEEP))
        if ranks % (data * pipeline) == 0
    }


def test_a_mesh_has_no_more_tensor_ranks_than_the_narrowest_layer_has_columns():
    meshes = [each.strategy.tensor for each in found("mesh", 4, sizes=(64, 8, 3))]
    assert set(meshes) == {1, 2}


def test_a_mesh_has_no_more_replicas_than_the_batch_has_samples():
    assert {each.strategy.data for each in found("mesh", 4, batch=2)} == {1, 2}


def test_batches_end_with_the_training_samples():
    batches = [each.settings.batch for each in found("batch", 2, batch=100)]
    assert batches == [25, 50, 100, 200, 400, 800]


@pytest.mark.parametrize("values", [{"batch": 64}, {"batch": 64, "lr_batch": 128, "lr": 0.4}])
def test_the_learning_rate_is_in_proportion_to_the_batch(values):
    for each in found("batch", 2, **values):
        assert float(each.columns["lr"]) == pytest.approx(0.2 * each.settings.batch / 64, rel=1e-5)
        assert each.settings.lr_batch == values.get("lr_batch", 64)


@pytest.mark.parametrize(
    ("kind", "ranks", "values", "reason"),
    [
        ("split_size", 5, {}, "no split size fits 5 ranks.*4 layers"),
        ("split_size", 5, {}, "add hidden layers, or use fewer ranks"),
        ("split_size", 3, {"schedule": "interleaved"}, "6 stages need as many layers"),
        ("split_size", 2, {"cut": (1, 2, 1)}, "cut is 1 2 1; wanted 2 stages of 4 layers"),
        ("split_size", 2, {"cut": (1, 2)}, "cut is 1 2; wanted 2 stages of 4 layers"),
        ("split_size", 2, {"wire": "bfloat16"}, "wire is for gradients that replicas send"),
        ("split_size", 2, {"stages": 3}, "stages is 3"),
        ("mesh", 4, {"tensor": 3}, "no mesh fits 4 ranks.*tensor is 3; wanted sizes with the"),
        ("batch", 2, {"warm_up": 10**9}, "warm_up"),
    ],
)
def test_a_search_without_candidates_is_refused(kind, ranks, values, reason):
    with pytest.raises(ValueError, match=reason):
        found(kind, ranks, **values)


def test_batch_normalisation_has_whole_batches():
    candidates = found("split_size", 2, batch_norm=True, batch=32)
    assert {each.strategy.split_size for each in candidates} == {32}


def test_neighbours_of_a_cut_move_one_layer():
    assert cuts([1] * 6, 3) == [(2, 2, 2), (1, 3, 2), (3, 1, 2), (2, 1, 3), (2, 3, 1)]


AROUND = {
    *((4, "gpipe", cut) for cut in [(1, 3), (3, 1)]),
    *((4, schedule, (2, 2)) for schedule in ["1f1b", "zero_bubble"]),
    *((size, "gpipe", (2, 2)) for size in [2, 8]),
}


@pytest.mark.parametrize(
    ("values", "around"),
    [
        ({}, AROUND),
        ({"cut": (2, 2)}, {each for each in AROUND if each[2] == (2, 2)}),
        ({"schedule": "gpipe"}, {each for each in AROUND if each[1] == "gpipe"}),
    ],
)
def test_the_neighbours_of_a_pipeline_differ_in_one_choice(values, around):
    given = Given({"strategy": "pipeline", "hidden": DEEP[1:-1], "batch": 32, **values})
    place = place_of(2, DEEP)
    pipelines = fitting("split_size", given, place)
    (each,) = (p for p in pipelines if p.name == "split size 4, schedule gpipe, cut 2 2")
    found = [*KINDS["split_size"].neighbours(each, given, place)]
    assert {(near.x, near.strategy.schedule, near.strategy.cut) for near in found} == around
    assert len(found) == len(around)


def test_no_two_neighbours_have_the_same_actions():
    given = Given({"strategy": "pipeline", "hidden": DEEP[1:-1], "batch": 32})
    place = place_of(2, DEEP)
    (whole,) = (
        p
        for p in fitting("split_size", given, place)
        if p.name == "split size 32, schedule zero_bubble, cut 2 2"
    )
    found = [*KINDS["split_size"].neighbours(whole, given, place)]
    choices = [(near.x, near.strategy.schedule) for near in found if near.strategy.cut == (2, 2)]
    assert choices == [(32, "1f1b"), (16, "zero_bubble")]


@pytest.mark.slow
def test_a_search_moves_to_a_faster_cut_that_is_not_next_to_the_balanced_one(monkeypatch):
    def measure(bench, candidate, seconds):
        bench.held_bytes[candidate] = 1
        first = candidate.strategy.cut[0]
        return [1e-3 * (1 + abs(first - 2))]

    monkeypatch.setattr(Bench, "measure", measure)
    hidden = ["8"] * 7
    words = ["--for", "split_size", "--schedule", "gpipe", "--budget-s", "5"]
    request = read([*words, "--hidden", *hidden])

    def search(comm):
        rows = find(comm, request)
        names = [row.candidate.name for row in rows]
        assert len(set(names)) == len(names)
        return [(row.candidate.strategy.schedule, row.candidate.strategy.cut) for row in rows]

    for found in rr.spawn(search, 2):
        assert found[0] == ("gpipe", (2, 6))


@pytest.mark.slow
@pytest.mark.parametrize("slow_s", [0.0, 2.0, 9.0])
@pytest.mark.parametrize("kind", ["split_size", "batch"])
def test_a_search_keeps_to_its_budget(kind, slow_s, monkeypatch):
    """A measurement takes its seconds, at least `slow_s`; counting bytes takes 3 s."""
    now = defaultdict(float)

    def spend(bench, candidate, seconds):
        bench.held_bytes[candidate] = 1
        now[bench] += max(seconds, slow_s, 0.01)
        return [1e-3]

    monkeypatch.setattr(Bench, "clock", lambda bench: now[bench])
    monkeypatch.setattr(Bench, "measure", spend)
    monkeypatch.setattr(Bench, "count_bytes", lambda bench, each: spend(bench, each, 3.0))
    words = ["--for", kind, "--budget-s", "20", "--hidden", "8", "8", "8"]
    rr.spawn(lambda comm: len(find(comm, read(words))), 2)
    # Predictions are fitted to four measurements, and one candidate is measured in any case.
    assert all(seconds <= max(20 + max(slow_s, 3), 5 * slow_s) for seconds in now.values())


# --- rounds ---------------------------------------------------------------------------------------


class Machine:
    """A machine on which a step of a candidate takes its number of seconds, times `drift`.

    From `slow_from_s` on every step takes 2.05 times as long.
    """

    def __init__(
        self,
        drift: float = 0.0,
        noise: float = 0.0,
        set_up_s: float = 0.0,
        slow_from_s: float = math.inf,
    ) -> None:
        self.now, self.longest_s = 0.0, 0.0
        self._drift, self._noise, self._set_up_s = drift, noise, set_up_s
        self._slow_from_s = slow_from_s
        self._rng = np.random.default_rng(3)
        self._seen: set[float] = set()
        self.dropped: list[float] = []

    def measure(self, candidate: float, seconds: float) -> list[float]:
        begin = self.now
        if candidate not in self._seen:
            self.now += self._set_up_s
        self._seen.add(candidate)
        times = []
        while not times or self.now - begin + candidate < seconds:
            slower = 1 + self._drift * self.now + self._noise * self._rng.exponential()
            slower *= 2.05 if self.now >= self._slow_from_s else 1
            times.append(candidate * slower)
            self.now += times[-1]
        self.longest_s = max(self.longest_s, self.now - begin)
        return times

    def halve(self, candidates, budget_s, near=0.0):
        clock = lambda: self.now  # noqa: E731
        return halve(candidates, self.measure, clock, budget_s, near=near, drop=self.dropped.append)


STEPS = [round(0.010 + 0.001 * n, 6) for n in range(32)]
MACHINES = [
    {},
    {"drift": 0.2},
    {"noise": 0.3},
    {"set_up_s": 0.05},
    *({"slow_from_s": at} for at in (7, 12, 17, 18.5)),
]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_best_survives(count, machine):
    candidates = np.random.default_rng(count).permutation(STEPS[:count]).tolist()
    last, values = Machine(**machine).halve(candidates, 20)
    assert last[0] == STEPS[0]
    assert len(last) == min(2, count)
    assert [*values][: len(last)] == last


@pytest.mark.parametrize("budget_s", [0.3, 2, 20])
@pytest.mark.parametrize("machine", [{}, {"set_up_s": 0.1}])
def test_the_budget_holds(budget_s, machine):
    simulated = Machine(**machine)
    simulated.halve(STEPS, budget_s)
    assert simulated.now <= budget_s + simulated.longest_s


def test_the_better_ones_are_measured_for_longer():
    _, values = Machine().halve(STEPS, 20)
    seconds = [sum(values[each]) for each in STEPS]
    assert seconds[0] > 4 * seconds[-1]


def test_a_short_budget_measures_the_first_candidates():
    last, values = Machine(set_up_s=1).halve(STEPS, 10)
    assert set(values) == set(STEPS[: len(values)])
    assert 3 <= len(values) <= 6
    assert last[0] == STEPS[0]


def test_one_candidate_is_measured_whatever_the_budget_is():
    last, values = Machine(set_up_s=5).halve(STEPS, 0.01)
    assert last == [STEPS[0]] == [*values]


def test_candidates_near_the_best_stay():
    close = [0.0100, 0.0101, 0.0102, 0.0103, 0.0104, 0.02, 0.03, 0.04]
    last, _ = Machine().halve(close, 20, near=0.05)
    assert last == close[:5]


def test_all_but_the_last_are_dropped_once():
    machine = Machine()
    last, _ = machine.halve(STEPS, 20)
    assert sorted(machine.dropped + last) == STEPS


def test_the_first_candidate_of_a_turn_is_another_in_the_next():
    machine, order = Machine(), []

    def measure(candidate, seconds):
        order.append(candidate)
        return machine.measure(candidate, seconds)

    halve(STEPS[:6], measure, lambda: machine.now, 1)
    assert [order[place] for place in (0, 6, 12)] == [STEPS[0], STEPS[2], STEPS[4]]
    assert all(sorted(order[n : n + 6]) == STEPS[:6] for n in (0, 6, 12))


def test_values_are_those_that_were_measured():
    _, values = Machine().halve(STEPS[:4], 5)
    assert all(median(times) == pytest.approx(each) for each, times in values.items())


# --- prices ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("split_size", 2), ("mesh", 2), ("mesh", 4)])
def test_prices_are_fitted_to_two_measured_candidates(kind, ranks):
    candidates = found(kind, ranks, batch=16)
    measured = {}

    def measure(some):
        measured.update(zip(some, (3.0, 7.0), strict=True))
        return [3.0, 7.0]

    def program(comm):
        priced = prices.Prices(comm, place_of(ranks), candidates, measure, np)
        return [priced.predict(each) for each in candidates]

    predicted = dict(zip(candidates, rr.spawn(program, ranks)[0], strict=True))
    assert {each: predicted[each] for each in measured} == pytest.approx(measured)
    assert min(predicted.values()) > 0


def test_every_action_has_the_fitted_time():
    """The layers take next to nothing: a step is its own time, and that of the actions."""
    candidates = found("split_size", 2, batch=32, cut=(2, 2))

    def program(comm):
        priced = prices.Prices(comm, place_of(2), candidates, lambda some: [10.0, 100.0], np)
        return {
            (each.strategy.schedule, 32 // each.strategy.split_size): priced.predict(each)
            for each in candidates
        }

    predicted = rr.spawn(program, 2)[0]
    # 1f1b takes 2 (M + P - 1) actions for M microbatches on P ranks.
    action_s = (predicted["1f1b", 32] - predicted["1f1b", 16]) / (2 * 16)
    own_s = predicted["1f1b", 16] - 2 * 17 * action_s
    assert predicted["1f1b", 8] == pytest.approx(own_s + 2 * 9 * action_s, rel=0.02)
    # zero_bubble has one action more for each microbatch.
    more_s = predicted["zero_bubble", 32] - predicted["1f1b", 32]
    assert more_s == pytest.approx(32 * action_s, rel=0.1)


def test_the_price_of_more_layers_on_one_rank_is_higher(monkeypatch):
    def time(timer, kind, samples, longest_s):
        inputs, outputs, *_ = kind
        return [1e-9 * inputs * outputs * samples] * 3

    monkeypatch.setattr(prices._LayerTimer, "time", time)
    sizes = (64, *[256] * 5, 10)
    candidates = found("split_size", 2, sizes=sizes, batch=256, schedule="1f1b")

    def program(comm):
        priced = prices.Prices(comm, place_of(2, sizes), candidates, lambda some: [0.0, 0.0], np)
        return {
            each.strategy.cut: priced.predict(each)
            for each in candidates
            if each.strategy.split_size == 64
        }

    by_cut = rr.spawn(program, 2)[0]
    assert set(by_cut) >= {(3, 3), (2, 4)} or set(by_cut) >= {(3, 3), (4, 2)}
    assert min(by_cut, key=by_cut.get) == (3, 3)


def test_prices_of_batches_are_a_time_of_their_own_and_a_time_for_each_sample():
    candidates = found("batch", 2)
    took = {each: 0.5 + 0.01 * each.settings.batch for each in candidates}
    assert prices.of_batches(candidates, lambda some: [took[each] for each in some]) == (
        pytest.approx(took)
    )


class Timer:
    """Stands for what times a layer."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def time(self, kind, samples, longest_s):
        self.longest_s += longest_s
        return [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("layers_s", "longest_s"), [(0.03, 0.03), (100.0, 6 * 0.1)])
def test_the_times_of_layers_have_a_share_of_the_budget(layers_s, longest_s):
    def program(comm):
        timer, cores = Timer(), {0: 1}
        # 64 x 32, 32 x 32 and 32 x 10, for 8 and for 16 samples.
        layers = prices.time_layers(comm, DEEP, [8, 16], timer, cores, layers_s)
        return timer.longest_s, [len(of_rows) for of_rows in layers.values()]

    (first, lengths), (second, _) = rr.spawn(program, 2)
    assert first == pytest.approx(longest_s)
    assert second == 0  # One core is for one rank.
    assert lengths == [4, 4]


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "values"),
    [
        ("split_size", 2, {"batch": 22, "optimizer": "adam"}),
        ("split_size", 3, {"batch": 7, "dtype": "float64"}),
        ("mesh", 4, {"batch": 21, "sizes": (64, 33, 17, 10), "momentum": 0.0}),
        ("mesh", 6, {"batch": 45, "schedule": "zero_bubble", "sizes": (64, 33, 17, 9, 10)}),
    ],
)
def test_computed_bytes_are_those_that_a_trainer_counts(kind, ranks, values):
    """Every candidate is compared, of widths and batches that the ranks do not divide."""
    candidates, sizes = found(kind, ranks, **values), values.get("sizes", DEEP)
    split = rr.train.load(candidates[0].settings)

    def program(comm):
        with contextlib.closing(Bench(comm, split, np)) as bench:
            for each in candidates:
                bench.count_bytes(each)
        return bench.held_bytes

    counted = rr.spawn(program, ranks, timeout_s=60)[0]
    place = place_of(ranks, sizes)
    assert {each: prices.held_bytes(each, place) for each in candidates} == counted


# --- the result -----------------------------------------------------------------------------------


def test_of_batches_the_smallest_that_is_nearly_as_fast_is_chosen():
    candidates = found("batch", 2, batch=64)
    rates = {64: 960.0, 128: 990.0, 256: 1000.0, 32: 900.0}
    rows = [
        CandidateRow(each, 0.0, 9, each.settings.batch / rates[each.settings.batch], 0, True)
        for each in candidates
        if each.settings.batch in rates
    ]
    rows.sort(key=lambda row: -row.samples_per_s)
    rows += [CandidateRow(each, 0.0) for each in candidates if each.settings.batch not in rates]
    assert choose(rows).candidate.settings.batch == 64


@pytest.mark.parametrize(
    ("slower", "held", "is_last", "chosen"),
    [
        ((1, 1.02, 1.04), (3, 1, 2), (True, True, True), 1),
        ((1, 1.02, 1.06), (3, 2, 1), (True, True, True), 1),
        ((1, 1.02, 1.04), (3, 2, 1), (True, True, False), 1),
        ((1, 1.02, 1.04), (2, 2, 2), (True, True, True), 0),
        ((1, 1.06, 1.06), (3, 2, 1), (True, True, True), 0),
    ],
)
def test_of_nearly_equal_candidates_the_one_that_holds_least_is_chosen(
    slower, held, is_last, chosen
):
    each = zip(found("split_size", 2), slower, held, is_last, strict=False)
    rows = [CandidateRow(one, 0.0, 9, 0.001 * times, *more) for one, times, *more in each]
    assert choose(rows) is rows[chosen]


GIVEN = {
    "hidden": (32, 32, 32),
    "batch_norm": False,
    "epochs": 3,
    "lr": 0.1,
    "data": "synthetic",
    "dtype": "float64",
}


@pytest.mark.parametrize(("kind", "ranks"), [("split_size", 2), ("mesh", 4), ("batch", 2)])
def test_the_command_trains_with_the_candidate(kind, ranks):
    for each in found(kind, ranks, **GIVEN):
        words = shlex.split(report.command(each, ranks, None))
        assert words[:4] == ["ringreduce", "train", "-n", str(ranks)]
        given = configuration.read(words[4:])
        assert given.settings() == each.settings
        assert (given.strategy() or each.strategy) == each.strategy


def test_the_command_starts_the_same_job():
    (each, *_) = found("batch", 2)
    text = report.command(each, 2, "-n 2 --hosts 'a:1,b:1' --timeout-s 3")
    assert text.startswith("ringreduce train -n 2 --hosts a:1,b:1 --timeout-s 3 --")


def test_a_table_has_every_candidate_and_what_is_not_known_of_it():
    first, second, third, *_ = found("mesh", 4, batch=30)
    rows = [
        CandidateRow(first, 0.004, 10, 0.002, 3 << 20),
        CandidateRow(second, 0.005, 0, held_bytes=1 << 19),
    ]
    lines = report.table([*rows, CandidateRow(third, 0.006)])
    assert [line.split() for line in lines[1:]] == [
        [*first.columns.values(), "4.000", "2.000", "10", "15,000", "3.00"],
        [*second.columns.values(), "5.000", "-", "0", "-", "0.50"],
        [*third.columns.values(), "6.000", "-", "0", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("others", "last"),
    [(10, None), (11, "and 1 slower one"), (30, "and 20 slower ones")],
)
def test_a_table_has_at_most_ten_candidates_that_were_not_measured(others, last):
    candidates = found("split_size", 2)[: 3 + others]
    rows = [
        CandidateRow(each, 0.004, 9 * (number < 3), 0.002) for number, each in enumerate(candidates)
    ]
    lines = report.table(rows)
    assert len(lines) == 1 + 3 + 10 + (last is not None)
    assert lines[-1] == last or last is None


@pytest.mark.parametrize("kind", ["split_size", "mesh", "batch"])
def test_a_table_fits_80_columns(kind):
    rows = [CandidateRow(each, 0.1234567, 1000, 0.1234567, 900 << 20) for each in found(kind, 2)]
    lines = report.table(rows)
    assert max(map(len, lines)) <= 80
    assert all("900.00" in line.split() for line in lines[1:])


def drawn(rows, kind, tmp_path):
    """The texts, the lines and the circles of the picture of these rows."""
    report.draw(tmp_path / "search.svg", "a title", "Facts.", rows, KINDS[kind])
    picture = parse((tmp_path / "search.svg").read_text())
    lines = [each for each in picture.iter("path") if each.get("class") == "line"]
    return [each.text for each in picture.iter("text")], lines, [*picture.iter("circle")]


def test_a_picture_has_every_candidate_and_the_name_of_every_line(tmp_path):
    """Two meshes are measured, one of them for two numbers of microbatches; one is predicted."""
    by_name = {}
    for each in found("mesh", 2, batch=30):
        by_name.setdefault(each.series, []).append(each)
    assert [*by_name] == ["2·1·1", "1·2·1", "1·1·2"]
    (data,), (two, four, eight), (tensor,) = by_name.values()
    rows = [
        CandidateRow(data, 0.004, 10, 0.002, 3 << 20),
        CandidateRow(two, 0.004, 10, 0.003, 2 << 20),
        CandidateRow(four, 0.004, 10, 0.003, 2 << 20),
        *(CandidateRow(each, 0.006, held_bytes=1 << 20) for each in (eight, tensor)),
    ]
    texts, lines, circles = drawn(rows, "mesh", tmp_path)
    assert [texts.count(name) for name in by_name] == [2, 2, 2]
    assert "Facts. A line is a mesh of data·stages·tensor ranks." in texts
    # Each line is predicted, measured, and of memory; the tensor ranks are not measured.
    assert len([each for each in lines if each.get("stroke-dasharray")]) == 3
    hollow = [each for each in circles if each.get("fill") == PAPER]
    assert len(hollow) == len(rows)
    assert len(circles) - len(hollow) == 3 + len(rows)


def test_of_one_place_of_a_line_the_best_is_drawn(tmp_path):
    first, second = (each for each in found("split_size", 2, batch=32, schedule="1f1b")[:2])
    assert (first.series, first.x) == (second.series, second.x)
    rows = [
        CandidateRow(first, 0.004, 10, 0.002, 1 << 20),
        CandidateRow(second, 0.005, 0, held_bytes=1 << 20),
    ]
    texts, _, circles = drawn(rows, "split_size", tmp_path)
    assert texts.count("1f1b") == 2
    assert len(circles) == 3


@pytest.mark.parametrize("best", ["1 3", "2 2"])
def test_a_line_of_memory_has_one_cut(best, monkeypatch):
    """Another cut was measured for one split size alone; interleaved has a cut of its own."""
    panels = []
    monkeypatch.setattr(report, "chart", lambda title, facts, found, **how: panels.extend(found))
    monkeypatch.setattr(report, "write", lambda path, picture: None)
    candidates = found("split_size", 2, batch=32)
    held = {each: (100 * len(each.name) + each.x) << 20 for each in candidates}
    rows = [CandidateRow(each, 0.004, held_bytes=held[each]) for each in candidates]
    rows.sort(key=lambda row: row.candidate.columns["cut"] != best)
    rows.insert(0, replace(rows[-1], candidate=replace(rows[0].candidate, columns={"cut": "3 1"})))
    report.draw(Path("search.svg"), "a title", "Facts.", rows, KINDS["split_size"])
    for line in panels[1].lines:
        cut = best if line.name != "interleaved" else "1 1 1 1"
        of_line = [
            each for each in candidates if (each.series, each.columns["cut"]) == (line.name, cut)
        ]
        assert line.points == [(each.x, held[each] / 2**20) for each in of_line[::-1]]


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "required: --for"),
        ("--for splits", "did you mean 'split_size'"),
        ("--for mesh --buget-s 3", "did you mean '--budget-s'"),
        ("--for mesh --budget-s 0", "--budget-s is 0; wanted a finite number of seconds above 0"),
        ("--for mesh --budget-s inf", "--budget-s is inf; wanted a finite number of seconds"),
        ("--for mesh --budget-s nan", "--budget-s is nan; wanted a finite number of seconds"),
        ("-n 4 --for split_size", "no split size fits 4 ranks"),
        ("-n 4 --for split_size", "the network has 2 layers: add hidden layers, or use fewer"),
        ("-n 0 --for split_size", "-n is 0; wanted at least 1 rank"),
        ("-n 4 --nodes 2,3 --for split_size", "--nodes has 5 ranks, -n asks for 4"),
        ("-n 4 --nodes 2,2 --for batch --strategy mirrored", "mirrored is for the ranks of one"),
        ("-n 4 --for mesh --stages 3", "no mesh fits 4 ranks"),
        ("--for batch --strategy mirrored --cross-device nccl", "nccl, which reduces on GPUs"),
        ("--for batch --strategy tpu --device cuda", "cannot be combined with strategy tpu"),
        ("--for mesh --plot a.pdf", "--plot is a.pdf; wanted a name that ends in .svg or .png"),
        ("--for mesh --strategy zero", "strategy is zero; --for mesh is for strategy hybrid"),
        ("--for split_size --strategy mirrored", "--for split_size is for strategy pipeline"),
        ("--for split_size --splits 4", "splits is given, but --for split_size searches for it"),
        ("--for split_size --split-size 4", "split_size is given, but"),
        ("--for mesh --virtual 2", "virtual is an option of strategy pipeline; strategy is hybrid"),
        ("--for batch --resume", "unrecognized arguments: --resume"),
        ("--for batch --lr 0", "lr is 0.0; wanted"),
        ("--for batch --zero 2", "zero is an option of strategy zero; strategy is auto"),
    ],
)
def test_a_wrong_option_is_refused_before_a_rank_starts(line, complaint, capsys, monkeypatch):
    monkeypatch.setattr(cli, "run", lambda job: pytest.fail("a job was started"))
    monkeypatch.setattr(strategies, "find_spec", lambda name: name)
    with pytest.raises(SystemExit) as stop:
        cli.main(["search", "-n", "2", *line.split()])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_search_for_tpu_without_jax_is_refused_before_a_rank_starts(capsys, monkeypatch):
    monkeypatch.setattr(cli, "run", lambda job: pytest.fail("a job was started"))
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["search", "-n", "2", "--for", "batch", "--strategy", "tpu"])
    assert "strategy tpu needs JAX: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "-n 2 --for split_size",
        "-n 3 --hosts a:2,b:2 --for split_size --hidden 8 8",
        "-n 3 --hosts a:4 --for batch --strategy mirrored",
        "-n 64 --for mesh",
    ],
)
def test_a_search_that_may_fit_starts(line, monkeypatch):
    started = []
    monkeypatch.setattr(cli, "run", lambda job: started.append(job.ranks) or 0)
    assert cli.main(["search", *line.split()]) == 0
    assert len(started) == 1


def test_a_file_of_a_run_may_be_searched_with(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('hidden = [32, 32]\nplot = "run.svg"\nresume = false\nepochs = 2\n')
    request = options.read(["--for", "batch", "--config", str(path), "--plot", "search.svg"])
    assert request.given.settings() == Settings(hidden=(32, 32), epochs=2)
    assert str(request.given.outputs().plot) == "run.svg"
    assert str(request.picture) == "search.svg"


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ("-n 4", "-n 4"),
        ("-n 4 --hosts a:2,b:2 --tag-output", "-n 4 --hosts a:2,b:2 --tag-output"),
        ("-n 4 --nodes 3,1 --timeout-s 2.5", "-n 4 --nodes 3,1 --timeout-s 2.5"),
    ],
)
def test_the_ranks_know_how_they_were_started(line, job, monkeypatch):
    started = []
    monkeypatch.setattr(cli, "run", lambda each: started.append(each.program) or 0)
    assert cli.main(["search", *line.split(), "--for", "mesh"]) == 0
    assert started == [("-P", "-m", "ringreduce.train.search", "--for", "mesh", "--job", job)]


# --- real runs ------------------------------------------------------------------------------------


on_threads = partial(command, main=main)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "more"),
    [
        ("split_size", 2, ["--hidden", "16", "16", "16"]),
        ("mesh", 4, ["--hidden", "16", "16", "--batch", "16"]),
        ("batch", 2, ["--hidden", "16", "--strategy", "zero", "--zero", "2"]),
        ("batch", 1, ["--hidden", "16"]),
    ],
)
def test_a_search_ends_with_a_command_that_trains(kind, ranks, more, monkeypatch, capsys, tmp_path):
    picture = tmp_path / "search.svg"
    line = ["--for", kind, "--budget-s", "0.5", *more, "--epochs", "1", "--plot", str(picture)]
    assert on_threads(monkeypatch, ranks, *line) == [0] * ranks
    lines = capsys.readouterr().out.splitlines()
    given = configuration.read(shlex.split(lines[-1])[4:])
    strategy, settings = given.strategy(), given.settings()
    trained = rr.spawn(
        lambda comm: rr.train.train(comm, rr.train.load(settings), settings, strategy=strategy),
        ranks,
    )
    assert trained[0].step_s > 0
    assert picture.read_text().startswith("<svg")


def test_a_search_that_does_not_fit_ends_with_the_reason(monkeypatch, capsys):
    assert on_threads(monkeypatch, 3, "--for", "split_size") == [2, 2, 2]
    assert "no split size fits 3 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", [Pipeline(splits=2), Hybrid(data=2), None])
def test_measured_steps_change_no_parameter(strategy):
    settings = Settings(hidden=(8,), batch=32)
    split = rr.train.load(settings)
    candidate = Candidate({}, settings, strategy or rr.train.strategies.Mirrored(), {}, "", 0)

    def program(comm):
        with contextlib.closing(Bench(comm, split, np)) as bench:
            times = bench.measure(candidate, 0.05)
            (of_candidate,) = bench._open.values()
            parameters = of_candidate.trainer.flat.copy()
        fresh = rr.train.Trainer(comm, split, settings)
        # A bias is zero at first, and a step of so small a learning rate makes it no more.
        same = np.abs(parameters - fresh.flat).max() < 1e-12
        return times, bool(same), bench.held_bytes[candidate] > 0

    (times, same, held), (times_of_other, *_) = rr.spawn(program, 2)
    assert len(times) >= 3
    assert times == times_of_other
    assert same
    assert held


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2])
def test_a_search_over_mpi(ranks):
    line = ["search", "-n", str(ranks), "--for", "split_size", "--hidden", "32", "32", "32"]
    search = [sys.executable, "-m", "ringreduce", *line, "--budget-s", "0.5", "--epochs", "1"]
    run = partial(subprocess.run, cwd=ROOT, env=environment(), capture_output=True, text=True)
    done = run(search, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    words = shlex.split(done.stdout.splitlines()[-1])
    assert words[:4] == ["ringreduce", "train", "-n", str(ranks)]
    trained = run([sys.executable, "-m", *words], timeout=60)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "accuracy" in trained.stdout


@pytest.mark.parametrize("module", ["candidates", "halving"])
def test_examples_print_what_they_say(module):
    tested = doctest.testmod(importlib.import_module(f"ringreduce.train.search.{module}"))
    assert tested.attempted > 0
    assert tested.failed == 0
