"""Jobs that `ringreduce run` really starts, under the MPI of the running interpreter.

The programs are plain mpi4py scripts.  Rank 1 fails, rank 0 waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringreduce.supervisor.launcher import Job, command_line
from ringreduce.supervisor.mpiexec import Flavour, Mpiexec, find_mpiexec
from ringreduce.system.cores import cores
from tests.support.mpi import DEADLINE_S, alive_in_the_end, is_alive

pytestmark = pytest.mark.mpi

RUN = [sys.executable, "-m", "ringreduce.launch.cli", "run"]
LIMIT_S = 300.0
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def alike(*values):
    """Parameters whose tests are the same under any MPI."""
    return [pytest.param(value, marks=pytest.mark.alike) for value in values]


@pytest.fixture
def short_path():
    """Open MPI makes sockets in TMPDIR: their names have room for 107 characters."""
    with tempfile.TemporaryDirectory(prefix="rr") as path:
        yield path


# --- what the program sees ------------------------------------------------------------------------

SHOW = """
    import json, sys
    main = sys.modules["__main__"]
    seen = {
        "arguments": sys.argv[1:], "path": sys.path, "file": __file__, "name": __name__,
        "main": main.__dict__ is globals(), "package": __package__ or "",
    }
    print(json.dumps(seen))
"""


STRAY = "open('stray', 'a').write(__file__); raise RuntimeError('a module of the folder')"
COMMANDS = [
    ["run", "-n", "1", "../src/show.py"],
    ["train", "-n", "1", "--epochs", "1", "--hidden", "8", "--data", "synthetic"],
    ["bench", "-n", "1", "-e", "8", "--iters", "1", "--no-peers"],
    ["explain", "-n", "2"],
    ["doctor"],
]


@pytest.mark.few(4)
@pytest.mark.alike
@pytest.mark.parametrize("start", ["command", "module"])
@pytest.mark.parametrize("words", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_no_module_of_the_working_directory_runs_before_the_program(
    script, run, tmp_path, words, start
):
    (tmp_path / "src").mkdir()
    script("import json, ringreduce; ringreduce.init().close()", "src/show.py")
    (tmp_path / "work").mkdir()
    for name in ("json", "signal", "numpy", "socket", "mpi4py", "numba", "matplotlib"):
        (tmp_path / f"work/{name}.py").write_text(STRAY)
    command = [str(Path(sys.executable).with_name("ringreduce"))]
    if start == "module":  # Python itself finds the package there
        command = [sys.executable, "-m", "ringreduce"]
    else:
        (tmp_path / "work/ringreduce.py").write_text(STRAY)
    ended = run(*words, command=command, cwd=tmp_path / "work")
    assert not (tmp_path / "work/stray").exists(), ended.stderr
    assert ended.returncode == 0, ended.stderr


WORDS = ["--", "-5", ":", "", "--", "-m", "$HOME", "*", "a b", "a\nb", "\udcff", "é", "x" * 70_000]


@pytest.mark.few(2)
@pytest.mark.parametrize("program", [["sub/show.py"], *alike(["-m", "sub.show"], ["sub"])])
def test_a_program_sees_what_it_would_under_python(script, run, tmp_path, program):
    (tmp_path / "sub").mkdir()
    script(SHOW, "sub/show.py")
    script(SHOW, "sub/__main__.py")
    arguments = [*program, "-n", "3", *WORDS, *map(str, range(20_000))]
    plain = run(*arguments, command=[sys.executable])
    ours = run("-n", "1", *arguments)
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [(), ("--elastic", "1"), ("--hosts", "localhost:2")])
def test_ranks_have_their_own_place_and_rank_0_the_launchers_stdin(script, run, tmp_path, options):
    script("""
        import os, sys
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
        place, line = [os.environ[name] for name in names], sys.stdin.readline()
        sys.stdout.write(f"{place} {line!r} {sys.stdin.seekable()}\\n")
    """)
    of_a_container = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "pod-0"}
    given = os.environ | of_a_container | {"TORCHELASTIC_RUN_ID": "7"}
    (tmp_path / "lines").write_text("first\nsecond\nthird\n")
    with open(tmp_path / "lines") as file:
        os.lseek(file.fileno(), len("first\n"), os.SEEK_SET)
        ended = run("-n", "2", *options, "script.py", stdin=file, env=given)
    assert sorted(line for line in ended.stdout.splitlines() if line) == [
        "['0', '2', '0', 'localhost'] 'second\\n' True",
        "['1', '2', '1', 'localhost'] '' True",
    ]


def test_what_the_program_does_not_read_of_a_pipe_is_left(script, run):
    script("")
    reading, writing = os.pipe()
    os.write(writing, b"a line\n")
    run("-n", "2", "script.py", stdin=reading)
    left = os.read(reading, 100)
    os.close(reading)
    os.close(writing)
    assert left == b"a line\n"


AFTER = """
    import atexit, pickle, sys, threading
    class Model: pass
    def save(where):
        sys.stdout.write(where + " " + type(pickle.loads(pickle.dumps(Model()))).__name__ + "\\n")
    def wait():
        threading.main_thread().join()
        save("thread")
    atexit.register(save, "exit handler")
    threading.Thread(target=wait).start()
