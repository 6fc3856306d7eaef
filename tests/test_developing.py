"""The pages for developers say what is there: packages, functions, words, programs."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.mpi import ROOT
from tests.support.mutations import MUTATIONS

DOCS = ROOT / "docs"
PACKAGE = ROOT / "ringreduce"
PAGE = (DOCS / "developing.md").read_text()
DEEP = ("shared-memory", "breaking-off", "recovery-levels")


def section(title: str) -> str:
    """Return the text below a heading, up to the next one of its kind."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return found


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of a table, without its head."""
    lines = re.findall(r"^\|(.*)\|$", text, re.M)[2:]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_bug_of_the_first_ten_minutes_is_a_planted_one():
    bug = MUTATIONS[0]
    assert f"'s|{bug.old}|{bug.new}|' ringreduce/{bug.file}" in section("Ten minutes")


@pytest.mark.parametrize("page", ["developing", *DEEP])
def test_the_files_that_a_page_names_exist(page):
    names = set(re.findall(r"`([\w/]+/\w+\.py)[`:]", (DOCS / f"{page}.md").read_text()))
    assert len(names) > 1
    missing = {n for n in names if not any((ROOT / top / n).exists() for top in ("", "ringreduce"))}
    assert missing == set()


# --- the house ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_list_of_packages_is_made_of_their_first_lines(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    block = importlib.import_module("house").block()
    assert f"<!-- house -->\n\n{block}\n\n<!-- end -->" in PAGE


def test_first_lines_are_short():
    said = {head: does for head, does, _ in rows(section("The house"))}
    assert {head: does for head, does in said.items() if not 20 < len(does) <= 90} == {}


# --- walks ----------------------------------------------------------------------------------------

STEPS = re.findall(r"`([\w/]+\.py):([\w.]+)`", section("Walks") + section("What always holds"))


@cache
def functions(path: Path) -> set[str]:
    """Return the functions and classes of a file, and the methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("file", "name"), dict.fromkeys(STEPS))
def test_a_function_of_a_walk_is_there(file, name):
    assert name in functions(PACKAGE / file)


def test_every_step_of_a_walk_names_a_function():
    text = section("Walks")
    assert len(re.findall(r"^### ", text, re.M)) == 6
    steps = re.findall(r"^\d+\. (`[\w/]+\.py:)?", text, re.M)
    assert len(steps) > 60
    assert all(steps)


# --- what to run ----------------------------------------------------------------------------------

TABLE = rows(section("What to run when you changed what"))


def test_every_package_has_a_row_of_what_to_run():
    changed = [name for row in TABLE for name in re.findall(r"`(\w+)`", row[0])]
    here = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(changed) == sorted(here)


def test_what_to_run_is_there_and_has_its_command():
    commands = (DOCS / "commands.md").read_text()
    for row in TABLE:
        for path in re.findall(r"`(tests/[\w/.]+)`", row[1]):
            assert (ROOT / path).exists(), path
        for program in re.findall(r"`([\w.]+)`", " ".join(row[2:])):
            place = ROOT / program.replace(".", "/")
            assert place.is_dir() or place.with_suffix(".py").exists(), program
            assert re.search(rf"-m {re.escape(program)}\b", commands), program


# --- words ----------------------------------------------------------------------------------------


def words() -> list[tuple[str, str]]:
    """Return each word of the glossary, with its package."""
    found, package = [], ""
    for head, terms, meaning in rows(section("Glossary")):
        package = head.strip("`") or package
        assert meaning
        found += [(package, term.strip("`")) for term in terms.split(", ")]
    return found


@cache
def text_of(package: str) -> str:
    """Return the sources of a package: underscores are spaces."""
    sources = "\n".join(path.read_text() for path in (PACKAGE / package).rglob("*.py"))
    return re.sub(r"\s+", " ", sources.replace("_", " ")).lower()


@pytest.mark.parametrize(("package", "word"), words())
def test_a_package_uses_the_words_that_the_glossary_gives_it(package, word):
    assert re.search(rf"\b{re.escape(word.replace('_', ' ').lower())}", text_of(package))


def test_meanings_are_short():
    long = {terms: meaning for _, terms, meaning in rows(section("Glossary"))}
    assert {terms: m for terms, m in long.items() if len(m.split()) > 8} == {}
