"""The folder of a user's launchers: the sockets of each launcher that has a supervisor.

Only the user can enter the folder.  The files of a launcher are found by its process id.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from ringreduce.recovery import wire
from ringreduce.system.proc import is_gone


def folder() -> Path:
    """Return the folder, made if missing.  PermissionError if others own it or can enter it."""
    path = Path(tempfile.gettempdir()) / f"ringreduce-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.geteuid() or not private:
        raise PermissionError(f"{path} is not a folder that you alone can enter; remove it")
    return path


def socket_of(launcher: int) -> Path:
    return folder() / f"{launcher}.socket"


def commands_of(launcher: int) -> Path:
    return folder() / f"{launcher}.commands"


def token_of(launcher: int) -> Path:
    return folder() / f"{launcher}.token"


def bound(path: Path) -> socket.socket:
    while True:
        with contextlib.suppress(FileNotFoundError):  # another launcher has removed the folder
            folder()
            try:
                return wire.bound(str(path))
            except OSError as error:  # such as a disk without sockets; the kernel names no file
                raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def prepare(launcher: int) -> None:
    """Remove the files of this process id, and of launchers that are gone, as after SIGKILL."""
    for path in folder().glob("*.*"):
        with contextlib.suppress(ValueError, OSError):
            if int(path.stem) == launcher or is_gone(int(path.stem)):
                path.unlink()


def remove(launcher: int) -> None:
    for path in (socket_of(launcher), commands_of(launcher), token_of(launcher)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
