"""Ranks that no MPI connects find each other: by variables, a file, a store or a function."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from datetime import timedelta

import pytest

import ringreduce as rr
from ringreduce import rendezvous
from ringreduce.config import Environment
from ringreduce.rendezvous import env, files
from ringreduce.rendezvous.env import of_environment
from ringreduce.transports import conversations, handshakes, mesh
from ringreduce.transports.mesh import SeveralHostsError, Way, connect
from tests.support.threads import Exchange, on_threads

MARK = 6
"""Index of the mark in an entry."""
JOB = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}


class Store:
    """As a store of torch.distributed: `wait` raises RuntimeError after its time."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def add(self, key, amount):
        with self._changed:
            self._values[key] = self._values.get(key, 0) + amount
            return self._values[key]

    def set(self, key, value):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key):
        return self._values[key]

    def check(self, keys):
        return all(key in self._values for key in keys)

    def delete_key(self, key):
        del self._values[key]

    def wait(self, keys, timeout: timedelta):
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")


@pytest.fixture(params=["file", "store", "function"])
def form(request, tmp_path):
    """A function: number of ranks -> what each rank passes to `init`."""

    def of(size):
        match request.param:
            case "file":
                return lambda rank: (f"file://{tmp_path}/meeting", rank, size)
            case "store":
                store = Store()
                return lambda rank: (store, rank, size)
            case "function":
                exchange = Exchange(size)
                return lambda rank: (exchange.of(rank), None, None)

    return of


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_form_gives_all_ranks_bytes_in_rank_order(form, size):
    passed = form(size)

    def run(rank):
        found = rendezvous.find(*passed(rank), 10.0)
        return found.collect(b"rank %d" % rank)

    assert on_threads(run, size) == [[b"rank %d" % rank for rank in range(size)]] * size


def test_every_form_can_be_used_again_and_again(form):
    passed = form(3)

    def run(rank):
        return [rendezvous.find(*passed(rank), 10.0).collect(bytes([turn])) for turn in range(20)]

    assert on_threads(run, 3) == [[[bytes([turn])] * 3 for turn in range(20)]] * 3


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("form", ["file", "store"], indirect=True)
def test_a_rank_may_try_again_after_the_others_were_missing(form, early):
    passed = form(2)
    with pytest.raises(rr.PeerTimeoutError, match=f"not there: {1 - early}"):
        rendezvous.find(*passed(early), 0.05).collect(b"too early")

    def run(rank):
        return rendezvous.find(*passed(rank), 10.0).collect(b"%d" % rank)

    assert on_threads(run, 2) == [[b"0", b"1"]] * 2


def test_ranks_of_every_form_make_a_communicator(form):
    passed = form(3)

    def run(rank):
        rendezvous, number, size = passed(rank)
        with rr.init(rendezvous=rendezvous, rank=number, size=size) as comm:
            assert "over shared memory" in repr(comm)
            return comm.all_reduce(comm.rank + 1).item(), comm.size

    assert on_threads(run, 3) == [(6, 3)] * 3


# --- the variables that torchrun sets ---


def variables(rank, size, port, **more):
    return {**JOB, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size), **more}


@pytest.fixture
def port(monkeypatch):
    """A port of a job whose ranks are threads, which have one rendezvous."""
    monkeypatch.setattr(env._completed, "number", 0)
    return os.getpid()


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_with_variables_may_try_again(port, early):
    with pytest.raises(rr.PeerTimeoutError, match=f"not there: {1 - early}"):
        of_environment(None, None, 0.05, variables(early, 2, port)).collect(b"too early")

    def run(rank):
        return of_environment(None, None, 10.0, variables(rank, 2, port)).collect(b"%d" % rank)

    assert on_threads(run, 2) == [[b"0", b"1"]] * 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_variables_are_enough(port, size):
    def run(rank):
        found = of_environment(None, None, 10.0, variables(rank, size, port))
        return found.rank, found.size, found.collect(b"%d" % rank)

    everybody = [b"%d" % rank for rank in range(size)]
    assert on_threads(run, size) == [(rank, size, everybody) for rank in range(size)]


def test_arguments_stand_in_for_variables(port):
    def run(rank):
        return of_environment(rank, 2, 10.0, variables("", "", port)).collect(b"%d" % rank)

    assert on_threads(run, 2) == [[b"0", b"1"]] * 2


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing):
    given = variables(0, 2, 1)
    del given[missing]
    with pytest.raises(ValueError, match=f"missing: {missing} ") as caught:
        of_environment(None, None, 10.0, given)
    assert all(name in str(caught.value) for name in given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "first"}, "RANK is 'first'; wanted a whole number"),
        ({"WORLD_SIZE": "2.0"}, r"WORLD_SIZE is '2\.0'; wanted a whole number"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2; ranks count from 0"),
        ({"RANK": "-1"}, "RANK is -1 and WORLD_SIZE is 2; ranks count from 0"),
        (
            {"LOCAL_WORLD_SIZE": "1"},
            "1 of 2 ranks are on this host, and MASTER_ADDR is localhost, which other hosts cannot",
        ),
        ({"RINGREDUCE_PORT": "65535"}, "RINGREDUCE_PORT is '65535'; wanted a port from 1 to 65534"),
    ],
)
def test_a_wrong_variable_is_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        of_environment(None, None, 10.0, variables(0, 2, 1, **wrong))


