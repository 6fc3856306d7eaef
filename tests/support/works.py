"""Programs with asynchronous, persistent and fused calls: the same for every transport."""

from __future__ import annotations

import gc
import random
import threading
import time
from dataclasses import replace

import mpi4py
import numpy as np
import pytest

import ringreduce as rr
from tests.support.cases import CONFIG

COUNTS = (1, 700, 5000, 60_001)


def ramp(comm: rr.Communicator, count: int, number: int = 0) -> np.ndarray:
    """Different on every rank, at every index and in every call; sums are exact."""
    return np.arange(count) * (comm.rank + 1.0) + number


def total(comm: rr.Communicator, count: int, number: int = 0) -> np.ndarray:
    n = comm.size
    return np.arange(count) * (n * (n + 1) / 2) + number * n


def many_in_flight(comm: rr.Communicator) -> None:
    """64 calls of all sizes, waited for in an order of each rank's own."""
    works = {
        number: comm.all_reduce(ramp(comm, COUNTS[number % 4], number), async_op=True)
        for number in range(64)
    }
    order = list(works)
    random.Random(comm.rank).shuffle(order)
    for number in order:
        result = works[number].wait()
        assert works[number].done()
        assert np.array_equal(result, total(comm, COUNTS[number % 4], number))
        assert works[number].wait() is result


def in_place_and_in_order(comm: rr.Communicator) -> None:
    """Calls on one array: each sees what the one before has left."""
    x = ramp(comm, 5000)
    works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(4)]
    last = comm.all_reduce(x)
    assert np.array_equal(last, total(comm, 5000) * comm.size**4)
    assert all(work.done() for work in works)
    assert works[0].wait() is x


def every_collective(comm: rr.Communicator) -> None:
    x = ramp(comm, 3 * comm.size)
    works = {
        "reduce_scatter": comm.reduce_scatter(x, async_op=True),
        "broadcast": comm.broadcast(x, 0, async_op=True),
        "all_gather": comm.all_gather(x[: comm.rank], async_op=True),
        "counted": comm.all_gather(x, counts=[x.size] * comm.size, async_op=True),
        "list": comm.all_reduce([x, x.astype(np.int32)], async_op=True),
        "barrier": comm.barrier(async_op=True),
    }
    assert works["barrier"].wait() is None
    assert all(work.done() for work in works.values())
    wanted = total(comm, x.size)
    assert np.array_equal(works["list"].wait()[1], wanted)
    assert np.array_equal(works["reduce_scatter"].wait(), wanted[3 * comm.rank : 3 * comm.rank + 3])
    assert np.array_equal(works["broadcast"].wait(), np.arange(x.size))
    assert works["all_gather"].wait().size == comm.size * (comm.size - 1) // 2
    assert works["counted"].wait().size == x.size * comm.size


def dropped(comm: rr.Communicator) -> None:
    """Nobody keeps the Work or the arrays: the call completes all the same."""
    target = np.zeros(60_001)
    comm.all_reduce(ramp(comm, 60_001), out=target, async_op=True)
    gc.collect()
    comm.barrier()
    assert np.array_equal(target, total(comm, 60_001))


def misuse_is_refused_before_it_is_in_line(comm: rr.Communicator) -> None:
    with pytest.raises(TypeError, match="cannot be"):
        comm.all_reduce(np.array(["text"]), async_op=True)
    with pytest.raises(ValueError, match="out has shape"):
        comm.all_reduce(np.ones(3), out=np.ones(4), async_op=True)
    assert comm.all_reduce(1).item() == comm.size


def failed(comm: rr.Communicator) -> None:
    """A call that differs raises where it is waited for; those after it go on."""
    before = comm.all_reduce(ramp(comm, 5000), async_op=True)
    odd = comm.all_reduce(np.ones(5 + (comm.rank == 0)), async_op=True)
    after = comm.all_reduce(ramp(comm, 700), async_op=True)
    assert np.array_equal(after.wait(), total(comm, 700))
    assert np.array_equal(before.wait(), total(comm, 5000))
    for _ in range(2):
        with pytest.raises(rr.MismatchError, match=r"rank 0 .*float64\[6\]"):
            odd.wait()


def failed_and_never_waited_for(comm: rr.Communicator) -> None:
    """The error of a Work that nobody waited for is raised by close, once."""
    comm.all_reduce(np.ones(5 + (comm.rank == 0)), async_op=True)
    seen = comm.all_reduce(np.ones(7 + (comm.rank == 0)), async_op=True)
    with pytest.raises(rr.MismatchError, match=r"float64\[8\]"):
        seen.wait()
    with pytest.raises(rr.MismatchError, match=r"float64\[6\]"):
        comm.close()
    comm.close()


