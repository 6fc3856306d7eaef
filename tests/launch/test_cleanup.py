"""Files of killed MPI jobs are removed, and no other file is."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ringreduce.launch import cli, doctor
from ringreduce.supervisor import cleanup
from ringreduce.supervisor.cleanup import abandoned_files, clean_up_job, remove_abandoned_files

MPICH, OPEN_MPI, INTEL, UCX, HYDRA = (
    "mpich_shm_11321613_0",
    "sm_segment.host.0.1.0",
    "Intel_MPI_a6Juc2",
    "ucx_shm_posix_292eeb92",
    "hydra_hwloc_xmlfile_0cYbLK",
)
HOLD = "import mmap, sys; {held}; print(flush=True); sys.stdin.read()"
OPENED = HOLD.format(held="file = open(sys.argv[1])")
MAPPED = HOLD.format(
    held="file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0); file.close()"
)

Holder = Callable[[Path, str], None]


@pytest.fixture(autouse=True)
def no_hydra_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other MPI jobs may run on this machine."""
    monkeypatch.setattr(cleanup, "_hydra_runs", lambda: False)


@pytest.fixture
def hold() -> Iterator[Holder]:
    """Starts a process that has a file open or mapped."""
    holders = []

    def start(path: Path, how: str) -> None:
        command = [sys.executable, "-c", how, str(path)]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert holders[-1].stdout is not None
        holders[-1].stdout.readline()

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def put(folder: Path, *names: str) -> list[Path]:
    """Write a page into each file."""
    paths = [folder / name for name in names]
    for path in paths:
        path.write_bytes(bytes(mmap.PAGESIZE))
    return paths


def found(folder: Path) -> list[Path]:
    return list(abandoned_files(directory=folder, hydra_files=folder))


@pytest.mark.parametrize(
    "name", [MPICH, OPEN_MPI, "vader_segment.a.b-c.1000.2f0001.3", INTEL, UCX, HYDRA]
)
def test_a_file_of_an_mpi_that_nobody_uses_is_abandoned(tmp_path: Path, name: str) -> None:
    assert found(tmp_path) == []
    put(tmp_path, name)
    assert found(tmp_path) == [tmp_path / name]


@pytest.mark.parametrize(
    "name",
    [
        *("mine", "mpich_shm_", "mpich_shm_1", "mpich_shm_xyz_0", "my_mpich_shm_1_0"),
        *("mpich_shm_1_0.backup", "sm_segment.host", "sm_segment.notes.txt", "vader_segment."),
        *("hydra_hwloc_xmlfile_", "hydra_hwloc_xmlfile_0cYbLK.xml", "hydra_hwloc_xmlfile_a/b"),
    ],
)
def test_a_file_with_another_name_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    put(tmp_path, name)
    assert found(tmp_path) == []


@pytest.mark.parametrize("how", [OPENED, MAPPED], ids=["opened", "mapped"])
@pytest.mark.parametrize("name", [MPICH, OPEN_MPI, HYDRA])
def test_a_file_that_a_process_uses_stays(
    tmp_path: Path, hold: Holder, name: str, how: str
) -> None:
    used, _ = put(tmp_path, name, f"{name[:-1]}9")
    hold(used, how)
    assert used not in found(tmp_path)
    assert used not in remove_abandoned_files(directory=tmp_path, hydra_files=tmp_path)
    assert list(tmp_path.iterdir()) == [used]


@pytest.mark.parametrize("how", [OPENED, MAPPED], ids=["opened", "mapped"])
def test_the_kernel_knows_of_users_that_cannot_be_inspected(
    tmp_path: Path, hold: Holder, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (used,) = put(tmp_path, MPICH)
    hold(used, how)
    monkeypatch.setattr(cleanup, "_in_use", lambda names: set())
    assert found(tmp_path) == []


@pytest.mark.parametrize("how", [OPENED, MAPPED], ids=["opened", "mapped"])
def test_users_are_seen_without_the_kernels_help(tmp_path: Path, hold: Holder, how: str) -> None:
    (used,) = put(tmp_path, MPICH)
    assert cleanup._in_use({used.name}) == set()
    hold(used, how)
    assert cleanup._in_use({used.name}) == {used.name}


def test_a_file_that_is_deleted_and_still_open_is_in_use(tmp_path: Path, hold: Holder) -> None:
    (used,) = put(tmp_path, MPICH)
    hold(used, OPENED)
    used.unlink()
    assert cleanup._in_use({used.name}) == {used.name}


def test_where_there_are_no_leases_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    put(tmp_path, MPICH)
    monkeypatch.setattr(cleanup.fcntl, "fcntl", refuse)
    assert found(tmp_path) == []


def test_a_symbolic_link_and_its_target_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (target,) = put(elsewhere, MPICH)
    (tmp_path / MPICH).symlink_to(target)
    assert remove_abandoned_files(directory=tmp_path, hydra_files=tmp_path) == {}
    assert target.exists()
    assert (tmp_path / MPICH).is_symlink()


def test_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / MPICH).mkdir()
    assert found(tmp_path) == []


