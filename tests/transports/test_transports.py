"""One contract for all transports: threads here, MPI in a job that runs the same checks."""

from __future__ import annotations

import threading

import pytest

import ringreduce as rr
from ringreduce.config import Environment
from ringreduce.transports import mesh
from ringreduce.transports.sockets import SocketTransport
from ringreduce.transports.thread import Switchboard, ThreadTransport
from tests.support.messages import DEADLINE_S
from tests.support.mpi import MpiJobs
from tests.support.threads import Exchange, on_threads
from tests.support.transport_checks import CHECKS, STRICT, name_of

NAMES = [name_of(check, ranks) for check, ranks in CHECKS]


@pytest.mark.parametrize(("check", "ranks"), CHECKS, ids=NAMES)
def test_threads_keep_the_contract(check, ranks):
    switchboard = Switchboard(ranks)

    def run(rank):
        transport = ThreadTransport(switchboard, rank)
        check(transport)
        transport.close()

    on_threads(run, ranks)


BUFFERED = [(check, ranks) for check, ranks in CHECKS if check not in STRICT]


@pytest.mark.parametrize("name", ["sockets", "tcp"])
@pytest.mark.parametrize(
    ("check", "ranks"), BUFFERED, ids=[name_of(check, ranks) for check, ranks in BUFFERED]
)
def test_sockets_keep_the_contract(check, ranks, name, monkeypatch):
    exchange = Exchange(ranks)
    if name == "tcp":  # each rank takes itself for a host
        monkeypatch.setattr(mesh, "network", lambda: threading.current_thread().name)

    def run(rank):
        way = mesh.Way(Environment(interface="lo"))
        found = mesh.connect(exchange.of(rank), None, None, DEADLINE_S, way=way)
        transport = SocketTransport(found, DEADLINE_S)
        assert transport.name == ("sockets" if ranks == 1 else name)
        check(transport)
        transport.close()

    on_threads(run, ranks)


def test_a_rank_that_nobody_joins_names_those_that_are_missing():
    transport = ThreadTransport(Switchboard(3), 1, timeout_s=0.05)
    with pytest.raises(rr.PeerTimeoutError, match=r"waited 0\.05 s .* not there: 0, 2") as caught:
        transport.collect(b"here")
    assert caught.value.ranks == (0, 2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What every check came to on each rank of an MPI job."""
    jobs = MpiJobs(tmp_path_factory.mktemp("contract"))
    yield jobs.run("call", 3, "tests.support.transport_checks:over_mpi")
    jobs.sweep()


OVER_MPI = [
    (sends, check, ranks)
    for sends in ("standard", "synchronous")
    for check, ranks in CHECKS
    if sends == "synchronous" or check not in STRICT
]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("sends", "check", "ranks"),
    OVER_MPI,
    ids=[f"{sends} {name_of(check, ranks)}" for sends, check, ranks in OVER_MPI],
)
def test_mpi_keeps_the_contract(outcomes, sends, check, ranks):
    assert outcomes.returncode == 0, outcomes.output
    name = f"{sends} {name_of(check, ranks)}"
    assert [rank[name] for rank in outcomes.results[:ranks]] == ["ok"] * ranks