"""


@pytest.mark.few(2)
@pytest.mark.alike
@pytest.mark.parametrize("program", [["script.py"], ["folder"], ["-m", "script"]])
def test_the_main_module_is_there_until_the_process_ends(script, run, tmp_path, program):
    script(AFTER)
    (tmp_path / "folder").mkdir()
    script(AFTER, "folder/__main__.py")
    ended = run("-n", "1", *program)
    assert (ended.stdout, ended.stderr) == ("thread Model\nexit handler Model\n", "")


def test_lines_of_unbuffered_ranks_do_not_mix_and_nothing_is_warned_of(script, run):
    # A rank prints 12 KiB: Intel MPI's launcher cuts what it reads after 16 KiB.
    script("""
        import os, ringreduce as rr
        with rr.init() as comm:
            for step in range(500):
                print("rank", comm.rank, "step", step, "loss", 0.5)
    """)
    variables = {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error"}
    ended = run("-n", "2", "script.py", env=os.environ | variables)
    wanted = [f"rank {rank} step {step} loss 0.5" for rank in (0, 1) for step in range(500)]
    assert sorted(ended.stdout.splitlines()) == sorted(wanted)
    assert ended.stderr == ""


@pytest.mark.smoke
def test_ranks_are_told_the_job(script, run):
    script("""
        import os
        from mpi4py import MPI
        names = ("EXPECTED_SIZE", "NODES", "TIMEOUT_S")
        mine = [os.environ[f"RINGREDUCE_{name}"] for name in names]
        told = MPI.COMM_WORLD.gather([*mine, os.environ["OMP_NUM_THREADS"]])
        if told:
            print(*told)
    """)
    ended = run("-n", "3", "--nodes", "2,1", "--timeout-s", "7", "script.py")
    mine = ["3", "2,1", "7", str(max(1, cores() // 3))]
    assert ended.stdout == f"{mine} {mine} {mine}\n"


def test_ranks_that_outnumber_the_cores_keep_one_each(script, run):
    script("""
        import os
        from mpi4py import MPI
        from ringreduce.system.cores import cores
        told = MPI.COMM_WORLD.gather((sorted(os.sched_getaffinity(0)), cores()))
        if told:
            print(*told, sep="\\n")
    """)
    mine, count = sorted(os.sched_getaffinity(0)), cores()
    there_and_back = [*mine, *reversed(mine)]
    unbound = os.environ | {"I_MPI_PIN": "0"}
    ended = run("-n", str(2 * count), "script.py", env=unbound)
    assert ended.stdout == "".join(f"([{core}], {count})\n" for core in there_and_back)
    ended = run("-n", str(count + 1), "script.py", env=unbound | {"RINGREDUCE_SHARED_CORES": "0"})
    assert ended.stdout == f"({mine}, {count})\n" * (count + 1)


# --- a good end -----------------------------------------------------------------------------------


def test_a_job_of_more_ranks_than_cores_says_nothing_but_its_own_words(script, run):
    ranks = cores() + 1
    script("""
        from mpi4py import MPI
        total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
        window = MPI.Win.Allocate(8, comm=MPI.COMM_WORLD)
        window.Free()
        if MPI.COMM_WORLD.rank == 0:
            print(MPI.COMM_WORLD.size, total)
    """)
    ended = run("-n", str(ranks), "script.py")
    assert ended.stderr == ""
    assert ended.stdout == f"{ranks} {ranks * (ranks - 1) // 2}\n"
    assert ended.returncode == 0


def test_tagged_lines_begin_with_their_rank(script, run):
    script("""
        import sys
        from mpi4py import MPI
        sys.stdout.write(f"I am {MPI.COMM_WORLD.rank}\\n")
    """)
    lines = sorted(run("-n", "2", "--tag-output", "script.py").stdout.splitlines())
    tags = ("[1,{}]<stdout>:", "[{}]")
    assert lines in [[f"{tag.format(rank)} I am {rank}" for rank in (0, 1)] for tag in tags]


def test_what_a_killed_mpiexec_left_does_not_stop_the_next_with_its_process_id(
    script, run, short_path
):
    script("""
        from mpi4py import MPI
        print(MPI.COMM_WORLD.size)
    """)
    newest = subprocess.Popen(["true"])
    newest.wait()
    for pid in range(newest.pid, newest.pid + 500):
        left = Path(short_path) / f"ompi.{pid}"
        left.mkdir()
        (left / f"pmix.{platform.node()}.tool").touch()
    ended = run("-n", "1", "script.py", env=os.environ | {"TMPDIR": short_path})
    assert (ended.stdout, ended.stderr) == ("1\n", "")


# --- a bad end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["sys.exit(3)", "comm.rank == 1 and sys.exit(3) or comm.recv()"])
def test_an_exit_code_is_passed_on(script, run, leaves):
    script(f"""
        import sys
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        comm.barrier()
        {leaves}
    """)
    ended = run("-n", "2", "script.py")
    assert ended.returncode == 3
    assert "BAD TERMINATION" not in ended.stdout  # of hydra's banner


def test_an_exception_ends_the_job_with_all_of_its_ranks_traceback(script, run):
    script("""
        from mpi4py import MPI

        def fail():
            raise ValueError("x" * 60_000 + " and rank 1's own end")

        MPI.COMM_WORLD.barrier()
        if MPI.COMM_WORLD.rank == 1:
            fail()
        MPI.COMM_WORLD.recv(source=1)
    """)
    ended = run("-n", "2", "script.py")
    assert ended.returncode == 1
    trace = ended.stderr[: ended.stderr.index("x" * 60_000 + " and rank 1's own end")]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert [word for word in trace.split() if word in ("<module>", "fail")] == ["<module>", "fail"]
    assert "runpy" not in trace


def test_an_exception_before_mpi_starts_ends_the_job(script, run):
    script("""
        import os
        if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
            raise ValueError("rank 1's own error")
        from mpi4py import MPI  # waits for all ranks
    """)
    ended = run("-n", "2", "script.py")
    assert "ValueError: rank 1's own error" in ended.stderr
    assert ended.returncode == 1


def test_a_job_of_the_wrong_size_ends_with_what_is_wrong(script, run):
    script("print('ran')")
    mpiexec = found_mpiexec()
    ended = run(
        command=command_line(Job(2, ("script.py",)), mpiexec, {}, ()),
        env=plain_environment(mpiexec) | {"RINGREDUCE_EXPECTED_SIZE": "3"},
    )
    assert "mpiexec started: 2, asked for: 3" in ended.stderr
    assert "ran" not in ended.stdout
    assert ended.returncode != 0


# --- signals --------------------------------------------------------------------------------------

WAIT = """
    import json, os, signal, subprocess, sys, time
    from ringreduce.system.place import mpi_rank
    if mpi_rank() is not None:
        from mpi4py import MPI
    processes, rank = [os.getpid(), os.getppid()], os.environ["RANK"]
    if "child" in sys.argv:
        processes.append(subprocess.Popen(["sleep", "60"]).pid)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(rank + ".part", "w") as file:
        json.dump(processes, file)
    os.rename(rank + ".part", rank)
    time.sleep(60)
