"""Ranks that stop, die, leave or never call: the others raise the same error in bounded time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.algorithms import build
from ringreduce.control import agreement
from ringreduce.control.diagnostics import describe_timeout
from ringreduce.devices.cpu import CpuDevice
from ringreduce.system.topology import Topology
from ringreduce.transports.thread import Switchboard, ThreadTransport
from ringreduce.transports.yielding import WaitClock
from tests.long.faults import judge
from tests.support.mpi import DEADLINE_S, Finished, with_environment


def test_the_exit_handlers_do_not_run_when_an_abort_comes_back_before_the_job_has_ended():
    """Exit handlers would close communicators as at a normal end."""
    script = """
import atexit, sys, types
from ringreduce.start import job
world = types.SimpleNamespace(Get_size=lambda: 2, Abort=lambda code: print("aborting"))
sys.modules["mpi4py.MPI"] = types.SimpleNamespace(
    COMM_WORLD=world, Is_initialized=lambda: True, Is_finalized=lambda: False
)
atexit.register(print, "closed")
job.ABORT_DEADLINE_S = 0.1
job.end_job(3)
"""
    done = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "aborting\n")


# --- over MPI: what all tests look at -------------------------------------------------------------


def nothing_left(job) -> None:
    """Wait until no process of the job is left; fail after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while left := with_environment(str(job.results)):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.02)


def run_to_its_end(mpi, program, ranks, *arguments):
    job = mpi.start(program, ranks, *arguments)
    done = mpi.finish(job)
    nothing_left(job)
    return done


def one_error(told, name, ranks=None):
    """Check that all these ranks raised one error; return its text."""
    assert {r["error"] for r in told} == {name}
    texts = {r["text"] for r in told}
    assert len(texts) == 1
    assert all(r["ranks"] == ranks for r in told)
    return texts.pop()


def others(done, *victims):
    """Return the reports of all ranks but the victims, which may do anything once continued."""
    return [result for rank, result in enumerate(done.results) if rank not in victims]


def names(text, culprits, size):
    """Check that a text names the culprits alone as stopped, and has a drawing."""
    head, *lines = text.splitlines()
    who = f"rank {culprits[0]}" if len(culprits) == 1 else f"ranks {culprits[0]} and {culprits[1]}"
    assert re.fullmatch(
        rf"{who} stopped answering: no progress within the timeout of \d+\.\d s", head
    )
    assert not any("stopped" in line for line in lines)
    waiting = {int(m[1]) for line in lines if (m := re.match(r"  rank (\d+) is waiting for", line))}
    assert not waiting & set(culprits)
    assert any(line.startswith("step  rank 0") for line in lines)
    assert lines[-1].startswith("! did not finish: ")
    assert waiting <= set(range(size))


def later_calls_raise_the_same_at_once(told):
    """Later calls have a timeout that is longer than the job may take."""
    for r in told:
        assert r["later"] == [r["text"]] * 3


# --- a rank that does not answer ------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "victims", "ranks"),
    [
        ("never", [0], 2),
        ("never", [1], 3),
        ("stop", [0], 3),
        ("stop", [1], 2),
        ("stop", [1, 2], 4),
    ],
)
def test_a_rank_that_does_not_answer_is_named_by_all_others(mpi, how, victims, ranks):
    done = run_to_its_end(mpi, "fault", ranks, how, ",".join(map(str, victims)), "caught")
    told = others(done, *victims)
    names(one_error(told, "PeerTimeoutError", victims), victims, ranks)
    later_calls_raise_the_same_at_once(told)
    assert done.returncode != 0


@pytest.mark.mpi
def test_an_uncaught_timeout_ends_the_job(mpi):
    done = run_to_its_end(mpi, "fault", 2, "stop", "1", "uncaught")
    assert "PeerTimeoutError: rank 1 stopped answering" in done.output, done.output
    assert done.returncode != 0


@pytest.mark.mpi
def test_the_least_patient_rank_speaks_for_all(mpi):
    done = run_to_its_end(mpi, "trouble", 3, "differing_timeouts")
    names(one_error(others(done, 1), "PeerTimeoutError", [1]), [1], 3)


