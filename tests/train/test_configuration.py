"""Settings from the command line and TOML: precedence, refused values, and output."""

from __future__ import annotations

import dataclasses
import re
import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringreduce.launch import cli
from ringreduce.train.configuration import FIELDS, from_plain, read, read_toml, to_toml
from ringreduce.train.settings import DTYPES, OPTIMIZERS, WIRES, Outputs, Settings
from ringreduce.train.strategies import STRATEGIES, options, to_plain


def toml(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


# --- precedence -----------------------------------------------------------------------------------


def test_nothing_said_is_the_default():
    given = read([])
    assert given.settings() == Settings()
    assert given.outputs() == Outputs()


def test_the_command_line_goes_before_the_file_and_that_before_the_default(tmp_path):
    path = toml(tmp_path, 'epochs = 7\nlr = 1\nhidden = [5, 6]\nmetrics = "m.jsonl"\n')
    given = read(["--config", str(path), "--epochs", "9"])
    assert given.settings() == Settings(epochs=9, lr=1.0, hidden=(5, 6))
    assert str(given.outputs().metrics) == "m.jsonl"


def test_what_is_asked_for_goes_before_what_a_checkpoint_says():
    before = dataclasses.asdict(Settings(lr=0.5, epochs=3, seed=8))
    assert read(["--epochs", "4"]).settings(before) == Settings(lr=0.5, epochs=4, seed=8)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--hidden", "64"], r"hidden is \(64,\), but the checkpoint was made with \(128,\)"),
        (["--batch", "16"], "batch is 16, but the checkpoint was made with 32"),
        (["--seed", "1"], "seed is 1, but"),
        (["--optimizer", "adam"], "optimizer is adam, but"),
        (["--dtype", "float64"], "dtype is float64, but"),
    ],
)
def test_what_cannot_change_in_the_middle_of_a_run_is_refused(flags, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(flags).settings(dataclasses.asdict(Settings()))


def test_saying_again_what_a_checkpoint_says_is_no_change():
    before = dataclasses.asdict(Settings(batch=16))
    assert read(["--batch", "16"]).settings(before) == Settings(batch=16)


# --- output ---------------------------------------------------------------------------------------

SURROGATES = range(0xD800, 0xE000)
CHARACTERS = st.integers(1, 127) | st.integers(128, 0x10FFFF).filter(lambda c: c not in SURROGATES)
"""Codes, for Hypothesis takes seconds to make its table of characters."""
SETTINGS = st.builds(
    Settings,
    hidden=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    epochs=st.integers(1, 9),
    optimizer=st.sampled_from(OPTIMIZERS),
    wire=st.sampled_from(WIRES),
    lr=st.floats(1e-9, 1e9),
    noise=st.floats(0, 1e30),
)


@pytest.mark.slow
@given(SETTINGS, st.lists(CHARACTERS.map(chr), max_size=20).map("".join))
@example(Settings(), '\x7f\x1f"\\é😀')
def test_what_is_printed_is_toml_that_gives_the_same_settings(settings, data):
    """No folder has such a name: it is compared before Settings are made of it."""
    table = tomllib.loads("\n".join(to_toml(to_plain(settings) | {"data": data})))
    values = {name: from_plain(name, value) for name, value in table.items()}
    assert values.pop("data") == data
    assert Settings(**values) == settings


def test_a_file_as_printed_can_be_read_again(tmp_path):
    settings = Settings(epochs=2, hidden=(3, 4), lr=0.125)
    path = toml(tmp_path, "\n".join(to_toml(to_plain(settings))))
    assert Settings(**read_toml(path)) == settings


@pytest.mark.parametrize(
    ("program", "flags"), [(read, ["--help"]), (cli.main, ["train", "--help"])]
)
def test_every_option_is_explained(program, flags, capsys):
    with pytest.raises(SystemExit) as stop:
        program(flags)
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in FIELDS.items():
        flag = "--" + name.replace("_", "-")
        assert re.search(f" {flag}[ ,]", shown), name
        assert " ".join(field.metadata["help"].split()) in shown, name


def test_numbers_of_layers_are_a_tuple():
    values = read(["--strategy", "pipeline", "--cut", "2", "1", "--hidden", "8", "8"]).values
    assert values["cut"] == (2, 1)


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("hidden", "cut")])
def test_every_option_sets_its_field(name):
    field = FIELDS[name]
    choices = field.metadata["choices"]
    if isinstance(field.default, bool):
        flags, wanted = [], True
    elif choices:
        flags, wanted = [choices[-1]], choices[-1]
    else:
        text = {"strategy": "zero", "data": "synthetic"}.get(name, "ring")
        wanted = {int: 3, float: 0.5, str: text, type(None): "x.png"}[type(field.default)]
        flags = [str(wanted)]
    besides = ["--checkpoint-dir", "c"] if name in ("resume", "checkpoint_every") else []
    besides += ["--batch-per-rank", "2"] if name == "ramp_steps" else []
    owners = [each for each, kind in STRATEGIES.items() if name in options(kind)]
    besides += ["--strategy", *owners[:1]] if owners else []
    values = read(["--" + name.replace("_", "-"), *flags, *besides]).values
    assert type(values[name])(wanted) == values[name]


def test_a_strategy_that_is_named_is_checked_before_a_run_goes_on(capsys):
    with pytest.raises(SystemExit):
        read(["--strategy", "mirrored", "--stages", "2", "--checkpoint-dir", "c", "--resume"])
    assert "stages is an option of strategy pipeline and hybrid" in capsys.readouterr().err
