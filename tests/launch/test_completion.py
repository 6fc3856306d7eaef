"""A shell completes commands, options, and the values of options."""

from __future__ import annotations

import io
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringreduce.algorithms import ALGORITHMS
from ringreduce.bench.inputs import OPS
from ringreduce.bench.options import read as read_bench
from ringreduce.launch import cli
from ringreduce.launch.completion import complete, script
from ringreduce.launch.example_call import ExplainRequest, PipelineRequest
from ringreduce.pipeline.generators import SCHEDULES
from ringreduce.train.strategies import STRATEGIES
from tests.support.mpi import ROOT

Completed = Callable[[str], list[str]]


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Completed:
    """Completes the last word of a line in a folder with the file file.py and the folder plots."""
    (tmp_path / "file.py").touch()
    (tmp_path / "plots").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("argcomplete.CompletionFinder._init_debug_stream", lambda self: None)
    for name, value in {"": "1", "_SUPPRESS_SPACE": "1", "_IFS": "\n"}.items():
        monkeypatch.setenv(f"_ARGCOMPLETE{name}", value)
    monkeypatch.setenv("_ARGCOMPLETE_COMP_WORDBREAKS", " \t\n\"'><=;|&(:")  # those of bash

    def complete_line(line: str) -> list[str]:
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        out = io.StringIO()
        how: dict[str, Any] = {"exit_method": lambda code: None, "output_stream": out}
        complete(*cli.parsers(), cli.options_module, **how)
        return out.getvalue().split()

    return complete_line


HELP = ["-h", "--help"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ringreduce exp", ["explain"]),
        ("ringreduce --v", ["--version"]),
        ("ringreduce doctor ", [*HELP, "--clean"]),
        ("ringreduce completion ", ["bash", "zsh", "fish", *HELP]),
        ("ringreduce explain --al", ["--algorithm"]),
        ("ringreduce explain -n 2 --tr", ["--trace", "--transport"]),
        ("ringreduce explain --transport ", ["shm", "mpi"]),
        ("ringreduce explain --collective all_", ["all_reduce", "all_gather", "all_to_all"]),
        ("ringreduce explain --collective=all_g", ["all_gather"]),
        ("ringreduce explain --collective=", [*ALGORITHMS]),
        ("ringreduce explain --algorithm ", ["auto", *ALGORITHMS["all_reduce"]]),
        ("ringreduce explain --algorithm=hier", ["hierarchical"]),
        ("ringreduce explain --collective all_gather --algorithm b", ["bruck"]),
        (
            "ringreduce explain --collective=broadcast --algorithm ",
            ["auto", *ALGORITHMS["broadcast"]],
        ),
        ("ringreduce explain --pipeline ", [*SCHEDULES]),
        ("ringreduce explain --pipeline=zero", ["zero_bubble"]),
        ("ringreduce explain --pipeline 1f1b --st", ["--stages"]),
        ("ringreduce explain --stages ", []),
        ("ringreduce explain -n ", []),
        ("ringreduce explain --svg ", ["file.py", "plots/"]),
        ("ringreduce bench -n 2 -o m", ["mean", "min", "max"]),
        ("ringreduce bench --collective re", ["reduce_scatter", "reduce"]),
        ("ringreduce bench --collective reduce --algorithm do", ["double_tree"]),
        ("ringreduce bench -n 2 --no", ["--nodes", "--no-peers"]),
        ("ringreduce train -n 2 --opt", ["--optimizer"]),
        ("ringreduce train -n 2 --optimizer ", ["sgd", "adam"]),
        ("ringreduce train --strategy ", ["auto", *STRATEGIES, "help"]),
        ("ringreduce search --data s", ["synthetic"]),
        ("ringreduce train -n 2 --checkpoint-dir pl", ["plots/"]),
        ("ringreduce search -n 2 --for ", ["split_size", "batch", "mesh"]),
        ("ringreduce search -n 2 --budg", ["--budget-s"]),
        ("ringreduce search -n 2 --plot pl", ["plots/"]),
        ("ringreduce run -", [*HELP, "-n", "-np", "--ranks", "--hosts", "--nodes"]),
        ("ringreduce run -n 2 --ta", ["--tag-output"]),
        ("ringreduce run -n=2 --ta", ["--tag-output"]),
        ("ringreduce run --hosts h1:2 --ta", ["--tag-output"]),
        ("ringreduce run -n 2 fi", ["file.py"]),
        ("ringreduce run -n 2 file.py --ta", []),
        ("ringreduce run -n 2 file.py pl", ["plots/"]),
        ("ringreduce run -n 2 file.py explain --algorithm ", ["file.py", "plots/"]),
    ],
)
def test_a_line_is_completed(completed: Completed, line: str, words: list[str]) -> None:
    found = completed(line)
    assert sorted(found) == sorted(words) if line[-1] != "-" else set(words) <= set(found)


