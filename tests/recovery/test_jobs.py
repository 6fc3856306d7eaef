"""Jobs that go on after losses, proven by counting: every sample counts once in every epoch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringreduce.launch.mpiexec import Flavour, ask
from tests.support.mpi import PROGRAMS, ROOT, alive_in_the_end, is_alive, mpiexec

pytestmark = pytest.mark.mpi
SAMPLES, BATCH, EPOCHS, STEP_S = 120, 30, 25, 0.02
STEPS = SAMPLES // BATCH * EPOCHS
COUNTING = tuple(map(str, (PROGRAMS / "counts_samples.py", SAMPLES, BATCH, EPOCHS, STEP_S)))
LIVE = ask(Path(mpiexec())).flavour is Flavour.OPEN_MPI
"""Whether ranks of this MPI can go on after a loss."""


@pytest.fixture
def start(start):
    """Start a program, by default the one that counts samples."""

    def started(*words, program=()):
        return start(*words, program=program or COUNTING)

    return started


def counted_once_an_epoch(ranks: int) -> str:
    return f"{ranks} ranks, step {STEPS}: counted [{EPOCHS}] times"


@pytest.mark.few(2)
@pytest.mark.parametrize("recovery", ["auto", "relaunch"] if LIVE else ["auto"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_job_goes_on_after_a_rank_is_killed(start, tmp_path, victim, recovery):
    job = start("-n", "3", "--elastic", "1:3", "--recovery", recovery)
    pids = job.await_generation(1)
    os.kill(pids[victim], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert counted_once_an_epoch(2) in output
    (resized,) = job.events("resized")
    facts = {name: resized[name] for name in ("before", "after", "lost", "joined", "cause")}
    assert facts == {"before": 3, "after": 2, "lost": [victim], "joined": 0, "cause": "killed"}
    level = 1 if recovery == "auto" and LIVE else 2
    assert (resized["level"], resized["redone"], resized["generation"]) == (level, 1, 2)
    assert resized["recovered_s"] > 0
    assert output.count("resized Change(before=3, after=2") == 2, "each rank calls the hook"
    assert [name for name in os.listdir(tmp_path) if name.startswith("ringreduce-")] == []


def test_two_losses_one_after_another_leave_one_rank(start):
    job = start("-n", "3", "--elastic", "1")
    os.kill(job.await_generation(1)[2], signal.SIGKILL)
    os.kill(job.await_step(2)[0], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert counted_once_an_epoch(1) in output
    named = re.findall(
        r"rank (\d) was killed \(SIGKILL\); goes on at step \d+ on (\d) ranks", output
    )
    assert named == [("2", "2"), ("0", "1")]
    assert "rr.elastic" not in output
    assert [event["after"] for event in job.events("resized")] == [2, 1]


def test_a_program_that_never_calls_elastic_is_warned_of(start, tmp_path):
    program = tmp_path / "plain.py"
    program.write_text("import ringreduce as rr\nwith rr.init(): pass\n")
    code, output = start("-n", "2", "--elastic", "1", program=(str(program),)).end()
    assert code == 0, output
    assert "warning: --elastic had no effect, for the program has not called rr.elastic" in output


def test_a_lost_rank_is_replaced(start):
    job = start("-n", "2", "--elastic", "1", "--replace")
    os.kill(job.await_generation(1)[0], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert counted_once_an_epoch(2) in output
    assert [event["joined"] for event in job.events("resized")] == [1]


def test_a_killed_mpiexec_costs_no_rank(start):
    job = start("-n", "2", "--elastic", "2")
    job.await_generation(1)
    tasks = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
    os.kill(int(tasks.read_text().split()[0]), signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert counted_once_an_epoch(2) in output
    assert [event["lost"] for event in job.events("resized")] == [[]]


def test_a_stopped_rank_is_killed_after_the_timeout(start):
    job = start("-n", "3", "--elastic", "1", "--timeout-s", "1")
    os.kill(job.await_generation(1)[1], signal.SIGSTOP)
    code, output = job.end()
    assert code == 0, output
    assert counted_once_an_epoch(2) in output
    (resized,) = job.events("resized")
    assert (resized["lost"], resized["cause"]) == ([1], "stopped")


def test_a_rank_killed_before_there_is_a_communicator_is_survived(start, tmp_path):
    program = tmp_path / "dies_once.py"
    text = (PROGRAMS / "counts_samples.py").read_text()
    once = tmp_path / "once"
    program.write_text(
        "import os, signal\n"
        f"if not os.path.exists({str(once)!r}):\n"
        f"    try: os.close(os.open({str(once)!r}, os.O_CREAT | os.O_EXCL))\n"
        "    except FileExistsError: pass\n"
        "    else: os.kill(os.getpid(), signal.SIGKILL)\n" + text
    )
    words = map(str, (SAMPLES, BATCH, 2, 0))
    job = start("-n", "3", "--elastic", "1", program=(str(program), *words))
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks, step 8: counted [2] times" in output


DIES_EARLY = """
import os, signal
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == "1":
    try: os.unlink({here!r})
    except FileNotFoundError: pass
    else: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_killed_before_it_has_connected_is_survived(start, tmp_path, monkeypatch):
    """In a generation that follows a loss."""
    here = tmp_path / "dies"
    (tmp_path / "sitecustomize.py").write_text(DIES_EARLY.format(here=str(here)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = start("-n", "3", "--elastic", "1:3", "--recovery", "relaunch")
    pids = job.await_generation(1)
    here.touch()
    os.kill(pids[2], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    # An MPI that has not noticed it leaves the rank without a place.
    assert counted_once_an_epoch(2) in output or counted_once_an_epoch(1) in output
    assert not here.exists()


BUG = """
import ringreduce as rr, numpy as np
def train(comm, state):
    comm.barrier()
    if comm.rank == 1:
        {bug}
    comm.barrier()
rr.elastic(train, rr.State({{"x": np.zeros(1)}}))
"""


@pytest.mark.parametrize(
    ("bug", "code", "text"),
    [
        ("raise ValueError('bad data')", 1, "ValueError: bad data"),
        ("import sys; sys.exit(5)", 5, "called sys.exit(5)"),
        ("import os; os._exit(3)", 3, ""),
    ],
)
def test_a_bug_is_no_fault(start, tmp_path, bug, code, text):
    program = tmp_path / "bug.py"
    program.write_text(BUG.format(bug=bug))
    job = start("-n", "2", "--elastic", "1", program=(str(program),))
    found, output = job.end()
    assert found == code, output
    assert text in output
    assert [event["generation"] for event in job.events("started")] == [1]


def test_a_step_that_kills_its_rank_ends_the_job(start, tmp_path):
    program = tmp_path / "kills.py"
    program.write_text(BUG.format(bug="import os; os.kill(os.getpid(), 9)"))
    # Two losses within 0.1 s count as one.
    job = start("-n", "4", "--elastic", "1", program=(str(program),))
    code, output = job.end()
    assert code == 137, output
    # MPICH kills the other ranks at once, and the launcher may see one of them end first.
    assert re.search(r"step 1 was lost (twice|3 times) running; in step 1 rank \d was kill", output)


def test_too_few_ranks_end_the_job_with_75(start):
    job = start("-n", "2", "--elastic", "2", "--wait-s", "0.5")
    os.kill(job.await_generation(1)[1], signal.SIGKILL)
    code, output = job.end()
    assert code == 75, output
    assert "ranks left: 1; --elastic wants at least 2" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all_ranks(start, number):
    job = start("-n", "2", "--elastic", "1")
    pids = job.await_generation(1)
    job.process.send_signal(number)
    code, output = job.end()
    assert code == 128 + number, output
    assert not any(map(is_alive, pids))


def test_a_state_is_saved_and_resumed(start, tmp_path):
    folder = tmp_path / "states"
    job = start("-n", "2", "--elastic", "1", "--state-dir", str(folder))
    job.await_generation(1)
    time.sleep(0.3)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 143, output
    assert f"is saved in {folder}" in output
    (folder / "step-000000999.json").write_text("no JSON")
    job = start("-n", "2", "--elastic", "1", "--state-dir", str(folder), "--resume")
    code, output = job.end()
    assert code == 0, output
    assert "passed over: " in output
    assert counted_once_an_epoch(2) in output


def test_after_the_launcher_was_killed_a_regular_state_goes_on(start, tmp_path):
    folder = tmp_path / "states"
    words = "-n", "2", "--elastic", "1", "--state-dir", str(folder), "--save-every-s", "0.1"
    job = start(*words)
    pids = job.await_generation(1)
    while len(list(folder.glob("*.json"))) < 2 and job.process.poll() is None:
        time.sleep(0.01)
    job.process.kill()
    job.process.wait()
    assert alive_in_the_end(pids) == []
    job = start(*words, "--resume")
    code, output = job.end()
    assert code == 0, output
    assert counted_once_an_epoch(2) in output
    (resumed,) = job.events("resumed")
    assert 0 < resumed["step"] < STEPS
    last = max(folder.glob("*.json"))
    assert json.loads(last.read_text())["step"] == STEPS
    assert len(list(folder.glob("*.json"))) == 3


def test_a_full_disk_is_reported_once_and_ends_a_job_with_1(start, tmp_path):
    folder = tmp_path / "states"
    words = "-n", "2", "--elastic", "1", "--state-dir", str(folder), "--save-every-s", "0.05"
    job = start(*words, program=full_disk(tmp_path))
    job.await_generation(1)
    code, output = job.end()
    assert code == 1, output
    assert counted_once_an_epoch(2) in output
    assert output.count("no checkpoint after step") == 1
    assert "No space left on device" in output


def test_events_that_cannot_be_written_are_given_up_and_the_job_ends_with_1(start, tmp_path):
    job = start("-n", "2", "--elastic", "1", "--events", "/dev/full")
    code, output = job.end()
    assert code == 1, output
    assert counted_once_an_epoch(2) in output
    assert output.count("no more events are written: [Errno 28]") == 1
    assert "Traceback" not in output


def test_a_full_disk_is_not_forgotten_with_the_rank_that_met_it(start, tmp_path):
    full = tmp_path / "full"
    full.touch()
    program = tmp_path / "trains.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "from ringreduce.train.__main__ import main\n"
        "written = os.fsync\n"
        "def sync(file):\n"
        f"    if pathlib.Path({str(full)!r}).exists():\n"
        "        raise OSError(28, 'No space left on device')\n"
        "    written(file)\n"
        "if __name__ == '__main__':\n"
        "    os.fsync = sync\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    words = f"--epochs 400 --checkpoint-dir {folder} --checkpoint-every 100".split()
    job = start("-n", "2", "--elastic", "1", "--replace", program=(str(program), *words))
    pids = job.await_generation(1)
    time.sleep(0.5)  # it begins to write
    full.unlink()
    os.kill(pids[0], signal.SIGKILL)
    code, output = job.end()
    assert code == 1, output
    assert output.count("no checkpoint after step") == 1
    assert list(folder.glob("*.json")), output


def full_disk(path: Path) -> tuple[str, ...]:
    """The program that counts samples, on a disk without space."""
    program = path / "full.py"
    program.write_text(
        "import os\n"
        "def full(_): raise OSError(28, 'No space left on device')\n"
        "os.fsync = full\n" + (PROGRAMS / "counts_samples.py").read_text()
    )
    return tuple(map(str, (program, SAMPLES, BATCH, EPOCHS, STEP_S)))


def test_a_folder_with_states_of_another_run_is_refused(start, tmp_path):
    (tmp_path / "step-000000001.json").touch()
    assert "has checkpoints already" in refused(
        "-n", "2", "--elastic", "1", "--state-dir", str(tmp_path)
    )


def test_a_killed_launcher_leaves_no_rank(start):
    job = start("-n", "2", "--elastic", "1")
    pids = job.await_generation(1)
    job.process.kill()
    job.process.wait()
    assert alive_in_the_end(pids) == []


def refused(*words: str) -> str:
    command = [sys.executable, "-m", "ringreduce", "run", *words, "-m", "ringreduce"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done
    return done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-n 4 --elastic 5", "MIN is 5, more than MAX, 4"),
        ("-n 4 --elastic 0:4", "MIN is 0; wanted at least 1 rank"),
        ("-n 9 --elastic 1:4", "-n is 9; --elastic allows 1 to 4 ranks"),
        ("-n 4 --elastic some", "'some'; wanted MIN or MIN:MAX, such as 2:6"),
        ("-n 4 --state-dir states", "--state-dir is for --elastic MIN:MAX; add it"),
        ("-n 4 --elastic 2 --save-every-s 9", "--save-every-s to where? name a --state-dir"),
        ("-n 4 --elastic 2 --resume", "--resume from where? name a --state-dir"),
        ("-n 4 --max-failures 3", "--max-failures is for --elastic MIN:MAX; add it"),
        (
            "-n 4 --elastic 2 --wait-s -1",
            "--wait-s is -1; wanted a finite number of at least 0 seconds",
        ),
        ("-n 4 --elastic 2 --nodes 2,2", "for the ranks of one host, without --nodes"),
    ],
)
def test_wrong_options_are_refused_before_a_rank_starts(words, text):
    assert text in refused(*words.split())


def test_a_folder_of_sockets_that_others_can_enter_is_refused(tmp_path):
    folder = tmp_path / f"ringreduce-{os.geteuid()}"
    folder.mkdir(mode=0o755)
    command = [sys.executable, "-m", "ringreduce", "run", "-n", "2", "--elastic", "1"]
    done = subprocess.run(
        [*command, "-m", "ringreduce"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 2, done
    assert "--elastic: no socket for the ranks" in done.stderr
    assert "you alone can enter; remove it" in done.stderr


def test_events_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "ringreduce", "run", "-n", "2", "--elastic", "1"]
    command += ["--events", str(tmp_path / "file" / "events"), "-m", "ringreduce"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done
    assert "--events" in done.stderr


def test_all_ranks_begin_with_the_arrays_and_the_step_of_rank_0(tmp_path):
    program = tmp_path / "begins.py"
    program.write_text(
        "import numpy as np, ringreduce as rr\n"
        "def make(comm):\n"
        "    state = rr.State({'x': np.zeros(1)})\n"
        "    if comm.rank == 0:\n"
        "        state.restore({'x': np.ones(1)}, 7)\n"
        "    return state\n"
        "def train(comm, state):\n"
        "    found = comm.all_gather(np.array([state.step, state['x'][0]]))\n"
        "    if comm.rank == 0:\n"
        "        print(found.tolist())\n"
        "rr.elastic(train, make)\n"
    )
    command = [sys.executable, "-m", "ringreduce", "run", "-n", "2", str(program)]
    for more in ([], ["--elastic", "1"]):
        words = [*command[:-1], *more, command[-1]]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == "[7.0, 1.0, 7.0, 1.0]\n", done


def test_without_elastic_the_function_is_called_once():
    command = [sys.executable, "-m", "ringreduce", "run", "-n", "2"]
    words = [str(PROGRAMS / "counts_samples.py"), *map(str, (SAMPLES, BATCH, EPOCHS, 0))]
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{counted_once_an_epoch(2)}\n", done
