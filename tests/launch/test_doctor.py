"""`ringreduce doctor`: each fact with ok, or with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.colours import Colours
from ringreduce.launch import doctor, probe
from ringreduce.launch.doctor import Finding
from ringreduce.launch.mpiexec import LaunchError
from ringreduce.launch.probe import Answer

PLAIN = Colours(enabled=False)
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
    assert finding.line(PLAIN) == line


WELL = Finding("NumPy", "2.4.6", essential=True)
SLOW = Finding("Numba", "not installed", "pip install numba")
BROKEN = Finding("MPI", "not installed", "pip install mpich", essential=True)


@pytest.mark.parametrize(
    ("findings", "last", "code"),
    [
        ([WELL], "no problems", 0),
        ([SLOW, WELL], "1 problem: Numba; jobs still run", 0),
        ([WELL, BROKEN], "1 problem: MPI; no job runs", 1),
        ([SLOW, BROKEN, WELL], "2 problems: Numba, MPI; no job runs", 1),
    ],
)
def test_the_last_line_counts_the_problems(monkeypatch, capsys, findings, last, code):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: findings[:1], lambda: findings[1:]))
    assert doctor.main() == code
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*(finding.line(PLAIN) for finding in findings), last]


@pytest.mark.parametrize(
    ("findings", "colours"),
    [([WELL], [32, 32]), ([SLOW], [33, 33]), ([BROKEN], [31, 31]), ([WELL, SLOW], [32, 33, 33])],
)
def test_ok_is_green_and_a_problem_is_yellow_or_red(monkeypatch, capsys, findings, colours):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: findings,))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    doctor.main()
    printed = capsys.readouterr().out.splitlines()
    assert [int(line[2:4]) for line in printed] == colours


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
    findings = doctor.job_findings(Answer([rank(), rank(rank=1)]))
    assert [finding.line(PLAIN) for finding in findings][1:] == [
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
    found = probe.read(str(held["pid"]), str(held["address"] + 1))
    assert found == {"error": "the bytes read are not those of the peer"}
    assert probe.read(str(2**22 + 1), str(held["address"])) == {"error": "No such process"}


def test_a_probe_that_fails_gives_its_last_words():
    answer = probe.answer_of([sys.executable, "-c", "raise ValueError('no luck')"])
    assert answer == Answer((), "ValueError: no luck")


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.1)
    answer = probe.answer_of([sys.executable, "-c", "import time; time.sleep(30)"])
    assert answer == Answer((), "no answer within 0.1 s")


def test_a_missing_package_is_told_from_a_broken_one(monkeypatch):
    assert doctor._package("x", "no_such_module", "get it").value == "not installed"
    monkeypatch.setattr(doctor, "ask", lambda *_: Answer((), "ImportError: libx.so"))
    assert doctor._package("x", "x", "get it").value == "ImportError: libx.so"


@pytest.mark.smoke
@pytest.mark.mpi
def test_a_healthy_environment_is_well():
    ended = subprocess.run(
        [sys.executable, "-m", "ringreduce", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    *lines, last = ended.stdout.splitlines()
    facts = {line[5:19].strip(): line[:3].strip() for line in lines}
    problems = [name for name, state in facts.items() if state == "fix"]
    assert last == "no problems" or last.endswith(f": {', '.join(problems)}; jobs still run")
    for name in (
        "ringreduce",
        "Python",
        "cores",
        "mpiexec",
        "after a loss",
        "MPI",
        "job",
        "thread level",
        "NumPy",
    ):
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
    monkeypatch.setattr(doctor, "ask", lambda *_: Answer(lines, complaint))
    found = doctor._short_floats()
    assert found.value == words
    assert bool(found.advice) == (words != "added by compiled loops")