@pytest.mark.mpi
def test_a_rank_that_stops_while_others_disagree_is_named(mpi):
    done = run_to_its_end(mpi, "trouble", 3, "stopped_in_a_disagreement")
    text = one_error(others(done, 2), "PeerTimeoutError", [2])
    assert "rank 2 stopped answering" in text
    assert "rank 0 is waiting for rank 2 in call 2" in text


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["never_init", "stopped_in_init"])
def test_a_rank_that_is_missing_from_init(mpi, kind):
    done = run_to_its_end(mpi, "trouble", 3, kind)
    zero, two = others(done, 1)
    assert zero == two
    assert zero["error"] == "PeerTimeoutError"
    assert zero["ranks"] == [1]


@pytest.mark.mpi
def test_ranks_that_are_stopped_and_continued_go_on(mpi):
    job = mpi.start("trouble", 2, "paused")
    pids = read_pids(job)
    time.sleep(0.2)
    pause([pids[1]], 0.5)
    # Longer than the timeout, but all ranks at once: no rank was waiting.
    pause(pids, 3)
    done = mpi.finish(job)
    assert done.results == [{"done": True}] * 2, done.output
    assert done.returncode == 0


def read_pids(job):
    """Return the process ids that the ranks of a job report when they start."""
    deadline = time.monotonic() + DEADLINE_S
    while len(list(job.results.glob("*.json"))) < job.ranks:
        assert time.monotonic() < deadline, "the job does not start"
        time.sleep(0.02)
    finished = [job.results / f"{rank}.json" for rank in range(job.ranks)]
    return [int(re.search(r'"pid": (\d+)', path.read_text())[1]) for path in finished]


def pause(pids, seconds):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


# --- a rank that ends -----------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.mpi
def test_a_killed_rank_takes_its_job_along(mpi):
    done = run_to_its_end(mpi, "fault", 2, "kill", "1", "caught")
    assert done.results[1]["failed_at"]
    assert done.returncode != 0


@pytest.mark.mpi
def test_a_rank_that_vanishes_takes_its_job_along(mpi):
    done = run_to_its_end(mpi, "fault", 2, "vanish", "1", "caught")
    assert done.results[1]["failed_at"]


@pytest.mark.mpi
def test_a_rank_that_exits_early_is_told_of_by_all_others(mpi):
    done = run_to_its_end(mpi, "fault", 3, "exit", "1", "caught")
    text = one_error(others(done, 1), "MismatchError")
    assert "rank 1 reached the end of the program while ranks 0 and 2 are in all_reduce(" in text
    left = "rank 1 has left the communicator: its process ends"
    assert all(left in later for r in others(done, 1) for later in r["later"])


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "ending"),
    [("raise", "uncaught"), ("raise", "asleep"), ("raise slowly", "with")],
)
def test_an_exception_ends_the_job_with_its_traceback(mpi, how, ending):
    done = run_to_its_end(mpi, "fault", 2, how, "1", ending)
    assert 'raise ValueError("the victim\'s own error")' in done.output
    assert "ValueError: the victim's own error" in done.output
    assert done.returncode != 0


@pytest.mark.mpi
def test_an_exception_that_is_caught_outside_of_the_with_block(mpi):
    done = run_to_its_end(mpi, "trouble", 3, "left_and_caught")
    told = others(done, 1)
    assert {r["error"] for r in told} == {"PeerLostError"}
    assert all("rank 1 has left the communicator: KeyError: 'mine'" in r["text"] for r in told)
    later_calls_raise_the_same_at_once(told)


@pytest.mark.mpi
def test_an_interrupt_while_waiting_ends_the_job(mpi):
    done = run_to_its_end(mpi, "fault", 2, "interrupt", "1", "asleep")
    assert "KeyboardInterrupt" in done.output


@pytest.mark.mpi
def test_the_death_of_mpiexec_is_the_end_of_its_ranks(mpi):
    job = mpi.start("trouble", 2, "blocked")
    read_pids(job)
    job.kill()
    job.wait()
    nothing_left(job)


