"""Arrays that the processor cannot reach: in order with the caller's work, nothing too soon."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import ringreduce as rr
from ringreduce import placement, staging
from tests.case_strategies import cases
from tests.cases import CONFIG, Case, expected, nodes_of, values_of
from tests.late import Card, LateArray, LateDevice, LateMark, LateQueue, values

COUNTS = (0, 1, 700, 5000, 60_001)


def spawn(program, ranks, *args, nodes=None):
    """Run ``program(comm, card, *args)`` on ranks that have a card each, of the rank's number."""
    cards = [Card(rank) for rank in range(ranks)]
    cuda = SimpleNamespace(
        CudaDevice=lambda number: LateDevice(cards[number]), as_card_array=lambda x: x
    )
    with mock.patch.object(placement, "_cuda", return_value=cuda):
        return rr.spawn(
            lambda comm: program(comm, cards[comm.rank], *args),
            ranks,
            nodes=nodes,
            timeout_s=20,
            config=CONFIG,
        )


def ramp(comm, count, number=0):
    """Different on every rank, at every index and in every call; sums are exact."""
    return np.arange(count) * (comm.rank + 1.0) + number


def total(comm, count, number=0):
    n = comm.size
    return np.arange(count) * (n * (n + 1) / 2) + number * n


# --- any call -------------------------------------------------------------------------------------


def as_view(card: Card, content: np.ndarray, view: str) -> LateArray:
    """The same values on the card, in memory of another order."""
    if content.ndim == 0 or view == "plain":
        return card.put(content)
    if view == "fortran":
        array = card.array(content.shape[::-1], content.dtype).T
    elif view == "strided":
        array = card.array((*content.shape[:-1], 2 * content.shape[-1]), content.dtype)[..., ::2]
    else:
        array = card.array(content.shape, content.dtype)[::-1]
    array[...] = content
    return array


def run_late(comm: rr.Communicator, card: Card, case: Case) -> None:
    """The call, between work of the caller's own that must come before it and after it."""
    before = values_of(case, comm.rank)
    x = as_view(card, before, case.view)
    out = None
    if case.out == "in_place" and case.collective in ("all_reduce", "broadcast"):
        out = x
    elif case.out != "new":
        wanted = expected(case, comm.rank)
        out = as_view(card, np.zeros(wanted.shape, wanted.dtype), case.view)
    options = {"out": out, "algorithm": case.algorithm}
    if case.collective in ("all_reduce", "reduce_scatter"):
        result = getattr(comm, case.collective)(x, case.op, **options)
    elif case.collective == "broadcast":
        result = comm.broadcast(x, case.root, **options)
    else:
        result = comm.all_gather(x, **options)
    kept = card.array(result.shape, result.dtype)
    kept[...] = result
    for array in (x, result):
        array[...] = np.zeros((), array.dtype)
    assert isinstance(result, LateArray)
    assert out is None or result is out
    assert np.array_equal(values(kept), expected(case, comm.rank)), f"rank {comm.rank}: {case}"


@given(case=cases(range(1, 6)))
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_case_gives_what_numpy_gives(case):
    spawn(run_late, case.ranks, case, nodes=nodes_of(case.layout, case.ranks))


# --- programs -------------------------------------------------------------------------------------


def one_after_another(comm, card):
    """The same memory again and again; what comes of each call is copied by the caller's stream."""
    kept = []
    for number in range(12):
        count = COUNTS[number % len(COUNTS)]
        x = card.put(ramp(comm, count, number))
        result = comm.all_reduce(x, out=x if number % 2 else None)
        kept.append((card.array(count, np.float64), total(comm, count, number)))
        kept[-1][0][...] = result
        x[...] = -1.0
    assert all(np.array_equal(values(got), wanted) for got, wanted in kept)


def on_the_same_arrays(comm, card):
    """Messages stay bound: the next call comes into blocks that may still be copied from."""
    for count in COUNTS:
        x, out = card.array(count, np.float64), card.array(count, np.float64)
        kept = []
        for number in range(4):
            x[...] = ramp(comm, count, number)
            assert comm.all_reduce(x, out=out) is out
            kept.append((card.array(count, np.float64), total(comm, count, number)))
            kept[-1][0][...] = out
        assert all(np.array_equal(values(got), wanted) for got, wanted in kept)


def asynchronous(comm, card):
    """When a Work is over its result is there, whatever stream looks at it."""
    works = []
    for number in range(8):
        x = card.put(ramp(comm, COUNTS[number % len(COUNTS)], number))
        works.append(comm.all_reduce(x, async_op=True))
    last = comm.all_reduce(card.put(ramp(comm, 700)))
    for number, work in enumerate(works):
        result = work.wait().view(np.ndarray)
        assert np.array_equal(result, total(comm, COUNTS[number % len(COUNTS)], number))
    assert np.array_equal(values(last), total(comm, 700))


def persistent(comm, card):
    for count in COUNTS:
        x, out = card.array(count, np.float64), card.array(count, np.float64)
        op = comm.plan("all_reduce", x, out=out)
        kept = []
        for number in range(3):
            x[...] = ramp(comm, count, number)
            assert op() is out
            kept.append((card.array(count, np.float64), total(comm, count, number)))
            kept[-1][0][...] = out
        assert all(np.array_equal(values(got), wanted) for got, wanted in kept)


def lists_and_wire(comm, card):
    members = [card.put(ramp(comm, 700)), card.put(ramp(comm, 60).astype(np.int16).reshape(3, 20))]
    members.append(card.put(ramp(comm, 5000))[::-2])
    results = comm.all_reduce(members)
    comm.all_reduce(members, out=members)
    for result, member, wanted in zip(
        results,
        members,
        (total(comm, 700), total(comm, 60).reshape(3, 20), total(comm, 5000)[::-2]),
        strict=True,
    ):
        assert np.array_equal(values(result), wanted)
        assert np.array_equal(values(member), wanted)
    small = card.put((ramp(comm, 100) % 8).astype(np.float32))
    wanted = sum(np.arange(100) * (rank + 1.0) % 8 for rank in range(comm.size))
    assert np.array_equal(values(comm.all_reduce(small, wire="float16")), wanted)


