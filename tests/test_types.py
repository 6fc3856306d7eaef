"""The types that editors show: mypy reads what is expected, and the parameters are the code's."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.calls.collectives import Collectives
from tests.support.mpi import ROOT

EXPECTED = ROOT / "tests/typing/expected.py"
STUB = ROOT / "ringreduce/calls/signatures.pyi"


def mypy(file: Path) -> str:
    """Return what mypy prints about a file."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return done.stdout


needs_mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="needs pip install 'ringreduce[lint]'"
)


@needs_mypy
def test_mypy_finds_the_expected_types():
    assert mypy(EXPECTED) == ""


@needs_mypy
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("comm.all_reduce(x), NDArray[np.float32]", "comm.all_reduce(x), NDArray[np.float64]"),
        ("work, rr.Work[Grid]", "work, Grid"),
        ('rr.spawn(program, 2, 3, "x")', "rr.spawn(program, 2, 3)"),
        ("comm.split(0), rr.Communicator | None", "comm.split(0), rr.Communicator"),
    ],
)
def test_mypy_finds_a_type_that_is_not_expected(tmp_path, right, wrong):
    text = EXPECTED.read_text()
    assert text.count(right) == 1
    (tmp_path / "wrong.py").write_text(text.replace(right, wrong))
    assert mypy(tmp_path / "wrong.py").count("error:") == 1


def overloads() -> list[ast.FunctionDef]:
    (kind,) = (node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef))
    return [node for node in kind.body if isinstance(node, ast.FunctionDef)]


def test_every_collective_with_a_result_has_overloads():
    methods = {name for name, value in vars(Collectives).items() if inspect.isfunction(value)}
    public = {name for name in methods if not name.startswith("_")}
    assert {node.name for node in overloads()} == public - {"barrier"}


@pytest.mark.parametrize("node", overloads(), ids=lambda node: f"{node.name}-{node.lineno}")
def test_an_overload_has_the_parameters_of_the_code(node):
    parameters = inspect.signature(getattr(Collectives, node.name)).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [a.arg for a in node.args.kwonlyargs] == named
    assert [a.arg for a in node.args.args] == [p.name for p in parameters if p.name not in named]
