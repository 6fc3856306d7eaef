"""A job of the proofs: its processes, its events, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.mpi import ROOT, alive_in_the_end, events_of

SILENCE_S = 90.0
"""Seconds without the next event after which a job counts as hanging."""
HELD = {"launcher_files": 0, "launcher_mappings": 8, "ranks_files": 0, "ranks_mappings": 8}
"""Names of the numbers that `Job.held` returns -> by how many each may grow.

The number of mappings of a process depends on when its threads begin, and on where memory is free.
A mapping left by each of hundreds of losses would be more than 8.
"""
_END_S = 600.0
"""Seconds from `Job.end` on after which a job counts as hanging; it may have steps left."""
_SHARED = Path("/dev/shm")
_SETTLING_S = 5.0
"""Seconds in which a job must give up what a change has needed."""


class Job:
    """A job of ``ringreduce run --elastic`` or ``train --elastic``, which ends with the block.

    All its files are in a folder.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        *words: str,
        program: Sequence[str | Path] = (),
        command: str = "run",
    ) -> None:
        self.folder = folder
        self._before = set(os.listdir(folder)) | {"events", "errors", "stop"}
        self._shared = set(os.listdir(_SHARED))
        self._events = self.folder / "events"
        self._pids: list[int] = []
        ours = [sys.executable, "-m", "ringreduce", command, "-n", str(ranks), *words]
        self.process = subprocess.Popen(
            [*ours, "--events", str(self._events), *program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=open(self.folder / "errors", "w"),  # noqa: SIM115  # mpiexecs share it
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        if kind is not None:
            print((self.folder / "errors").read_text()[-9000:], file=sys.stderr)

    def ranks_of(self, generation: int) -> list[int]:
        """Wait until a generation trains; return the process ids of its ranks."""
        pids: list[int] = self.event("started", generation)["pids"]
        self._pids += pids
        return pids

    def event(self, kind: str, generation: int) -> dict[str, Any]:
        """Wait for an event of a generation."""
        return self._await(
            f"{kind} of generation {generation}",
            lambda: (
                event
                for event in events_of(self._events, kind)
                if event["generation"] == generation
            ),
        )

    def _await(self, what: str, find: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline:
            if (event := next(find(), None)) is not None:
                return event
            if self.process.poll() is not None:
                sys.exit(f"the job ended with {self.process.returncode}")
            time.sleep(0.003)
        sys.exit(f"no {what} within {SILENCE_S:g} s")

    def recovered(self, generation: int, lost: Collection[int]) -> dict[str, Any]:
        """Wait for the first step of a later generation without `lost`; return its event."""
        return self._await(
            f"a step after generation {generation}",
            lambda: (
                event
                for event in events_of(self._events, "resized")
                if event["generation"] > generation
                and event["recovered_s"] is not None
                and not set(lost) & set(self.ranks_of(event["generation"]))
            ),
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        return events_of(self._events, kind)

    def started_after(self, generation: int) -> dict[str, Any]:
        """Wait until a later generation trains, and return its event."""
        return self._await(
            f"a generation after {generation}",
            lambda: (e for e in self.events("started") if e["generation"] > generation),
        )

    def settle(self) -> None:
        """Wait until the last generation has made a step."""
        self._await(
            "a step of the last generation",
            lambda: (
                event
                for event in self.events("started")[-1:]
                if event["generation"] == 1
                or event["generation"] in [e["generation"] for e in self.events("resized")]
            ),
        )

    def scale(self, size: int) -> subprocess.Popen[str]:
        """Start `ringreduce scale`, which waits until the job has so many ranks."""
        return subprocess.Popen(
            [sys.executable, "-m", "ringreduce", "scale", str(self.process.pid), str(size)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )

    def ranks(self) -> list[int]:
        """Return the process ids of all ranks, also of those that start."""
        return [pid for pid in descendants(self.process.pid) if is_rank(pid)]

    def held(self, ranks: Collection[int] = ()) -> tuple[int, ...]:
        """Return the numbers of open files and of mappings of the launcher.

        With process ids of ranks also the most files and the most mappings of one of these.
        """
        of_launcher = held_by(self.process.pid)
        if not ranks:
            return of_launcher
        files, mappings = zip(*map(held_by, ranks), strict=True)
        return *of_launcher, max(files), max(mappings)

    def check_held(self, before: Sequence[int], ranks: Collection[int] = ()) -> tuple[int, ...]:
        """Return what the launcher and these ranks hold.  Exits if it is more than before."""
        deadline = time.monotonic() + _SETTLING_S
        most = [then + varies for then, varies in zip(before, HELD.values(), strict=False)]
        held = self.held(ranks)
        while any(now > limit for now, limit in zip(held, most, strict=True)):
            if time.monotonic() > deadline:
                sys.exit(f"{', '.join(HELD)}: {before} before, now {held}")
            time.sleep(0.05)
            held = self.held(ranks)
        return held

    def end(self) -> str:
        """Wait for the end; return the output.  Exits if the job fails or leaves something."""
        output, _ = self.process.communicate(timeout=_END_S)
        if self.process.returncode != 0:
            sys.exit(f"the job ended with {self.process.returncode}")
        if left := alive_in_the_end(self._pids):
            sys.exit(f"processes are left: {left}")
        deadline, files = time.monotonic() + SILENCE_S, self._new_files()
        while files and time.monotonic() < deadline:  # other jobs have files for a moment
            time.sleep(0.05)
            files &= self._new_files()
        if files:
            sys.exit(f"files are left: {sorted(files)}")
        return output

    def _new_files(self) -> set[str]:
        """Return the files that were not there before, in the job's folder and in memory."""
        in_memory = set(os.listdir(_SHARED)) - self._shared
        return in_memory | (set(os.listdir(self.folder)) - self._before)


def held_by(pid: int) -> tuple[int, int]:
    """Return the numbers of open files and of mappings of a process."""
    process = Path(f"/proc/{pid}")
    return len(os.listdir(process / "fd")), len((process / "maps").read_text().splitlines())


def descendants(pid: int) -> list[int]:
    """Return the process ids of all processes below this one."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_rank(pid: int) -> bool:
    """Return whether a process is a rank of a job, and not its mpiexec."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    code = b"".join(words[2:3])
    return b"python" in words[0] and b"ringreduce.launch.rank_main" in code


def check_counts(output: str) -> dict[str, Any]:
    """Return what `tests.long_recovery.counting` has printed.  Exits if a count is wrong.

    The mpiexec of a generation whose rank was killed may print its own lines later.
    """
    counts = [line for line in output.splitlines() if line.startswith('{"')]
    if len(counts) != 1:
        sys.exit(f"the job has not printed its counts, but {output!r}")
    found: dict[str, Any] = json.loads(counts[0])
    if found["least"] != found["epochs"] or found["most"] != found["epochs"]:
        sys.exit(f"samples are lost or counted twice: {found}")
    return found


def parameters(output: str) -> str:
    """Return the line of a trainer's output with the hash of the parameters."""
    return next(line for line in output.splitlines() if line.startswith("parameters "))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share of the values is."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
