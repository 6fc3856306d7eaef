"""Remove the files that an MPI job leaves behind when it ends badly.

These are files in shared memory that no process has open: 2 MiB with MPICH, 16 MiB a rank with
Open MPI.  The /dev/shm of a container has 64 MiB.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

_PREFIXES = ("mpich_shm_", "sm_segment.", "vader_segment.")
_DYING_S = 1.0
"""Seconds to wait for ranks that end a moment after their mpiexec."""


def abandoned_files(*, since: float = 0.0, directory: Path = SHARED_MEMORY) -> list[Path]:
    """List this user's MPI files that no process has open, written after `since` (Unix time)."""
    mine = {path for path in _mpi_files(directory) if _written(path, since)}
    return sorted(mine - _in_use(mine)) if mine else []


def clean_up_job(pid: int, *, since: float, directory: Path = SHARED_MEMORY) -> None:
    """Remove the files of the job whose mpiexec had the process id `pid`, once its ranks are gone.

    The mpiexec has ended.  `since` is the Unix time at which the job started.  A file that another
    process has open stays.
    """
    deadline = time.monotonic() + _DYING_S
    while True:
        for path in abandoned_files(since=since, directory=directory):
            path.unlink(missing_ok=True)
        written = (path for path in _mpi_files(directory) if _written(path, since))
        # Ranks whose mpiexec was killed end a moment after it.  Until then their files are open.
        if not any(written) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    shutil.rmtree(_session_directory(pid), ignore_errors=True)


def remove_stale_session_directory() -> None:
    """Remove the session directory of an earlier mpiexec that had the process id of this process.

    For a process that is about to become mpiexec.  Open MPI's mpiexec names its session directory
    by its process id, leaves it behind if it is killed, and does not start if it finds one of this
    host.
    """
    with contextlib.suppress(OSError):
        left = _session_directory(os.getpid())
        if left.stat().st_uid == os.geteuid() and any(left.glob(f"pmix.{platform.node()}.*")):
            shutil.rmtree(left)


def _session_directory(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"ompi.{pid}"


def _mpi_files(directory: Path) -> Iterator[Path]:
    for prefix in _PREFIXES:
        yield from directory.glob(f"{prefix}*")


def _written(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_uid == os.geteuid() and status.st_mtime >= since
    return False


def _in_use(paths: set[Path]) -> set[Path]:
    """Return those of `paths` that a process has open or mapped, as far as this user may look."""
    used: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(errors="replace")
            used |= {path for path in paths if str(path) in maps}
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used |= {path for path in paths if os.readlink(link) == str(path)}
    return used
