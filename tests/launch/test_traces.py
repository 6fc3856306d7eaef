"""Traces: what each rank records, and the file that is made of it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.config import Environment
from ringreduce.launch import cli
from ringreduce.supervisor import launcher
from ringreduce.trace import traces
from ringreduce.trace.recorder import (
    ASYNC,
    CALL,
    EVENT,
    HEADER,
    MESSAGE,
    RECORDERS,
    SPAN,
    TRACE,
    WAIT,
    Recorder,
)
from ringreduce.trace.ring import EventRing, words_of
from tests.support.mpi import STAND_IN

ROUNDED = 1e-3
"""Microseconds by which times in a trace are rounded."""


@pytest.fixture
def recorder(tmp_path):
    """Makes recorders of ranks for the trace `tmp_path / "t.json"`."""
    return lambda rank: Recorder(tmp_path / "t.json", rank)


@pytest.fixture
def add(monkeypatch):
    """Adds an event with a given end to a recorder."""

    def add(recorder, kind, name, begin_s, end_s, *words):
        with monkeypatch.context() as patch:
            patch.setattr("ringreduce.trace.recorder.perf_counter_ns", lambda: ns(end_s))
            recorder.add(kind, name, ns(begin_s), *words)

    return add


def ns(seconds: float) -> int:
    return round(1e9 * seconds)


def events_of(path: Path, **facts: object) -> list[dict]:
    """The complete events of a trace that have these facts."""
    found = json.loads(path.read_text())["traceEvents"]
    return [e for e in found if e["ph"] == "X" and facts.items() <= e.items()]


# --- the file -------------------------------------------------------------------------------------


def test_an_event_has_a_name_a_track_and_microseconds(recorder, add, tmp_path):
    first, second = recorder(0), recorder(1)
    add(second, CALL, "all_reduce", 10.5, 10.75, 38_912, "ring")
    add(first, SPAN, "step", 10.0, 12.0)
    add(first, MESSAGE, "send", 10.25, 10.5, 1536, "to 1")
    traces.write(tmp_path / "t.json")
    step, message, call = events_of(tmp_path / "t.json")
    assert [step[name] for name in ("pid", "tid", "name", "cat")] == [0, 0, "step", "span"]
    assert [step[name] for name in ("ts", "dur", "args")] == [0.0, 2e6, {}]
    assert [call[name] for name in ("pid", "tid", "cat")] == [1, 1, "call"]
    assert call["name"] == "all_reduce 38 KiB ring"
    assert [call[name] for name in ("ts", "dur")] == [5e5, 2.5e5]
    assert call["args"] == {"bytes": 38_912, "algorithm": "ring"}
    assert (message["name"], message["tid"]) == ("send 1.5 KiB to 1", 1)
    assert message["args"] == {"bytes": 1536, "peer": 1}


def test_ranks_and_tracks_have_names(recorder, tmp_path):
    recorder(3).add(SPAN, "step", 1)
    traces.write(tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = [(e["pid"], e["name"], e["tid"], e["args"]["name"]) for e in found if e["ph"] == "M"]
    assert named == [
        (3, "process_name", 0, "rank 3"),
        (3, "thread_name", 0, "computes"),
        (3, "thread_name", 1, "communicates"),
    ]


def test_the_clock_of_a_rank_is_that_of_rank_0(recorder, add, tmp_path):
    first, second = recorder(0), recorder(1)
    add(first, SPAN, "a", 100.0, 101.0)
    HEADER.pack_into(second.memory, 0, 1, -900.0, 2e-6)
    add(second, SPAN, "b", 1000.5, 1001.0)
    traces.write(tmp_path / "t.json")
    assert [event["ts"] for event in events_of(tmp_path / "t.json")] == [0.0, 5e5]
    facts = json.loads((tmp_path / "t.json").read_text())["otherData"]
    assert facts == {"clock_error_us": {"rank 0": 0.0, "rank 1": 2.0}}


def test_the_last_events_of_a_rank_are_kept(recorder, add, tmp_path, monkeypatch):
    monkeypatch.setattr("ringreduce.trace.recorder.MOST", 5)
    mine = recorder(0)
    for number in range(12):
        add(mine, SPAN, f"{number}", 1.0 + number, 1.5 + number)
    traces.write(tmp_path / "t.json")
    names = [event["name"] for event in events_of(tmp_path / "t.json")]
    assert names == ["7", "8", "9", "10", "11"]


def test_an_event_that_a_kill_has_torn_is_left_out():
    new = EVENT.pack(2, 0, words_of(SPAN, "new"), 3)
    torn = new[:-8] + EVENT.pack(0, 0, words_of(SPAN, "old"), 1)[-8:]
    ((_, _, events),) = traces.read(HEADER.pack(0, 0.0, 0.0) + torn + new + bytes(EVENT.size))
    assert [event["name"] for event in events] == ["new"]


def test_an_event_that_overlaps_another_one_has_a_track_of_its_own(recorder, add, tmp_path):
    mine = recorder(0)
    for name, begin_s, end_s in (("a", 1, 4), ("inside", 2, 3), ("b", 3, 6), ("c", 4, 5)):
        add(mine, ASYNC, name, begin_s, end_s)
    add(mine, SPAN, "step", 1, 5)
    traces.write(tmp_path / "t.json")
    found = {event["name"]: event["tid"] for event in events_of(tmp_path / "t.json")}
    assert found == {"a": 1, "inside": 1, "step": 0, "b": 3, "c": 1}


def test_parts_are_removed_once_the_trace_is_written(recorder, tmp_path):
    recorder(0).add(SPAN, "a", 1)
    other = Recorder(tmp_path / "other.json", 0).part
    traces.write(tmp_path / "t.json")
    traces.write(tmp_path / "t.json")  # another rank ends later
    assert {*tmp_path.iterdir()} == {tmp_path / "t.json", other}
    assert len(events_of(tmp_path / "t.json")) == 1


def test_a_trace_that_cannot_be_written_is_named_and_its_parts_stay(recorder, tmp_path, capsys):
    part = recorder(0).part
    (tmp_path / "t.json").mkdir()
    traces.write(tmp_path / "t.json")
    assert "ringreduce: there is no trace: [Errno 21] Is a directory" in capsys.readouterr().err
    assert part.exists()


# --- the picture ----------------------------------------------------------------------------------


Times = tuple[float, float, bytes, str]


def rank_of(rank: int, *events: Times) -> tuple[int, float, list[traces.Event]]:
    """Return a rank as `draw` gets it, from the times in seconds, kinds and names of its events."""
    content = HEADER.pack(rank, 0.0, 0.0)
    for begin, end, kind, name in events:
        words = words_of(kind, name, "to 0" if kind == MESSAGE else "")
        content += EVENT.pack(ns(begin + 1), 0, words, ns(end + 1))
    ((_, error_us, found),) = traces.read(content)
    return rank, error_us, found


def steps(count: int) -> list[Times]:
    """Steps that take a second each, and compute in its middle."""
    names = {"step": 0.0, "x": 0.1}
    return [(n + at, n + 1 - at, SPAN, name) for n in range(count) for name, at in names.items()]


@pytest.mark.parametrize(("count", "seen"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_a_picture_has_two_steps_and_a_lane_for_each_rank(count, seen):
    svg = traces.draw([rank_of(rank, *steps(count)) for rank in range(3)])
    assert [f"rank {rank}" in svg for rank in range(4)] == [True, True, True, False]
    assert svg.count('class="bar"') == 3 * seen


@pytest.mark.parametrize(
    ("events", "idle"),
    [
        ([(0, 4, SPAN, "x"), (1, 2, CALL, "y"), (2, 3, SPAN, "z")], "0 %"),
        ([(0, 4, SPAN, "x"), (1, 2, WAIT, "wait")], "25 %"),
        ([(0, 4, SPAN, "x"), (1, 2, WAIT, "wait"), (1.5, 3, ASYNC, "y")], "12 %"),
        ([(0, 1, SPAN, "x"), (3, 4, ASYNC, "y"), (1, 3, MESSAGE, "send")], "50 %"),
    ],
)
def test_a_lane_shows_what_began_last_and_where_the_rank_is_idle(events, idle):
    assert f"{idle} idle" in traces.draw([rank_of(0, *events)])


# --- spans ----------------------------------------------------------------------------------------


def test_a_span_is_recorded_with_its_time(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr("ringreduce.trace.recorder.RECORDERS", [recorder(0)])
    begin = time.perf_counter()
    with rr.span("load"), rr.span("é" * 100):
        time.sleep(0.002)
    seconds = time.perf_counter() - begin
    traces.write(tmp_path / "t.json")
    load, long = events_of(tmp_path / "t.json")
    assert 2000 <= load["dur"] <= 1e6 * seconds + ROUNDED
    assert (load["name"], long["name"]) == ("load", "é" * 32)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_span_lets_exceptions_pass(recorder, monkeypatch, is_traced):
    monkeypatch.setattr("ringreduce.trace.recorder.RECORDERS", [recorder(0)] * is_traced)
    with pytest.raises(ZeroDivisionError), rr.span("load"):
        _ = 1 / 0
    with pytest.raises(TypeError, match="span: name is of type int; pass a str"):
        rr.span(5)


# --- clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 1000.0, -50.0])
def test_ranks_compare_their_clocks_with_that_of_rank_0(shift):
    def program(comm):
        own = shift * comm.rank
        return traces.clock_of(comm, [1, 2], lambda: time.perf_counter() + own)

    found = rr.spawn(program, 3)
    assert found[0] == (0.0, 0.0)
    for rank in (1, 2):
        error_s, offset_s = found[rank]
        assert offset_s == pytest.approx(-shift * rank, abs=error_s + 1e-9)


# --- jobs -----------------------------------------------------------------------------------------


def calls(comm: rr.Communicator) -> None:
    """Make a call of each kind."""
    x, peer = np.arange(1024.0) * (comm.rank + 1), 1 - comm.rank
    for _ in range(3):
        comm.all_reduce(x, algorithm="ring")
    work = comm.all_reduce([x, x[:2]], async_op=True)
    with rr.span("mine"):
        work.wait()
    comm.barrier()
    if comm.rank:
        comm.send(x, peer, tag=3)
        comm.recv(x, peer)
    else:
        comm.recv(x, comm.probe(3), tag=3)
        comm.send(x, peer)


@pytest.fixture(scope="module", params=[(2,), (1, 1)], ids=["one host", "two hosts"])
def traced(request, tmp_path_factory):
    """The trace of two ranks that make `calls`, and the ranks of each host."""
    path = tmp_path_factory.mktemp("traced") / "t.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRACE, str(path))
        rr.spawn(calls, 2, processes=True, nodes=request.param)
    return path, request.param


RANKS = pytest.mark.parametrize("rank", [0, 1])


def is_inside(event: dict, other: dict) -> bool:
    """Whether an event lies within the time of another one."""
    ends = event["ts"] + event["dur"] <= other["ts"] + other["dur"] + 3 * ROUNDED
    return ends and event["ts"] >= other["ts"] - ROUNDED


@RANKS
def test_calls_are_recorded_with_their_bytes(traced, rank):
    ours = [e for e in events_of(traced[0], pid=rank) if e["name"].startswith("all_reduce")]
    assert [e["name"] for e in ours][:3] == ["all_reduce 8 KiB ring"] * 3
    assert sum(e["args"]["bytes"] for e in ours) == 4 * 8192 + 16
    names = [event["name"] for event in events_of(traced[0], pid=rank, cat="call")]
    assert any(name.startswith("barrier") for name in names)


def check_messages(path: Path, rank: int, wanted_bytes: int, size: str = "8 KiB") -> None:
    """Check the messages within each of three calls of that size, on one rank of two."""
    calls = events_of(path, pid=rank, cat="call", name=f"all_reduce {size} ring")
    assert len(calls) == 3
    for call in calls:
        inside = [e for e in events_of(path, pid=rank, cat="message") if is_inside(e, call)]
        for direction in ("send", "recv"):
            found = [e for e in inside if e["name"].startswith(direction)]
            assert sum(e["args"]["bytes"] for e in found) == wanted_bytes
            assert {e["args"]["peer"] for e in found} <= {1 - rank}


@RANKS
def test_the_messages_of_a_call_between_hosts_lie_within_its_time(traced, rank):
    path, nodes = traced
    check_messages(path, rank, 8192 if len(nodes) > 1 else 0)  # a ring of two ranks


SIZES = {"16 B": 16, "64 KiB": 64 << 10}


def compiled_calls() -> dict[str, int]:
    """Return how many events compiled code has recorded, by an MPI job on two stated nodes."""
    with rr.init(nodes=(1, 1)) as comm:
        calls(comm)
        for nbytes in [*SIZES.values()] * 3:
            comm.all_reduce(np.ones(nbytes // 8), algorithm="ring")
    return {"events": EventRing(RECORDERS[0].ring).count}


@pytest.mark.mpi
def test_compiled_calls_between_hosts_record_themselves_and_their_messages(mpi, tmp_path):
    path = tmp_path / "t.json"
    program = "tests.launch.test_traces:compiled_calls"
    done = mpi.run_ok("call", 2, program, **{TRACE: str(path)}, RINGREDUCE_TRANSPORT="auto")
    assert all(each["events"] >= 9 * 4 for each in done)  # messages
    for rank in (0, 1):
        check_messages(path, rank, 8192)
        for size, nbytes in SIZES.items():
            check_messages(path, rank, nbytes, size)


def repeats(comm: rr.Communicator) -> int:
    """Make one call three times in each compiled way; return what compiled code has recorded."""
    x = np.ones(1000)
    planned = comm.plan("all_reduce", x)
    for _ in range(3):
        comm.all_reduce(x)
        comm.all_reduce([x, x])
        comm.barrier()
        planned()
    return EventRing(RECORDERS[0].ring).count


def test_compiled_code_makes_and_records_the_calls_of_one_host(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    monkeypatch.setenv(TRACE, str(path))
    assert all(count >= 6 for count in rr.spawn(repeats, 2, processes=True))
    for rank in (0, 1):
        found = [e["args"]["bytes"] for e in events_of(path, pid=rank, cat="call")]
        assert [found.count(nbytes) for nbytes in (8000, 16000)] == [6, 3]


@RANKS
def test_messages_between_two_ranks_and_waits_are_recorded(traced, rank):
    found = {event["name"] for event in events_of(traced[0], pid=rank)}
    assert {f"send 8 KiB to {1 - rank}", f"recv 8 KiB from {1 - rank}", "wait"} <= found
    assert ("probe" in found) == (rank == 0)
    (span,) = events_of(traced[0], pid=rank, name="mine")
    assert any(is_inside(e, span) for e in events_of(traced[0], pid=rank, cat="wait"))


def test_no_rank_ends_a_call_before_the_other_begins_it(traced):
    error_us = json.loads(traced[0].read_text())["otherData"]["clock_error_us"]["rank 1"]
    first, second = (events_of(traced[0], pid=rank, cat="call") for rank in (0, 1))
    for mine, theirs in zip(first, second, strict=False):
        assert mine["ts"] <= theirs["ts"] + theirs["dur"] + error_us + ROUNDED
        assert theirs["ts"] <= mine["ts"] + mine["dur"] + error_us + ROUNDED


def test_the_error_of_a_clock_is_known_where_there_is_one(traced):
    path, nodes = traced
    errors = json.loads(path.read_text())["otherData"]["clock_error_us"]
    assert (errors["rank 0"], errors["rank 1"] > 0) == (0.0, nodes == (1, 1))
    assert [*path.parent.iterdir()] == [path]


def trains(comm: rr.Communicator) -> None:
    settings = rr.train.Settings(epochs=1, hidden=(8,), batch=359)
    strategy = rr.train.strategies.Pipeline(splits=3)
    trainer = rr.train.Trainer(comm, rr.train.load(settings), settings, strategy=strategy)
    trainer.run(save=lambda trainer: None)


def test_the_trainer_records_its_steps_and_the_actions_of_a_pipeline(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    monkeypatch.setenv(TRACE, str(path))
    rr.spawn(trains, 2, processes=True)
    for rank in (0, 1):
        spans = [e["name"] for e in events_of(path, pid=rank, cat="span")]
        names = ("step", "compute", "update", "check", "save", "evaluate", "B 2")
        assert [spans.count(name) for name in names] == [5, 5, 5, 2, 1, 2, 5]
        assert {"F 0", "F 1", "F 2"} <= {*spans}


PROGRAM = """
    import os, signal, sys
    import ringreduce as rr
    comm = rr.init()
    with rr.span("first"):
        comm.all_reduce(comm.rank)
    comm.barrier()
    if "kill" in sys.argv and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in sys.argv and comm.rank == 1:
        raise ValueError("of rank 1")
    comm.barrier()
