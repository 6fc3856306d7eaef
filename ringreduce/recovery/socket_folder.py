"""The folder of a user's launchers: a socket for each launcher that has a supervisor.

Only the user can enter the folder.  The socket of a launcher is found by its process id.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from ringreduce.recovery import wire


def folder() -> Path:
    """Return the folder; make it if it is missing.

    Raises PermissionError if somebody else owns it or can enter it.
    """
    path = Path(tempfile.gettempdir()) / f"ringreduce-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.geteuid() or not private:
        raise PermissionError(f"{path} is not a folder that you alone can enter; remove it")
    return path


def socket_of(launcher: int) -> Path:
    """Return the path of a launcher's socket, given its process id."""
    return folder() / f"{launcher}.socket"


def bound(launcher: int) -> socket.socket:
    """Return a socket that is bound to the path of a launcher.

    The sockets of launchers that are gone are removed, as after SIGKILL.
    """
    for path in folder().glob("*.socket"):
        with contextlib.suppress(ValueError, OSError):
            if int(path.stem) == launcher or not Path(f"/proc/{int(path.stem)}").exists():
                path.unlink()
    while True:
        with contextlib.suppress(FileNotFoundError):  # another launcher has removed the folder
            return wire.bound(str(socket_of(launcher)))


def remove(launcher: int) -> None:
    """Remove the socket of a launcher, and the folder if it is empty."""
    path = socket_of(launcher)
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