@pytest.mark.mpi
def test_a_forked_child_is_refused_and_disturbs_nobody(mpi):
    for result in mpi.run_ok("trouble", 2, "forked"):
        assert result["total"] == [2.0, 2.0, 2.0]
        for answer in result["answers"]:
            seconds, _, text = answer.partition(" ")
            assert float(seconds) < 30  # at once, not after a timeout
            assert text.startswith("this process was forked from the one that made")


# --- among threads --------------------------------------------------------------------------------


def on_threads(
    program,
    ranks,
    *,
    transport=ThreadTransport,
    timeout_s=DEADLINE_S,
    config=None,
    devices=None,
    late=(),
):
    """Run ``program(comm)`` on threads; return each rank's result or exception.

    The ranks `late` begin when all others have ended; before, all have met in a barrier.
    """
    switchboard, ended = Switchboard(ranks), threading.Semaphore(0)
    outcomes = [None] * ranks

    def run(rank):
        topology = Topology((tuple(range(ranks)),), rank)
        try:
            with rr.Communicator(
                transport(switchboard, rank),
                topology,
                devices[rank] if devices else CpuDevice(),
                config or rr.Config(),
                timeout_s,
            ) as comm:
                if late:
                    comm.barrier()
                if rank in late:
                    ended.acquire(timeout=DEADLINE_S)
                outcomes[rank] = program(comm)
        except Exception as error:
            outcomes[rank] = error
        if None not in [outcome for other, outcome in enumerate(outcomes) if other not in late]:
            ended.release(len(late) or 1)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def all_timed_out(outcomes, culprits):
    """Check that every rank has the same PeerTimeoutError, naming exactly the culprits."""
    assert {type(outcome) for outcome in outcomes} == {rr.PeerTimeoutError}
    assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
    assert all(outcome.ranks == tuple(culprits) for outcome in outcomes)
    return str(outcomes[0])


IMPATIENT_S = 0.5
"""The timeout of a call that must fail, in seconds."""


