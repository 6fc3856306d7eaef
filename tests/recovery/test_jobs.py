"""Jobs that go on after losses, and how they end and are resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.support.mpi import ROOT, alive_in_the_end

pytestmark = pytest.mark.mpi


def test_after_losses_every_sample_counts_once_in_every_epoch(start, finish, tmp_path):
    program = "-m", "tests.long_recovery.counting", str(tmp_path / "stop")
    job = start("-n", "3", "--elastic", "1:3", "--recovery", "relaunch", program=program)
    os.kill(job.await_generation(1)[0], signal.SIGKILL)
    os.kill(job.await_step(2)[1], signal.SIGKILL)
    job.await_step(3)
    output = finish(job)
    found = json.loads(output.splitlines()[-1])
    assert found["least"] == found["most"] == found["epochs"] > 0
    named = re.findall(
        r"rank (\d) was killed \(SIGKILL\); goes on at step \d+ on (\d) ranks?", output
    )
    assert named == [("0", "2"), ("1", "1")]
    assert "rr.elastic" not in output
    names = "before", "after", "lost", "joined", "cause", "level", "redone", "generation"
    events = job.events("resized")
    assert [tuple(event[name] for name in names) for event in events] == [
        (3, 2, [0], 0, "killed", 2, 1, 2),
        (2, 1, [1], 0, "killed", 2, 1, 3),
    ]
    assert all(event["recovered_s"] > 0 for event in events)
    assert [path.name for path in tmp_path.glob("ringreduce-*")] == []


def test_a_program_that_never_calls_elastic_is_warned_of(start, tmp_path):
    program = tmp_path / "plain.py"
    program.write_text("import ringreduce as rr\nwith rr.init(): pass\n")
    code, output = start("-n", "1", "--elastic", "1", program=(str(program),)).end()
    assert code == 0, output
    assert "warning: --elastic had no effect, for the program has not called rr.elastic" in output


DIES = """
if os.environ["RANK"] == "1" and once("died"):
    (here / "dies").touch()
    os.kill(os.getpid(), 9)
