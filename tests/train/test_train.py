"""Training: ranks compared with one rank, the times of messages, and the command line."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.parallel import sampler
from ringreduce.train import (
    DriftError,
    Epoch,
    Settings,
    Trainer,
    check_equal,
    load,
    load_split,
    loop,
    mlp,
    optimizers,
    train,
)
from ringreduce.train.__main__ import main
from ringreduce.train.progress import Progress, heading, last_line, results
from ringreduce.train.results import Result
from ringreduce.train.strategies import Hybrid, table, to_plain
from tests.support.mpi import ROOT
from tests.support.rounding import (
    SIZES,
    loss_and_layers,
)
from tests.support.trainer import command

# --- ranks together ----------------------------------------------------------------------------

FLOAT64 = Settings(hidden=(20, 15), dtype="float64")


def test_running_means_are_the_same_on_every_rank_and_follow_the_batches():
    split = load_split(np.float64)
    settings = replace(FLOAT64, epochs=1, batch=600, batch_norm=True, noise=0.0, lr=1e-12)

    def run(comm):
        trainer = Trainer(comm, split, settings)
        trainer.run()
        return {n: a for n, a in trainer.arrays().items() if n.startswith("running/")}

    first, second = rr.spawn(run, 2)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    # Parameters hardly change, and the batches of 600, 600 and 238 samples count alike.
    layer = mlp.views(mlp.init_params(SIZES, 0, np.float64, batch_norm=True), SIZES, True)[0]
    values = split.train_x[sampler.order(1438, 0, 1)] @ layer.weight
    batches = [values[start : start + 600] for start in (0, 600, 1200)]
    for name, of in (("mean", np.mean), ("variance", np.var)):
        wanted = np.mean([of(batch, axis=0) for batch in batches], axis=0)
        assert np.allclose(first[f"running/0.{name}"], wanted, rtol=1e-6, atol=1e-9)


def test_the_time_of_normalising_counts_as_exposed_communication():
    def run(comm):
        told = Told()
        trainer = Trainer(comm, load_split(), Settings(epochs=1, batch=500, batch_norm=True))
        trainer.run([told])
        return told.all_steps[-1], trainer._part.reducer.times, trainer._part._normalising.seconds

    for step, of_gradients, normalising_s in rr.spawn(run, 2):
        assert normalising_s > 0
        assert step.exposed_s == of_gradients.exposed_s + normalising_s
        assert step.communication_s == of_gradients.communication_s + normalising_s


@pytest.mark.parametrize(
    ("ranks", "longest"), [(1, 0.0), (2, 0.0), (2, 0.1), (3, 0.0), (3, 0.1), (5, 0.0)]
)
def test_parameters_are_the_same_on_every_rank(ranks, longest):
    settings = Settings(epochs=1, batch=200, clip=longest)
    results = rr.spawn(train, ranks, load_split(), settings)
    assert {result.digest for result in results} == {
        hashlib.sha256(result.parameters.tobytes()).hexdigest() for result in results
    }
    assert len({result.digest for result in results}) == 1
    assert len({result.accuracy for result in results}) == 1


def drift(comm, culprits):
    parameters = np.arange(100, dtype=np.float32)
    if comm.rank in culprits:
        parameters[17] = np.nextafter(parameters[17], np.float32(np.inf))
    try:
        return check_equal(comm, parameters)
    except DriftError as error:
        return str(error)


@pytest.mark.parametrize(
    ("ranks", "culprits", "named"),
    [(4, (2,), "rank 2"), (4, (0,), "rank 0"), (5, (1, 4), "rank 1, 4"), (2, (1,), "rank 1")],
)
def test_rank_that_drifts_by_one_bit_is_named_everywhere(ranks, culprits, named):
    messages = rr.spawn(drift, ranks, culprits)
    assert len(set(messages)) == 1
    without_digests = re.sub(r" \(\w+…\)", "", messages[0])
    assert without_digests.startswith(f"check_equal: the parameters of {named} differ from")


def test_parameters_start_as_those_of_rank_0():
    def start(comm):
        settings = Settings(hidden=(20, 15), seed=comm.rank)
        return Trainer(comm, load_split(), settings).flat

    expected = mlp.init_params(SIZES, 0)
    assert all(np.array_equal(flat, expected) for flat in rr.spawn(start, 3))


@pytest.mark.parametrize(
    ("given", "words"),
    [({"lr": 1e30}, r"loss is (nan|inf) in step \d, epoch 1,.*"), ({"lr": 1e38, "clip": 1.0}, "")],
)
def test_training_that_diverges_says_so(given, words):
    def diverge(comm):
        with pytest.raises(FloatingPointError, match=f"{words}take a smaller lr"):
            train(comm, load_split(), Settings(batch=200, **given))

    rr.spawn(diverge, 2)


@pytest.mark.slow
def test_accuracy_over_five_seeds_is_at_least_97_percent():
    split = load_split()

    def five(comm):
        return [train(comm, split, Settings(seed=seed)).accuracy for seed in range(5)]

    assert np.mean(rr.spawn(five, 1)) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5])
def test_a_rank_that_drifts_is_named_within_so_many_steps(every):
    """One bit of rank 2's parameters is changed in the middle of the run."""

    class Astray:
        def __init__(self, trainer):
            self.trainer, self.told = trainer, []

        def steps(self, steps):
            self.told += [step.step for step in steps]
            if self.told[-1] == 10:
                weight = self.trainer.store["0.weight"]
                weight.flags.writeable = True
                weight[0, 3] = np.nextafter(weight[0, 3], np.float32(np.inf))

        def epoch(self, epoch): ...

    def run(comm):
        trainer = Trainer(comm, load_split(), Settings(batch=100, check_every=every))
        watcher = Astray(trainer)
        with pytest.raises(DriftError) as error:
            trainer.run([watcher] if comm.rank == 2 else [])
        return str(error.value), trainer.state.step

    results = rr.spawn(run, 4)
    assert len(set(results)) == 1
    text, step = results[0]
    assert "parameters of rank 2 (" in text
    assert step == 10  # told of the step before they are compared