"""
BOTH_WAYS = pytest.mark.parametrize("way", [(), *alike(("--without-mpi",))], ids=["mpi", "none"])


@contextlib.contextmanager
def waiting_job(
    script, tmp_path, *options: str
) -> Iterator[tuple[subprocess.Popen[str], list[int], list[int]]]:
    """A job of two ranks that wait: the launcher, the ranks' ids, and their parents' ids."""
    script(WAIT)
    temporary = tempfile.TemporaryDirectory(prefix="rr", ignore_cleanup_errors=True)
    launcher = subprocess.Popen(
        [*RUN, "-n", "2", *options, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": temporary.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    ids: list[int] = []
    try:
        ids = read_ids(tmp_path)
        yield launcher, ids[::2], ids[1::2]
    finally:
        for pid in (launcher.pid, *ids):
            with contextlib.suppress(ProcessLookupError):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
        launcher.wait()
        temporary.cleanup()


def heed_signals() -> None:
    """A background job of a shell may have SIGINT ignored, and one of nohup SIGHUP."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


def read_ids(folder: Path) -> list[int]:
    """The processes of rank 0, and then those of rank 1."""
    deadline, files = time.monotonic() + LIMIT_S, (folder / "0", folder / "1")
    while not all(path.exists() for path in files):
        assert time.monotonic() < deadline, "the job does not start"
        time.sleep(0.02)
    return [process for path in files for process in json.loads(path.read_text())]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("number", "way"), [*((each, ()) for each in ENDING), (signal.SIGHUP, ("--without-mpi",))]
)
def test_a_signal_to_the_launcher_ends_all_ranks(script, tmp_path, number, way):
    with waiting_job(script, tmp_path, *way) as (launcher, ranks, _):
        launcher.send_signal(number)
        assert launcher.wait(DEADLINE_S) == 128 + number
        assert alive_in_the_end(ranks) == []