"""


@pytest.mark.parametrize("end", ["well", "raise"])
def test_another_launcher_writes_a_trace_by_the_variable(script, tmp_path, run, end):
    script(PROGRAM)
    (tmp_path / "t.json.7.1.part").write_bytes(b"of an earlier job")
    environment = {**os.environ, TRACE: "t.json"}
    ended = run("-n", "2", sys.executable, "script.py", end, command=STAND_IN, env=environment)
    assert (ended.returncode == 0) == (end == "well")
    assert {e["pid"] for e in events_of(tmp_path / "t.json", name="first")} == {0, 1}
    closed = events_of(tmp_path / "t.json", name="close direct")
    assert len(closed) == 2 * (end == "well")


@pytest.mark.mpi
def test_where_a_rank_is_killed_the_events_of_all_are_written(script, tmp_path, run):
    script(PROGRAM)
    (tmp_path / "t.json.7.1.part").write_bytes(b"of an earlier job")
    ended = run("-n", "3", "--trace", "t.json", "script.py", "kill")
    assert ended.returncode == 128 + signal.SIGKILL
    assert {e["pid"] for e in events_of(tmp_path / "t.json", name="first")} == {0, 1, 2}
    assert [path.name for path in tmp_path.glob("t.json*")] == ["t.json"]


@pytest.mark.parametrize("command", ["run", "train", "bench"])
@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_command_passes_the_name_to_the_ranks(command, by, tmp_path, monkeypatch):
    jobs: list[launcher.Job] = []
    monkeypatch.setattr(cli, "run", lambda job: jobs.append(job) or 0)
    monkeypatch.chdir(tmp_path)
    if by == "variable":
        monkeypatch.setenv(TRACE, "t.json")
    words = [command, "-n", "2", *["--trace", "t.json"] * (by == "option")]
    assert cli.main(words + [__file__] * (command == "run")) == 0
    assert launcher._ringreduce_settings(jobs[0])[TRACE] == str(tmp_path / "t.json")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "train", "bench"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.txt", "is 'x.txt'; wanted a name that ends in .json, .svg or .png"),
        ("/nonexistent/x.json", "No such file or directory: '/nonexistent/x.json'"),
    ],
)
def test_a_file_that_cannot_be_a_trace_is_refused(command, name, text, capsys):
    program = [__file__] * (command == "run")
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "-n", "2", "--trace", name, *program])
    assert stop.value.code == 2
    assert re.search(re.escape(text), capsys.readouterr().err)


def test_a_variable_that_cannot_be_a_trace_is_refused():
    with pytest.raises(ValueError, match=r"RINGREDUCE_TRACE is 'x.txt'; wanted a name that ends"):
        Environment.read({TRACE: "x.txt"})
