"""The comparison of strategies: its rows, figures, table and refusals, and a run on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.launch import cli
from ringreduce.train import Settings, Trainer, pace, strategies
from ringreduce.train.compare import __main__ as turns
from ringreduce.train.compare import report
from ringreduce.train.compare.options import CompareOptions, read
from ringreduce.train.compare.report import StrategyRow
from ringreduce.train.configuration import Given
from ringreduce.train.pace import ComputePace
from ringreduce.train.strategies import (
    CentralStorage,
    Hybrid,
    LocalSGD,
    Mirrored,
    OneDevice,
    ParameterServer,
    Pipeline,
    Tensor,
    Zero,
)
from tests.support.mpi import environment
from tests.support.pictures import parse
from tests.support.trainer import command

SMALL = Settings(epochs=2, hidden=(9, 7), batch=300, dtype="float64", lr=0.05)
"""An epoch has five steps, the last with 238 samples."""
FIGURES = {
    "accuracy": 0.9,
    "samples_per_s": 1000.0,
    "step_ms": 4.0,
    "seconds_to": 1.5,
    "sent_bytes": 2048,
    "held_bytes": 4096,
    "staleness_mean": None,
    "staleness_max": None,
    "discarded": None,
    "idle": 0.25,
}


def row(strategy=None, error="", *, ranks=4, servers=0, to=90.0, **figures):
    """A row with one seed."""
    runs = [] if error else [{**FIGURES, **figures, "points": [(1.0, 0.8), (2.0, 0.9)]}]
    return StrategyRow(strategy or Mirrored(), ranks, servers, to, error, runs)


# --- a trainer that stops, and slow ranks ---------------------------------------------------------

EVERY = [
    Mirrored(),
    CentralStorage(),
    Zero(stage=3),
    Pipeline(),
    Tensor(),
    Hybrid(data=1, pipeline=2),
    LocalSGD(every=2),
    ParameterServer(),
]


def ranks_of(strategy):
    return 3 if isinstance(strategy, ParameterServer) else 2


@pytest.mark.parametrize("strategy", EVERY, ids=lambda each: each.name)
@pytest.mark.slow
def test_epochs_one_by_one_train_as_all_at_once(strategy):
    split = rr.train.load(SMALL)
    settings = replace(SMALL, optimizer="adam", lr=0.01)

    def program(comm):
        whole = Trainer(comm, split, settings, strategy=strategy)
        digest = whole.run().digest
        parts = Trainer(comm, split, settings, strategy=strategy)
        digests = [parts.run(epochs=1).digest for _ in range(settings.epochs)]
        made = parts.state.step, int(parts.times[:, 0].sum())
        whole.close()
        parts.close()
        return digest, digests, made

    found = rr.spawn(program, ranks_of(strategy))
    for digest, digests, (step, _) in found:
        assert digests[0] != digests[1] == digest
        assert step == 10
    assert found[0][2][1] == 10


@pytest.mark.parametrize("strategy", EVERY, ids=lambda each: each.name)
def test_ranks_share_the_units_of_every_strategy(strategy):
    """Each sample and weight is a unit in forward, and two units in backward."""
    split, units = rr.train.load(SMALL), Counter()

    class Counts(ComputePace):
        def __init__(self, rank):
            super().__init__(0.0, 1.0, 0.0, ())
            self.rank = rank

        def stretch(self, units_of_layer, began_s):
            units[self.rank] += units_of_layer

    def program(comm):
        own = Counts(comm.rank)
        Trainer(comm, split, SMALL, strategy=strategy, pace=own).run(epochs=1)

    rr.spawn(program, ranks_of(strategy))
    weights = sum(a * b for a, b in pairwise((64, 9, 7, 10)))
    assert sum(units.values()) == 3 * 1438 * weights
    assert set(units) == {0, 1}


def slept(monkeypatch, own, units, computed_s=0.0):
    """How long a rank sleeps in a step for these units, for which it has computed so long."""
    naps, clock = [], iter([0.0, computed_s, computed_s, computed_s])
    fake = SimpleNamespace(
        sleep=naps.append, thread_time=clock.__next__, perf_counter=lambda: sum(naps)
    )
    monkeypatch.setattr(pace, "time", fake)
    own.begin(fake.thread_time())
    own.stretch(units, computed_s)
    return sum(naps)


@pytest.mark.parametrize(
    ("factor", "units", "computed_s", "seconds"),
    [(1.0, 8, 0.0, 4.0), (3.0, 8, 0.0, 12.0), (1.0, 8, 1.5, 2.5), (1.0, 2, 1.5, 0.0)],
)
def test_computing_is_stretched_to_its_share(factor, units, computed_s, seconds, monkeypatch):
    assert slept(monkeypatch, ComputePace(0.5, factor, 0.0, ()), units, computed_s) == seconds


@pytest.mark.parametrize("jitter", [0.3, 1.0])
def test_jitter_has_mean_1_and_its_coefficient_of_variation(jitter, monkeypatch):
    one, same, other = (ComputePace(1.0, 2.0, jitter, (5, rank)) for rank in (1, 1, 2))
    drawn, again, others = (
        [slept(monkeypatch, each, 1) for _ in range(2000)] for each in (one, same, other)
    )
    assert drawn == again
    assert drawn != others
    # Five standard errors of the mean, and about as much of the deviation.
    assert np.mean(drawn) == pytest.approx(2.0, rel=5 * jitter / 2000**0.5)
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(jitter, rel=0.2)


# --- the rows -------------------------------------------------------------------------------------


def names(ranks, nodes=None, strategies=(), **values):
    request = CompareOptions(Given(values), strategies)
    return [StrategyRow(each, 0, 0, 90).name for each in request.rows(nodes or [range(ranks)])]


SERVERS = [
    "parameter_server",
    "parameter_server:staleness=2",
    "parameter_server:staleness=none",
]
ZERO = ["zero", "zero:zero=2", "zero:zero=3"]


@pytest.mark.parametrize(
    ("ranks", "values", "wanted"),
    [
        (
            4,
            {},
            [
                *("one_device", "mirrored", "multi_worker_mirrored", "central_storage", *ZERO),
                *("tensor", "hybrid:data_parallel=2:stages=2", "local_sgd", *SERVERS),
            ],
        ),
        (
            3,
            {"hidden": (8, 8), "wire": "float16"},
            ["one_device", "mirrored", "multi_worker_mirrored", "local_sgd"],
        ),
        (
            3,
            {"clip": 1.0},
            ["one_device", "mirrored", "multi_worker_mirrored", "central_storage", *ZERO, "tensor"],
        ),
        (
            2,
            {"hidden": (8, 8, 8), "batch_norm": True, "dtype": "float64"},
            [
                *("one_device", "mirrored", "multi_worker_mirrored", "central_storage", *ZERO),
                *("tensor", "hybrid:data_parallel=2"),
            ],
        ),
    ],
)
def test_all_are_those_that_the_network_and_the_ranks_can_have(ranks, values, wanted, monkeypatch):
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    assert names(ranks, **values) == wanted


def test_two_nodes_have_other_rows():
    found = names(4, [[0, 1], [2, 3]])
    assert {"mirrored", "central_storage"}.isdisjoint(found)
    assert {"multi_worker_mirrored", *ZERO, *SERVERS} <= set(found)


def test_tpu_is_compared_where_jax_is_installed(monkeypatch):
    monkeypatch.setattr(strategies, "find_spec", lambda name: name)
    assert "tpu" in names(2)
    assert "tpu" not in names(2, dtype="float64")


def test_one_device_is_first_and_no_strategy_comes_twice():
    given = (Mirrored(), OneDevice(), Mirrored(), Zero())
    assert names(4, strategies=given) == ["one_device", "mirrored", "zero"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("all", ()),
        ("zero:zero=3", (Zero(stage=3),)),
        ("pipeline:cut=1 2:schedule=gpipe", (Pipeline(cut=(1, 2), schedule="gpipe"),)),
        (
            "mirrored,parameter_server:staleness=none:servers=2",
            (Mirrored(), ParameterServer(servers=2, staleness=None)),
        ),
    ],
)
def test_strategies_are_read_with_their_options(words, wanted):
    assert read(["--strategies", words]).strategies == wanted


def test_a_file_of_a_run_may_be_compared_with(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('hidden = [9]\nstrategy = "zero"\nzero = 2\nplot = "run.svg"\nlr = 0.5\n')
    request = read(["--config", str(path)])
    assert request.given.settings() == Settings(hidden=(9,), lr=0.5)
    assert (request.strategies, request.picture) == ((), None)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--strategies mirored", "did you mean 'mirrored'?"),
        ("--strategies auto", "strategy is auto; name one"),
        ("--strategies mirrored:every=2", "every is an option of strategy local_sgd; strategy is"),
        ("--strategies mirrored:lr=2", "'lr=2' is no option of a strategy with its value"),
        ("--strategies parameter_server:server=2", "did you mean 'servers'?"),
        ("--strategies parameter_server:staleness=-1", "staleness is -1; wanted a whole number"),
        ("--strategies parameter_server:staleness=1.5", "staleness is 1.5; wanted a whole number"),
        ("--strategies parameter_server:servers=0", "servers is 0; wanted a whole number"),
        ("--strategies parameter_server:replicas=2", "replicas is 2; wanted at most servers, 1"),
        ("--strategies parameter_server:backup_workers=2", "backup_workers is 2; wanted fewer"),
        ("--strategies parameter_server:backup_workers=1:staleness=2", "for staleness 0"),
        ("--strategies local_sgd:every=0", "every is 0; wanted a whole number"),
        (
            "--strategies pipeline:virtual=2:schedule=interleaved",
            "the network has 2 layers: add hidden layers",
        ),
        ("--compute-ms 3 --slowdown 2:4", "--slowdown is 2:4; wanted a rank from 0 to 1"),
        ("--compute-ms 3 --slowdown 1:0", "--slowdown is 1:0; wanted a rank from 0 to 1, and a"),
        ("--compute-ms 3 --slowdown 1", "argument --slowdown: invalid slowdown value: '1'"),
        ("--slowdown 1:4", "--slowdown and --jitter change what --compute-ms makes; add it"),
        ("--jitter 0.3", "--slowdown and --jitter change what --compute-ms makes; add it"),
        ("--compute-ms -1", "compute_ms is -1; wanted a finite number of at least 0"),
        ("--compute-ms 1 --jitter nan", "jitter is nan; wanted a finite number of at least 0"),
        ("--plot a.pdf", "plot is a.pdf; wanted a name that ends in .svg or .png"),
        ("--strategy mirrored", "unrecognized arguments: --strategy mirrored; did you mean"),
        ("--batch-per-rank 4", "unrecognized arguments: --batch-per-rank"),
        ("--lr 0", "lr is 0.0; wanted"),
        ("--seeds 0", "seeds is 0; wanted at least 1"),
    ],
)
def test_a_wrong_option_is_refused_before_a_rank_starts(line, complaint, capsys, monkeypatch):
    monkeypatch.setattr(cli, "run", lambda job: pytest.fail("a job was started"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", "-n", "2", *line.split()])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "ranks", "nodes"),
    [
        ("-n 4 --strategies mirrored", 4, ()),
        ("-n 4 --strategies parameter_server,parameter_server:servers=3", 7, ()),
        ("-n 4 --nodes 2,2 --strategies parameter_server:servers=2", 6, (2, 4)),
        ("-n 2", 3, ()),
        ("-n 2 --batch-norm", 2, ()),
    ],
)
def test_servers_are_started_beside_the_ranks_that_compute(line, ranks, nodes, monkeypatch):
    started = []
    monkeypatch.setattr(cli, "run", lambda job: started.append(job) or 0)
    assert cli.main(["compare", *line.split()]) == 0
    (job,) = started
    assert (job.ranks, job.nodes) == (ranks, nodes)
    assert job.program[-2:] == ("--ranks", line.split()[1])


# --- the figures ----------------------------------------------------------------------------------


def given(**values):
    plain = {"epochs": 2, "hidden": (9, 7), "batch": 300, "dtype": "float64", "lr": 0.05}
    return Given({**plain, **values})


@pytest.mark.slow
def test_synchronous_strategies_are_equal_to_one_device():
    servers = ParameterServer(), ParameterServer(servers=2)
    request = CompareOptions(given(seeds=2), (*EVERY[:6], *servers), ranks=2)
    shown = []

    def program(comm):
        return turns.compare(comm, request, shown.append if comm.rank == 0 else str)

    first, *rows = rr.spawn(program, 4)[0]
    assert (first.name, first.ranks, first.record["sent_bytes"]) == ("one_device", 1, 0)
    for each in rows:
        assert each.error == ""
        assert np.abs(each.parameters - first.parameters).max() < 1e-10
        assert each.record["accuracy"] == first.record["accuracy"]
        assert each.record["accuracy_range"] == first.record["accuracy_range"]
        assert [run["sent_bytes"] > 0 for run in each.runs] == [True, True]
    order = [text.partition(": ")[2] for text in shown]
    assert order == [each.name for each in (first, *rows)] * 4  # two seeds of two epochs


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("strategy", [LocalSGD(), ParameterServer()], ids=lambda each: each.name)
def test_a_strategy_that_fails_is_a_row_and_the_others_go_on(strategy, seed, monkeypatch):
    request = CompareOptions(given(seeds=2), (strategy, Mirrored()), ranks=2)

    def samples(self, number):
        here = self.strategy, self.comm.rank, self.settings.seed
        if here == (strategy, 1, seed) and number >= 5:
            raise MemoryError("too large a number")
        return found(self, number)

    found = Trainer._samples
    monkeypatch.setattr(Trainer, "_samples", samples)
    rows = rr.spawn(lambda comm: turns.compare(comm, request), 3, timeout_s=120)[0]
    assert [(each.name, len(each.runs)) for each in rows if not each.error] == [
        ("one_device", 2),
        ("mirrored", 2),
    ]
    assert "too large a number" in rows[1].error


class Fake:
    """A trainer whose figures follow from its rank."""

    epoch_steps = 5

    def __init__(self, comm, split, settings, xp, strategy, pace):
        self._rank, self._serves = comm.rank, isinstance(strategy, ParameterServer)
        self.times = np.zeros((2, 5))
        self.accuracy = iter([0.7, 0.8, 0.95])

    def run(self, epochs):
        rank = self._rank
        # A server makes no steps.
        self.times[1] += (5, 10, 0, rank, 1) if rank < 2 else (0, 0, 0, 0, 0)
        facts = {"step_s": 0.5, "sent_bytes": 10 * rank, "held_bytes": 30 - 10 * rank}
        facts |= {"accuracy": next(self.accuracy), "communication_s": 0.0, "exposed_s": 0.0}
        return rr.train.Result(np.zeros(1), "", 0.0, **facts)

    @property
    def pushes(self):
        staleness = {0: 3, 3 + self._rank: 1}
        return rr.train.StoreStats(4, self._rank, staleness) if self._serves else None

    def close(self):
        pass


@pytest.mark.parametrize(
    ("strategy", "servers", "wanted"),
    [
        (Mirrored(), 0, {"sent_bytes": 10, "held_bytes": 30, "discarded": None}),
        (
            ParameterServer(),
            1,
            {
                "sent_bytes": 20,
                "held_bytes": 30,
                "discarded": 3,
                "staleness_mean": (3 + 4) / 8,
                "staleness_max": 4,
            },
        ),
    ],
)
def test_figures_are_those_of_all_ranks(strategy, servers, wanted, monkeypatch):
    monkeypatch.setattr(turns, "Trainer", Fake)
    request = CompareOptions(given(epochs=3), (strategy,), ranks=2, to=75.0)
    _, found = rr.spawn(lambda comm: turns.compare(comm, request), 3)[0]
    figures = dict.fromkeys(("staleness_mean", "staleness_max"))
    figures |= {"accuracy": 0.95, "accuracy_range": 0.0, "seconds_to": 20.0}
    figures |= {"samples_per_s": 1438 / 2.5, "step_ms": 500.0, **wanted}
    # Of 30 seconds rank 0 waits 3, and rank 1 waits 6; servers are left out.
    figures["idle"] = (3 / 30 + 6 / 30) / 2
    where = {"strategy": strategy.name, "options": {}, "ranks": 2, "servers": servers}
    assert found.record == {**where, **{name: figures[name] for name in figures}, "error": None}


def test_a_line_of_json_has_means_over_the_seeds_and_null_where_nothing_was_reached():
    found = row(ParameterServer(servers=2, backup_workers=1), servers=2)
    found.runs.append({**FIGURES, "accuracy": 0.96, "seconds_to": None, "held_bytes": 8192})
    record = found.record
    assert list(record) == [
        *("strategy", "options", "ranks", "servers", "accuracy", "accuracy_range"),
        *("samples_per_s", "step_ms", "seconds_to", "sent_bytes", "held_bytes"),
        *("staleness_mean", "staleness_max", "discarded", "idle", "error"),
    ]
    assert record["options"] == {"servers": 2, "backup_workers": 1}
    assert record["accuracy"] == pytest.approx(0.93)
    assert record["accuracy_range"] == pytest.approx(0.06)
    assert record["held_bytes"] == 8192
    assert record["seconds_to"] is None


def test_a_failed_row_has_its_error_and_no_figure():
    record = row(error="too large").record
    assert record["error"] == "too large"
    assert {record[name] for name in FIGURES} == {None}


# --- the table, and the picture -------------------------------------------------------------------


def test_columns_that_are_empty_or_equal_are_left_out():
    rows = [row(OneDevice(), ranks=1), row(step_ms=5.0, idle=0.5)]
    heads, second, *lines = report.table(rows)
    assert f"{heads} {second}".split() == ["step", "strategy", "ranks", "ms", "idle"]
    assert [line.split() for line in lines[:2]] == [
        ["one_device", "1", "4.00", "25%"],
        ["mirrored", "4", "5.00", "50%"],
    ]


def test_the_widest_table_fits_80_columns():
    wide = {"samples_per_s": 123456.7, "step_ms": 1234.56, "seconds_to": 345.67}
    wide |= {"sent_bytes": 999_999, "held_bytes": 1_999_999, "accuracy": 1.0, "idle": 1.0}
    served = {"staleness_mean": 12.34, "staleness_max": 56, "discarded": 1234.0}
    strategy = ParameterServer(servers=2, staleness=0, backup_workers=1)
    rows = [row(OneDevice(), ranks=1), row(strategy, ranks=16, servers=2, **wide, **served)]
    rows[1].runs.append({**FIGURES, "accuracy": 0.5, **served})
    lines = report.table(rows)
    assert max(map(len, lines)) <= 80
    assert "12.34/56" in "".join(lines)


@pytest.mark.parametrize(
    ("speeds", "sentences"),
    [
        ((1000, 3600), ["mirrored was fastest: 3,600 samples/s.", "One device has 28 % of this"]),
        ((1000, 1040), ["One device was as fast: do not distribute this."]),
        ((1000, 300), ["one_device was fastest: 1,000", "One device was as fast: do not"]),
    ],
)
def test_sentences_follow_from_the_rows(speeds, sentences):
    alone, mirrored = map(float, speeds)
    held = {"held_bytes": 1024}
    rows = [row(OneDevice(), samples_per_s=alone), row(samples_per_s=mirrored, **held)]
    lines = report.table(rows)[-3:]
    for sentence in (*sentences, "mirrored holds least: 1.0 KiB on a rank."):
        assert sentence in " ".join(lines)


def test_errors_are_below_the_table():
    lines = report.table([row(OneDevice(), ranks=1), row(), row(Zero(), "no memory\nat all")])
    assert "zero failed: no memory at all" in lines
    assert "was fastest" in " ".join(lines)


def test_the_picture_has_a_bar_and_a_line_for_each_strategy(tmp_path):
    rows = [row(OneDevice(), ranks=1), row(), row(Zero(), "no memory")]
    path = tmp_path / "compare.svg"
    report.write_all(rows, CompareOptions(Given({}), picture=path))
    written = path.read_text()
    parse(written)
    assert written.count('class="area"') == 3 * 2
    assert written.count('class="line"') == 2
    assert "2 mirrored" in written


# --- real runs ------------------------------------------------------------------------------------


def test_a_failed_comparison_ends_with_code_1(monkeypatch, capsys, tmp_path):
    path = tmp_path / "compare.json"
    line = ["--strategies", "mirrored", "--lr", "1e30", "--epochs", "1", "--json", str(path)]
    code = partial(command, monkeypatch, 2, *line, "--hidden", "9", main=turns.main)
    assert code() == [1, 1]
    assert "mirrored failed: train: the loss is nan" in capsys.readouterr().out
    assert [json.loads(text)["error"][:6] for text in path.read_text().splitlines()] == [
        "train:"
    ] * 2


@pytest.mark.mpi
def test_a_comparison_over_mpi(tmp_path):
    words = "mirrored,parameter_server:staleness=none,local_sgd:every=2"
    line = ["compare", "-n", "2", "--strategies", words, "--epochs", "2", "--hidden", "16"]
    more = ["--json", "found.json", "--plot", "found.svg", "--compute-ms", "2", "--slowdown", "1:2"]
    run = partial(subprocess.run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    done = run([sys.executable, "-m", "ringreduce", *line, *more, "--jitter", "0.3"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(text) for text in (tmp_path / "found.json").read_text().splitlines()]
    assert [(each["ranks"], each["servers"]) for each in records] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 0),
    ]
    assert [each["idle"] > 0 for each in records] == [False, True, True, True]
    assert records[2]["staleness_max"] >= 1
    assert "holds least" in done.stdout
    parse((tmp_path / "found.svg").read_text())
