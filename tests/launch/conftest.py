"""Jobs that the launcher starts in a folder of their own, and what `explain` prints."""

from __future__ import annotations

import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ringreduce.launch import cli

LIMIT_S = 300.0
Said = Callable[[str], list[list[str]]]


@pytest.fixture
def script(tmp_path):
    """Writes script.py into the job's directory."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Runs `ringreduce run`, or another command, to its end in the job's directory."""
    ours = (sys.executable, "-m", "ringreduce.launch.cli", "run")

    def start(*words: str, command=ours, **settings) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words],
            **{"stdin": subprocess.DEVNULL, "cwd": tmp_path, "timeout": LIMIT_S} | settings,
            capture_output=True,
            text=True,
        )

    return start


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs `ringreduce explain`, which must end well; gives the lines of each section it prints."""

    def run(line: str) -> list[list[str]]:
        assert cli.main(["explain", *shlex.split(line)]) == 0
        text = capsys.readouterr().out
        return [section.splitlines() for section in text.rstrip("\n").split("\n\n")]

    return run
