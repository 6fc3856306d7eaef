"""Ranks that meet and connect by TCP: here on one host, whose ranks take each other for hosts."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time

import pytest

import ringreduce as rr
from ringreduce.config import Environment
from ringreduce.rendezvous.env import of_environment
from ringreduce.rendezvous.meeting import Meeting
from ringreduce.system import addresses, place
from ringreduce.system.addresses import Address, listen, own_addresses
from ringreduce.transports import conversations, handshakes, mesh
from ringreduce.transports.mesh import SocketMesh, Way, connect
from tests.support.threads import Exchange, on_threads

LOOPBACK = Environment(interface="lo")


@pytest.fixture
def free_port():
    """A port above which some others are free, too."""
    with listen([0]) as listening:
        return listening.getsockname()[1] - 100


@pytest.fixture
def apart(monkeypatch):
    """Has each thread take itself for a host."""
    monkeypatch.setattr(mesh, "network", lambda: threading.current_thread().name)


def connected(size, way=None, timeout_s=5.0):
    """Connect ranks that are threads; return how each is connected, or its error."""
    exchange = Exchange(size)

    def run(rank):
        given = way(rank) if way else Way(LOOPBACK)
        try:
            return connect(exchange.of(rank), rank, size, timeout_s, way=given)
        except (rr.RingReduceError, ValueError) as error:
            return error

    found = on_threads(run, size)
    return [peers_of(each) if isinstance(each, SocketMesh) else each for each in found]


def peers_of(found):
    """Return the addresses of the peers of a mesh, whose connections are closed."""
    streams = [stream for stream in found.streams if stream is not None]
    peers = {stream.getpeername()[0].removeprefix("::ffff:") for stream in streams}
    for stream in streams:
        stream.close()
    return peers


@pytest.fixture
def published(monkeypatch):
    """The addresses that all ranks publish."""
    found: list[Address] = []
    monkeypatch.setattr(mesh, "own_addresses", lambda *_: found)
    return found


@pytest.fixture
def silent(monkeypatch):
    """An address that does not answer at rank 0's port: there its kernel keeps no more waiting."""
    for module in conversations, handshakes:
        monkeypatch.setattr(module, "CONNECT_S", 0.1)
    with contextlib.ExitStack() as closing:
        full = closing.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        place = full.getsockname()
        for _ in range(3):
            waiting = closing.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)

        def listen_elsewhere(way):
            return socket.create_server(("127.0.0.1", 0 if way.local_rank else place[1]))

        monkeypatch.setattr(mesh, "_listen", listen_elsewhere)
        yield Address("lo", place[0])


# --- addresses ---


def test_a_host_publishes_no_loopback_and_no_address_that_others_cannot_use():
    every = own_addresses()
    assert not [each for each in every if each.address.startswith(("127.", "::1", "fe80:"))]
    assert {each.interface for each in every} <= {name for _, name in socket.if_nameindex()}


def test_the_address_on_the_route_to_rank_0_comes_first(monkeypatch):
    found = [(Address(name, f"10.{name[-1]}.0.1"), False) for name in ("eth0", "eth1", "eth2")]
    monkeypatch.setattr(addresses, "_of_interfaces", lambda: iter(found))
    routes = {"rank0": "10.2.0.1", addresses._OUTSIDE: "10.1.0.1"}
    monkeypatch.setattr(addresses, "_begin_of_route", routes.get)
    assert [each.interface for each in own_addresses("rank0")] == ["eth2", "eth1", "eth0"]


def test_an_interface_that_is_absent_is_an_error():
    with pytest.raises(ValueError, match=r"RINGREDUCE_INTERFACE is 'eth9'; .* it has .*lo"):
        connect(lambda mine: [mine], 0, 1, 1.0, way=Way(Environment(interface="eth9")))


def test_an_interface_alone_is_published():
    assert {each.interface for each in own_addresses(interface="lo")} == {"lo"}


# --- the mesh ---


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_several_hosts_connect(apart, size):
    families = {"127.0.0.1"} if size > 1 else set()
    assert connected(size) == [families] * size


def test_ipv6_connects_where_ipv4_leads_nowhere(apart, published):
    published += [Address("lo", "240.0.0.1"), Address("lo", "::1")]
    assert connected(3, local) == [{"::1"}] * 3


