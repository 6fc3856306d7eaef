"""A program on a terminal of its own: what it showed, and what is left when it has ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LIMIT_S = 600
_CONTROL = re.compile(r"\r|\n|\x1b\[K|[^\r\n\x1b]+")


@dataclass
class Screen:
    """A terminal that knows carriage returns, line feeds and the end of a line erased.

    Raises ValueError for any other control sequence.
    """

    columns: int
    lines: list[str] = field(default_factory=lambda: [""])
    """The lines from the first; the last one has the cursor."""
    shown: list[str] = field(default_factory=list)
    """What a line showed each time that the cursor left it or went back to its beginning."""
    _column: int = 0

    def feed(self, text: str) -> None:
        """Replay `text`."""
        at = 0
        while at < len(text):
            part = _CONTROL.match(text, at)
            if part is None:
                raise ValueError(f"unknown control sequence {text[at : at + 8]!r}")
            at = part.end()
            self._replay(part[0])

    def _replay(self, part: str) -> None:
        if part == "\x1b[K":
            self.lines[-1] = self.lines[-1][: self._column]
        elif part == "\r":
            self.shown.append(self.lines[-1])
            self._column = 0
        elif part == "\n":
            self._next_line(self._column)
        else:
            for character in part:
                if self._column == self.columns:
                    self._next_line(0)
                line = self.lines[-1].ljust(self._column)
                self.lines[-1] = line[: self._column] + character + line[self._column + 1 :]
                self._column += 1

    def _next_line(self, column: int) -> None:
        self.shown.append(self.lines[-1])
        self.lines.append("")
        self._column = column


def on_a_terminal(
    command: Sequence[str], columns: int, folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a command on a pseudo-terminal; return its exit code, and all that it wrote there."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    job = subprocess.Popen(
        ["timeout", str(_LIMIT_S), *command],
        cwd=folder,
        env={**environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    said = b""
    with (
        open(terminal, "rb", buffering=0) as shown,
        contextlib.suppress(OSError),  # Linux raises this error once the other end is closed
    ):
        while part := shown.read(1 << 16):
            said += part
    return job.wait(), said.decode()


BAR = re.compile(r"\[█* *\] \d+ of \d+ sizes?")
ROW = re.compile(r" +\d+ +[a-z_]+( +[\d.e-]+){6,} +\d+")
"""The line of a size in the table of `ringreduce bench`."""
EPOCH = re.compile(
    r"epoch +\d+/\d+  loss [\d.]+  held-out [\d.]+ %  [\d,]+ samples/s  exposed \d+ %"
)
STEP = re.compile(r"epoch +\d+/\d+  step +\d+/\d+  loss [\d.]+")
"""The live line of `ringreduce train`."""
BENCH = ("bench", "-b", "8", "-e", "512K", "-f", "16", "--iters", "3")
BENCH_SIZES = 5
TRAIN = ("train", "--epochs", "4", "--check-every", "9")


def ours(command: Sequence[str], ranks: int) -> list[str]:
    """Return the command line that runs `bench` or `train` on `ranks` ranks."""
    name, *options = command
    return [sys.executable, "-m", "ringreduce", name, "-n", str(ranks), *options]


def faults_of_bench(screen: Screen) -> list[str]:
    """Return what is wrong with a run of `BENCH`: a line that is shared, or was never shown."""
    found = [f"left over: {line!r}" for line in screen.lines if BAR.search(line)]
    rows = [line for line in screen.lines if ROW.fullmatch(line)]
    if len(rows) != BENCH_SIZES:
        found.append(f"{len(rows)} rows: {screen.lines}")
    bars = [line for line in screen.shown if BAR.fullmatch(line)]
    if len(set(bars)) != BENCH_SIZES:
        found.append(f"{len(set(bars))} of {BENCH_SIZES} bars were shown: {bars}")
    return found


def faults_of_training(screen: Screen) -> list[str]:
    """Return what is wrong with a run of `TRAIN`: a line that is shared, or was never shown."""
    epochs = [line for line in screen.lines if "epoch" in line and "=" not in line]
    found = []
    if [line for line in epochs if not EPOCH.fullmatch(line)] or len(epochs) != 1:
        found.append(f"left over: {epochs}")
    live = [line for line in screen.shown if STEP.match(line)]
    if len(set(live)) < 4:
        found.append(f"the live line was shown {len(set(live))} times: {live}")
    if not screen.lines[-2].startswith("accuracy "):
        found.append(f"at the end: {screen.lines[-2:]}")
    return found