class Told:
    """A watcher that keeps all steps and epochs."""

    def __init__(self):
        self.all_steps, self.all_epochs = [], []

    def steps(self, steps):
        self.all_steps += steps

    def epoch(self, epoch):
        self.all_epochs.append(epoch)


def test_watchers_change_nothing_and_may_be_on_one_rank():
    def run(comm, watched):
        watchers = [Told()] if watched and comm.rank == 0 else []
        return train(comm, load_split(), Settings(epochs=2, batch=200), watchers=watchers).digest

    assert rr.spawn(run, 2, False) == rr.spawn(run, 2, True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_watchers_are_told(ranks):
    settings = Settings(epochs=2, batch=500, check_every=2, warm_up=3)

    def run(comm):
        told = Told()
        return train(comm, load_split(), settings, watchers=[told]), told

    for result, told in rr.spawn(run, ranks):
        assert [step.step for step in told.all_steps] == [1, 2, 3, 4, 5, 6]
        assert [step.epoch for step in told.all_steps] == [1, 1, 1, 2, 2, 2]
        assert [step.samples for step in told.all_steps] == [500, 500, 438] * 2
        assert [epoch.epoch for epoch in told.all_epochs] == [1, 2]
        for number, step in enumerate(told.all_steps):
            assert step.lr == optimizers.learning_rate(settings, number, 6)
            assert step.step_s == pytest.approx(step.compute_s + step.exposed_s)
            assert (0 < step.exposed_s < step.step_s) if ranks > 1 else step.exposed_s == 0
            assert (step.communication_s > 0) == (ranks > 1)
        for epoch in told.all_epochs:
            steps = [step for step in told.all_steps if step.epoch == epoch.epoch]
            assert epoch.loss == pytest.approx(sum(s.loss * s.samples for s in steps) / 1438)
        assert result.loss == told.all_epochs[-1].loss
        assert result.accuracy == told.all_epochs[-1].accuracy
        assert (result.exposed_s > 0) == (ranks > 1)
        assert result.efficiency == 1 - result.exposed_s / result.step_s


@pytest.mark.parametrize(
    ("epochs", "batch", "seconds", "mean_s", "rates"),
    [
        (2, 500, [90, 1, 70, 2, 3, 6], 3, [500 / 1, 1438 / 11]),  # 500, 500 and 438 samples
        (2, 1438, [90, 2], 2, [1438 / 90, 1438 / 2]),
        (1, 1438, [90], 90, [1438 / 90]),
        (1, 1000, [90, 70], 80, [1438 / 160]),
    ],
)
def test_times_leave_out_the_first_step_with_each_number_of_samples(
    epochs, batch, seconds, mean_s, rates, monkeypatch
):
    """A step of one rank looks at the clock when it begins and when it ends."""
    clock = chain.from_iterable((0.0, float(each)) for each in seconds)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=clock.__next__))

    def run(comm):
        told = Told()
        settings = Settings(epochs=epochs, batch=batch)
        return train(comm, load_split(), settings, watchers=[told]), told

    ((result, told),) = rr.spawn(run, 1)
    assert [step.step_s for step in told.all_steps] == seconds
    assert result.step_s == mean_s
    assert [epoch.samples_per_s for epoch in told.all_epochs] == rates


