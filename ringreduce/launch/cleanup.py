"""What MPI jobs that ended badly leave behind: shared-memory files that nobody has open.

MPICH leaves 2 MiB, Open MPI 16 MiB a rank.  A container's /dev/shm has 64 MiB.
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


def abandoned(*, since: float = 0.0, directory: Path = SHARED_MEMORY) -> list[Path]:
    """This user's MPI files, written after `since` (Unix time), that no process has open."""
    mine = {path for path in _mpi_files(directory) if _written(path, since)}
    return sorted(mine - _in_use(mine)) if mine else []


def remove_leftovers(pid: int, *, since: float, directory: Path = SHARED_MEMORY) -> None:
    """Remove what the job of the mpiexec with id `pid` has left, once its ranks are gone.

    `pid` has ended; `since` is when the job started.  What other processes use is left alone.
    """
    deadline = time.monotonic() + _DYING_S
    while True:
        for path in abandoned(since=since, directory=directory):
            path.unlink(missing_ok=True)
        written = (path for path in _mpi_files(directory) if _written(path, since))
        # Ranks whose mpiexec was killed die a moment after it; their files are still in use.
        if not any(written) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    shutil.rmtree(_session_directory(pid), ignore_errors=True)


def remove_own_session_directory() -> None:
    """Before this process becomes mpiexec: remove what another has left that had its id.

    Open MPI's names its session directory by its id, leaves it if it is killed, and does not start
    where there is one of this host.
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
    """Those of `paths` that a process has open or mapped, as far as we may look."""
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
