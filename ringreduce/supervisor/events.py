"""The events of a job with a supervisor: one JSON line each, in a file that grows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from ringreduce.supervisor.membership import Resize


class EventFile:
    """Writes events to `path`, if there is one, until a write fails.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = None
        self.complain: Callable[[str], None] = _nothing
        """Called with a text when an event could not be written."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # held until close

    def write(self, event: str, /, **fields: Any) -> None:
        if self._file is not None:
            line = {"event": event, **fields, "time": time.time()}
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            except OSError as error:
                self.close()
                self.complain(f"no more events are written: {error}")

    def resized(
        self,
        resize: Resize,
        recovered_s: float | None,
        step: int,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write that a generation follows another.

        `recovered_s`: seconds from the detection to the commit of step `step`; None: there
        was no commit.
        """
        self.write(
            "resized",
            **asdict(resize.change),
            detected_s=round(resize.detected_s, 6),
            recovered_s=None if recovered_s is None else round(recovered_s, 6),
            redone=resize.redone,
            step=step,
            **facts,
        )

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # of the line that could not be written
                file.close()


def _nothing(_: str) -> None: ...