@pytest.mark.parametrize(
    "command", ["run", "train", "search", "bench", "explain", "doctor", "completion"]
)
def test_every_option_of_a_command_is_offered(completed: Completed, command: str) -> None:
    parser = cli.parsers()[1][command]
    assert set(parser._option_string_actions) <= set(completed(f"ringreduce {command} -"))


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_explain_takes_every_algorithm_that_is_offered(
    completed: Completed, collective: str
) -> None:
    for name in completed(f"ringreduce explain --collective {collective} --algorithm "):
        ExplainRequest(ranks=2, collective=collective, algorithm=name)


def test_explain_takes_every_pipeline_that_is_offered(completed: Completed) -> None:
    for name in completed("ringreduce explain --pipeline "):
        PipelineRequest(name, ranks=2, splits=2)


def test_explain_takes_every_dtype_that_is_offered(completed: Completed) -> None:
    dtypes = completed("ringreduce explain --dtype ")
    assert len(dtypes) > 3
    for dtype in dtypes:
        ExplainRequest(ranks=2, dtype=dtype)


@pytest.mark.parametrize("option", ["-o", "-d", "--collective"])
def test_bench_takes_every_word_that_is_offered(completed: Completed, option: str) -> None:
    words = completed(f"ringreduce bench {option} ")
    assert len(words) > 3
    for word in words:
        integers = ["-d", "int32"] if option == "-o" and word not in ("mean", "avg") else []
        read_bench([option, word, *integers], "bench")


def test_every_op_is_offered(completed: Completed) -> None:
    assert set(completed("ringreduce bench -o ")) == {*OPS, "avg"}


def test_bash_completes_at_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "completion.bash").write_text(script("bash"))
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(tmp_path)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        set_ = {"TERM": "dumb", "PS1": "$ ", "PATH": path, "PYTHONPATH": str(ROOT)}
        os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, **set_})
    try:
        read_until(terminal, "$ ")
        for typed, shown in (
            (b"source ./completion.bash\n", "$ "),
            (b"ringreduce exp\t", "explain "),
            (b"--collective all_g\t", "all_gather "),
            (b"--algorithm br\t", "bruck "),
        ):
            os.write(terminal, typed)
            read_until(terminal, shown)
    finally:
        os.close(terminal)
        os.kill(shell, 9)
        os.waitpid(shell, 0)


def read_until(terminal: int, wanted: str) -> None:
    """Read what a terminal shows; raise AssertionError if that lacks `wanted`."""
    shown, deadline = "", time.monotonic() + 180
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096).decode()


def test_fish_shows_what_a_word_means(
    completed: Completed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_ARGCOMPLETE_SHELL", "fish")
    monkeypatch.setenv("_ARGCOMPLETE_DFS", "\t")
    assert completed("ringreduce bench --without")[:3] == ["--without-mpi", "start", "the"]


SHELLS = ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(script(shell))
    ended = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == script(shell)
    assert "complete " in printed


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["completion", "tcsh"])
    assert stop.value.code == 2
    assert "bash" in capsys.readouterr().err