def test_the_loss_is_that_of_the_parameters_before_the_step():
    split = load_split(np.float64)
    settings = Settings(epochs=1, batch=1438, noise=0.0, dtype="float64")

    def run(comm):
        told = Told()
        train(comm, split, settings, watchers=[told])
        return told.all_steps[0].loss

    start = mlp.views(mlp.init_params((64, 128, 10), 0, np.float64), (64, 128, 10))
    wanted, _ = loss_and_layers(start, split.train_x, split.train_labels, 1438)
    assert rr.spawn(run, 3) == pytest.approx([wanted] * 3, rel=1e-12)


# --- messages and their times ---------------------------------------------------------------------


def test_the_first_all_reduce_begins_before_backward_ends(monkeypatch):
    """The network's last gradient is computed after the first bucket is sent."""

    def run(comm):
        trainer = Trainer(comm, load_split(), Settings(hidden=(300, 200), first_bucket_bytes=1))
        begun, events = [], []
        reduce = comm.all_reduce

        def all_reduce(*arguments, **named):
            events.append("all_reduce")
            work = reduce(*arguments, **named)
            if isinstance(work, rr.Work):
                begun.append(work)
            return work

        comm.all_reduce = all_reduce
        ready = trainer._part.reducer.ready

        def watched(name):
            events.append(name)
            if name == "0.weight":
                begun[0].wait()  # which would never end if it had to wait for this gradient
            ready(name)

        trainer._part.reducer.ready = watched
        x, labels = np.ones((8, 64), np.float32), np.zeros(8, int)
        trainer.gradients(x, labels, 8)
        return events

    for events in rr.spawn(run, 2, timeout_s=120):
        assert events.index("all_reduce") < events.index("0.weight")
        assert events[0] == "2.bias"


@pytest.mark.slow
def test_16_bits_on_the_wire_still_learn():
    def run(comm, wire):
        return train(comm, load_split(), Settings(epochs=5, wire=wire))

    plain, *others = (rr.spawn(run, 2, each)[0] for each in ("none", "bfloat16", "float16"))
    for short in others:
        assert short.parameters.dtype == np.float32
        assert short.digest != plain.digest
        assert abs(short.accuracy - plain.accuracy) < 0.03


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weight_decay_makes_parameters_smaller(optimizer):
    def run(comm, decay):
        settings = Settings(epochs=2, optimizer=optimizer, lr=0.01, weight_decay=decay)
        return train(comm, load_split(), settings).parameters

    plain, decayed = (rr.spawn(run, 1, decay)[0] for decay in (0.0, 0.1))
    assert np.linalg.norm(decayed) < 0.97 * np.linalg.norm(plain)


def test_synthetic_samples_are_learnt_as_well_as_they_can_be():
    """Centres are mostly 5.7 apart: the nearest centre is the right class but for a few percent."""
    settings = Settings(data="synthetic", samples=3000, inputs=20, epochs=5, lr=0.05)

    def run(comm):
        return train(comm, load(settings), settings).accuracy

    assert rr.spawn(run, 2)[0] > 0.9


# --- the command line --------------------------------------------------------------------------


LAST_LINE = r"accuracy \d+\.\d % in \d+\.\d\d s on \d ranks?, efficiency \d+ %"


