"""Jobs that get another number of ranks: no step is lost or made twice."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringreduce.errors import counted
from tests.support.mpi import alive_in_the_end

pytestmark = pytest.mark.mpi


def sizes(job) -> list[tuple[int, int, str]]:
    """(before, after, cause) of each change; each is planned, and no step is made twice."""
    events = job.events("resized")
    assert [event["level"] for event in events] == [3] * len(events)
    assert [event["redone"] for event in events] == [0] * len(events)
    return [(event["before"], event["after"], event["cause"]) for event in events]


AGAIN = """
(here / "second").touch()
def again(comm, state):
    while not state["stops"][0]:
        time.sleep(0.005)
        stops = comm.all_reduce(np.array([(here / "stop again").exists()], np.int64))
        with state.update():
            state["stops"] += stops
    if comm.rank == 0:
        print("again", comm.size, flush=True)
rr.elastic(again, rr.State({"stops": np.zeros(1, np.int64)}))
"""


def test_a_job_grows_and_shrinks_by_command_also_in_its_second_call_of_elastic(
    steps, scale, tmp_path
):
    job = steps("-n", "2", "--elastic", "1:3", then=AGAIN)
    pids = job.await_step(1)
    for size in (3, 1):
        code, text = scale(job.process.pid, size)
        assert code == 0, text
        assert f"-> {counted(size, 'rank')} from step" in text
    assert "1 rank, as before" in scale(job.process.pid, 1)[1]
    (tmp_path / "stop").touch()
    job.wait_until((tmp_path / "second").exists)
    assert scale(job.process.pid, 2)[0] == 0
    pids += [pid for event in job.events("started") for pid in event["pids"]]
    (tmp_path / "stop again").touch()
    code, output = job.end()
    assert code == 0, output
    assert "1 ranks made each step once" in output
    assert "again 2" in output
    # Ranks that leave run their finally clauses; the last two run their first call of elastic, too.
    assert [output.count(f"of {size} cleans up") for size in (2, 3, 1)] == [2 + 2, 3, 1]
    assert sizes(job) == [(2, 3, "command"), (3, 1, "command"), (1, 2, "command")]
    assert [event["lost"] for event in job.events("resized")] == [[], [1, 2], []]
    assert alive_in_the_end(pids) == []
    assert [path.name for path in tmp_path.glob("ringreduce-*")] == []


def test_a_job_prints_its_number_and_is_listed_and_wrong_commands_change_nothing(
    steps, scale, finish, refused
):
    job = steps("-n", "1", "--elastic", "1:3")
    job.await_step(1)
    code, text = scale()
    assert code == 0
    lines = text.splitlines()
    assert lines[0].startswith(f"{job.process.pid}  ")
    assert "--elastic 1:3" in " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 80
    code, text = scale(job.process.pid, 4)
    assert code == 2
    assert "wanted ranks: 4; --elastic allows 1 to 3" in text
    refused(f"scale {job.process.pid} some")
    code, text = scale(os.getpid(), 2)
    assert code == 2
    assert "is a launcher with --elastic" in text
    assert f"job {job.process.pid}; `ringreduce scale {job.process.pid} N`" in finish(job)
    assert sizes(job) == []


def test_too_few_ranks_wait_for_a_command_and_a_killed_mpiexec_costs_none(steps, scale, finish):
    job = steps("-n", "2", "--elastic", "2")
    job.await_step(1)
    tasks = f"/proc/{job.process.pid}/task/{job.process.pid}/children"
    with open(tasks) as children:
        os.kill(int(children.read().split()[0]), signal.SIGKILL)
    pids = job.await_step(2)
    os.kill(pids[1], signal.SIGTERM)
    assert alive_in_the_end(pids) == []
    assert scale(job.process.pid, 2)[0] == 0
    assert "2 ranks made each step once" in finish(job)
    assert [event["generation"] for event in job.events("started")] == [1, 2, 3]
    assert [event["lost"] for event in job.events("resized")] == [[], [1]]


HANGS = """
def pause_of(comm):
    if comm.rank < comm.size - 1 or not (here / f"hang {comm.size}").exists():
        return 0.005
    (here / f"hangs {comm.size}").touch()
    return 600
