"""Commands of the user to a running job: `ringreduce scale`.

They come over a socket of their own, in the folder of the launchers.  Its token is in a file beside
it, which only the user can read.
"""

from __future__ import annotations

import contextlib
import os
import sys

from ringreduce.errors import counted
from ringreduce.recovery.change import Change
from ringreduce.recovery.wire import Connection, WireError, connected
from ringreduce.supervisor import socket_folder
from ringreduce.supervisor.ranks import Rank, Ranks, Said
from ringreduce.system.proc import command_of


class Commands:
    """The commands that come to this launcher."""

    def __init__(self) -> None:
        token = os.urandom(16).hex()
        self._senders = Ranks(socket_folder.bound(socket_folder.commands_of(os.getpid())), token)
        path = socket_folder.token_of(os.getpid())
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(token)
        self._waiting: Rank | None = None

    def fileno(self) -> int:
        return self._senders.fileno()

    def received(self) -> list[tuple[Rank, int]]:
        """Return the sender and the number of ranks of each command that has come."""
        found = []
        for event in self._senders.happened():
            if not isinstance(event, Said):
                self._senders.forget(event.rank)
                continue
            event.message.close()
            size = event.message.fields.get("size")
            if event.message.kind == "scale" and isinstance(size, int):
                found.append((event.rank, size))
        return found

    def refuse(self, sender: Rank, text: str, *, is_wrong: bool) -> None:
        sender.connection.send("refused" if is_wrong else "failed", text=text)

    def begin(self, sender: Rank) -> None:
        """Carry out the command of `sender`; another one that waits is given up."""
        self.fail("another command has come")
        self._waiting = sender

    def fail(self, text: str) -> None:
        self._answer("failed", text=text)

    def done(self, text: str) -> None:
        self._answer("done", text=text)

    def close(self) -> None:
        """Answer the last command, and listen no longer."""
        self.fail("the job has ended")
        self._senders.close()

    def _answer(self, kind: str, text: str) -> None:
        if self._waiting is not None:
            self._waiting.connection.send(kind, text=text)
            self._waiting = None


def resized_text(change: Change, step: int, pause_s: float | None) -> str:
    """Return a sentence for the user: `step` is the first one of the ranks that there are now."""
    text = f"{change.before} -> {counted(change.after, 'rank')} from step {step} on"
    return text if pause_s is None else f"{text}, after a pause of {pause_s:.3f} s"


def scale(job: int, size: int) -> int:
    """Have the job of launcher process `job` go on with `size` ranks, and wait until it does.

    Returns the exit code: 1 if the job cannot, 2 if there is no such job or it may not have
    `size` ranks.
    """
    launcher = _connected(job)
    if launcher is None:
        return _complain(
            f"no process {job} of yours is a launcher with --elastic; "
            "JOB is the process id of `ringreduce run` or `ringreduce train`",
            2,
        )
    answer = launcher.ask("scale", size=size)
    if answer is None:
        return _complain("the job has ended", 1)
    if answer.kind == "done":
        print(answer.fields["text"])
        return 0
    return _complain(str(answer.fields["text"]), 2 if answer.kind == "refused" else 1)


def jobs() -> list[str]:
    """Return the number and the command line of each job of this user that `scale` can change."""
    found = [path.stem for path in socket_folder.folder().glob("*.commands")]
    numbers = sorted(int(stem) for stem in found if stem.isdecimal())
    return [f"{number}  {command}" for number in numbers if (command := command_of(number))]


def _connected(job: int) -> Connection | None:
    with contextlib.suppress(OSError, WireError):
        token = socket_folder.token_of(job).read_text()
        return connected(str(socket_folder.commands_of(job)), token)
    return None


def _complain(text: str, code: int) -> int:
    print(f"ringreduce scale: {text}", file=sys.stderr)
    return code
