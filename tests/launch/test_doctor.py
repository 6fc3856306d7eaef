"""`ringreduce doctor`: each fact with ok, or with what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ringreduce.console.colours import Colours
from ringreduce.launch import doctor, probe
from ringreduce.launch.doctor import Finding
from ringreduce.launch.probe import ProbeResult
from ringreduce.supervisor.mpiexec import Flavour, LaunchError, Mpiexec

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


def test_every_line_fits_80_columns_and_says_all(monkeypatch, capsys):
    path, advice = "/opt/" + "a" * 100, "pip install a new one"
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [Finding("mpiexec", path, advice)],))
    monkeypatch.delenv("COLUMNS", raising=False)
    doctor.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join("".join(lines).split()).startswith(f"fixmpiexec{path}:pipinstallanewone")


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
    findings = doctor.job_findings(ProbeResult(lines, "libmpi.so.40: no such file"))
    (broken,) = (finding for finding in findings if finding.advice)
    assert (broken.name, broken.essential) == (name, essential)
    assert advice in broken.advice


def test_a_good_job_is_ok():
    findings = doctor.job_findings(ProbeResult([rank(), rank(rank=1)]))
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
    ("scope", "advice"), [("2\n", "ptrace_scope is 2"), ("1\n", "seccomp"), (None, "seccomp")]
)
def test_what_forbids_single_copy_is_named(monkeypatch, scope, advice):
    def read(path):
        if scope is None:
            raise FileNotFoundError
        return scope

    monkeypatch.setattr(Path, "read_text", read)
    assert advice in doctor._single_copy_advice("Operation not permitted")
    assert doctor._single_copy_advice("") == ""


@pytest.mark.parametrize("allowing_helps", [True, False])
def test_single_copy_that_ranks_must_allow_is_found(monkeypatch, allowing_helps):
    refused = {"error": "Operation not permitted"}
    answers = [refused, {"error": ""} if allowing_helps else refused]
    monkeypatch.setattr(doctor, "ask", lambda *_: ProbeResult([answers.pop(0)]))
    finding = next(iter(doctor.shared_memory()))
    works = "process_vm_readv and process_vm_writev work, as ranks allow it to each other"
    works += " (ptrace_scope 1)"
    assert finding.value == (works if allowing_helps else "Operation not permitted")
    assert bool(finding.advice) != allowing_helps


@pytest.fixture
def held():
    """A process that holds the memory to be read: its id and the address."""
    command = [sys.executable, "-m", "ringreduce.launch.probe", "hold"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        yield json.loads(holder.stdout.readline())


def test_single_copy_reads_and_writes_another_process(held):
    found = probe.read(str(held["pid"]), str(held["address"]))
    assert found == {"error": "", "writes": True}


def test_single_copy_without_writes_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "ask", lambda *_: ProbeResult([{"error": "", "writes": False}]))
    finding = next(iter(doctor.shared_memory()))
    assert finding.value == "process_vm_readv works; process_vm_writev is forbidden"
    assert "seccomp" in finding.advice


def test_single_copy_sees_wrong_bytes_and_missing_processes(held):
    found = probe.read(str(held["pid"]), str(held["address"] + 1))
    assert found == {"error": "the bytes read are not those of the peer"}
    assert probe.read(str(2**22 + 1), str(held["address"])) == {"error": "No such process"}


def test_a_probe_that_fails_gives_its_last_words():
    answer = probe.answer_of([sys.executable, "-c", "raise ValueError('no luck')"])
    assert answer == ProbeResult((), "ValueError: no luck")


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("ringreduce.supervisor.mpiexec.ANSWER_S", 0.1)
    answer = probe.answer_of([sys.executable, "-c", "import time; time.sleep(30)"])
    assert answer == ProbeResult((), "no answer within 0.1 s")


def test_a_missing_package_is_told_from_a_broken_one(monkeypatch):
    assert doctor._package("x", "no_such_module", "get it").value == "not installed"
    monkeypatch.setattr(doctor, "ask", lambda *_: ProbeResult((), "ImportError: libx.so"))
    assert doctor._package("x", "x", "get it").value == "ImportError: libx.so"


OPEN_MPI = Mpiexec(Path("mpiexec"), Flavour.OPEN_MPI, "5.0.11")
OTHER = Mpiexec(Path("mpiexec"), Flavour.MPICH, "5.0.2")
GOES_ON = ProbeResult([{"reason": "", "size": 2}] * 2)
RELAUNCH = "ok   level 2        relaunch: after a loss a new job goes on after the last update"
HANDOVER = "ok   level 3        handover: other ranks, in a new job, take over at a step"


def lines_of(answer, mpiexec, problem=("", "")):
    findings = doctor.level_findings(answer, problem, mpiexec)
    return [finding.line(PLAIN) for finding in findings]


def test_an_mpi_that_goes_on_has_all_three_levels():
    assert lines_of(GOES_ON, OPEN_MPI) == [
        "ok   level 1        live: after a loss the other ranks go on in their processes",
        RELAUNCH,
        f"{HANDOVER}; if ranks only leave, the others go on in their processes",
    ]


def test_an_mpi_that_ends_the_job_has_two_levels_and_says_why():
    why = "MPICH Version: 5.0.2 ends the whole job if a rank is lost; Open MPI 5 does not"
    answer = ProbeResult([{"reason": why.replace(": ", ":\t"), "size": 0}] * 2)
    live = f"ok   level 1        live, not here: {why}"
    assert lines_of(answer, OTHER) == [live, RELAUNCH, HANDOVER]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            ProbeResult((), "unrecognized option '--with-ft'"),
            "no job of 2 ranks runs with fault tolerance: unrecognized option '--with-ft'",
        ),
        (
            ProbeResult([{"reason": "", "size": 2}, {"reason": "", "size": 1}]),
            "the shrunk communicators of 2 ranks have the sizes [2, 1]",
        ),
        (ProbeResult([{"reason": "it was built without", "size": 0}] * 2), "it was built without"),
    ],
)
def test_an_open_mpi_without_fault_tolerance_says_what_to_add(answer, why):
    """The version alone does not decide."""
    advice = "add --recovery relaunch to --elastic"
    live = f"fix  level 1        live, not here: {why}: {advice}"
    assert lines_of(answer, OPEN_MPI) == [live, RELAUNCH, HANDOVER]


def test_where_the_launcher_cannot_supervise_no_level_holds():
    problem = "no memory for a State, Operation not permitted", "allow memfd_create"
    assert lines_of(GOES_ON, OPEN_MPI, problem) == [
        f"fix  level {level}        {word}, not here: {': '.join(problem)}"
        for level, word in enumerate(("live", "relaunch", "handover"), 1)
    ]


@pytest.mark.parametrize(
    ("module", "name", "why", "advice"),
    [
        ("os", "memfd_create", "no memory for a State, Operation not permitted", "seccomp"),
        ("os", "pidfd_open", "no view of the ranks' processes, Operation not", "Linux 5.3"),
        ("socket_folder", "prepare", "no socket for the ranks", "set TMPDIR"),
        ("socket_folder", "bound", "no socket for the ranks", "set TMPDIR"),
    ],
)
def test_what_the_launcher_needs_is_named(monkeypatch, tmp_path, module, name, why, advice):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert doctor._why_not_elastic() == ("", "")
    assert list(tmp_path.iterdir()) == []

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(getattr(doctor, module), name, refuse)
    found = doctor._why_not_elastic()
    assert why in found[0]
    assert advice in found[1]
    assert list(tmp_path.iterdir()) == []


def asking(monkeypatch, mpiexec, answers):
    """Give the probes of jobs these answers; return the command lines of the jobs."""
    asked = []

    def answer(argv, _):
        asked.append(argv)
        return answers[json.loads(argv[-1])[-1]]

    monkeypatch.setattr(doctor, "find_mpiexec", lambda *_: mpiexec)
    monkeypatch.setattr(doctor, "installed_wheels", list)
    monkeypatch.setattr(doctor, "answer_of", answer)
    return asked


@pytest.mark.parametrize("mpiexec", [OPEN_MPI, OTHER])
def test_the_second_job_is_started_as_the_launcher_starts_one_that_goes_on(monkeypatch, mpiexec):
    answers = {"mpi": ProbeResult([rank(), rank(rank=1)]), "shrink": GOES_ON}
    asked = asking(monkeypatch, mpiexec, answers)
    names = [finding.name for finding in doctor.mpi()]
    assert names[-3:] == ["level 1", "level 2", "level 3"]
    assert ["--with-ft" in argv for argv in asked] == [False, mpiexec is OPEN_MPI]


def test_without_a_job_there_is_no_level(monkeypatch):
    asked = asking(monkeypatch, OPEN_MPI, {"mpi": ProbeResult((), "no slots")})
    *_, broken, levels = doctor.mpi()
    assert broken.essential
    assert levels.line(PLAIN) == (
        "fix  levels 1 to 3  not here: no job of 2 ranks runs: repair that first"
    )
    assert len(asked) == 1


def facts_of(lines: list[str], name: str) -> str:
    """The value of the fact of a name."""
    return next(line[20:] for line in lines if line[5:19].strip() == name)


@pytest.mark.mpi
def test_a_healthy_environment_is_well():
    ended = subprocess.run(
        [sys.executable, "-m", "ringreduce", "doctor"],
        env={**os.environ, "COLUMNS": "400"},  # a fact a line
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    *lines, last = ended.stdout.splitlines()
    facts = {line[5:19].strip(): line[:3].strip() for line in lines}
    problems = [name for name, state in facts.items() if state == "fix"]
    is_live = "Open MPI" in facts_of(lines, "mpiexec")
    live = "live: after a loss the other ranks go on in their processes"
    assert (facts_of(lines, "level 1") == live) == is_live
    assert ("if ranks only leave" in facts_of(lines, "level 3")) == is_live
    assert last == "no problems" or last.endswith(f": {', '.join(problems)}; jobs still run")
    for name in (
        "ringreduce",
        "Python",
        "cores",
        "mpiexec",
        "MPI",
        "job",
        "thread level",
        "level 1",
        "level 2",
        "level 3",
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
    monkeypatch.setattr(doctor, "ask", lambda *_: ProbeResult(lines, complaint))
    found = doctor._short_floats()
    assert found.value == words
    assert bool(found.advice) == (words != "added by compiled loops")
