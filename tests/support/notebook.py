"""Execute the notebook among the examples.  As a program, write its outputs into its file:

python -m tests.support.notebook
"""

from __future__ import annotations

import nbformat
from nbclient import NotebookClient

from tests.support.mpi import ROOT

NOTEBOOK = ROOT / "examples/ranks_as_threads.ipynb"
LIMIT_S = 300.0


def read() -> nbformat.NotebookNode:
    """Return the notebook as it stands in its file."""
    return nbformat.read(NOTEBOOK, as_version=4)


def execute() -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a new run.  Raises CellExecutionError."""
    notebook = read()
    metadata = notebook.metadata.copy()
    client = NotebookClient(notebook, timeout=LIMIT_S, record_timing=False, coalesce_streams=True)
    client.execute()
    notebook.metadata = metadata  # without the version of this Python
    return notebook


if __name__ == "__main__":
    nbformat.write(execute(), NOTEBOOK)