"""


def test_a_step_that_takes_longer_than_the_grace_is_given_up(steps, tmp_path):
    """First a rank that is told to end is given up, then the whole job."""
    words = "-n", "2", "--elastic", "1", "--grace-s", "0.5"
    job = steps(*words, before=HANGS, step_s="pause_of(comm)")
    for size in (2, 1):
        pids = job.await_step(3 - size)
        (tmp_path / f"hang {size}").touch()
        job.wait_until((tmp_path / f"hangs {size}").exists)
        os.kill(pids[1] if size == 2 else job.process.pid, signal.SIGTERM)
    code, output = job.end()
    assert code == 143, output
    assert [event["cause"] for event in job.events("resized")] == ["notice"]


STARTS = """
if (here / "bug").exists(): raise ValueError("no data here")
if (here / "dies").exists(): os.kill(os.getpid(), 9)
if (here / "late").exists():
    (here / "joins").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
"""


def test_newcomers_that_cannot_start_leave_the_job_as_it_is(steps, scale, finish, tmp_path):
    job = steps("-n", "1", "--elastic", "1:2", before=STARTS)
    job.await_step(1)
    for bug, text in (("bug", "raised ValueError"), ("dies", "was killed by signal 9")):
        (tmp_path / bug).touch()
        code, said = scale(job.process.pid, 2)
        (tmp_path / bug).unlink()
        assert code == 1, said
        assert "no other ranks can start" in said
        assert text in said
    assert "1 ranks made each step once" in finish(job)
    assert sizes(job) == []
    assert len(job.events("not_resized")) == 2


def test_a_loss_and_the_end_of_training_while_others_start_are_survived(steps, scale, tmp_path):
    """The newcomers come late: a rank is lost, or all have finished, before they are ready."""
    job = steps("-n", "2", "--elastic", "1:3", "--recovery", "relaunch", before=STARTS)
    pids = job.await_step(1)
    (tmp_path / "late").touch()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(scale, job.process.pid, 3)
        job.wait_until((tmp_path / "joins").exists)
        os.kill(pids[0], signal.SIGKILL)
        assert alive_in_the_end([pids[0]]) == []
        (tmp_path / "go").touch()
        code, text = asked.result()
        assert code == 0, text
        assert "-> 3 ranks from step" in text
        (event,) = job.events("resized")
        assert (event["before"], event["after"], event["lost"]) == (2, 3, [0])
        assert (event["level"], event["cause"], event["redone"]) == (2, "killed", 1)
        for name in ("joins", "go"):
            (tmp_path / name).unlink()
        asked = pool.submit(scale, job.process.pid, 2)
        job.wait_until((tmp_path / "joins").exists)
        (tmp_path / "stop").touch()
        code, output = job.end()
        assert code == 0, output
        assert "3 ranks made each step once" in output
        code, text = asked.result()
        assert code == 1
        assert "the job has ended" in text


def test_the_ranks_follow_a_command_that_discovers_room(steps, finish, tmp_path):
    slots = tmp_path / "slots"
    slots.write_text("localhost:1\n")
    soon = "from ringreduce.supervisor import discovery; discovery._EVERY_S = 0.2"
    discover = f"cat {slots}"
    job = steps("-n", "2", "--elastic", "1:2", "--discover", discover, launcher=soon)
    assert len(job.await_step(1)) == 1
    (tmp_path / "new").write_text("localhost:9\n")
    (tmp_path / "new").rename(slots)
    assert len(job.await_step(2)) == 2
    finish(job)
    assert sizes(job) == [(1, 2, "discover")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--discover false", "--discover 'false' ended with exit code 1"),
        ("--discover 'echo localhost:x'", "printed 'localhost:x'; wanted host:slots"),
        ("--discover 'echo far:2'", "printed 'far:2'; all ranks run on this host"),
        ("--discover true", "has room for ranks: 0; --elastic wants at least 1"),
        ("--grace-s -1", "--grace-s is -1; wanted a finite number of at least 0 seconds"),
        ("--slow never", "invalid choice: 'never'"),
    ],
)
def test_wrong_options_are_refused_before_a_rank_starts(refused, words, text):
    assert text in refused(f"run -n 2 --elastic 1 {words} -m ringreduce")


@pytest.mark.few(1)
@pytest.mark.parametrize("slow", ["report", "drop"])
def test_a_rank_that_computes_slowly_is_named(steps, finish, slow):
    """One step in 53 is measured."""
    step_s = "(0.1 if comm.rank == 1 and comm.size == 2 else 0.001) * (state.step % 53 == 0)"
    job = steps("-n", "2", "--elastic", "1:2", "--slow", slow, step_s=step_s)
    job.await_generation(1)
    job.wait_until(lambda: job.events("slow"), "a slow rank")
    if slow == "drop":
        job.await_step(2)
    finish(job)
    event = job.events("slow")[0]
    assert (event["rank"], event["generation"]) == (1, 1)
    assert event["compute_s"] > 2 * event["median_s"]
    assert sizes(job) == ([(2, 1, "slow")] if slow == "drop" else [])
