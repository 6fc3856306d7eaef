"""Jobs that the launcher starts in a folder of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT_S = 300.0


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
