"""Jobs that the launcher starts without MPI: where there is none, and where the user wants none."""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest

from ringreduce.launch import cli

pytestmark = pytest.mark.slow

NO_MPI = {"MPI4PY_LIBMPI": "/nonexistent.so", "MPI4PY_MPIABI": "mpich"}
COMMAND = [sys.executable, "-P", "-m", "ringreduce"]


@pytest.fixture
def start(script, run):
    """Runs a command to its end in the folder of script.py, with the text of that program."""

    def start(text, *words, command=COMMAND, env=os.environ | NO_MPI, **settings):
        script(text)
        return run(*words, command=command, env=env, **settings)

    return start


ADDS = """
    import os, sys
    import numpy as np, ringreduce as rr
    with rr.init() as comm:
        total = comm.all_reduce(np.arange(3) * (comm.rank + 1))
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    told = [os.environ.get(name) for name in names]
    sys.stdout.write(f"{comm.rank} {total} {told} {sys.stdin.readline()!r} {sys.argv[1:]}\\n")
"""


@pytest.mark.parametrize("variables", [NO_MPI, {"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "5"}])
def test_ranks_meet_without_mpi(start, tmp_path, variables):
    (tmp_path / "lines").write_text("first\nsecond\n")
    with open(tmp_path / "lines") as file:
        ended = start(
            ADDS,
            *("run", "-n", "2", *["--without-mpi"] * (variables is not NO_MPI), "script.py"),
            *("--", ":"),
            stdin=file,
            env=os.environ | variables,
        )
    assert ended.stderr == ""
    assert sorted(ended.stdout.splitlines()) == [
        f"{rank} [0 3 6] ['2', '{rank}', '2'] {line!r} ['--', ':']"
        for rank, line in enumerate(["first\n", ""])
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("words", [["train", "--epochs", "1"], ["bench", "-e", "8"]])
def test_commands_run_without_mpi(start, words):
    command, *rest = words
    ended = start("", command, "-n", "2", *rest)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "2 ranks" in ended.stdout


@pytest.mark.parametrize("variables", [NO_MPI, {}])
def test_a_process_that_nothing_has_started_is_one_rank(start, variables):
    ended = start(ADDS, env=os.environ | variables, command=[sys.executable, "script.py"])
    assert ended.stdout == "0 [0 1 2] [None, None, None] '' []\n", ended.stderr


ENDS = {
    "os.kill(os.getpid(), 9)": (137, "was killed by signal 9 (SIGKILL)"),
    "sys.exit(3)": (3, "called sys.exit(3)"),
    "raise ValueError('its own')": (1, "raised ValueError"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("end", ENDS)
def test_the_rank_that_ends_the_job_is_named(start, end):
    ended = start(
        f"""
        import os, sys, time
        import ringreduce as rr
        comm = rr.init()
        comm.barrier()
        if comm.rank == 1:
            {end}
        comm.barrier()
        """,
        *("run", "-n", "2", "script.py"),
    )
    code, how = ENDS[end]
    *lines, last = ended.stderr.splitlines()
    assert ended.returncode == code
    assert last == f"ringreduce: rank 1 on {os.uname().nodename} {how}; this ended the job"
    assert ("ValueError: its own" in lines) == ("raise" in end)


def test_lines_are_tagged_and_whole_and_a_closed_standard_input_is_empty(start):
    ended = start(
        """
        import os, sys
        print("out", os.environ["RANK"], repr(sys.stdin.read()))
        print("err", os.environ["RANK"], file=sys.stderr)
        sys.stdout.write("no end")
        """,
        *("run", "-n", "2", "--tag-output", "script.py"),
        preexec_fn=partial(os.close, 0),
    )
    wanted = ["[0] no end", "[0] out 0 ''", "[1] no end", "[1] out 1 ''"]
    assert sorted(ended.stdout.splitlines()) == wanted
    assert sorted(ended.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]


@pytest.mark.parametrize("option", [("--hosts", "a,b"), ("--elastic", "1")])
def test_what_needs_an_mpi_says_so(start, capsys, tmp_path, monkeypatch, option):
    ended = start("", "run", "-n", "2", *option, "script.py")
    assert ended.returncode == 1
    assert f"{option[0]} needs an MPI" in ended.stderr
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "-n", "2", "--without-mpi", *option, "script.py"])
    assert stop.value.code == 2
    assert f"{option[0]} needs an MPI" in capsys.readouterr().err
