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


WRONG = [
    ("comm.all_reduce(x), NDArray[np.float32]", "comm.all_reduce(x), NDArray[np.float64]"),
    ("work, rr.Work[Grid]", "work, Grid"),
    ('rr.spawn(program, 2, 3, "x")', "rr.spawn(program, 2, 3)"),
    ("comm.split(0), rr.Communicator | None", "comm.split(0), rr.Communicator"),
]
"""Right texts of `EXPECTED`, and a wrong text in the place of each."""


def mypy(*files: Path) -> str:
    """Return mypy's output about `files`."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return done.stdout


needs_mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="needs pip install 'ringreduce[lint]'"
)


@pytest.mark.slow
@needs_mypy
def test_mypy_finds_the_expected_types():
    assert mypy(EXPECTED) == ""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, list[str]]:
    """Wrong text -> the errors that mypy finds in a copy of `EXPECTED` with this text."""
    text, folder = EXPECTED.read_text(), tmp_path_factory.mktemp("wrong")
    files = {wrong: folder / f"wrong{number}.py" for number, (_, wrong) in enumerate(WRONG)}
    for right, wrong in WRONG:
        files[wrong].write_text(text.replace(right, wrong))
    found = [line for line in mypy(*files.values()).splitlines() if "error:" in line]
    return {
        wrong: [line for line in found if f"{file.name}:" in line] for wrong, file in files.items()
    }


@pytest.mark.slow
@needs_mypy
@pytest.mark.parametrize(("right", "wrong"), WRONG)
def test_mypy_finds_a_type_that_is_not_expected(errors, right, wrong):
    assert EXPECTED.read_text().count(right) == 1
    assert len(errors[wrong]) == 1


def overloads() -> list[ast.FunctionDef]:
    (kind,) = (node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef))
    return [node for node in kind.body if isinstance(node, ast.FunctionDef)]


def test_every_collective_has_overloads():
    methods = {name for name, value in vars(Collectives).items() if inspect.isfunction(value)}
    public = {name for name in methods if not name.startswith("_")}
    assert {node.name for node in overloads()} == public


@pytest.mark.parametrize("node", overloads(), ids=lambda node: f"{node.name}-{node.lineno}")
def test_an_overload_has_the_parameters_of_the_code(node):
    parameters = inspect.signature(getattr(Collectives, node.name)).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [a.arg for a in node.args.kwonlyargs] == named
    assert [a.arg for a in node.args.args] == [p.name for p in parameters if p.name not in named]
