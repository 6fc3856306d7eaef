"""Every public name: what its docstring has, that its example runs, and what `help` shows."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import pydoc
import re
import sys
import typing
from operator import attrgetter

import numpy as np
import pytest

import ringreduce as rr
from tests.support.each import each
from tests.support.mpi import ROOT, mpiexec, output_of
from tests.support.public import PACKAGES, entries, facts, lacking, names

ENTRIES = dict(entries())
WITH_EXAMPLE = {name: value for name, value in ENTRIES.items() if not isinstance(value, property)}
OVER_MPI = {
    name: value
    for name, value in WITH_EXAMPLE.items()
    if any(f"rr.{made}(" in value.__doc__ for made in ("init", "elastic", "wrap"))
}


def run_example(value: object) -> list[str]:
    """Return the differences between the printed and the stated output of an example."""
    test = doctest.DocTestParser().get_doctest(
        value.__doc__, {"np": np, "rr": rr}, value.__name__, None, None
    )
    found: list[str] = []
    assert test.examples
    doctest.DocTestRunner(verbose=False).run(test, out=found.append)
    return found


@each("name", ENTRIES)
def test_a_docstring_lacks_nothing(name):
    assert lacking(name, ENTRIES[name]) == []


@pytest.mark.parametrize("name", [n for n in WITH_EXAMPLE if n not in OVER_MPI])
def test_an_example_prints_what_the_docstring_says(name):
    assert run_example(WITH_EXAMPLE[name]) == []


@pytest.mark.mpi
def test_examples_over_mpi_print_what_the_docstrings_say():
    code = (
        "from tests.test_public import OVER_MPI, run_example; "
        "found = [*map(run_example, OVER_MPI.values())]; assert not any(found), found"
    )
    output_of([mpiexec(), "-n", "2", sys.executable, "-c", code], ROOT)


def test_all_public_names_are_looked_at():
    assert {
        "init",
        "Communicator.all_reduce",
        "Work.wait",
        "train.shard",
        "train.strategies.Zero",
    } <= ENTRIES.keys()
    assert OVER_MPI
    inner = {f"{name}.{n}" for name in PACKAGES for n in attrgetter(name)(rr).__all__}
    assert names().keys() == {*rr.__all__, *inner} - {*PACKAGES}


def test_a_public_class_names_the_module_that_users_import_it_from():
    for name, value in names().items():
        if isinstance(value, type):
            assert value.__module__ == ".".join(["ringreduce", *name.split(".")[:-1]]), name


def test_help_shows_the_public_names_and_no_inner_module():
    text = pydoc.render_doc(rr, renderer=pydoc.plaintext)
    # pydoc itself lists the files of every package.
    before, _, after = text.partition("PACKAGE CONTENTS")
    shown = before + after[after.index("CLASSES") :]
    for name in set(rr.__all__) - {*PACKAGES}:
        assert re.search(rf"^ +(class )?{name}\b", shown, re.M), name
    # The types of two settings, `Profile` and `Memory`, are named with their modules.
    assert set(re.findall(r"ringreduce\.([a-z]\w+)", shown)) <= {"schedules", "config", *PACKAGES}


def test_tools_can_read_the_types_of_the_settings():
    hints = typing.get_type_hints(rr.Config)
    assert hints.keys() == {field.name for field in dataclasses.fields(rr.Config)}


# --- and would be found ---------------------------------------------------------------------------


def without_parts(x: int) -> int:
    """Says something."""


def complete(x: int) -> int:
    """Return `x` twice.

    Args:
        x: a number.

    Returns:
        The double.

    Raises:
        TypeError: it is no number.

    Example:
        >>> 1 + 1
        3
    """


@pytest.mark.parametrize(("line", "text"), [("'a b'", "a b"), ("...", ""), ("x", "")])
def test_a_string_alone_is_the_text_of_a_field(line, text):
    assert facts._string(ast.parse(line).body[0]) == text


def test_what_a_docstring_lacks_is_listed():
    found = lacking("without_parts", without_parts)
    assert found == ["argument x", "Returns", "Raises", "an example"]


@pytest.mark.parametrize(
    ("part", "lacks"),
    [
        ("        x: a number.\n", ["argument x"]),
        ("    Returns:\n        The double.\n", ["Returns"]),
        ("    Raises:\n        TypeError: it is no number.\n", ["Raises"]),
        ("        >>> 1 + 1\n        3\n", ["an example"]),
    ],
)
def test_each_missing_part_is_listed(monkeypatch, part, lacks):
    assert lacking("complete", complete) == []
    monkeypatch.setattr(complete, "__doc__", complete.__doc__.replace(part, ""))
    assert lacking("complete", complete) == lacks


def test_a_wrong_example_is_found():
    assert run_example(complete)
