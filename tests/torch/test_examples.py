"""The examples for torch run under two launchers, and print what their docstrings say."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.mpi import ROOT, output_of
from tests.test_examples import command_and_output, names, one_after_another, pattern
from tests.torch.test_launchers import TORCHRUN

pytestmark = pytest.mark.torch
SCRIPTS = sorted((ROOT / "examples" / "torch").glob("*.py"))
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2"],
    "ringreduce": [sys.executable, "-m", "ringreduce", "run", "-n", "2"],
}
MOST_LINES = 69
LEAST_RIGHT = 85


TOGETHER = pytest.param(SCRIPTS, "torchrun", id="in one job")
ALONE = [
    pytest.param([path], launcher, id=f"{path.name}-{launcher}", marks=pytest.mark.long)
    for path in SCRIPTS
    for launcher in LAUNCHERS
]


@pytest.mark.parametrize(("paths", "launcher"), [TOGETHER, *ALONE])
def test_examples_print_what_their_docstrings_say(paths, launcher, tmp_path):
    (tmp_path / "each.py").write_text(one_after_another(paths))
    program = paths[0] if len(paths) == 1 else "each.py"
    printed = output_of([*LAUNCHERS[launcher], str(program)], tmp_path)
    output = "".join(command_and_output(path)[1] for path in paths)
    assert re.fullmatch(pattern(output), printed), f"wanted:\n{output}\nprinted:\n{printed}"
    assert min(map(float, re.findall(r"([\d.]+) %", printed))) > LEAST_RIGHT


@pytest.mark.parametrize("path", SCRIPTS, ids=names)
def test_an_example_is_short_and_says_which_line_differs_from_gloo(path):
    command, _ = command_and_output(path)
    assert command == f"torchrun --nproc-per-node 2 examples/torch/{path.name}"
    lines = path.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    (line,) = [line for line in lines if "# before: " in line]
    assert ('"ringreduce"' in line) == line.endswith('  # before: "gloo"')
