"""Find out whether a terminal shows the output: under mpiexec a rank writes into a pipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

_STARTERS = ("mpiexec", "mpiexec.hydra", "mpirun", "prterun", "orterun")
_TERMINALS = ("/dev/pts/", "/dev/tty")


def leads_to_a_terminal(stream: TextIO) -> bool:
    """Whether a terminal shows what this process writes to `stream`.

    Either the stream is a terminal, or the stream with the same number of the mpiexec on this host
    is, which started this process and passes its output on.
    """
    if stream.isatty():
        return True
    process = os.getppid()
    while process > 1:
        here = Path(f"/proc/{process}")
        try:
            if (here / "comm").read_text().strip() in _STARTERS:
                return os.readlink(here / "fd" / str(stream.fileno())).startswith(_TERMINALS)
            process = int((here / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or is another user's
            return False
    return False
