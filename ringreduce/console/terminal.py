"""A live line: progress on the last line of a terminal, also under mpiexec.

A rank writes into a pipe, and mpiexec passes it on.  It passes standard output and standard error
on separately, in any order.  So a program draws its live line and prints its results through one
`LiveLine`, on one stream.  Every write first clears the line that the cursor is in.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Self, TextIO

from ringreduce.system.proc import PARENT, file_of, name_of, stat_of, words_of

_STARTERS = (
    "mpiexec",
    "mpiexec.hydra",
    "mpiexec.mpich",
    "mpiexec.openmpi",
    "mpirun",
    "prterun",
    "orterun",
    "prted",
    "orted",
)
"""Programs that start ranks, and read what they write."""
RELAYED_BY = "RINGREDUCE_RELAYED_BY"
"""Variable: the process id of a launcher that reads the standard output of its mpiexec; or ""."""
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_TAGS = {b"-prepend-rank", b"-l", b"--tag-output", b"--output"}
"""Options with which mpiexec writes the rank before each line, or writes to files."""
_CLEAR = "\r\x1b[K"
"""Moves the cursor to the first column and clears the line."""
_COLUMNS = 80
"""Columns of a terminal of unknown width."""


class LiveLine:
    """A line of progress below the printed lines; without a terminal there is no such line.

    A context manager, whose end removes the line.  While it is open, all output to `out` goes
    through `print`.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = terminal_of(out)
        self._text = ""

    @property
    def is_shown(self) -> bool:
        """Whether there is a terminal."""
        return self._terminal is not None

    def show(self, text: str) -> None:
        """Show `text` as the live line, cut to the width of the terminal; "" removes the line."""
        if self._terminal is not None and (text or self._text):
            self._text = text[: _columns(self._terminal) - 1]
            self._write(_CLEAR + self._text)

    def print(self, *lines: str) -> None:
        """Print `lines` above the live line."""
        text = "".join(f"{line}\n" for line in lines)
        self._write(f"{_CLEAR}{text}{self._text}" if self._text else text)

    def _write(self, text: str) -> None:
        # In one write, or mpiexec could pass on a part of it.
        self._out.write(_encodable(text, self._out))
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")


def replace_unencodable() -> None:
    """Have standard output replace characters that its encoding lacks.  For commands of ours."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _encodable(text: str, out: TextIO) -> str:
    """Return `text` with "?" for characters that the encoding of `out` lacks."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def print_error(text: str) -> None:
    """Print `text` to standard error; on a terminal it takes the place of a live line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
        clear = "" if terminal_of(sys.stderr) is None else _CLEAR
        sys.stderr.write(_encodable(f"{clear}{text}\n", sys.stderr))
        sys.stderr.flush()


def terminal_of(stream: TextIO) -> Path | None:
    """Return the terminal that shows what this process writes to `stream`; None if there is none.

    In a job the stream leads to mpiexec, and it is the stream of mpiexec with the same number that
    may be a terminal.  (Open MPI's mpiexec gives each rank a terminal of its own, in place of a
    pipe.)  None also for a terminal that cannot clear a line, and for an mpiexec that writes the
    rank before each line.
    """
    try:
        descriptor = stream.fileno()
        file, mpiexec = file_of("self", descriptor), _mpiexec()
        if mpiexec is not None and not file.is_file():
            reader = int(stat_of(mpiexec)[PARENT])
            is_relayed = descriptor == 1 and str(reader) == os.environ.get(RELAYED_BY)
            file = file_of(reader if is_relayed else mpiexec, descriptor)
            if not _TAGS.isdisjoint(words_of(mpiexec)):
                return None
        is_terminal = os.readlink(file).startswith(_TERMINALS)
    except OSError:  # `stream` is no file, or mpiexec has ended or is another user's
        return None
    return file if is_terminal and os.environ.get("TERM") != "dumb" else None


def _mpiexec() -> int | None:
    """Return the process id of the mpiexec that started this process; None without one.

    Raises OSError if a process on the way has ended.
    """
    process = os.getppid()
    while process > 1:
        if name_of(process) in _STARTERS:
            return process
        process = int(stat_of(process)[PARENT])
    return None


def _columns(terminal: Path) -> int:
    """Return the width of `terminal` in characters."""
    try:
        number = os.open(terminal, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(number).columns or _COLUMNS
        finally:
            os.close(number)
    except OSError:  # it is another user's, or was closed
        return _COLUMNS