def test_addresses_that_lead_to_another_rank_or_back_are_passed_over(
    apart, published, monkeypatch, free_port, caplog
):
    """As 172.17.0.1 does, which every host with Docker has, where all hosts have the same ports."""

    def listen_apart(way):
        return socket.create_server((f"127.0.0.{1 + way.local_rank}", free_port))

    monkeypatch.setattr(mesh, "_listen", listen_apart)
    published += [Address("lo", f"127.0.0.{number}") for number in (2, 3, 1)]
    both = {"127.0.0.1", "127.0.0.2"}
    assert connected(3, local) == [{"127.0.0.1"}, {"127.0.0.1"}, both]
    assert caplog.text == ""


def local(rank):
    return Way(local_rank=rank)


def test_an_address_that_does_not_answer_is_not_the_last(apart, published, silent):
    published += [silent, Address("lo", "127.0.0.1")]
    assert connected(2, local) == [{"127.0.0.1"}] * 2


def test_an_address_that_cannot_be_reached_is_named(apart, published, silent):
    published += [silent]
    waits, error = connected(2, local, timeout_s=1.5)
    assert isinstance(error, rr.PeerTimeoutError)
    assert error.ranks == (0,)
    host = socket.gethostname()
    assert f"init: rank 1 cannot connect to rank 0 on {host} at 127.0.0.2 port" in str(error)
    assert "(lo): timed out; is the rank there, and does no firewall close" in str(error)
    assert "not there: 1" in str(waits)


def test_a_host_without_addresses_is_named(apart, published):
    _, error = connected(2, timeout_s=0.2)
    assert "at any address: no interface is up there" in str(error)


def test_a_port_that_is_taken_is_an_error(free_port):
    way = Way(Environment(interface="lo", port=free_port), local_rank=3)
    said = rf"RINGREDUCE_PORT is {free_port}, so local rank 3 listens at port {free_port + 4}: Addr"
    with listen([free_port + 4]), pytest.raises(ValueError, match=said):
        connect(lambda mine: [mine], 0, 1, 1.0, way=way)
    way = Way(Environment(interface="lo", port=free_port))
    with pytest.raises(ValueError, match="set LOCAL_RANK"):
        connect(lambda mine: [mine], 0, 1, 1.0, way=way)


def test_silent_strangers_and_those_that_say_too_much_keep_no_rank_waiting(
    apart, monkeypatch, caplog
):
    """Ten of them cost no rank the five seconds of one."""
    caplog.set_level(logging.WARNING)
    exchange, strangers = Exchange(2), []

    def run(rank):
        def collect(mine):
            port = json.loads(mine)[7]
            if rank == 0:
                for index in range(10):
                    strangers.append(socket.create_connection(("127.0.0.1", port)))
                    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10 * (index % 2))
            return exchange.of(rank)(mine)

        return connect(collect, rank, 2, 60.0, way=Way(LOOPBACK))

    start = time.monotonic()
    found = on_threads(run, 2)
    assert time.monotonic() - start < conversations.TALK_S
    assert [peers_of(each) for each in found] == [{"127.0.0.1"}] * 2
    for stranger in strangers:
        stranger.close()
    assert "dropped a stranger at" in caplog.text
    assert "it is no rank of this job" in caplog.text


def test_a_stranger_is_dropped_after_its_seconds(monkeypatch, caplog):
    monkeypatch.setattr(conversations, "TALK_S", 0.05)
    talks = conversations.Conversations()

    def talk(connection):
        yield 100

    with listen([0]) as listening, socket.socket() as stranger:
        talks.serve(listening, talk)
        stranger.connect(("127.0.0.1", listening.getsockname()[1]))
        stranger.sendall(b"12345")
        while "sent only 5 bytes" not in caplog.text:
            talks.step(0.01)
        assert stranger.recv(1) == b""
        talks.close()


def test_another_secret_is_noticed_by_all_before_they_connect(apart):
    def way(rank):
        return Way(Environment(interface="lo", secret="wrong" if rank == 1 else "right"))

    first, second, third = connected(3, way)
    assert "these ranks have another RINGREDUCE_SECRET than this rank: 1; pass" in str(first)
    assert "than this rank: 0, 2; pass" in str(second)
    assert str(third) == str(first)


# --- the meeting ---