def other_collectives(comm, card):
    mine = card.put(np.full((comm.rank + 1, 3), comm.rank))
    everybody = np.concatenate([np.full((rank + 1, 3), rank) for rank in range(comm.size)])
    assert np.array_equal(values(comm.all_gather(mine)), everybody)
    counts = range(1, comm.size + 1)
    assert np.array_equal(values(comm.all_gather(mine, counts=counts)), everybody)
    comm.barrier()
    assert np.array_equal(values(comm.broadcast(mine[:1], root=comm.size - 1)), everybody[-1:])
    shard = comm.reduce_scatter(card.put(ramp(comm, 5000)), "max")
    wanted = np.array_split(np.arange(5000.0) * comm.size, comm.size)[comm.rank]
    assert np.array_equal(values(shard), wanted)


PROGRAMS = [
    one_after_another,
    on_the_same_arrays,
    asynchronous,
    persistent,
    lists_and_wire,
    other_collectives,
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program, ranks):
    spawn(program, ranks)


def test_some_ranks_on_cards_and_some_in_host_memory():
    def program(comm, card):
        for count in COUNTS:
            x = ramp(comm, count)
            result = comm.all_reduce(card.put(x) if comm.rank % 2 else x)
            assert isinstance(result, LateArray) == bool(comm.rank % 2)
            result = values(result) if comm.rank % 2 else result
            assert np.array_equal(result, total(comm, count))

    spawn(program, 4)


def test_a_call_returns_before_the_device_is_done():
    def program(comm, card):
        returned_early = 0
        for _ in range(20):
            comm.all_reduce(card.put(ramp(comm, 700)))
            returned_early += bool(card.streams[0].operations)
        return returned_early

    assert all(spawn(program, 2))


@pytest.mark.parametrize("count", [1, 700, 60_001])
def test_ranks_that_disagree_go_on(count):
    def program(comm, card):
        for number in range(3):
            with pytest.raises(rr.MismatchError, match=r"float64\[2\]"):
                comm.all_reduce(card.put(np.ones(2 if comm.rank == 0 else count + 2)))
            result = comm.all_reduce(card.put(ramp(comm, count, number)))
            assert np.array_equal(values(result), total(comm, count, number))

    spawn(program, 3)


def test_a_device_that_does_nothing_any_more_is_not_waited_for_without_end():
    def program(comm, card):
        x = card.put(np.ones(700))
        card.poll = lambda: None
        with pytest.raises(rr.PeerTimeoutError):
            comm.all_reduce(x, timeout_s=0.3)
        assert comm.broken

    spawn(program, 2)


# --- what is refused ------------------------------------------------------------------------------


def test_out_lives_where_the_array_does():
    def program(comm, card):
        x, host = card.put(np.ones(4)), np.ones(4)
        with pytest.raises(TypeError, match="out is in host memory, the array is on card 0"):
            comm.all_reduce(x, out=host)
        with pytest.raises(TypeError, match="out is on card 0, the array is in host memory"):
            comm.all_reduce(host, out=x)
        with pytest.raises(TypeError, match="member 0 is on card 0, member 1 is in host memory"):
            comm.all_reduce([x, host])
        with pytest.raises(ValueError, match="out overlaps the input"):
            comm.all_reduce(x[1:], out=x[:-1])
        with pytest.raises(TypeError, match="out has dtype float32"):
            comm.all_reduce(x, out=card.put(np.ones(4, np.float32)))
        assert np.array_equal(values(comm.all_reduce(x, out=x)), np.ones(4))

    spawn(program, 1)


def test_what_lives_on_a_card_needs_cupy():
    with (
        mock.patch.dict("sys.modules", {"cupy": None}),
        pytest.raises(ImportError, match=r"broadcast: .*pip install 'ringreduce\[gpu\]'"),
    ):
        rr.spawn(lambda comm: comm.broadcast(Card(0).put(np.ones(2))), 1)


# --- bugs that must be found ----------------------------------------------------------------------


def starts_at_once(self):
    """A send does not wait for its copy."""
    for send in self._sends[self._started :]:
        if send.header is not None:
            send.header[0][:] = send.header[1]
        send.request.Start()
        self._started += 1
    return True


def posts_at_once(self):
    """A receive does not wait until what came before is copied in."""
    for recv in self._recvs[self._started :]:
        recv.request.Start()
        self._started += 1
    return True


def copies_without_order(self, source, host):
    """The copy does not wait for what was asked before."""
    host[...] = source.view(np.ndarray).view(np.uint8)


BUGS = {
    "a send does not wait for its copy": (staging.Outbox, "started", starts_at_once),
    "a block is used again too soon": (staging.Inbox, "started", posts_at_once),
    "the call does not follow the caller": (LateQueue, "follow", lambda self: None),
    "the caller does not wait for the call": (LateQueue, "lead", lambda self: None),
    "a copy is out of order": (LateQueue, "copy_out", copies_without_order),
    "a mark is always reached": (LateMark, "reached", lambda self: not self._card.poll()),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug):
    """By some of the programs, at some try."""
    owner, name, wrong = BUGS[bug]

    def run_them():
        for _ in range(20):
            for program in (one_after_another, on_the_same_arrays, asynchronous):
                spawn(program, 2)

    with mock.patch.object(owner, name, wrong), pytest.raises((AssertionError, rr.RingReduceError)):
        run_them()
