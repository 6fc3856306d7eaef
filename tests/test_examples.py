"""Every example runs, most on two ranks, and prints what its docstring says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import ringreduce as rr
from tests.support.mpi import ROOT, output_of

FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
COMMAND = [sys.executable, "-m", "ringreduce"]
MOST_LINES = 59
INDENTED = re.compile(r"(?:^    .*\n)+", re.M)
DOCUMENTED = {
    "ringreduce.algorithms": {"build"},
    "ringreduce.picture": {"to_svg"},
    "ringreduce.schedules.check": {"check"},
    "ringreduce.schedules.draw": {"draw"},
    "ringreduce.schedules.schedule": {"Recv", "Send", "Step"},
}
"""What a page of `docs/` imports from inside the package, for algorithms of one's own."""


def names(path: Path) -> str:
    return path.name


def docstring(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None, path
    return text + "\n"


def command_and_output(path: Path) -> tuple[str, str]:
    """The two indented blocks of a docstring."""
    command, output = INDENTED.findall(docstring(path))
    return command.strip(), re.sub("^    ", "", output, flags=re.M)


def pattern(output: str) -> str:
    """A pattern for a printed text, in which … stands for a number with spaces before it."""
    return re.sub(r"(\\ )+…", r" +[\\d.]+", re.escape(output))


# --- the scripts ----------------------------------------------------------------------------------


def one_after_another(paths: Iterable[Path | str]) -> str:
    """A program that runs others, each of which makes a communicator of its own."""
    lines = (f"runpy.run_path({str(path)!r}, run_name='__main__')" for path in paths)
    return "\n".join(["import runpy", *lines])


TOGETHER = pytest.param(SCRIPTS[:-1], id="in one job on two ranks")
ALONE = [pytest.param([path], id=path.name, marks=pytest.mark.long) for path in SCRIPTS]


@pytest.mark.mpi
@pytest.mark.parametrize("paths", [TOGETHER, *ALONE])
def test_examples_print_what_their_docstrings_say(paths, tmp_path):
    command, _ = command_and_output(paths[0])
    if len(paths) > 1:
        (tmp_path / "each.py").write_text(one_after_another(paths))
        command = "ringreduce run -n 2 each.py"
    (tmp_path / "examples").symlink_to(FOLDER)
    printed = output_of([*COMMAND, *command.split()[1:]], tmp_path)
    output = "".join(command_and_output(path)[1] for path in paths)
    assert re.fullmatch(pattern(output), printed), f"wanted:\n{output}\nprinted:\n{printed}"
    pictures = {name for path in paths for name in re.findall(r"\w+\.svg", docstring(path))}
    assert all((tmp_path / name).read_text().startswith("<svg") for name in pictures)


@pytest.mark.parametrize("path", SCRIPTS, ids=names)
def test_an_example_is_started_on_two_ranks_unless_it_needs_a_mesh(path):
    command, _ = command_and_output(path)
    ranks = {"strategies.py": 4}.get(path.name, 2)
    assert command == f"ringreduce run -n {ranks} examples/{path.name}"


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "slurm.sh"], ids=names)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", SCRIPTS, ids=names)
def test_an_example_uses_public_names_alone(path):
    tree = ast.parse(path.read_text())
    assert set(inner_imports(tree)) <= {(m, name) for m in DOCUMENTED for name in DOCUMENTED[m]}
    assert set(attributes_of("rr", tree)) <= {*rr.__all__, "train"}
    assert set(attributes_of("rr.train", tree)) <= set(rr.train.__all__)


def inner_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringreduce"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.startswith("ringreduce."))


def attributes_of(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name:
            yield node.attr


def test_the_pages_document_what_examples_import():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for module, members in DOCUMENTED.items():
        imported = re.findall(rf"^from {re.escape(module)} import (.+)$", pages, re.M)
        assert members <= {name for line in imported for name in line.split(", ")}, module


def test_three_edits_lead_from_mpi4py():
    before, after = (code(FOLDER / f"from_mpi4py_{which}.py") for which in ("before", "after"))
    edits = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(edits) == 3, edits
    outputs = {command_and_output(FOLDER / f"from_mpi4py_{w}.py")[1] for w in ("before", "after")}
    assert len(outputs) == 1


def code(path: Path) -> list[str]:
    """The lines of a script without its docstring and without empty lines."""
    return [line for line in path.read_text().split('"""\n', 1)[1].splitlines() if line]


# --- the folder -----------------------------------------------------------------------------------


def test_the_table_lists_every_example():
    page = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \| .+ \| `.*examples/(\S+)` \|$", page, re.M)
    assert all(len(set(row)) == 1 for row in rows), rows
    listed = [name for name, _, _ in rows]
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert sorted(listed) == sorted(files - {"README.md"})


# --- the job of a cluster -------------------------------------------------------------------------

SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames node" ] && echo localhost\n'
SRUN = '#!/bin/bash\nexport SLURM_NODEID=0\nuntil [ -x "$1" ]; do shift; done\nexec "$@"\n'
"""Stands for Slurm's command that starts a process on a node: here it is this host."""


def test_bash_can_read_the_slurm_script():
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)


@pytest.mark.mpi
def test_the_slurm_script_starts_an_example_on_the_nodes_of_its_job(tmp_path):
    (tmp_path / "examples").symlink_to(FOLDER)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ringreduce").write_text(f'#!/bin/bash\nexec {" ".join(COMMAND)} "$@"\n')
    (tmp_path / "ringreduce").chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    printed = output_of(["bash", "examples/slurm.sh"], tmp_path, PATH=path, **job)
    assert printed == command_and_output(FOLDER / "mean_of_gradients.py")[1]