def a_wait_that_is_given_up(comm: rr.Communicator) -> None:
    """wait(timeout_s) leaves the call under way."""
    if comm.rank == 0:
        work = comm.all_reduce(ramp(comm, 5000), async_op=True)
        with pytest.raises(TimeoutError, match=r"after 0.05 s; it goes on"):
            work.wait(timeout_s=0.05)
        assert not work.done()
        comm.split(0)
    else:
        threading.Event().wait(0.3)
        work = comm.all_reduce(ramp(comm, 5000), async_op=True)
        comm.split(0)
    assert np.array_equal(work.wait(), total(comm, 5000))


def eight_threads(comm: rr.Communicator) -> None:
    """Each thread has a communicator of its own, and all of them share another.

    On the shared one threads take turns in any order, so they all make the same call.
    """
    parts = [comm.split(0) for _ in range(8)]
    wrong = []

    def run(part: rr.Communicator) -> None:
        for number in range(2):
            works = [part.all_reduce(ramp(part, count, number), async_op=True) for count in COUNTS]
            shared = comm.all_reduce(ramp(comm, 700))
            if not np.array_equal(shared, total(comm, 700)):
                wrong.append("shared")
            for work, count in zip(works, COUNTS, strict=True):
                if not np.array_equal(work.wait(), total(part, count, number)):
                    wrong.append(count)

    threads = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for part in parts:
        part.close()


def persistent(comm: rr.Communicator) -> None:
    """A planned call reads its arrays anew each time, and may stand between other calls."""
    for count in COUNTS:
        x, out = np.empty(count), np.empty(count)
        into = comm.plan("all_reduce", x, out=out)
        in_place = comm.plan("all_reduce", out, op="max", out=out)
        strided = comm.plan("reduce_scatter", np.ones(2 * count)[::2])
        for number in range(3):
            x[:] = ramp(comm, count, number)
            assert into() is out
            assert np.array_equal(out, total(comm, count, number))
            out += comm.rank
            later = comm.all_reduce(x, async_op=True)
            assert in_place() is out
            assert np.array_equal(out, total(comm, count, number) + comm.size - 1)
            assert np.array_equal(later.wait(), total(comm, count, number))
            assert np.all(strided() == comm.size)


def persistent_calls_disagree(comm: rr.Communicator) -> None:
    """Every call compares the signature."""
    op = comm.plan("all_reduce", np.ones(100), out=np.empty(100))
    op()
    with pytest.raises(rr.MismatchError, match="rank 1 calls barrier"):
        comm.barrier() if comm.rank == 1 else op()
    assert op()[0] == comm.size


def on_the_wire(comm: rr.Communicator) -> None:
    """Half the bytes and the input's dtype again; ranks that send other dtypes are told so."""
    for count in COUNTS:
        x = (np.arange(count) % 50 + comm.rank).astype(np.float32)
        wanted = np.arange(count) % 50 * comm.size + comm.size * (comm.size - 1) // 2
        for wire, most in (("float16", 2**-11), ("bfloat16", 2**-8)):
            result = comm.all_reduce(x, wire=wire)
            assert result.dtype == np.float32
            assert np.all(abs(result - wanted) <= (comm.size + 1) * most * wanted)
            assert np.array_equal(comm.plan("all_reduce", x, wire=wire)(), result)
    with pytest.raises(rr.MismatchError, match="wire="):
        comm.all_reduce(np.ones(9), wire="float16" if comm.rank else "bfloat16")


def lists(comm: rr.Communicator) -> None:
    members = [ramp(comm, 700), ramp(comm, 60).astype(np.int16).reshape(3, 20), comm.rank, 2.5]
    members += [ramp(comm, 5000)[::-2], np.ones((0, 4), np.int16)]
    results = comm.all_reduce(members)
    assert isinstance(results, list)
    for result, member in zip(results, members, strict=True):
        alone = comm.all_reduce(member)
        assert (result.dtype, result.shape) == (alone.dtype, alone.shape)
        assert np.array_equal(result, alone)
    targets = [np.zeros_like(member) for member in members]
    assert comm.all_reduce(members, out=targets) is targets
    assert all(map(np.array_equal, targets, results))
    assert comm.all_reduce([]) == []
    with pytest.raises(TypeError, match="cannot be"):
        comm.all_reduce([np.ones(2), np.array(["text"])])
    with pytest.raises(rr.MismatchError, match=r"float64\[2\], float64\[3\]"):
        comm.all_reduce([np.ones(2), np.ones(3)][:: 1 if comm.rank else -1])