def test_ranks_that_do_not_come_are_named_on_all_ranks(port):
    def run(rank):
        with pytest.raises(rr.PeerTimeoutError, match=r"waited 0\.3 s .* not there: 1, 3") as error:
            of_environment(None, None, 0.3, variables(2 * rank, 4, port)).collect(b"here")
        return error.value.ranks

    assert on_threads(run, 2) == [(1, 3)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_timeout_hints_at_an_address_that_is_spelt_in_two_ways(port, rank):
    said = "spell MASTER_ADDR and MASTER_PORT alike: rank {} has MASTER_ADDR=localhost and MASTER_"
    here = variables(rank, 2, port, MASTER_ADDR="localhost")
    with pytest.raises(rr.PeerTimeoutError, match=said.format(rank)):
        of_environment(None, None, 0.1, here).collect(b"here")


def test_a_rank_0_that_does_not_come_is_named(port):
    with pytest.raises(rr.PeerTimeoutError, match="not there: 0"):
        of_environment(None, None, 0.2, variables(1, 2, port)).collect(b"here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes have RANK 1"),
        ([(0, 3), (1, 2)], "WORLD_SIZE is 3 on rank 0, and 2 on rank 1"),
        ([(0, 1), (1, 2)], "not there: 0"),
    ],
)
def test_ranks_that_do_not_fit_raise_on_all_who_wait(port, ranks, said):
    def run(index):
        rank, size = ranks[index]
        try:
            of_environment(None, None, 0.5, variables(rank, size, port)).collect(b"here")
        except (ValueError, rr.PeerTimeoutError, rr.PeerLostError) as error:
            return str(error)

    texts = [text for text in on_threads(run, len(ranks)) if text]
    assert texts
    # A rank that connects just before rank 0 closes its socket finds that rank 0 has ended.
    assert all(said in text or "rank 0 has ended" in text for text in texts)


@pytest.mark.slow
def test_two_ranks_0_are_an_error(port):
    def run(rank):
        try:
            of_environment(None, None, 0.5, variables(0, 2, port)).collect(b"here")
        except (ValueError, rr.PeerTimeoutError) as error:
            return str(error)

    texts = on_threads(run, 2)
    assert any("another process is rank 0" in text for text in texts)
    assert any("not there: 1" in text for text in texts)


@pytest.mark.parametrize("line", [b"", b"{", b'{"rank": 1}\n', b"[]\n", b"x" * (2 << 20) + b"\n"])
def test_rank_0_ignores_what_is_no_rank(port, line, monkeypatch):
    monkeypatch.setattr(conversations, "TALK_S", 0.2)
    address = env._meeting(2, 5.0, Environment(), variables(0, 2, port)).unix_address

    def run(rank):
        if rank == 2:
            with socket.socket(socket.AF_UNIX) as stranger:
                end = time.monotonic() + 5
                while stranger.connect_ex(address) and time.monotonic() < end:
                    time.sleep(0.01)
                with contextlib.suppress(OSError):
                    stranger.sendall(line)
                    assert stranger.recv(1) == b""
                return None
        if rank == 1:
            time.sleep(0.1)
        return of_environment(None, None, 5.0, variables(rank, 2, port)).collect(b"%d" % rank)

    assert on_threads(run, 3) == [[b"0", b"1"], [b"0", b"1"], None]


# --- which way a process takes ---


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({}, None),
        ({"RANK": "0"}, "env://"),
        ({"WORLD_SIZE": "2"}, "env://"),
        ({"LOCAL_RANK": "0"}, None),
        ({"PMI_RANK": "0"}, None),
        ({"OMPI_COMM_WORLD_RANK": "0", "RANK": "0"}, None),
        ({"PMIX_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, "env://"),
    ],
)
def test_the_nearest_launcher_decides(given, way):
    assert rendezvous.default(given) == way


# --- files ---


def test_a_file_is_removed_by_the_last_rank_to_read_it(tmp_path):
    path = tmp_path / "meeting"
    on_threads(lambda rank: files.of_file(str(path), rank, 3, 10.0)(b"x"), 3)
    assert list(tmp_path.iterdir()) == []


def test_only_the_user_can_read_a_file(tmp_path):
    files._RendezvousFile(tmp_path / "meeting", 1, 3, 0.0).join(b"x")
    assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600


