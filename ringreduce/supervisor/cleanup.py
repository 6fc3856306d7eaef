"""Remove the files that an MPI job leaves behind when it ends badly.

Most are files in shared memory: 2 MiB with MPICH, 16 MiB a rank with Open MPI.  The /dev/shm of a
container has 64 MiB.  The files of Intel MPI and of UCX have a name only for a moment, and keep it
if the rank is killed then.  The memory of ringreduce itself never has a name: the kernel frees it
with the last process that maps it.

A file is removed only if it is a regular file of this user with a name that an MPI gives, no
process has it open or mapped, and the kernel confirms that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ringreduce.console.terminal import print_error
from ringreduce.system.proc import file_names_of, name_of, running

SHARED_MEMORY = Path("/dev/shm")
HYDRA_FILES = Path("/tmp")
"""Where MPICH's process manager, hydra, writes a description of the machine for its ranks."""

_SHARED_MEMORY_NAME = re.compile(
    r"mpich_shm_[0-9a-f]+_\d+"  # MPICH
    r"|ucx_shm_posix_[0-9a-f]+"  # MPICH, with UCX
    r"|Intel_MPI_\w{6}"
    r"|(sm|vader)_segment\..+\.\d+\.[0-9a-f]+\.\d+"  # Open MPI: host, user, job, rank
)
_HYDRA_NAME = re.compile(r"hydra_hwloc_xmlfile_\w{6}")
_HYDRA_PROCESSES = ("hydra_", "mpiexec")
"""The names of hydra's processes begin with these words."""
DYING_S = 1.0
"""Seconds to wait for ranks that end a moment after their mpiexec."""


def abandoned_files(
    *, since: float = 0.0, directory: Path = SHARED_MEMORY, hydra_files: Path = HYDRA_FILES
) -> dict[Path, int]:
    """Return the bytes of each of this user's files of MPI jobs that are gone.

    Older files than `since` (Unix time) are left out.  A file of hydra counts as abandoned only
    while no process of hydra runs: the ranks open it for a moment alone, at any time of their
    start.
    """
    found = list(_written(directory, _SHARED_MEMORY_NAME, since))
    if not _hydra_runs():
        found += _written(hydra_files, _HYDRA_NAME, since)
    sizes = {}
    for path in sorted(found):
        with contextlib.suppress(OSError), _lease(path) as file:
            sizes[path] = os.fstat(file).st_size
    used = _in_use({path.name for path in sizes}) if sizes else set()  # some ms for each process
    return {path: nbytes for path, nbytes in sizes.items() if path.name not in used}


def remove_abandoned_files(
    *, since: float = 0.0, directory: Path = SHARED_MEMORY, hydra_files: Path = HYDRA_FILES
) -> dict[Path, int]:
    """Remove the abandoned files; return them with their sizes in bytes."""
    removed = {}
    found = abandoned_files(since=since, directory=directory, hydra_files=hydra_files)
    for path, nbytes in found.items():
        with contextlib.suppress(OSError), _lease(path):
            path.unlink()
            removed[path] = nbytes
    return removed


def clean_up_job(
    pid: int,
    *,
    since: float,
    directory: Path = SHARED_MEMORY,
    hydra_files: Path = HYDRA_FILES,
    dying_s: float = DYING_S,
) -> None:
    """Remove the files of the job whose mpiexec, process `pid`, has ended.

    The job began at `since` (Unix time).  Waits at most `dying_s` seconds for its ranks to end.
    A file that another process has open stays.  No error of the clean-up is raised: it is not
    worth a job.
    """
    deadline = time.monotonic() + dying_s
    try:
        remove_abandoned_files(since=since, directory=directory, hydra_files=hydra_files)
        # Ranks whose mpiexec was killed end a moment after it.  Until then their files are open.
        while any(_written(directory, _SHARED_MEMORY_NAME, since)) and time.monotonic() <= deadline:
            time.sleep(0.05)
            remove_abandoned_files(since=since, directory=directory, hydra_files=hydra_files)
        shutil.rmtree(_session_directory(pid), ignore_errors=True)
    except Exception as error:
        print_error(f"ringreduce: files of the job are left in {directory}: {error!r}")


def remove_stale_session_directory() -> None:
    """Remove the session directory of an earlier mpiexec that had the process id of this process.

    For a process that is about to become mpiexec.  Open MPI's mpiexec names its session
    directory by its process id, leaves it behind if it is killed, and does not start if it
    finds one of this host.
    """
    with contextlib.suppress(Exception):  # it runs between fork and exec
        left = _session_directory(os.getpid())
        if left.stat().st_uid == os.geteuid() and any(left.glob(f"pmix.{platform.node()}.*")):
            shutil.rmtree(left)


def _session_directory(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"ompi.{pid}"


def _written(directory: Path, name: re.Pattern[str], since: float) -> Iterator[Path]:
    """Yield the regular files of this user with such a name, written after `since`."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if name.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                    if mine and status.st_mtime >= since:
                        yield Path(entry)


def _in_use(names: set[str]) -> set[str]:
    """Return which names, without folders, are those of files that processes have open or mapped.

    Some processes cannot be inspected.  `_lease` asks the kernel, which knows of them too.
    """
    return {name for process in running() for name in file_names_of(process) if name in names}


def _hydra_runs() -> bool:
    for process in running():
        with contextlib.suppress(OSError):
            if name_of(process).startswith(_HYDRA_PROCESSES):
                return True
    return False


@contextlib.contextmanager
def _lease(path: Path) -> Iterator[int]:
    """Open a file with a write lease, and yield its descriptor.

    The kernel refuses the lease (OSError) if any process, of any user or container, has the
    file open or mapped.  A process that opens the file waits until the lease ends.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The kernel signals that another process waits.  Its usual signal would end this process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield file
    finally:
        os.close(file)