def split(comm: rr.Communicator) -> None:
    part = comm.split(comm.rank % 2, key=-comm.rank)
    assert part is not None
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    works = [part.all_reduce(comm.rank, async_op=True), comm.all_reduce(1, async_op=True)]
    assert [work.wait().item() for work in works] == [sum(members), comm.size]
    part.close()
    assert comm.all_reduce(1).item() == comm.size
    rest = comm.split(None if comm.rank == 0 else 7)
    assert (rest is None) == (comm.rank == 0)
    if rest is not None:
        assert rest.all_gather(comm.rank).tolist() == list(range(1, comm.size))
        rest.close()


def messages_between_calls_in_line(comm: rr.Communicator) -> None:
    for count in (10, 100_000):
        if comm.rank == 0:
            work = comm.all_reduce(ramp(comm, count), algorithm="ring", async_op=True)
            comm.send(np.ones(5), 1)  # all other ranks wait for the all-reduce
            assert np.array_equal(work.wait(), total(comm, count))
        else:
            found = comm.all_reduce(ramp(comm, count), algorithm="ring")
            assert np.array_equal(found, total(comm, count))
            if comm.rank == 1:
                assert comm.recv(np.empty(5), 0).sum() == 5


def calls_of_callbacks_come_in_one_order(comm: rr.Communicator) -> None:
    """Each rank attaches callbacks before or after the end of their calls, as it happens."""
    random.seed(comm.rank)
    sums, n = [], comm.size

    def twice(work: rr.Work[np.ndarray]) -> None:
        first = comm.all_reduce(work.wait(), "max")
        again = comm.all_reduce(first, async_op=True)
        again.then(lambda work: sums.append(comm.all_reduce(work.wait(), "min")))

    works = []
    for number in range(30):
        works.append(comm.all_reduce(ramp(comm, COUNTS[number % 3], number), async_op=True))
        time.sleep(random.choice([0, 0, 1e-3]))
        works[-1].then(twice)
        if number % 7 == 0:  # behind the calls of the callbacks
            assert comm.all_reduce(number) == n * number
    comm.barrier()
    expected = [n * total(comm, COUNTS[number % 3], number) for number in range(30)]
    assert all(np.array_equal(*pair) for pair in zip(sums, expected, strict=True))


def a_callback_waits_for_a_later_call(comm: rr.Communicator) -> None:
    later: list[rr.Work[np.ndarray]] = []
    found = []

    def wait(_: object) -> None:
        while not later:
            time.sleep(1e-3)
        found.append(later[0].wait(timeout_s=10).item())

    work = comm.all_reduce(ramp(comm, 60_001), async_op=True)
    if work._queue._threads:  # else no thread runs the callback while this one goes on
        work.then(wait)
        later.append(comm.all_reduce(1, async_op=True))
        comm.barrier()
        assert found == [comm.size]


def callbacks_of_messages(comm: rr.Communicator) -> None:
    seen = []
    if comm.rank == 0:
        work: rr.Work = comm.send(np.arange(3), 1, async_op=True)
        work.then(lambda work: seen.append("sent"))
        work.wait()
    elif comm.rank == 1:
        work = comm.recv(np.empty(3, int), 0, async_op=True)
        work.then(lambda work: seen.append(work.wait().sum()))
        work.wait()
    end = time.monotonic() + 10  # a callback may be about to run when the wait is over
    while comm.rank < 2 and not seen and time.monotonic() < end:
        time.sleep(1e-3)
    assert seen == [["sent"], [3], []][min(comm.rank, 2)]


PROGRAMS = [
    calls_of_callbacks_come_in_one_order,
    a_callback_waits_for_a_later_call,
    callbacks_of_messages,
    messages_between_calls_in_line,
    many_in_flight,
    in_place_and_in_order,
    every_collective,
    dropped,
    misuse_is_refused_before_it_is_in_line,
    failed,
    failed_and_never_waited_for,
    a_wait_that_is_given_up,
    eight_threads,
    persistent,
    persistent_calls_disagree,
    on_the_wire,
    lists,
    split,
]
NEEDS_THREADS = (eight_threads,)


def over_mpi(level: str) -> None:
    """Run all programs on communicators of one job; `level` is MPI's thread level."""
    mpi4py.rc.thread_level = level
    for program in PROGRAMS:
        if level == "multiple" or program not in NEEDS_THREADS:
            with rr.init(timeout_s=120, config=replace(CONFIG)) as comm:
                assert comm._transport.threads == (level == "multiple")
                program(comm)
