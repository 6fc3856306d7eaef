"""The live line: on a terminal, without one, and under mpiexec, through the command line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from ringreduce.console.terminal import LiveLine, print_error, terminal_of
from tests.support.mpi import environment, mpiexec
from tests.support.terminal import (
    BENCH,
    TRAIN,
    Screen,
    faults_of_bench,
    faults_of_training,
    on_a_terminal,
    ours,
)

# --- the model of a terminal ----------------------------------------------------------------------


def screen(text: str, columns: int = 20) -> Screen:
    replayed = Screen(columns)
    replayed.feed(text)
    return replayed


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\r\ntwo", ["one", "two"]),
        ("one\rtw", ["twe"]),
        ("[##] 1\r\x1b[Krow\r\n[##] 2", ["row", "[##] 2"]),
        ("[##] 1row\r\n", ["[##] 1row", ""]),
        ("a" * 25, ["a" * 20, "a" * 5]),
        ("a" * 25 + "\r\x1b[Kb", ["a" * 20, "b"]),
        ("one\ntwo", ["one", "   two"]),
    ],
)
def test_the_model_ends_with_the_lines_of_a_terminal(text, lines):
    assert screen(text).lines == lines


def test_the_model_keeps_what_was_shown():
    assert screen("one\r\x1b[Ktwo\r\x1b[Kthree\r\n").shown == ["one", "two", "three", "three"]


def test_the_model_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown control sequence"):
        screen("\x1b[2J")


BAR = "[██    ] 1 of 5 sizes"
ROW = "   8   one_shot   1.00  1.00  1.00  1.00  1.00  1.00  1.00  1.00   0"
ENDED = "epoch 4/4  loss 0.10  held-out 9.0 %  1,000 samples/s  exposed 9 %"


@pytest.mark.parametrize(
    ("faults", "text", "fault"),
    [
        (faults_of_bench, f"{BAR}{ROW}\r\n", "left over"),
        (faults_of_bench, f"{ROW}\r\n{BAR}", "left over"),
        (faults_of_bench, f"{ROW}\r\n" * 5, "0 of 5 bars"),
        (faults_of_training, f"epoch 1/4  step 9/45  loss 0.1{ENDED}\r\n\r\n", "left over"),
        (faults_of_training, f"{ENDED}\r\naccuracy 9.0 %\r\n", "shown 0 times"),
    ],
)
def test_a_shared_line_and_a_missing_one_are_noticed(faults, text, fault):
    assert any(fault in found for found in faults(screen(text, 200)))


# --- the live line --------------------------------------------------------------------------------

COLUMNS = 30


@pytest.fixture
def terminal(monkeypatch) -> Iterator[tuple[TextIO, Callable[[], Screen]]]:
    """A stream that leads to a terminal of 30 columns, and a function that reads its screen."""
    monkeypatch.setenv("TERM", "xterm")
    shows, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 10, COLUMNS, 0, 0))
    os.set_blocking(shows, False)

    def read() -> Screen:
        replayed = Screen(COLUMNS)
        with contextlib.suppress(BlockingIOError):
            while True:
                replayed.feed(os.read(shows, 1 << 16).decode())
        return replayed

    with open(end, "w") as stream:
        yield stream, read
    os.close(shows)


def test_printed_lines_are_above_the_live_line(terminal):
    stream, read = terminal
    live = LiveLine(stream)
    live.show("a long text of progress")
    live.print("row 1", "row 2")
    live.show("short")
    assert read().lines == ["row 1", "row 2", "short"]


def test_the_live_line_is_gone_at_the_end(terminal):
    stream, read = terminal
    with contextlib.suppress(KeyError), LiveLine(stream) as live:
        live.show("progress")
        live.print("row")
        raise KeyError
    assert read().lines == ["row", ""]


def test_the_live_line_takes_one_line_of_a_narrow_terminal(terminal):
    stream, read = terminal
    live = LiveLine(stream)
    for number in range(3):
        live.show(f"{number}" * (2 * COLUMNS))
    assert read().lines == ["2" * (COLUMNS - 1)]


def test_an_error_takes_the_place_of_the_live_line(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    live = LiveLine(stream)
    live.show("progress of a run")
    print_error("error: no")
    live.show("more")
    assert read().lines == ["error: no", "more"]


def test_a_terminal_that_cannot_clear_a_line_has_no_live_line(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream, read = terminal
    with LiveLine(stream) as live:
        live.show("progress")
        live.print("row")
    assert read().lines == ["row", ""]


def test_a_file_has_no_live_line(tmp_path):
    with open(tmp_path / "out", "w") as file, LiveLine(file) as live:
        live.show("progress")
        live.print("row")
    assert (tmp_path / "out").read_text() == "row\n"


def test_what_is_no_file_leads_to_no_terminal(capsys):
    assert terminal_of(sys.stdout) is None


# --- under mpiexec --------------------------------------------------------------------------------

FAULTS = {"bench": faults_of_bench, "train": faults_of_training}


def theirs(command: tuple[str, ...], ranks: int) -> list[str]:
    """Return the same command for an mpiexec of the user's."""
    name, *options = command
    program = [sys.executable, "-m", f"ringreduce.{name}", *options]
    return [mpiexec(), "-n", str(ranks), *program]