"""
DIES_EARLY = """
import os, signal
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == "1":
    try: os.unlink({here!r})
    except FileNotFoundError: pass
    else: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_killed_before_they_have_connected_or_a_communicator_are_survived(
    steps, finish, tmp_path, monkeypatch
):
    """First a rank without a communicator, then one without a connection."""
    dies = tmp_path / "dies"
    (tmp_path / "sitecustomize.py").write_text(DIES_EARLY.format(here=str(dies)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = "-n", "3", "--elastic", "1", "--recovery", "relaunch"
    job = steps(*words, before=DIES)
    job.wait_until(lambda: job.events("started"), "a generation that trains")
    output = finish(job)
    # An MPI that has not noticed the second leaves the rank without a place.
    assert re.search(r"^[12] ranks made each step once$", output, re.MULTILINE), output
    assert job.events("started")[0]["generation"] == 3
    assert not dies.exists()


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


ENDS = [
    ("--elastic 1", slice(1, 3), 15, 75, "all ranks were told to end; rank 0, rank 1 left; step"),
    ("--elastic 2 --wait-s 0", slice(2, 3), 9, 75, "ranks left: 1; --elastic wants at least 2"),
    ("--elastic 1", slice(1), 2, 130, "ringreduce: signal 2 came; step"),
    ("--elastic 1", slice(1), 15, 143, "ringreduce: signal 15 came; step"),
]
"""Options; which processes get a signal, the launcher or ranks; the signal; the end of the job."""


def test_a_state_is_saved_and_resumed_however_a_job_ends(steps, finish, tmp_path):
    """Each job goes on where the one before has ended, and leaves no rank."""
    folder = tmp_path / "states"
    words = "-n", "2", "--state-dir", str(folder), "--save-every-s", "0.1"
    tells = "if comm.rank == 0: print('the last step is', state.step, flush=True)"

    def saved_step() -> int:
        return max(int(path.stem.removeprefix("step-")) for path in folder.glob("*.json"))

    job = steps(*words, "--elastic", "1")
    pids = job.await_generation(1)
    job.wait_until(lambda: len(list(folder.glob("*.json"))) > 1, "a second regular state")
    job.process.kill()
    job.process.wait()
    assert alive_in_the_end(pids) == []
    for options, chosen, number, code, text in ENDS:
        step = saved_step()
        job = steps(*words, "--resume", *options.split())
        pids = job.await_generation(1)
        for pid in [job.process.pid, *pids][chosen]:
            os.kill(pid, number)
        ended, output = job.end()
        assert ended == code, output
        assert text in output
        assert f"is saved in {folder}" in output
        assert number != signal.SIGTERM or output.count("of 2 cleans up") == 2
        assert alive_in_the_end(pids) == []
        assert [event["step"] for event in job.events("resumed")] == [step]
    step = saved_step()
    (folder / "step-999999999.json").write_text("no JSON")
    job = steps(*words, "--resume", "--elastic", "1", at_end=tells)
    job.await_generation(1)
    output = finish(job)
    assert "passed over: " in output
    assert "2 ranks made each step once" in output
    assert [event["step"] for event in job.events("resumed")] == [step]
    (folder / "step-999999999.json").unlink()
    assert f"the last step is {saved_step()}\n" in output
    assert len(list(folder.glob("*.json"))) == 3


FULL = """
def full(_):
    with open(here / "tries", "a") as file:
        file.write("x")
    raise OSError(28, "No space left on device")
os.fsync = full
"""


def test_a_full_disk_is_reported_once_and_ends_a_job_with_1(steps, tmp_path):
    words = "--state-dir", str(tmp_path / "states"), "--save-every-s", "0.05"
    job = steps("-n", "1", "--elastic", "1", *words, before=FULL)
    tries = tmp_path / "tries"
    job.wait_until(lambda: tries.exists() and tries.stat().st_size > 2, "a third try")
    (tmp_path / "stop").touch()
    code, output = job.end()
    assert code == 1, output
    assert "1 ranks made each step once" in output
    assert output.count("no checkpoint after step") == 1
    assert "No space left on device" in output


def test_events_that_cannot_be_written_are_given_up_and_the_job_ends_with_1(steps, tmp_path):
    (tmp_path / "stop").touch()
    code, output = steps("-n", "1", "--elastic", "1", "--events", "/dev/full").end()
    assert code == 1, output
    assert "1 ranks made each step once" in output
    assert output.count("no more events are written: [Errno 28]") == 1
    assert "Traceback" not in output


# --- SIGTERM that is no notice ---


@pytest.mark.parametrize("launcher_first", [True, False])
def test_a_sigterm_to_the_launcher_and_a_rank_is_no_notice(steps, launcher_first):
    job = steps("-n", "2", "--elastic", "1", "--grace-s", "60")
    victims = [job.process.pid, job.await_step(1)[1]]
    for pid in victims if launcher_first else reversed(victims):
        os.kill(pid, signal.SIGTERM)
    code, output = job.end()
    assert code == 128 + signal.SIGTERM, output
    assert "ringreduce: signal 15 came; step" in output
    assert job.events("resized") == []
    assert len(job.events("started")) == 1


HANDLES = """
signal.signal(signal.SIGTERM, lambda *_: (here / "handled").touch())
"""


def test_a_sigterm_that_the_program_handles_is_no_notice(steps, finish, tmp_path):
    job = steps("-n", "1", "--elastic", "1", before=HANDLES)
    os.kill(job.await_step(1)[0], signal.SIGTERM)
    job.wait_until((tmp_path / "handled").exists)
    assert "1 ranks made each step once" in finish(job)
    assert job.events("resized") == []


# --- a launcher that is late ---

HOLDS_AT_JOIN = """
join = rr.State.join
def joins(state, *given):
    join(state, *given)
    (here / "joins").touch()
    while (here / "hold").exists():
        time.sleep(0.01)
rr.State.join = joins
"""


def test_a_new_job_is_not_resumed_if_its_rank_is_ahead_of_the_launcher(steps, finish, tmp_path):
    (tmp_path / "hold").touch()
    job = steps("-n", "1", "--elastic", "1", before=HOLDS_AT_JOIN)
    job.wait_until((tmp_path / "joins").exists)
    job.process.send_signal(signal.SIGSTOP)
    try:
        (tmp_path / "hold").unlink()
        job.wait_until((tmp_path / "stepped").exists)
    finally:
        job.process.send_signal(signal.SIGCONT)
    finish(job)
    assert len(job.events("started")) == 1
    assert job.events("resumed") == []


# --- options and programs that are refused ---


def test_a_folder_with_states_of_another_run_is_refused(refused, tmp_path):
    (tmp_path / "step-000000001.json").touch()
    text = refused(f"run -n 2 --elastic 1 --state-dir {tmp_path} -m ringreduce")
    assert "has checkpoints already" in text


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
def test_wrong_options_are_refused_before_a_rank_starts(refused, words, text):
    assert text in refused(f"run {words} -m ringreduce")


def test_a_folder_of_sockets_that_others_can_enter_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"ringreduce-{os.geteuid()}").mkdir(mode=0o755)
    text = refused("run -n 2 --elastic 1 -m ringreduce")
    assert "--elastic: no socket for the ranks" in text
    assert "you alone can enter; remove it" in text


def test_events_that_cannot_be_written_are_refused(refused, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "events"
    assert "--events" in refused(f"run -n 2 --elastic 1 --events {path} -m ringreduce")


@pytest.mark.parametrize("more", [[], ["--elastic", "1"]])
def test_a_function_that_makes_no_state_is_refused(tmp_path, more):
    program = tmp_path / "makes.py"
    program.write_text(
        "import numpy as np, ringreduce as rr\n"
        "rr.elastic(lambda comm, state: print('trained'), lambda comm: {'rank': comm.rank})\n"
    )
    done = run("-n", "1", *more, str(program))
    assert done.returncode == 1, done
    assert re.search(r"TypeError: elastic: state is dict; pass rr\.State", done.stderr)
    assert "trained" not in done.stdout


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringreduce", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("more", [[], ["--elastic", "1"]])
def test_all_ranks_begin_once_with_the_arrays_and_the_step_of_rank_0(tmp_path, more):
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
    done = run("-n", "2", *more, str(program))
    assert done.stdout == "[7.0, 1.0, 7.0, 1.0]\n", done
