"""Sections of the output of `ringreduce explain`, with an empty line before each."""

from __future__ import annotations

from collections.abc import Sequence


def print_section(*lines: str) -> None:
    """Print an empty line and then the lines."""
    print("", *lines, sep="\n")


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