def test_command_ends_with_the_mean_accuracy(monkeypatch, capsys):
    assert command(monkeypatch, 1, "--epochs", "3", "--seeds", "2", "--batch", "200") == [0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("digits: 1,438 to train, 359 held out; 64-128-10, 9,610 parameters")
    assert re.fullmatch(
        r"epoch 1/3  loss \d\.\d{4}  held-out \d+\.\d %  [\d,]+ samples/s  exposed \d+ %",
        next(line for line in lines if line.startswith("epoch")),
    )
    seeds = [line.split() for line in lines if line.startswith("seed")]
    assert [number for _, number, *_ in seeds] == ["0:", "1:"]
    mean = np.mean([float(accuracy) for *_, accuracy, _ in seeds])
    assert float(lines[-1].split()[1]) == pytest.approx(mean, abs=0.051)  # all are rounded
    assert re.fullmatch(rf"{LAST_LINE}, mean of 2 seeds", lines[-1])


def test_the_page_shows_the_last_line_as_it_is_printed():
    page = (ROOT / "docs/training.md").read_text()
    assert re.search(f"`{LAST_LINE}`", page)


@pytest.mark.parametrize("ranks", [1, 2])
def test_command_ends_with_parameters_a_step_and_the_accuracy(ranks, monkeypatch, capsys):
    command(monkeypatch, ranks, "--epochs", "1")
    digest, step, last = capsys.readouterr().out.splitlines()[-3:]
    assert re.fullmatch(r"parameters [0-9a-f]{16}…", digest)
    assert re.fullmatch(r"a step: \d+\.\d\d ms", step)
    assert re.fullmatch(LAST_LINE, last)
    assert f" on {ranks} rank{'s' * (ranks > 1)}, " in last


def test_results_are_those_of_the_run():
    run = Result(None, "80e1c5d87bf96a2c77", 0.1, 0.9893, 0.004, 0.002, 0.001, 3000, 2_000_000)
    assert (
        results(run, verbose=False, computing=2) == "parameters 80e1c5d87bf96a2c…\na step: 4.00 ms"
    )
    assert results(run, verbose=True, computing=2).splitlines()[2:] == [
        "  3.00 ms of computation, 1.00 ms of exposed communication",
        "  communication is under way for 2.00 ms",
        "  rank 0 sends 3,000 bytes a step, holds at most 2,000,000 bytes",
    ]


def test_lost_ranks_are_named_last():
    run = Result(None, "80e1", 0.1, 0.98, 0.0, 0.0, 0.0, lost=((1, 2), (4, 3)))
    assert results(run, verbose=True, computing=4).splitlines()[1:] == [
        "rank 1, a worker, was lost in epoch 2",
        "rank 4, a server, was lost in epoch 3",
    ]


def test_the_lines_of_training_fit_80_columns():
    out = io.StringIO()
    Progress(999, 45, out).epoch(Epoch(999, 2.5, 1.0, samples_per_s=1_234_567.0, exposed=1.0))
    run = Result(None, "80e1c5d8", 0.1, 1.0, 9.9, 9.8, 9.7, 10**9, 10**11)
    comm, split = SimpleNamespace(size=64), load(Settings())
    strategy = Hybrid(data=4, pipeline=4, tensor=4, splits=64, schedule="zero_bubble")
    said = heading(comm, split, Settings(hidden=(512,) * 9), strategy, verbose=False)
    lines = [*out.getvalue().splitlines(), *results(run, verbose=True, computing=2).splitlines()]
    lines += [*said.splitlines(), *table().splitlines()]
    assert max(map(len, lines)) <= 80


def test_last_line_has_accuracy_time_ranks_and_efficiency():
    runs = [
        Result(None, "", 0.1, accuracy, step_s, 0.002, 0.001)
        for accuracy, step_s in ((0.98, 0.004), (0.99, 0.006))
    ]
    lines = rr.spawn(lambda comm: (last_line(comm, runs[:1], 1.234), last_line(comm, runs, 2)), 2)
    assert lines[0] == (
        "accuracy 98.0 % in 1.23 s on 2 ranks, efficiency 75 %",
        "accuracy 98.5 % in 2.00 s on 2 ranks, efficiency 80 %, mean of 2 seeds",
    )


def test_a_run_without_steps_has_no_time_of_a_step_and_no_efficiency():
    run = Result(None, "80e1c5d87bf96a2c77", 0.1, 0.98, 0.0, 0.0, 0.0)
    assert results(run, verbose=True, computing=2) == "parameters 80e1c5d87bf96a2c…"
    (line,) = rr.spawn(lambda comm: last_line(comm, [run], 0.5), 1)
    assert line == "accuracy 98.0 % in 0.50 s on 1 rank"


def settings_shown(text):
    """The settings between the heading and the first epoch, as TOML."""
    return tomllib.loads("\n".join(line for line in text.splitlines() if line.startswith("  ")))


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ((), {}),
        (("--batch", "200", "--noise", "0"), {"batch": 200, "noise": 0.0}),
        (("--hidden", "128"), {}),
        (("--hidden", "30", "20", "--seed", "4"), {"hidden": [30, 20], "seed": 4}),
    ],
)
def test_only_settings_that_are_not_the_defaults_are_shown(flags, shown, monkeypatch, capsys):
    command(monkeypatch, 1, "--epochs", "1", *flags)
    assert settings_shown(capsys.readouterr().out) == {"epochs": 1} | shown


