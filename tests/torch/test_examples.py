"""The examples for torch run under two launchers, and print what their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.mpi import ROOT, environment
from tests.test_examples import command_and_output, names, pattern
from tests.torch.test_backend import TORCHRUN

pytestmark = pytest.mark.torch
SCRIPTS = sorted((ROOT / "examples" / "torch").glob("*.py"))
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2"],
    "ringreduce": [sys.executable, "-m", "ringreduce", "run", "-n", "2"],
}
MOST_LINES = 69
LEAST_RIGHT = 85


@pytest.mark.few(4)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("path", SCRIPTS, ids=names)
def test_an_example_prints_what_its_docstring_says(path, launcher, tmp_path):
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(path)],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, output = command_and_output(path)
    wanted = pattern(output)
    assert re.fullmatch(wanted, done.stdout), f"wanted:\n{output}\nprinted:\n{done.stdout}"
    (right,) = re.findall(r"([\d.]+) %", done.stdout)
    assert float(right) > LEAST_RIGHT


@pytest.mark.parametrize("path", SCRIPTS, ids=names)
def test_an_example_is_short_and_says_which_line_differs_from_gloo(path):
    command, _ = command_and_output(path)
    assert command == f"torchrun --nproc-per-node 2 examples/torch/{path.name}"
    lines = path.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    (line,) = [line for line in lines if "# before: " in line]
    assert ('"ringreduce"' in line) == line.endswith('  # before: "gloo"')
