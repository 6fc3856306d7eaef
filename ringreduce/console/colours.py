"""Colour the texts that a terminal shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

_GREEN, _RED, _YELLOW, _BOLD = "32", "31", "33", "1"


@dataclass(frozen=True)
class Colours:
    """Functions that colour a text.

    >>> Colours(enabled=True).good("ok")
    '\\x1b[32mok\\x1b[0m'
    """

    enabled: bool
    """Whether the functions colour.  If not, they return the text as it is."""

    @classmethod
    def of(cls, stream: TextIO, *, variables: Mapping[str, str] = os.environ) -> Colours:
        """Return the colours for texts that are written to `stream`.

        They are enabled if `stream` is a terminal.  The variable NO_COLOR disables them, and
        FORCE_COLOR enables them.  Both count if they are set and not empty, and NO_COLOR comes
        first.
        """
        if variables.get("NO_COLOR"):
            return cls(enabled=False)
        if variables.get("FORCE_COLOR"):
            return cls(enabled=True)
        return cls(enabled=stream.isatty() and variables.get("TERM") != "dumb")

    def good(self, text: str) -> str:
        """Return `text` in green: a proof, the algorithm taken, a passed check."""
        return self._painted(text, _GREEN)

    def bad(self, text: str) -> str:
        """Return `text` in red: an error."""
        return self._painted(text, _RED)

    def doubtful(self, text: str) -> str:
        """Return `text` in yellow: a problem that does not stop ringreduce."""
        return self._painted(text, _YELLOW)

    def strong(self, text: str) -> str:
        """Return `text` in bold letters."""
        return self._painted(text, _BOLD)

    def _painted(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled and text else text
