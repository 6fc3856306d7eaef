"""Is anybody looking?  Under mpiexec a rank writes into a pipe, whatever that leads to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

_STARTERS = ("mpiexec", "mpiexec.hydra", "mpirun", "prterun", "orterun")
_TERMINALS = ("/dev/pts/", "/dev/tty")


def leads_to_a_terminal(stream: TextIO) -> bool:
    """Whether what this process writes there is shown on a terminal.

    That is, if the stream is one; or if that of the same number is, of the mpiexec on this host
    that started this process and passes on what it writes.
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
