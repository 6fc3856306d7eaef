"""Read /proc: what the kernel says of processes, of this host and of its control groups.

Its paths are in no other module.  Names and words of processes are bytes, and may be cut.  A
process is given by its number, or as "self".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
CONTROL_GROUPS = _PROC / "self/cgroup"
"""The file with the control groups of this process."""
_STATE, PARENT, FLAGS, _THREADS, _START, _STATUS = 0, 1, 6, 17, 19, -1
"""Indices of fields of `stat_of`: see ``proc(5)``."""
_ENDED = (b"Z", b"X")
"""States of a process that is not reaped yet, and of one that is just being reaped."""
_EXITING = 0x4
"""``PF_EXITING`` in the flags of a process."""
_PROCESS_INFO = struct.Struct("Q52xi")
"""``struct pidfd_info`` of Linux: the mask of fields asked for and returned; the exit status."""
_WITH_STATUS = 1 << 3
"""``PIDFD_INFO_EXIT`` in the mask."""
_GET_PROCESS_INFO = 3 << 30 | _PROCESS_INFO.size << 16 | 0xFF << 8 | 11
"""The ioctl ``PIDFD_GET_INFO``."""


# --- processes ------------------------------------------------------------------------------------


def running() -> Iterator[int]:
    """Yield the numbers of the processes that this one sees."""
    yield from map(int, filter(str.isdigit, os.listdir(_PROC)))


def stat_of(process: int) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` behind the name: state, parent, and so on.

    The name stands in parentheses, and may have spaces, newlines and parentheses itself.  Raises
    OSError if there is no such process.
    """
    stat = _read(process, "stat").rpartition(b")")[2].split()
    if not stat:  # it ended while it was read
        raise ProcessLookupError(f"process {process} has ended")
    return stat


def name_of(process: int) -> str:
    """Return the name of a process, cut after 15 bytes.  Raises OSError if there is none."""
    return _read(process, "comm").decode("utf-8", "replace").removesuffix("\n")


def words_of(process: int) -> list[bytes]:
    """Return the words of the command line of a process.  Raises OSError if it is gone."""
    return _read(process, "cmdline").rstrip(b"\0").split(b"\0")


def command_of(process: int) -> str:
    """Return the command line of a process, with "?" for what cannot be shown; "" if it is gone."""
    try:
        text = os.fsdecode(b" ".join(words_of(process)))
    except OSError:
        return ""
    return "".join(each if each.isprintable() else "?" for each in text)


def variables_of(process: int | str) -> dict[str, str]:
    """Return the environment with which a process began its program.

    Raises OSError if the process is gone, or belongs to another user.
    """
    entries = _read(process, "environ").split(b"\0")
    return dict(os.fsdecode(each).split("=", 1) for each in entries if b"=" in each)


def file_of(process: int | str, descriptor: int | str) -> Path:
    """Return the path that opens the file with this descriptor of a process."""
    return _PROC / str(process) / "fd" / str(descriptor)


def file_names_of(process: int) -> Iterator[str]:
    """Yield the names, without folders, of the files that a process has open or mapped.

    Leaves out what this process may not inspect.
    """
    with contextlib.suppress(OSError), open(f"{_PROC}/{process}/maps", "rb") as mappings:
        for line in mappings:  # one at a time: a process may have thousands
            _, slash, name = line.rstrip(b"\n").rpartition(b"/")
            if slash:
                yield os.fsdecode(name.removesuffix(b" (deleted)"))
    with contextlib.suppress(OSError):
        folder = f"{_PROC}/{process}/fd"
        for descriptor in os.listdir(folder):  # a Path would keep the name of each in a table
            with contextlib.suppress(OSError):
                opened = os.readlink(f"{folder}/{descriptor}")
                yield os.path.basename(opened).removesuffix(" (deleted)")


def start_of(process: int) -> int | None:
    """Return when a process started, in clock ticks since the host did; None if it has ended.

    A later process with the same number has another start.  A process that was killed stays a
    zombie until its parent reaps it.  The first thread of a process can be a zombie while others
    still run, so a zombie has ended when it has no other thread.
    """
    try:
        fields = stat_of(process)
    except OSError:
        return None
    if fields[_STATE] in _ENDED and int(fields[_THREADS]) <= 1:
        return None
    return int(fields[_START])


def is_gone(process: int) -> bool:
    """Return whether there is no such process; a zombie is one."""
    return not (_PROC / str(process)).exists()


def is_exiting(process: int) -> bool:
    """Return whether a process ends already, though it may not be gone yet."""
    try:
        return bool(int(stat_of(process)[FLAGS]) & _EXITING)
    except OSError:
        return True


def status_of(process: int, descriptor: int) -> int | None:
    """Return the status of a process that has ended; None if it is not known.

    `descriptor` is the pidfd of the process.  A process that its parent has reaped is not in /proc.
    Linux 6.15 and later return its status by the pidfd.
    """
    with contextlib.suppress(OSError):
        return int(stat_of(process)[_STATUS])
    info = bytearray(_PROCESS_INFO.size)
    _PROCESS_INFO.pack_into(info, 0, _WITH_STATUS, 0)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _GET_PROCESS_INFO, info)
        mask, status = _PROCESS_INFO.unpack(info)
        return int(status) if mask & _WITH_STATUS else None
    return None


# --- this host ------------------------------------------------------------------------------------


def network() -> str:
    """Return a text that is equal exactly on processes that can connect by abstract addresses."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/net')}"
    except OSError:
        return socket.gethostname()


def memory_bytes() -> tuple[int, int]:
    """Return the bytes of memory that this host has, and that are available."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib["MemTotal"] << 10, kib["MemAvailable"] << 10


def cpu_name() -> str:
    """Return the model of the cores; "" if the kernel does not say it."""
    for line in (_PROC / "cpuinfo").read_text("utf-8", "replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def ptrace_scope() -> int:
    """Return Yama's ``ptrace_scope``.  Raises OSError or ValueError where there is none."""
    return int((_PROC / "sys/kernel/yama/ptrace_scope").read_text())


def has_nvidia_driver() -> bool:
    """Return whether the kernel has the driver of NVIDIA's GPUs."""
    return (_PROC / "driver/nvidia/version").exists()


def _read(process: int | str, name: str) -> bytes:
    with open(f"{_PROC}/{process}/{name}", "rb") as file:
        return file.read()