def meeting(ports, number=b"n" * 16, secret=b"", timeout_s=5.0):
    unix = b"\0ringreduce-test" + secrets.token_hex(8).encode()
    return Meeting(number, secret, unix, "127.0.0.1", ports, timeout_s)


def met(*places):
    """Return what ranks find that have such a meeting each, in place of their addresses."""

    def run(rank):
        try:
            if rank == 0:
                return places[0].serve(len(places), b"0")
            return places[rank].ask(rank, len(places), b"%d" % rank)
        except (rr.RingReduceError, ValueError) as error:
            return str(error)

    return on_threads(run, len(places))


@pytest.fixture
def ports(free_port):
    return range(free_port, free_port + 3)


def test_ranks_meet_by_tcp(ports):
    assert met(*[meeting(ports, secret=b"s")] * 3) == [[b"0", b"1", b"2"]] * 3


def test_other_programs_and_other_jobs_are_passed_over(ports, caplog, monkeypatch):
    """One program at the first port does not answer; another job meets at the second."""
    monkeypatch.setattr("ringreduce.rendezvous.meeting.CONNECT_S", 0.2)
    ours, theirs = meeting(ports), meeting(ports, number=b"m" * 16)
    found = {}
    with listen(ports[:1]):
        thread = threading.Thread(target=lambda: found.update(theirs=theirs.serve(2, b"x")))
        thread.start()
        assert met(ours, ours) == [[b"0", b"1"]] * 2
        assert theirs.ask(1, 2, b"y") == [b"x", b"y"]
        thread.join()
    assert found == {"theirs": [b"x", b"y"]}
    assert "stranger" not in caplog.text


def test_a_wrong_secret_is_refused_and_the_rank_is_missing(ports, caplog):
    right, wrong = (meeting(ports, secret=word, timeout_s=0.5) for word in (b"right", b"wrong"))
    alone, refused = met(right, wrong)
    assert "not there: 1" in alone
    assert "rank 0 has another RINGREDUCE_SECRET than this rank; pass all ranks the same" in refused


def test_who_does_not_prove_the_secret_is_dropped(ports, caplog):
    """A stranger that knows all of the protocol, and the number of the job."""
    right, wrong = (meeting(ports, secret=word, timeout_s=1.0) for word in (b"right", b"wrong"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringreduce.rendezvous.meeting.compare_digest", lambda *_: False)
        alone, _ = met(right, wrong)
    assert "not there: 1" in alone


def test_ports_that_are_taken_are_an_error(ports):
    taken = [listen([port]) for port in ports]
    said = f"rank 0 may listen at {ports[0]} to {ports[-1]}: Address already in use; set RINGRED"
    assert said in met(meeting(ports))[0]
    assert f"RINGREDUCE_PORT is {ports[0]}: Address" in met(meeting(ports[:1]))[0]
    for each in taken:
        each.close()


def test_a_rank_0_that_cannot_be_reached_is_named(ports):
    with pytest.raises(rr.PeerTimeoutError, match=rf"there: 0: 127\.0\.0\.1, ports {ports[0]} to"):
        meeting(ports, timeout_s=0.2).ask(1, 2, b"1")


# --- variables ---


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node03", "node03"),
        ("node[03-05,7],other1", "node03"),
        ("a,b", "a"),
        ("rack[1-2]node[8,9]", "rack1node8"),
        ("", None),
    ],
)
def test_srun_names_the_host_of_rank_0(hosts, first):
    step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    found = place.of_launcher(step | {"SLURM_STEP_NODELIST": hosts})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("2", "3", "0")
    assert found.get("MASTER_ADDR") == first
    assert found.get("MASTER_PORT") == (first and str(place.port_of("7.1")))


def test_kubernetes_numbers_the_pods_of_a_job():
    given = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.headless"}
    found = of_environment(None, None, 1.0, given)
    assert (found.rank, found.size, found.one_host) == (1, 2, False)
    variables = dict(given)
    place.fill(variables)
    assert (variables["RANK"], variables["MASTER_PORT"]) == ("1", "29500")
    assert place._job(variables) == place._job(given)  # a worker knows its rank before and after
    assert "RANK" not in place.of_launcher({"JOB_COMPLETION_INDEX": "1"})
    assert place.of_launcher({**given, "RANK": "0"}) == {}
