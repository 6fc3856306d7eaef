"""Messages between a launcher and its ranks."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from threading import Thread

import pytest

from ringreduce.recovery.elastic import _notices
from ringreduce.recovery.wire import ADDRESS, TOKEN, Connection, WireError, bound, connect
from ringreduce.supervisor import socket_folder
from ringreduce.system.proc import stat_of


def pair(token: str = "secret", theirs: str = "secret") -> tuple[Connection, Connection]:
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Connection(ours, token), Connection(other, theirs)


def test_a_message_arrives_with_its_fields_and_files():
    sender, receiver = pair()
    file = os.memfd_create("test")
    os.write(file, b"state")
    assert sender.send("state", (file,), call=1)
    os.close(file)
    sender.close()  # the file outlives its sender
    message = receiver.receive()
    assert (message.kind, message.fields) == ("state", {"call": 1})
    assert os.pread(message.files[0], 9, 0) == b"state"
    message.close()
    assert receiver.receive() is None


@pytest.mark.parametrize(
    "packet", [b"no json", b"[1]", b'{"kind": "x"}', b'{"token": 1, "kind": 2}']
)
def test_what_is_no_message_is_refused(packet):
    sender, receiver = pair()
    sender.socket.send(packet)
    with pytest.raises(WireError):
        receiver.receive()


def test_a_wrong_token_is_refused_and_its_files_are_closed():
    sender, receiver = pair("of the generation before")
    before = set(os.listdir("/proc/self/fd"))
    sender.send("state", (0,))
    with pytest.raises(WireError, match="wrong token"):
        receiver.receive()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_message_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="bytes, more than"):
        pair()[0].send("state", text="x" * 70000)


def test_a_forked_child_sends_nothing():
    sender, receiver = pair()
    child = os.fork()
    if child == 0:
        os._exit(int(sender.send("hello")))
    assert os.waitpid(child, 0)[1] == 0
    sender.close()
    assert receiver.receive() is None


def test_a_killed_process_closes_its_connection_before_older_files():
    connection, launcher = pair()
    older, reader = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        connection.close_first()
        connection.socket.send(b"ready")
        signal.pause()
        os._exit(0)
    connection.close()
    older.close()
    with select.epoll() as closings, reader:
        assert launcher.socket.recv(9) == b"ready"
        for end in (reader, launcher.socket):
            closings.register(end, select.EPOLLIN)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        first, _ = closings.poll(0)[0]
        assert first == launcher.socket.fileno()


EXIT = {"x86_64": 60, "aarch64": 93}
"""The number of the system call that ends a thread."""


def launcher_whose_first_thread_ends(name: str) -> None:
    """Take messages for as long as a second thread lives, then end."""
    listening = bound(name)
    listening.listen()
    Thread(target=signal.sigtimedwait, args=([signal.SIGUSR1], 200)).start()
    end, _ = listening.accept()
    end.recv(9)
    ctypes.CDLL(None).syscall(EXIT[os.uname().machine], 0)


def forked(run: Callable[[], None]) -> int:
    """Return the process id of a child that runs a function."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(1)
    return child


def test_sigterm_ends_a_rank_whose_launcher_ends_though_the_launcher_takes_the_notice():
    # The kernel tells mpiexec of a killed launcher with the end of its first thread, and closes
    # its files with the end of its last.  mpiexec may pass SIGTERM on to the ranks in between.
    name = f"ringreduce test {os.getpid()}"
    launcher = forked(lambda: launcher_whose_first_thread_ends(name))
    while (connection := connect({ADDRESS: name})) is None:
        pass

    def train() -> None:
        own = Connection(connection.socket, connection.token)  # its process may send
        signal.alarm(200)
        with _notices(own):
            own.send("trains")
            while True:
                signal.pause()

    rank = forked(train)
    while stat_of(launcher)[0] != b"Z":
        time.sleep(0.001)
    assert connection.send("a message")
    os.kill(rank, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == -signal.SIGTERM
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    connection.close()


def test_without_a_launcher_there_is_no_connection():
    assert connect({}) is None
    assert connect({ADDRESS: "nobody listens here", TOKEN: "x"}) is None


def test_the_folder_of_sockets_is_private_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (socket_folder.folder() / "999999999.token").touch()  # of a launcher that is gone
    socket_folder.prepare(os.getpid())
    listening = socket_folder.bound(socket_folder.socket_of(os.getpid()))
    listening.listen()
    assert [path.name for path in socket_folder.folder().iterdir()] == [f"{os.getpid()}.socket"]
    assert socket_folder.folder().stat().st_mode & 0o777 == 0o700
    assert connect({ADDRESS: str(socket_folder.socket_of(os.getpid()))}) is not None
    listening.close()
    socket_folder.remove(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    socket_folder.folder().chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder that you alone can enter"):
        socket_folder.folder()


def test_a_name_needs_no_file():
    listening = bound(f"ringreduce test {os.getpid()}")
    listening.listen()
    assert connect({ADDRESS: f"ringreduce test {os.getpid()}"}) is not None
