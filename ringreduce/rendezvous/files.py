"""Find the other ranks by a file: each rank adds a line, and reads those of the others.

The last rank to have read all lines removes the file.  So a path can be used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringreduce.transports.base import not_assembled

_POLL_S = 0.002
"""Seconds between two looks at the file."""


def of_file(path: str, rank: int, size: int, timeout_s: float) -> Callable[[bytes], list[bytes]]:
    def collect(mine: bytes) -> list[bytes]:
        file = _RendezvousFile(Path(path), rank, size, time.monotonic() + timeout_s)
        file.join(mine)
        while (entries := file.entries()) is None:
            if time.monotonic() > file.deadline:
                file.leave()
                raise not_assembled(timeout_s, file.missing)
            time.sleep(_POLL_S)
        return entries

    return collect


class _RendezvousFile:
    """A file of lines: `entry` has the bytes of a rank, `read` says that a rank has read all."""

    def __init__(self, path: Path, rank: int, size: int, deadline: float) -> None:
        self.deadline = deadline
        self.missing: list[int] = []
        """The ranks whose lines were not there at the last look."""
        self._path, self._rank, self._size = path, rank, size

    def join(self, mine: bytes) -> None:
        """Add this rank's line, once all have read its line of an earlier rendezvous.

        Raises ValueError if the file is of another job.
        """
        while True:
            with self._locked() as (descriptor, lines):
                ours = [line for line in lines if line["rank"] == self._rank]
                if not ours:
                    self._check_size(lines)
                    self._add(descriptor, {"entry": mine.hex(), "size": self._size})
                    return
                if not any("read" in line for line in ours) or time.monotonic() > self.deadline:
                    raise ValueError(
                        f"init: {self._path} has an entry of rank {self._rank} already; remove the "
                        "file if its job has ended, and give each job its own"
                    )
            time.sleep(_POLL_S)

    def entries(self) -> list[bytes] | None:
        with self._locked() as (descriptor, lines):
            self._check_size(lines)
            found = {line["rank"]: line["entry"] for line in lines if "entry" in line}
            self.missing = [rank for rank in range(self._size) if rank not in found]
            if self.missing:
                return None
            if sum("read" in line for line in lines) == self._size - 1:
                self._path.unlink()
            else:
                self._add(descriptor, {"read": True})
            return [bytes.fromhex(found[rank]) for rank in range(self._size)]

    def leave(self) -> None:
        """Remove this rank's line, so that a later `init` of the rank can use the file."""
        with self._locked() as (descriptor, lines):
            others = [line for line in lines if line["rank"] != self._rank]
            if not others:
                self._path.unlink()
            os.ftruncate(descriptor, 0)
            os.write(descriptor, b"".join(json.dumps(line).encode() + b"\n" for line in others))

    def _check_size(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line.get("size", self._size) != self._size:
                raise ValueError(
                    f"init: size is {self._size} on rank {self._rank}, and {line['size']} on rank "
                    f"{line['rank']}"
                )

    def _add(self, descriptor: int, line: dict[str, Any]) -> None:
        os.write(descriptor, json.dumps({"rank": self._rank, **line}).encode() + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Open and lock the file; give its descriptor, and its lines."""
        descriptor = self._opened()
        try:
            text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            yield descriptor, [self._parsed(line) for line in text.splitlines()]
        finally:
            os.close(descriptor)

    def _opened(self) -> int:
        """Return a descriptor of the file, locked.  Another rank may have removed it meanwhile."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            descriptor = os.open(self._path, flags, 0o600)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    raise ValueError(f"init: {self._path} is no file of this user; name another")
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                except OSError as error:  # ranks would overwrite each other's lines
                    raise ValueError(
                        f"init: {self._path} cannot be locked ({error.strerror}); name a file on a "
                        "disk with locks, such as one in /tmp"
                    ) from None
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case {"rank": int()} as parsed:
                    return dict(parsed)
        raise ValueError(f"init: {self._path} has other lines than those of ranks; name another")