@pytest.mark.few(2)
@pytest.mark.mpi
@pytest.mark.parametrize("started", [ours, theirs])
@pytest.mark.parametrize("command", [BENCH, TRAIN], ids=["bench", "train"])
def test_no_line_of_a_terminal_is_shared_and_the_live_line_is_shown(command, started, tmp_path):
    code, said = on_a_terminal(started(command, 2), 110, tmp_path, environment())
    assert code == 0, said
    assert FAULTS[command[0]](screen(said, 110)) == []


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize("command", [TRAIN, BENCH], ids=["train", "bench"])
def test_there_is_no_live_line_beside_the_tags_of_ranks(command, tmp_path):
    code, said = on_a_terminal([*ours(command, 2), "--tag-output"], 110, tmp_path, environment())
    assert code == 0, said
    assert "\x1b" not in said


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize("command", [TRAIN, BENCH], ids=["train", "bench"])
def test_in_a_file_there_is_no_live_line(command, tmp_path):
    """Also if standard error is a terminal, and where the MPI gives each rank a terminal."""
    script = f'exec "$@" >{tmp_path}/out'
    code, said = on_a_terminal(
        ["bash", "-c", script, "bash", *ours(command, 2)], 110, tmp_path, environment()
    )
    assert code == 0, said
    assert said == ""
    assert "\x1b" not in (tmp_path / "out").read_text()


@pytest.mark.mpi
def test_a_rank_that_writes_into_a_file_of_its_own_shows_no_live_line(tmp_path):
    launcher, n, ranks, *program = theirs(TRAIN, 2)
    redirected = ["bash", "-c", f'exec "$@" >{tmp_path}/$$', "bash", *program]
    code, said = on_a_terminal([launcher, n, ranks, *redirected], 110, tmp_path, environment())
    assert code == 0, said
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert len(written) == 2
    assert "accuracy" in "".join(written)
    assert "\x1b" not in "".join(written)


# --- what cannot be encoded -----------------------------------------------------------------------

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SETTINGS = [*({"PYTHONIOENCODING": name} for name in ("ascii", "latin-1", "gbk")), C_LOCALE]
COMMANDS = [
    "ringreduce explain -n 4",
    "ringreduce explain -n 2 --pipeline 1f1b",
    "ringreduce train --strategy help",
    "ringreduce completion bash",
    "ringreduce.train --epochs 1 --hidden 4",
    "ringreduce.train --help",
]


@pytest.mark.few(5)
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: next(iter(each.values())))
def test_a_command_replaces_what_its_output_cannot_encode(setting, command):
    argv = [sys.executable, "-m", *command.split()]
    ended = subprocess.run(argv, env=os.environ | setting, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_lines_of_a_users_program_replace_it_too(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict")
    monkeypatch.setattr(sys, "stderr", out)
    with LiveLine(out) as live:
        live.print("[██] µs \udcff")
    print_error("µ → \udcff")
    out.seek(0)
    assert out.read() == "[??] µs ?\nµ ? ?\n"


@pytest.mark.parametrize("closed", [None, io.StringIO()])
def test_an_error_without_a_standard_error_is_dropped(monkeypatch, closed):
    if closed is not None:
        closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    print_error("lost")