@BOTH_WAYS
def test_a_killed_launcher_leaves_nothing(script, tmp_path, way):
    with waiting_job(script, tmp_path, *way) as (launcher, ranks, parents):
        launcher.kill()
        assert alive_in_the_end([*ranks, *parents]) == []


@BOTH_WAYS
def test_a_killed_mpiexec_leaves_no_rank(script, tmp_path, way):
    with waiting_job(script, tmp_path, *way) as (launcher, ranks, _):
        files = [path for rank in ranks for path in shared_memory_of(rank)]
        os.kill(child_of(launcher.pid), signal.SIGKILL)
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGKILL
        assert alive_in_the_end(ranks) == []
        assert [path for path in files if path.exists()] == []


def test_an_mpiexec_that_does_not_end_by_a_signal_is_killed(script, tmp_path):
    with waiting_job(script, tmp_path) as (launcher, ranks, _):
        os.kill(child_of(launcher.pid), signal.SIGSTOP)
        launcher.terminate()
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert alive_in_the_end(ranks) == []


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def shared_memory_of(pid: int) -> set[Path]:
    words = Path(f"/proc/{pid}/maps").read_text().split()
    return {Path(word) for word in words if word.startswith("/dev/shm/")}


@pytest.mark.parametrize(
    "words",
    ["script.py", *alike(*(f"--without-mpi script.py child {how}" for how in ("", "stubborn")))],
)
def test_ctrl_c_at_a_terminal_ends_all_ranks(script, tmp_path, words):
    script(WAIT)
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(tmp_path)
        os.execv(sys.executable, [*RUN, "-n", "2", *words.split()])
    processes = read_ids(tmp_path)
    os.write(terminal, b"\x03")
    left = alive_in_the_end(processes)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert left == []
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT


# --- several hosts --------------------------------------------------------------------------------

AGENT = """#!/bin/sh
# Stands in for ssh: options, a host, a command.  It runs the command here, with nothing of the
# caller's environment.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
mkdir -p "HERE/$host"
exec env -i PATH="$PATH" HOME="$HOME" TMPDIR="HERE/$host" AGENT_HOST="$host" sh -c "$*"
"""


def test_hosts_get_their_ranks_and_the_environment(script, run, short_path):
    agent = script(AGENT.replace("HERE", short_path), "agent")
    agent.chmod(0o755)
    script("""
        import os, sys
        size = os.environ.get("PMI_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"]
        rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
        names = ("AGENT_HOST", "RINGREDUCE_NODES", "RINGREDUCE_MINE", "OMP_NUM_THREADS")
        sys.stdout.write(" ".join((rank, size, *map(os.environ.get, names))) + "\\n")
    """)
    launchers = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "I_MPI_HYDRA_BOOTSTRAP_EXEC")
    ours = dict.fromkeys(launchers, str(agent)) | {
        "RINGREDUCE_MINE": "mine",
        "OMP_NUM_THREADS": "5",
    }
    hosts = "127.0.0.2:2,127.0.0.3:1"
    ended = run(
        *("-n", "3", "--hosts", hosts, "--nodes", "2,1", "script.py"), env=os.environ | ours
    )
    # Open MPI and its agent race to put the agent in a process group; the loser says so.
    said = [line for line in ended.stderr.splitlines() if "setpgid" not in line]
    assert said == []
    assert sorted(ended.stdout.splitlines()) == [
        "0 3 127.0.0.2 2,1 mine 5",
        "1 3 127.0.0.2 2,1 mine 5",
        "2 3 127.0.0.3 2,1 mine 5",
    ]


# --- the MPI of this interpreter ------------------------------------------------------------------


def found_mpiexec() -> Mpiexec:
    return find_mpiexec(Path(sys.prefix), os.environ["PATH"])


def plain_environment(mpiexec: Mpiexec) -> dict[str, str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return {**os.environ, **(allowed | crowded if mpiexec.flavour is Flavour.OPEN_MPI else {})}
