"""When ranks disagree: one error with one text on all of them, soon, and they can go on."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.control import agreement
from ringreduce.control.diagnostics import describe_mismatch
from ringreduce.devices.cpu import CpuDevice
from ringreduce.system.topology import Topology
from ringreduce.transports import yielding
from ringreduce.transports.thread import Switchboard, ThreadTransport
from tests.support import threads
from tests.support.cases import CONFIG, nodes_of
from tests.support.disagreements import (
    CALLS,
    Ended,
    Mixed,
    check,
    close_too_early,
    disagree_often,
    every_mixture,
    expected_words,
    mix,
    mix_large,
    mix_several_messages_a_step,
    mixtures,
    swap,
    wait_in_opposite_order,
)
from tests.support.mpi import MpiJobs

SOON_S = 60.0
"""Half of the timeout: what takes longer was not noticed before it."""
LIMIT_S = 300.0
"""Every pair of calls takes ten seconds over MPI, and more on a busy machine."""


def on_threads(program, ranks, *arguments):
    nodes = nodes_of("two", ranks)
    return rr.spawn(program, ranks, *arguments, nodes=nodes, config=CONFIG, timeout_s=120)


TOGETHER = {
    2: ("mix_all", "close_late"),
    3: ("disagree_otherwise", "mix_large", "run_ahead 3", "run_ahead 300", "disagree_often 90"),
}
"""Number of ranks -> programs that one job runs."""


@pytest.fixture(scope="module")
def over_mpi(tmp_path_factory):
    """Gives what a program, named with its arguments, returns on each rank of a job."""
    jobs = MpiJobs(tmp_path_factory.mktemp("jobs"))

    @cache
    def run(ranks, *programs):
        function = "tests.support.disagreements:over_mpi"
        found = jobs.run_ok("call", ranks, function, *programs, timeout_s=LIMIT_S)
        return dict(zip(programs, map(list, zip(*found, strict=True)), strict=True))

    def result(program, ranks):
        together = TOGETHER.get(ranks, ())
        return run(ranks, *(together if program in together else [program]))[program]

    yield result
    jobs.sweep()


def agreed(ranks_ended: list[list[Ended]]) -> list[str]:
    """The texts of the disagreements, all of which must have ended alike and soon on all ranks."""
    texts = []
    for ended in zip(*ranks_ended, strict=True):
        same = {text for text, _ in ended}
        assert len(same) == 1, f"not one text on all ranks: {ended}"
        assert max(seconds for _, seconds in ended) < SOON_S
        texts += same
    assert "" not in texts, f"no rank noticed number {texts.index('')}"
    numbers = [int(re.search(r"call (\d+)", text)[1]) for text in texts]
    assert numbers == sorted(set(numbers)), "a call's number came twice"
    return texts


def check_words(texts: list[str], mixed: list[Mixed], size: int) -> None:
    assert len(texts) == len(mixed)
    for text, mixture in zip(texts, mixed, strict=True):
        for words in expected_words(mixture, size):
            assert words in text, mixture


# --- every pair -----------------------------------------------------------------------------------


THREE = pytest.param(3, marks=pytest.mark.long)


SOME = ("sum", "beside", "sliced scatter", "sliced counted gather", "sliced from root 1", "list")
"""With every other call; over MPI half of all pairs are mixed."""
USUAL = [pytest.param(call, marks=() if call in SOME else pytest.mark.long) for call in CALLS]


@pytest.mark.parametrize("ranks", [2, THREE])
@pytest.mark.parametrize("usual", USUAL)
def test_any_two_calls_mixed_on_threads(usual, ranks):
    mixed = mixtures(usual, ranks)
    check_words(agreed(on_threads(mix, ranks, mixed)), mixed, ranks)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("usual", "ranks"), [("sum", 5), ("sliced hierarchical", 5), ("gather", 4), ("broadcast 1", 4)]
)
def test_any_call_mixed_into_some_on_more_threads(usual, ranks):
    mixed = mixtures(usual, ranks)
    check_words(agreed(on_threads(mix, ranks, mixed)), mixed, ranks)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, THREE])
def test_any_two_calls_mixed_over_mpi(over_mpi, ranks):
    check_words(agreed(over_mpi("mix_all", ranks)), every_mixture(ranks), ranks)


# --- other ways to disagree -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_order_of_calls_differs_on_threads(ranks):
    agreed(on_threads(swap, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_close_against_a_call_closes_nothing_on_threads(ranks):
    for text in agreed(on_threads(close_too_early, ranks)):
        assert "close()" in text


def test_several_messages_of_one_peer_in_a_step_on_threads():
    agreed(rr.spawn(mix_several_messages_a_step, 6, nodes=(3, 1, 2), config=CONFIG, timeout_s=20))


@pytest.mark.mpi
def test_several_messages_of_one_peer_in_a_step_over_mpi(over_mpi):
    agreed(over_mpi("mix_several_messages_a_step", 6))


@pytest.mark.slow
def test_mixed_large_calls_on_threads():
    agreed(on_threads(mix_large, 2))


@pytest.mark.mpi
@pytest.mark.parametrize("program", [name for name in TOGETHER[3] if "ahead" not in name])
def test_other_disagreements_over_mpi(over_mpi, program):
    agreed(over_mpi(program, 3))


@pytest.mark.mpi
@pytest.mark.parametrize("calls", [3, 300])
def test_a_root_that_is_several_calls_ahead(over_mpi, calls):
    (text,) = agreed(over_mpi(f"run_ahead {calls}", 3))
    assert "rank 0 calls broadcast(float32[0], root=0, algorithm='auto')" in text
    assert "ranks 1 and 2 call barrier()" in text


def test_a_root_that_is_further_ahead_than_it_remembers():
    reports = {
        0: {"first": 900, "calls": [0, 1], "signatures": [["broadcast", []], ["barrier", []]]},
        1: {"first": 0, "calls": [0], "signatures": [["barrier", []]]},
    }
    text, _ = describe_mismatch(reports)
    assert text == (
        "rank 0 had gone on to call 901 while rank 1 is at call 0, and can no longer tell which "
        "call was not the same; every rank must make the same calls in the same order"
    )


@pytest.mark.parametrize("first", [0, 1])
def test_an_argument_that_one_rank_alone_passes_is_named(first):
    def program(comm):
        wire = "float16" if comm.rank == first else None
        with pytest.raises(rr.MismatchError) as caught:
            comm.all_reduce(np.ones(3, np.float32), wire=wire)
        return str(caught.value)

    texts = rr.spawn(program, 2, timeout_s=120)
    passed = {first: "wire='float16'", 1 - first: "no wire"}
    for text in texts:
        assert all(f"rank {rank} passes {what}" in text for rank, what in passed.items())
        assert "every rank must pass the same wire" in text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 5])
def test_many_disagreements_in_a_row_on_threads(ranks):
    agreed(on_threads(disagree_often, ranks, "50"))


def told_of_the_other_group(results):
    """Rank 0 blames nobody, and names what rank 1 waits in; the other group goes on."""
    (text, total), (nothing, total_there) = results
    assert (total, total_there, nothing) == ([0.0, 2.0, 4.0], [0.0, 2.0, 4.0], "")
    head, there, *_ = text.splitlines()
    assert head.startswith("() rank 1 waited in another communicator: no progress within")
    assert "rank 1 waited in another communicator, in all_reduce(float64[3]," in there
    assert "of 2 ranks of split 2 (color 7) of all 2 ranks;" in there


@pytest.mark.slow
def test_a_rank_that_waits_in_another_group_says_so_on_threads(monkeypatch):
    monkeypatch.setattr(agreement, "_ROLL_CALL_S", 60.0)  # more than a busy machine needs
    told_of_the_other_group(rr.spawn(wait_in_opposite_order, 2))


@pytest.mark.mpi
def test_a_rank_that_waits_in_another_group_says_so_over_mpi(mpi):
    function = "tests.support.disagreements:wait_in_opposite_order_over_mpi"
    told_of_the_other_group(mpi.run("call", 2, function).results)


def test_the_time_in_which_a_rank_was_stopped_is_no_wait(monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(yielding, "time", clock)
    waits = agreement.Agreement(ThreadTransport(Switchboard(2), 0), timeout_s=30)
    waits.wait(1)
    for passed_s, waited_s in ((0.5, 0.5), (600.0, 0.6), (0.5, 1.1)):
        clock.now += passed_s
        assert waits._waited() == pytest.approx(waited_s)


def test_other_nodes_are_noticed_when_ranks_meet():
    switchboard = Switchboard(3)
    texts = []

    def meet(rank):
        topology = Topology(((0, 1), (2,)) if rank == 1 else ((0, 1, 2),), rank)
        transport = ThreadTransport(switchboard, rank)
        with pytest.raises(rr.MismatchError) as caught:
            rr.Communicator(transport, topology, CpuDevice(), rr.Config(), timeout_s=5)
        texts.append(str(caught.value))

    threads.on_threads(meet, 3)
    assert set(texts) == {
        "init: rank 1 passes nodes=((0, 1), (2,)), ranks 0 and 2 pass nodes=((0, 1, 2),); "
        "every rank must pass the same nodes (call 0)"
    }


@pytest.mark.mpi
def test_what_was_said_to_a_closed_communicator_disturbs_no_later_one(over_mpi):
    assert over_mpi("close_late", 2) == [[2] * 26] * 2


# --- what never happened --------------------------------------------------------------------------


def test_a_refused_call_consumes_no_number():
    def program(comm):
        for attempt in range(5):
            if comm.rank == attempt % comm.size:
                with pytest.raises(ValueError, match="unknown op"):
                    comm.all_reduce(np.ones(3), "average")
                with pytest.raises(ValueError, match="one count"):
                    comm.all_gather(np.ones(3), counts=[1])
            check(comm, CALLS["sum"])
        return comm._engine.agreement.completed

    assert on_threads(program, 3) == [6, 6, 6]


def test_an_error_that_is_not_caught_leaves_no_rank_waiting():
    def program(comm):
        disagree_uncaught = CALLS["sum" if comm.rank else "max"].make
        disagree_uncaught(comm)

    with pytest.raises(rr.MismatchError, match=r"rank 0 passes op='max', ranks 1 and 2 pass"):
        on_threads(program, 3)
