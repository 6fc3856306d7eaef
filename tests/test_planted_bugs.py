"""The list of planted bugs can be planted, and is the one in the documentation."""

from __future__ import annotations

import pytest

from tests.planted_bugs import copy_all, found_by, markdown, plant
from tests.support.each import each
from tests.support.mpi import ROOT
from tests.support.mutations import MUTATIONS


@each("mutation", MUTATIONS)
def test_its_old_text_is_found_once(mutation):
    assert mutation.occurrences() == 1
    assert mutation.old != mutation.new


def test_there_are_enough_with_names_of_their_own():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 120


def test_the_documentation_lists_them():
    assert (ROOT / "docs" / "planted-bugs.md").read_text() == markdown()


@pytest.mark.slow
def test_a_planted_bug_is_found_and_none_is_found_without(tmp_path):
    copy_all(ROOT, tmp_path)
    test = "planning/test_plan.py::test_shards_are_those_of_array_split"
    assert found_by(tmp_path, [f"tests/{test}"]) == ""
    plant(next(m for m in MUTATIONS if m.name == "shards-longer-at-the-end"), tmp_path)
    assert found_by(tmp_path, [f"tests/{test}"]) == test