def test_a_file_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, MPICH, HYDRA)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert found(tmp_path) == []


def test_a_missing_folder_has_no_files(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere") == []


def test_files_of_hydra_stay_while_hydra_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, _ = put(tmp_path, MPICH, HYDRA)
    monkeypatch.setattr(cleanup, "_hydra_runs", lambda: True)
    assert found(tmp_path) == [shared]


@pytest.mark.parametrize("name", ["hydra_pmi_proxy", "mpiexec.hydra", "mpiexec"])
def test_hydra_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.undo()
    (tmp_path / name).symlink_to(shutil.which("sleep") or "sleep")
    with subprocess.Popen([tmp_path / name, "3600"]) as process:
        monkeypatch.setattr(cleanup, "running", lambda: [process.pid])
        deadline = time.monotonic() + 120
        while not (known := cleanup._hydra_runs()) and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
    assert known
    assert not cleanup._hydra_runs()


@pytest.mark.slow
def test_a_process_that_opens_the_file_meanwhile_waits_and_harms_nobody(tmp_path: Path) -> None:
    (path,) = put(tmp_path, MPICH)
    leases = (
        "import pathlib, sys; from ringreduce.supervisor import cleanup\n"
        "with cleanup._lease(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.readline()"
    )
    opens = "import sys; print(flush=True); open(sys.argv[1])"
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with start([sys.executable, "-c", leases, str(path)]) as owner:
        owner.stdout.readline()
        with start([sys.executable, "-c", opens, str(path)]) as opener:
            opener.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                opener.wait(0.5)
            assert owner.poll() is None
            owner.communicate(b"\n")
    assert (owner.returncode, opener.returncode) == (0, 0)


# --- cleaning after a job, and by the doctor ------------------------------------------------------


def test_files_older_than_the_job_stay(tmp_path: Path) -> None:
    old, new = put(tmp_path, "mpich_shm_1_0", "mpich_shm_2_0")
    old_hydra, _ = put(tmp_path, f"{HYDRA[:-1]}1", f"{HYDRA[:-1]}2")
    for path in (old, old_hydra):
        os.utime(path, (1.0, 1.0))
    clean_up_job(0, since=2.0, directory=tmp_path, hydra_files=tmp_path)
    assert sorted(tmp_path.iterdir()) == [old_hydra, old]
    assert not new.exists()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which `ringreduce doctor` looks for files."""
    for function in (abandoned_files, remove_abandoned_files):
        replacement = partial(function, directory=tmp_path, hydra_files=tmp_path)
        monkeypatch.setattr(doctor, function.__name__, replacement)
    return tmp_path


def test_doctor_counts_the_files_and_says_how_to_remove_them(here: Path) -> None:
    assert list(doctor._stale_files()) == []
    put(here, MPICH)
    os.truncate(here / MPICH, 3 << 20)
    put(here, OPEN_MPI)
    (stale,) = doctor._stale_files()
    assert stale.value == "killed MPI jobs have left 2 files, 3 MiB in all"
    assert stale.advice == "ringreduce doctor --clean"
    assert not stale.essential


def test_doctor_removes_the_files_and_names_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here, MPICH, "mine")
    assert cli.main(["doctor", "--clean"]) == 0
    assert capsys.readouterr().out == (
        f"removed {here / MPICH}, 4,096 bytes\nremoved 1 file, 0 MiB in all\n"
    )
    assert [path.name for path in here.iterdir()] == ["mine"]
    assert cli.main(["doctor", "--clean"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