def test_missing_ranks_of_a_file_are_named_and_the_file_is_removed(tmp_path):
    with pytest.raises(rr.PeerTimeoutError, match="not there: 0, 2"):
        files.of_file(str(tmp_path / "meeting"), 1, 3, 0.05)(b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"rank": 0, "entry": "00", "size": 2}', "has an entry of rank 0 already"),
        ('{"rank": 1, "entry": "00", "size": 3}', "size is 2 on rank 0, and 3 on rank 1"),
        ("notes of mine", "has other lines than those of ranks"),
        ('{"rank": "0"}', "has other lines than those of ranks"),
    ],
)
def test_a_file_of_something_else_is_an_error_and_stays(tmp_path, content, said):
    path = tmp_path / "meeting"
    path.write_text(content + "\n")
    with pytest.raises(ValueError, match=said):
        files.of_file(str(path), 0, 2, 1.0)(b"x")
    assert path.read_text() == content + "\n"


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "meeting").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="meeting"):
        files.of_file(str(tmp_path / "meeting"), 0, 2, 1.0)(b"x")
    assert not (tmp_path / "elsewhere").exists()


# --- stores ---


def test_missing_ranks_of_a_store_are_named():
    with pytest.raises(rr.PeerTimeoutError, match="not there: 0, 2"):
        rendezvous.find(Store(), 1, 3, 0.05).collect(b"x")


def test_an_error_of_a_store_stays_what_it_is():
    class Broken(Store):
        def wait(self, keys, timeout):
            raise RuntimeError("connection reset")

        def check(self, keys):
            return True

    with pytest.raises(RuntimeError, match="connection reset"):
        rendezvous.find(Broken(), 0, 2, 1.0).collect(b"x")


# --- functions ---


def entries_with(change):
    """A function that returns the entries of two ranks, of which `change` makes the second."""

    def collect(mine):
        other = json.loads(mine)
        other[0] = "0" * 32
        other[MARK] = mesh._mark(other[0], Way())
        return [mine, change(other)]

    return collect


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entry: b"nothing", "returned other bytes for rank 1 than ranks pass"),
        (lambda entry: json.dumps(entry[:2]).encode(), "for rank 1 than ranks pass"),
        (lambda entry: json.dumps([*entry[:-1], [3]]).encode(), "for rank 1 than ranks pass"),
        (lambda entry: json.dumps([*entry[:-1], [["eth0"]]]).encode(), "than ranks pass"),
        (
            lambda entry: json.dumps([*entry[:MARK], "another", *entry[MARK + 1 :]]).encode(),
            "these ranks have another RINGREDUCE_SECRET than this rank: 1; pass all ranks the same",
        ),
        (lambda entry: 3, "it returned"),
    ],
)
def test_entries_are_checked(change, said):
    with pytest.raises(ValueError, match=said):
        connect(entries_with(change), None, None, 1.0)


def on_the_moon(mpi_rank):
    """A function that changes an entry to that of a rank on another host, without addresses."""

    def change(entry):
        entry[2], entry[5], entry[-1] = "moon", mpi_rank, []
        return json.dumps(entry).encode()

    return change


def test_mpi_connects_ranks_of_several_hosts_if_it_has_started_all():
    with pytest.raises(SeveralHostsError) as caught:
        connect(entries_with(on_the_moon(3)), None, None, 1.0, way=Way(mpi_rank=5))
    assert caught.value.mpi_ranks == [5, 3]


@pytest.mark.parametrize(("here", "there"), [(5, None), (5, 5), (None, 5)])
def test_tcp_connects_ranks_of_several_hosts_otherwise(here, there):
    with pytest.raises(rr.PeerTimeoutError, match="not there: 1"):
        connect(entries_with(on_the_moon(there)), None, None, 0.1, way=Way(mpi_rank=here))


def test_a_rank_that_has_ended_is_named():
    """Nothing listens at the address of the other rank, which is rank 0 here."""

    def collect(mine):
        return list(reversed(entries_with(lambda entry: json.dumps(entry).encode())(mine)))

    with pytest.raises(rr.PeerLostError, match="rank 0 has ended before all ranks") as error:
        connect(collect, None, None, 1.0)
    assert error.value.ranks == (0,)


def test_a_rank_that_does_not_connect_is_named():
    collect = entries_with(lambda entry: json.dumps(entry).encode())
    with pytest.raises(rr.PeerTimeoutError, match="not there: 1"):
        connect(collect, None, None, 0.1)


@pytest.mark.parametrize("number", [1, 7, 1 << 31])
def test_who_does_not_know_the_secret_is_not_accepted(number):
    """A process of the user that read the address, but not the other ranks' entries."""
    exchange = Exchange(2)
    addresses = []

    def run(rank):
        def collect(mine):
            if rank == 0:
                addresses.append(f"\0ringreduce-{json.loads(mine)[0]}")
            entries = exchange.of(rank)(mine)
            if rank == 1:
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(addresses[0])
                    stranger.sendall(handshakes.GREETING.pack(number, bytes(32)))
                    assert stranger.recv(1) == b""
            return entries

        return connect(collect, None, None, 5.0).rank

    assert on_threads(run, 2) == [0, 1]
