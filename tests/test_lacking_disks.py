"""Disks without locks, syncs or renames: go on without them, or name the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.recovery import checkpoint
from ringreduce.recovery.checkpoint import Checkpoint, Folder
from ringreduce.recovery.slots import Slots
from ringreduce.train.metrics import JsonLines

LACKS = [errno.ENOSYS, errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.EINVAL]


def fails(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def sync_of_folders(number: int) -> Callable[[int], None]:
    def sync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            fails(number)()

    return sync


@pytest.fixture(autouse=True)
def notes_of_this_test() -> None:
    checkpoint._note.cache_clear()


@pytest.mark.parametrize("number", LACKS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("module", "name", "lacking", "text"),
    [
        (fcntl, "flock", fails, "cannot be locked"),
        (os, "fsync", fails, "cannot be synced"),
        (os, "fsync", sync_of_folders, "cannot be synced"),
        (os, "replace", fails, "has no renames"),
    ],
)
def test_checkpoints_are_written_without_it_and_a_line_says_so_once(
    tmp_path, monkeypatch, capsys, module, name, lacking, text, number
):
    monkeypatch.setattr(module, name, lacking(number))
    folder = Folder(tmp_path, keep=9)
    for step in (3, 4):
        folder.save(Checkpoint(step, {"w": np.arange(step)}, {}))
    found = folder.last(lambda _: None, pytest.fail)
    folder.close()
    assert found is not None
    assert (found.step, found.arrays["w"].tolist()) == (4, [0, 1, 2, 3])
    assert len([*tmp_path.glob("step-*")]) == 4
    (note,) = [line for line in capsys.readouterr().err.splitlines() if str(tmp_path) in line]
    assert text in note
    assert os.strerror(number) in note


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path, monkeypatch, name, number):
    folder = Folder(tmp_path, keep=9)
    monkeypatch.setattr(os, name, fails(number))
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "step-000000007.safetensors"))):
        folder.save(Checkpoint(7, {"w": np.arange(5)}, {}))
    assert not [*tmp_path.glob("*.unfinished")]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOSPC], ids=errno.errorcode.get)
def test_metrics_go_on_without_renames_and_keep_their_lines_on_a_full_disk(
    tmp_path, monkeypatch, number
):
    path = tmp_path / "metrics.jsonl"
    path.write_text("another program's line\n")
    monkeypatch.setattr(os, "replace", fails(number))
    full = pytest.raises(OSError, match="No space left")
    with full if number == errno.ENOSPC else contextlib.nullcontext():
        JsonLines(path, 0, 0, goes_on=True).close()
    assert path.read_text() == "another program's line\n"
    assert [*tmp_path.iterdir()] == [path]


def test_a_rendezvous_without_locks_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "meet"
    monkeypatch.setattr(fcntl, "flock", fails(errno.ENOLCK))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} cannot be locked \(No locks"):
        rr.init(rendezvous=f"file://{path}", rank=0, size=2, timeout_s=60)


def test_a_state_goes_on_without_memory_files_and_not_without_memory(monkeypatch):
    for name, number in (("posix_fallocate", errno.EOPNOTSUPP), ("memfd_create", errno.ENOSYS)):
        monkeypatch.setattr(os, name, fails(number))
        slots = Slots.new({"w": np.arange(5)}, step=4)
        assert slots.committed("w").tolist() == [0, 1, 2, 3, 4]
        slots.close()
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOMEM))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Slots.new({"w": np.arange(5)})