@pytest.mark.parametrize(("ranks", "culprits"), [(4, [0]), (4, [3]), (5, [1, 2])])
def test_threads_that_never_call_are_named_by_all(ranks, culprits):
    def program(comm):
        return comm.all_reduce(np.ones(100_000), timeout_s=IMPATIENT_S)

    names(all_timed_out(on_threads(program, ranks, late=culprits), culprits), culprits, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("apart_s", [0, 0.0005, 0.002])
def test_ranks_that_lose_patience_at_once_say_the_same(apart_s):
    def program(comm):
        return comm.all_reduce(1, timeout_s=IMPATIENT_S + apart_s * (comm.rank % 3))

    all_timed_out(on_threads(program, 5, late=[0]), [0])


def test_after_a_timeout_every_call_raises_it_again_and_close_waits_for_nobody():
    def program(comm):
        with pytest.raises(rr.PeerTimeoutError) as first:
            comm.all_reduce(1, timeout_s=IMPATIENT_S)
        for call in (comm.barrier, lambda: comm.all_reduce(1), lambda: comm.broadcast(1)):
            with pytest.raises(rr.PeerTimeoutError) as again:
                call()
            assert str(again.value) == str(first.value)
            assert again.value.ranks == first.value.ranks
        comm.close()
        comm.close()
        raise first.value

    all_timed_out(on_threads(program, 3, late=[2]), [2])


@pytest.mark.slow
def test_ranks_that_disagree_while_another_never_calls():
    def program(comm):
        return comm.all_reduce(np.ones(8 + comm.rank), timeout_s=IMPATIENT_S)

    text = all_timed_out(on_threads(program, 3, late=[2]), [2])
    assert "rank 1 is waiting for rank 2 in call 2" in text


def test_a_rank_that_gives_up_over_a_disagreement_lets_the_others_hear_of_it_first():
    def program(comm):
        with pytest.raises(rr.MismatchError) as caught:
            comm.all_reduce(np.ones(8 + comm.rank // 2))
        if comm.rank == 2:
            raise caught.value
        with pytest.raises(rr.PeerLostError, match="rank 2 has left"):
            comm.barrier()

    for _ in range(20):
        *fine, last = on_threads(program, 3)
        assert fine == [None, None]
        assert isinstance(last, rr.MismatchError)


# --- transports that fail -------------------------------------------------------------------------

SLICED = rr.Config(slice_bytes=1 << 12, in_flight=2)


class CountingTransport(ThreadTransport):
    """Counts the messages of all ranks in `begun`."""

    begun: ClassVar[list[int]] = []

    def sender(self, peer, flow, buffer):
        message = super().sender(peer, flow, buffer)
        start = message.Start
        message.Start = lambda: self.begun.append(peer) or start()
        return message


def test_a_slow_call_that_moves_is_no_error(monkeypatch):
    """Each message takes a second."""
    monkeypatch.setattr(CountingTransport, "begun", [])
    monkeypatch.setattr(WaitClock, "now", lambda _: float(len(CountingTransport.begun)))

    def program(comm):
        start = len(CountingTransport.begun)
        total = comm.all_reduce(np.arange(20_000) + comm.rank)
        assert np.array_equal(total, 3 * np.arange(20_000) + 3)
        return len(CountingTransport.begun) - start

    timeout_s = 40
    took = on_threads(program, 3, transport=CountingTransport, timeout_s=timeout_s, config=SLICED)
    assert min(took) > 3 * timeout_s


class FaultyTransport(ThreadTransport):
    """Applies `fault` to message number `at` of rank 0."""

    def __init__(self, switchboard, rank, at, fault):
        super().__init__(switchboard, rank)
        self.left, self.fault = at if rank == 0 else -1, fault

    def sender(self, peer, flow, buffer):
        return _Faulty(self, super().sender(peer, flow, buffer))


class _Faulty:
    def __init__(self, transport, message):
        self.transport, self.message, self.lost = transport, message, False

    def Start(self):  # noqa: N802 - mpi4py's name
        self.transport.left -= 1
        if self.transport.left == -1:
            self.transport.fault(self)
        else:
            self.message.Start()

    def Test(self):  # noqa: N802 - mpi4py's name
        return not self.lost and self.message.Test()

    def Free(self):  # noqa: N802 - mpi4py's name
        self.message.Free()


def lose(faulty):
    faulty.lost = True


def delay(faulty):
    faulty.message.complete = False
    threading.Timer(0.02, faulty.message.Start).start()


def faulty_call(fault, at, ranks, timeout_s):
    def program(comm):
        results = []
        for _ in range(3):
            x = np.arange(1000.0) * (comm.rank + 1)
            total = comm.all_reduce(x, algorithm="ring", timeout_s=timeout_s)
            results.append(np.array_equal(total, np.arange(1000.0) * (ranks * (ranks + 1) / 2)))
        return results

    def transport(switchboard, rank):
        return FaultyTransport(switchboard, rank, at, fault)

    return on_threads(program, ranks, transport=transport, config=rr.Config(slice_bytes=1 << 12))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("at", range(2, 10, 2))
def test_a_lost_message_is_an_error_on_all(ranks, at, monkeypatch):
    monkeypatch.setattr(agreement, "_ROLL_CALL_S", 60.0)  # all answer, on a busy machine too
    all_timed_out(faulty_call(lose, at, ranks, IMPATIENT_S), [])


@pytest.mark.parametrize("at", range(2, 10, 2))
def test_a_late_message_changes_nothing(at):
    assert faulty_call(delay, at, 3, DEADLINE_S) == [[True] * 3] * 3


class PausingDevice(CpuDevice):
    """Waits for `go_on` before each fold: meanwhile its rank does not answer."""

    def __init__(self):
        self.go_on = threading.Event()

    def fold(self, op, dtype):
        fold = super().fold(op, dtype)

        def paused(left, right, into):
            self.go_on.wait()
            fold(left, right, into)

        return paused


@pytest.mark.slow
def test_a_late_rank_writes_nothing_into_arrays_that_others_use_again():
    """Rank 1 continues after rank 0 has cancelled the call and written to its array again."""
    device, kept = PausingDevice(), []

    def program(comm):
        x = np.arange(100_000.0)
        with pytest.raises(rr.RingReduceError):
            comm.all_reduce(x, out=x)
        if comm.rank == 0:
            x[:] = 7
            kept.append(x)
            device.go_on.set()
            time.sleep(0.5)

    on_threads(program, 2, devices=[CpuDevice(), device], timeout_s=0.3)
    assert np.all(kept[0] == 7)


# --- whom to blame --------------------------------------------------------------------------------


def status(number, step, *waits_for):
    return {"number": number, "step": step, "waits_for": list(waits_for)}


@pytest.mark.parametrize(
    ("collective", "size", "statuses", "culprits"),
    [
        # A rank waits for the silent rank.
        ("all_reduce", 3, {0: status(4, 0, 2), 1: status(4, 1, 0)}, [2]),
        # No rank waits for rank 1, but rank 1 still needs a message of rank 0.
        ("all_reduce", 4, {0: status(4, 1, 3), 3: status(4, 0, 2)}, [1, 2]),
        # The root can have sent all its messages and be done.
        ("broadcast", 3, {2: status(4, 1, 1)}, [1]),
        # Ranks 1 and 2 can have sent all their messages and be done.
        ("broadcast", 5, {4: status(4, 3, 3)}, [3]),
        # Rank 0 has not begun the call in which rank 1 is silent.
        ("all_reduce", 3, {0: status(3, 2, 2), 2: status(4, 0, 1)}, [1]),
        # In the last step of a ring the other ranks may be done.
        ("all_reduce", 4, {2: status(4, 5, 1)}, [1]),
        # No rank is silent: a message was lost.
        ("all_reduce", 2, {0: status(4, 1, 1), 1: status(4, 1, 0)}, []),
        # The silent rank has sent all its messages.
        ("broadcast", 3, {1: status(4, 1, 2), 2: status(4, 1, 1)}, []),
    ],
)
def test_only_those_are_blamed_whom_others_need(collective, size, statuses, culprits):
    schedule = build(collective, "ring", [tuple(range(size))])
    text, blamed = describe_timeout(schedule, statuses, 2.0)
    assert blamed == culprits
    silent = sorted(set(range(size)) - set(statuses))
    told_apart = [rank for rank in silent if rank not in culprits]
    assert ("not answer either" in text) == bool(told_apart)


def test_the_drawing_shows_where_ranks_of_the_same_call_are():
    schedule = build("all_reduce", "ring", [(0, 1, 2)])
    text, _ = describe_timeout(schedule, {0: status(4, 2, 2), 1: status(5, 0, 2)}, 2.0)
    assert text.splitlines()[:3] == [
        "rank 2 stopped answering: no progress within the timeout of 2.0 s",
        "  rank 0 is waiting for rank 2 in step 2 of call 4",
        "  rank 1 is waiting for rank 2 in step 0 of call 5",
    ]
    assert text.splitlines()[-1] == "! did not finish: rank 0 in step 2"


# --- the long run can find something --------------------------------------------------------------


def told(text="rank 1 stopped answering", ranks=(1,), raised_at=0.0, error="PeerTimeoutError"):
    return {"error": error, "text": text, "ranks": list(ranks), "raised_at": raised_at}


@pytest.mark.parametrize(
    ("how", "results", "wrong"),
    [
        ("stop", [told(), None, told(raised_at=0.4)], []),
        ("stop", [None, {"failed_at": 0.0}, None], []),
        ("stop", [told(ranks=[2]), None, told(ranks=[2])], ["wrong_culprits"]),
        ("stop", [told(), None, told(raised_at=0.6)], ["differing_errors"]),
        ("never", [told(), None, told("rank 1 has gone")], ["differing_errors"]),
        ("never", [told(error="MismatchError")], ["wrong_culprits"]),
        ("raise", [told("rank 1 has left", error="PeerLostError")], []),
        ("raise", [told("rank 0 has left", error="PeerLostError")], ["wrong_culprits"]),
        ("exit", [told("rank 1 reached the end of the program", error="MismatchError")], []),
        ("kill", [{"wrong_result": "1 in place of 2"}], ["wrong_results"]),
    ],
)
def test_the_long_run_judges_what_ranks_say(how, results, wrong):
    assert judge(Finished(0, "", 0.0, results), how, victim=1) == wrong
