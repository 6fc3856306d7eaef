"""Lines that fit the terminal, or 80 columns, and sections of them after an empty line."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence


def columns() -> int:
    return shutil.get_terminal_size().columns


def wrapped(text: str, indent: int = 4) -> str:
    """Wrap the lines of `text` to the terminal; a continued line begins with `indent` spaces."""
    return "\n".join(
        line
        if len(re.sub(r"\x1b\[\d+m", "", line)) <= columns()
        else textwrap.fill(line, columns(), subsequent_indent=" " * indent, break_on_hyphens=False)
        for line in text.splitlines()
    )


def print_section(*lines: str) -> None:
    print("", *map(wrapped, lines), sep="\n")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as columns: the first is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