def test_all_settings_are_shown_if_verbose(monkeypatch, capsys):
    command(monkeypatch, 1, "--epochs", "1", "--verbose")
    before = capsys.readouterr().out.partition("\nepoch")[0]
    assert settings_shown(before) == to_plain(Settings(epochs=1))


def test_command_fails_with_a_message_when_training_diverges(monkeypatch, capsys):
    assert command(monkeypatch, 1, "--lr", "1e30", "--batch", "200") == [1]
    assert "take a smaller lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--epochs 2.5", "invalid int value: '2.5'"),
        ("--batch 0", "batch is 0; wanted at least 1"),
        ("--wire float32", "unknown value 'float32'; wanted one of none, bfloat16"),
        ("--weight-decay -1", "weight_decay is -1.0; wanted a finite number of at least 0"),
        ("--warm-up -1", "warm_up is -1; wanted at least 0"),
        ("--check-every -1", "check_every is -1; wanted at least 0"),
        ("--bucket-bytes 0", "bucket_bytes is 0; wanted at least 1"),
        ("--keep 0", "keep is 0; wanted at least 1"),
        ("--checkpoint-every -5", "checkpoint_every is -5; wanted at least 0"),
        ("--lr nan", "lr is nan; wanted a finite number above 0"),
        ("--lr inf", "lr is inf; wanted a finite number above 0"),
        ("--noise -1", "noise is -1.0; wanted a finite number of at least 0"),
        ("--clip -1", "clip is -1.0; wanted a finite number of at least 0"),
        ("--hidden 64 0", "hidden is (64, 0); wanted widths of at least 1"),
        ("--seed -1", "seed is -1; wanted at least 0"),
        ("--seeds 0", "seeds is 0; wanted at least 1"),
        ("--dtype int8", "unknown value 'int8'; wanted one of float32, float64"),
    ],
)
def test_command_refuses_bad_values_before_it_starts(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(rr, "init", lambda: pytest.fail("started"))
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_command_refuses_an_unknown_algorithm(monkeypatch, capsys):
    assert command(monkeypatch, 1, "--algorithm", "quick") == [2]
    assert "unknown algorithm 'quick'; choose one of 'auto', 'ring'" in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "ranks"), [((), 1), (("-m", "ringreduce.launch.cli", "run", "-n", "2"), 2)]
)
def test_command_runs_alone_and_under_mpi(launcher, ranks):
    command = [sys.executable, *launcher, "-m", "ringreduce.train", "--epochs", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"\n{ranks} rank" in ended.stdout
    assert re.fullmatch(LAST_LINE, ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(("epochs", "lines"), [(1, 1), (7, 7), (30, 10), (95, 10)])
def test_progress_elsewhere_is_a_few_lines(epochs, lines):
    out = io.StringIO()
    progress = Progress(epochs, 45, out)
    for number in range(1, epochs + 1):
        progress.epoch(Epoch(number, 0.5, 0.875, samples_per_s=1234.5, exposed=0.25))
    written = out.getvalue().splitlines()
    assert len(written) == lines
    assert written[-1] == (
        f"epoch {epochs}/{epochs}  loss 0.5000  held-out 87.5 %  1,234 samples/s  exposed 25 %"
    )
