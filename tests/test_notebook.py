"""The notebook among the examples runs, and shows the outputs that stand in its file."""

from __future__ import annotations

import nbformat
import pytest

from tests.support import notebook


def outputs(of: nbformat.NotebookNode) -> list[tuple[str, list[object]]]:
    """Each cell of code, with what it prints, returns and shows."""
    cells = [cell for cell in of.cells if cell.cell_type == "code"]
    return [(c.source, [each.get("text") or each.get("data") for each in c.outputs]) for c in cells]


@pytest.mark.slow
def test_the_notebook_shows_what_its_file_has():
    """If the outputs are to change: `python -m tests.support.notebook`."""
    assert outputs(notebook.execute()) == outputs(notebook.read())


@pytest.mark.parametrize("cell", outputs(notebook.read()), ids=lambda cell: cell[0].split("\n")[0])
def test_a_cell_of_the_notebook_shows_something(cell):
    assert cell[1]
