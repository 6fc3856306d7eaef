"""Facts of messages between two ranks, each shown by a function that every rank runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

import ringreduce as rr
from tests.support.mpi import report

RANKS = 3
Check = Callable[[rr.Communicator], Any]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def values(seed: int, shape: Any, dtype: Any) -> np.ndarray:
    """Numbers that differ by seed and index."""
    count = int(np.prod(shape))
    return (np.arange(count) * 7 + seed).astype(np.dtype(dtype)).reshape(shape)


def error_of(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """Return the error of that kind that a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@cache
def _arrays() -> list[np.ndarray]:
    return [
        values(1, (), np.int64),
        values(2, (0,), np.float32),
        values(3, (5, 3), np.float64),
        values(4, (4, 0, 2), np.uint8),
        values(5, (1021,), np.float32),
        values(6, (4, 33), ml_dtypes.bfloat16),
        values(7, (1025,), np.complex128),
        values(8, (1 << 18,), np.float32),
        values(9, (3, 5, 7), np.bool_),
    ]


@check
def arrays_of_any_kind_arrive(comm: rr.Communicator) -> None:
    for _ in range(2):  # the second time by compiled code, where there is some
        for array in _arrays():
            if comm.rank == 0:
                assert comm.send(array, 1) is None
            elif comm.rank == 1:
                out = np.empty(array.shape, array.dtype)
                assert comm.recv(out, 0) is out
                assert out.tobytes() == array.tobytes()


@check
def strided_arrays_arrive_in_logical_order(comm: rr.Communicator) -> None:
    array = values(1, (6, 8), np.int32)
    if comm.rank == 0:
        comm.send(array[::2, ::-1], 1)
        comm.send(array.T, 1)
    elif comm.rank == 1:
        out = np.zeros((9, 8), np.int32)
        comm.recv(out[::3], 0)
        assert np.array_equal(out[::3], array[::2, ::-1])
        assert not out[1::3].any()
        columns = np.empty((8, 6), np.int32, order="F")
        assert np.array_equal(comm.recv(columns, 0), array.T)


@check
def registered_arrays_arrive(comm: rr.Communicator) -> None:
    for count in (10, 100_000, 1_000_000):
        array = comm.empty(count, np.float32)
        if comm.rank == 0:
            array[:] = values(count, count, np.float32)
            comm.send(array, 1)
        elif comm.rank == 1:
            assert np.array_equal(comm.recv(array, 0), values(count, count, np.float32))


@check
def messages_of_one_tag_keep_their_order(comm: rr.Communicator) -> None:
    if comm.rank == 0:
        works = [comm.send(np.full(3, i), 1, async_op=True) for i in range(100)]
        for work in works:
            assert work.wait() is None
    elif comm.rank == 1:
        out = np.empty(3, int)
        assert [comm.recv(out, 0)[0] for i in range(100)] == [*range(100)]


@check
def tags_are_received_in_any_order(comm: rr.Communicator) -> None:
    count = 100  # more than there are places for offers, and for answers
    if comm.rank == 0:
        works = [comm.send(np.full(2, i), 1, tag=i, async_op=True) for i in range(count)]
        for work in reversed(works):
            work.wait()
    elif comm.rank == 1:
        for i in reversed(range(count)):
            assert comm.recv(np.empty(2, int), 0, tag=i).tolist() == [i, i]


@check
def receives_may_be_posted_before_their_messages(comm: rr.Communicator) -> None:
    sizes = [10, 100_000] * 10
    if comm.rank == 1:
        works = [comm.recv(np.empty(n), 0, i % 3, async_op=True) for i, n in enumerate(sizes)]
        comm.barrier()
        for i, work in enumerate(works):
            assert np.array_equal(work.wait(), values(i, sizes[i], float))
    else:
        comm.barrier()
        if comm.rank == 0:
            for i, n in enumerate(sizes):
                comm.send(values(i, n, float), 1, i % 3)


@check
def a_send_is_over_when_it_is_received(comm: rr.Communicator) -> None:
    for count in (1, 100_000):
        array, begin = np.zeros(count), time.monotonic()
        comm.barrier()  # the receiver's pause begins after `begin`
        if comm.rank == 0:
            comm.send(array, 1)
            assert time.monotonic() - begin > 0.1
        elif comm.rank == 1:
            time.sleep(0.15)
            comm.recv(array, 0)
        comm.barrier()


@check
def ranks_exchange_long_arrays(comm: rr.Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = {left: np.empty(200_000), right: np.empty(7)}
    sends = {right: values(comm.rank, 200_000, float), left: values(comm.rank, 7, float)}
    assert comm.exchange(sends, out, tag=5) is out
    assert np.array_equal(out[left], values(left, 200_000, float))
    assert np.array_equal(out[right], values(right, 7, float))
    assert comm.exchange({}, {}) == {}
    assert comm.exchange({}, {}, async_op=True).wait(timeout_s=20) == {}


@check
def messages_and_collectives_do_not_affect_each_other(comm: rr.Communicator) -> None:
    peer = 1 - comm.rank
    for i in range(20):
        works: list[Any] = []
        if comm.rank < 2:
            works.append(comm.recv(np.empty(1000), peer, async_op=True))
        total = comm.all_reduce(np.full(10_000, i), async_op=comm.rank == 0 or i % 2 == 0)
        if comm.rank < 2:
            works.append(comm.send(np.full(1000, float(i)), peer, async_op=True))
        assert comm.all_reduce(1).item() == comm.size
        if hasattr(total, "wait"):
            total = total.wait()
        assert total[0] == i * comm.size
        if works:
            works[1].wait()
            assert works[0].wait()[-1] == i


@check
def long_messages_and_collectives_are_under_way_together(comm: rr.Communicator) -> None:
    peer = 1 - comm.rank
    for i in range(30):
        works: list[Any] = []
        if comm.rank < 2:
            works.append(comm.recv(np.empty(30_000), peer, async_op=True))
            works.append(comm.send(np.full(30_000, float(i)), peer, async_op=True))
        for _ in range(3):
            assert (comm.all_reduce(np.ones(50_000)) == comm.size).all()
        for work in works:
            work.wait()
        if works:
            assert (works[0].wait() == i).all()


@check
def a_mismatch_is_raised_by_both_and_the_next_message_is_right(comm: rr.Communicator) -> None:
    texts = []
    for asynchronous in (False, True):
        for count in (3, 100_000):
            try:
                if comm.rank == 0:
                    sent = comm.send(np.zeros(count), 1, tag=4, async_op=asynchronous)
                    if asynchronous:
                        sent.wait()
                elif comm.rank == 1:
                    wanted = np.zeros((count, 1), np.float32)
                    got = comm.recv(wanted, 0, tag=4, async_op=asynchronous)
                    if asynchronous:
                        got.wait()
            except rr.MismatchError as error:
                texts.append(str(error))
            if comm.rank == 0:
                comm.send(np.ones(count), 1, tag=4)
            elif comm.rank == 1:
                assert comm.recv(np.zeros(count), 0, tag=4).sum() == count
    if comm.rank < 2:
        assert texts == 2 * [
            f"send and recv: rank 0 sends float64[{count}] with tag 4, rank 1 receives "
            f"float32[{count}, 1]; both must pass the same dtype and shape"
            for count in (3, 100_000)
        ]


@check
def both_ranks_shorten_a_long_shape_alike(comm: rr.Communicator) -> None:
    ones = (1,) * 60
    for send, receive in (
        (np.zeros(ones, np.int32), np.zeros(ones, np.float32)),
        (np.zeros(ones, np.float32), np.zeros(ones, np.int32)),
        (np.zeros((*ones, 2, 3)), np.zeros((*ones, 3, 2))),  # shortened, both are the same
    ):
        text = ""
        if comm.rank == 0:
            sends = partial(comm.send, send, 1)
            text = str(error_of(rr.MismatchError, sends))
        elif comm.rank == 1:
            receives = partial(comm.recv, receive, 0)
            text = str(error_of(rr.MismatchError, receives))
        texts = comm.all_gather(np.frombuffer(text.encode(), np.uint8)).tobytes()
        assert texts == 2 * texts[: len(texts) // 2]


@check
def memory_of_a_message_under_way_is_refused_for_another(comm: rr.Communicator) -> None:
    x = np.zeros(10)
    for _ in range(2):  # compiled code knows the second time
        if comm.rank == 0:
            comm.recv(x, 2)
            comm.send(x, 2)
        elif comm.rank == 2:
            comm.send(x, 0)
            comm.recv(x, 0)
    if comm.rank == 0:
        work = comm.recv(x, 1, async_op=True)
        for call, word in ((comm.recv, "another receive writes to"), (comm.send, "is sent")):
            text = str(error_of(ValueError, partial(call, x, 2, timeout_s=10)))
            assert f"out shares memory with an array that {word}" in text
        comm.send(np.zeros(1), 1)
        assert work.wait()[0] == 1
        assert work.seconds is not None
    elif comm.rank == 1:
        comm.recv(np.zeros(1), 0)
        comm.send(np.ones(10), 0)
    comm.barrier()  # rank 2 has not closed its communicator before


@check
def a_receive_that_timed_out_leaves_no_trace(comm: rr.Communicator) -> None:
    if comm.rank == 1:
        begin = time.monotonic()
        late = partial(comm.recv, np.empty(3), 0, tag=2, timeout_s=0.2)
        error = error_of(rr.PeerTimeoutError, late)
        assert str(error) == "recv: waited 0.2 s; rank 0 has not sent float64[3] with tag 2"
        assert error.ranks == (0,)
        assert time.monotonic() - begin > 0.15
    comm.barrier()
    if comm.rank == 0:
        comm.send(np.arange(3.0), 1, tag=2)
    elif comm.rank == 1:
        assert comm.recv(np.empty(3), 0, tag=2).tolist() == [0, 1, 2]


@check
def a_timeout_names_the_tags_that_have_arrived(comm: rr.Communicator) -> None:
    if comm.rank == 0:
        works = [comm.send(1.0, 1, tag, async_op=True) for tag in (7, 3)]
        for work in works:
            work.wait()
    elif comm.rank == 1:
        late = partial(comm.recv, np.empty(()), 0, tag=5, timeout_s=0.3)
        text = str(error_of(rr.PeerTimeoutError, late))
        assert "tag 5; messages with tag 3, 7 have arrived" in text
        for tag in (3, 7):
            comm.recv(np.empty(()), 0, tag)


@check
def a_send_that_timed_out_ends_the_pair_alone(comm: rr.Communicator) -> None:
    count, kind = 100_000, "float64[100000]"  # a receiver could read it from the sender's memory
    with comm.split(0) as part:
        if part.rank == 0:
            late = partial(part.send, np.zeros(count), 1, tag=1, timeout_s=0.2)
            for _ in range(2):  # a later message raises the same
                text = str(error_of(rr.PeerTimeoutError, late))
                assert text == f"send: waited 0.2 s; rank 1 has not received {kind} with tag 1"
            part.send(np.arange(2), 2)
        elif part.rank == 2:
            assert part.recv(np.empty(2, int), 0).tolist() == [0, 1]
        part.barrier()
        if part.rank == 1:
            text = str(error_of(rr.PeerLostError, lambda: part.recv(np.zeros(count), 0, 1)))
            assert "rank 0 takes part in no more messages with this rank" in text


@check
def a_peer_that_closes_refuses_messages(comm: rr.Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    lost = []
    if part.rank == 0:
        works = [part.send(np.zeros(2), 1, async_op=True), part.recv(np.zeros(2), 1, async_op=True)]
        for work in works:
            try:
                work.wait()
            except rr.PeerLostError as error:
                lost.append(str(error))
        assert len(lost) == 2, lost
    part.close()


@check
def a_message_that_has_arrived_is_refused_at_the_close(comm: rr.Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    if part.rank == 0:
        unwanted = part.send(np.zeros(2), 1, 1, async_op=True)
        part.send(np.ones(2), 1, 2)
        text = str(error_of(rr.PeerLostError, unwanted.wait))
        assert "closed the communicator without a receive for float64[2] with tag 1" in text
    elif part.rank == 1:
        part.recv(np.zeros(2), 0, 2)
    part.close()


@check
def a_message_of_any_rank_is_found_by_its_tag(comm: rr.Communicator) -> None:
    if comm.rank:
        three, two = np.full(3, comm.rank), np.full(2, -comm.rank)
        works = [comm.send(three, 0, 5, async_op=True), comm.send(two, 0, 7, async_op=True)]
        for work in works:
            work.wait()
        comm.barrier()
        return
    assert {comm.probe(7) for _ in range(9)} <= set(range(1, comm.size))  # takes no message
    for tag, length, sign in ((7, 2, -1), (5, 3, 1)):
        sources = []
        for _ in range(comm.size - 1):
            sources.append(comm.probe(tag))
            out = comm.recv(np.zeros(length, int), sources[-1], tag)
            assert out.tolist() == [sign * sources[-1]] * length
        assert sorted(sources) == list(range(1, comm.size))
    error = error_of(rr.PeerTimeoutError, lambda: comm.probe(5, timeout_s=0.05))
    assert "waited 0.05 s; no rank has sent a message with tag 5" in str(error)
    assert "tag is -1" in str(error_of(ValueError, lambda: comm.probe(-1)))
    comm.barrier()


@check
def waits_for_any_rank_end_when_no_rank_can_send(comm: rr.Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    if comm.rank:
        part.send(np.ones(1), 0)
    else:
        for _ in range(1, part.size):
            part.recv(np.zeros(1), None)
        works = [part.recv(np.zeros(1), None, tag, async_op=True) for tag in (1, 2)]
        for wait in (part.probe, *(work.wait for work in works)):
            error = error_of(rr.PeerLostError, wait)
            assert "takes part in no more messages" in str(error)
    part.close()


@check
def an_error_that_nobody_waited_for_is_raised_at_close(comm: rr.Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    if part.rank == 0:
        part.send(np.zeros(2), 1, async_op=True)
    elif part.rank == 1:
        error_of(rr.MismatchError, lambda: part.recv(np.zeros(3), 0))
    if part.rank == 0:
        assert "rank 0 sends float64[2]" in str(error_of(rr.MismatchError, part.close))
    else:
        part.close()


@check
def wait_any_returns_a_work_that_is_over(comm: rr.Communicator) -> None:
    if comm.rank == 0:
        works = [comm.recv(np.empty(()), peer, async_op=True) for peer in (1, 2)]
        assert rr.wait_any(works, timeout_s=30) == 1
        assert works[1].done()
        assert not works[0].done()
        comm.send(0, 1)
        assert works[0].wait() == 1
        assert rr.wait_any(works) == 0
    elif comm.rank == 1:
        comm.recv(np.empty((), int), 0)
        comm.send(1.0, 0)
    else:
        comm.send(2.0, 0)


@check
def threads_of_a_rank_send_at_the_same_time(comm: rr.Communicator) -> None:
    def talk(tag: int) -> None:
        for i in range(50):
            out = np.empty(tag * 700 + 1, int)
            try:
                if comm.rank == 0:
                    comm.send(np.full(tag * 700 + 1, i), 1, tag)
                else:
                    assert comm.recv(out, 0, tag)[-1] == i
            except BaseException as error:
                failures.append(error)
                return

    failures: list[BaseException] = []
    if comm.rank < 2 and _allows_threads(comm):
        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures


def _allows_threads(comm: rr.Communicator) -> bool:
    if "mpi4py.MPI" not in sys.modules:
        return True
    from mpi4py import MPI

    return not MPI.Is_initialized() or bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def over_mpi(transport: str) -> list[str]:
    """Run all checks in one job; return the names of those that passed."""
    passed = []
    with rr.init(transport=transport) as comm:
        for name, function in CHECKS.items():
            try:
                function(comm)
            except BaseException as error:
                raise AssertionError(name) from error
            comm.barrier()
            passed.append(name)
    return passed


class _AlarmError(Exception):
    """What the handler of an alarm raises."""


def interrupted(transport: str, seconds: str) -> None:
    """Send from rank 0 to rank 1, interrupted by alarms; report how often a round ended how.

    After an alarm rank 0 changes the array, which rank 1 must not see.
    """

    def on_alarm(*_: Any) -> None:
        raise _AlarmError

    signal.signal(signal.SIGALRM, on_alarm)
    random, ends = Random(1), Counter[str]()
    with rr.init(transport=transport, timeout_s=120) as comm:
        end = time.monotonic() + float(seconds)
        while comm.all_reduce(np.array([time.monotonic() < end]), op="and")[0]:
            part, length = comm.split(0), random.choice([3, 100_000])
            assert part is not None
            ends[_interrupted_round(part, np.zeros(length, int), random.random() * 3e-3)] += 1
            part.leave("the round is over")
        signal.setitimer(signal.ITIMER_REAL, 0)
        report(comm.rank, ends)
        comm.barrier()
        os._exit(0)


def _interrupted_round(part: rr.Communicator, x: np.ndarray, after_s: float) -> str:
    try:
        if part.rank == 1:
            while x[0] >= 0:
                part.recv(x, 0, timeout_s=5)
                if not (x == x[0]).all() or x[0] == -2:
                    return "torn"
            return "received"
        try:
            # Another alarm follows if the first raises where Python ignores exceptions.
            signal.setitimer(signal.ITIMER_REAL, after_s + 2e-5, 2.0)
            while True:
                x += 1
                part.send(x, 1)
        except _AlarmError:
            signal.setitimer(signal.ITIMER_REAL, 0)
            x[:] = -2
        x[:] = -1
        part.send(x, 1, timeout_s=5)
        return "sent"
    except rr.PeerLostError:
        return "ended"
    except rr.PeerTimeoutError:
        return "timed out"
    except _AlarmError:
        return "interrupted again"


def with_one_killed(transport: str) -> None:
    """Kill rank 1 while rank 0 receives from it; ranks 0 and 2 then go on.

    The living ranks do not return: MPI_Finalize would wait for rank 1.
    """
    with rr.init(transport=transport, timeout_s=3600) as comm:
        out, other = np.empty(50_000), 2 - comm.rank
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 0:
            comm.send(np.zeros(1), 1)
        calls = [partial(call, out, 1) for call in (comm.recv, comm.send, comm.recv)]
        found: dict[str, Any] = {
            "errors": [str(error_of(rr.PeerLostError, call)) for call in calls]
        }
        for number in range(20):
            if comm.rank == 0:
                comm.send(np.full(50_000, number), other)
            else:
                assert comm.recv(np.empty(50_000, int), other)[-1] == number
        exchanged = comm.exchange({other: np.full(3, comm.rank)}, {other: np.empty(3, int)})
        found["exchanged"] = exchanged[other].tolist()
        report(comm.rank, found)
        time.sleep(0.5)  # the other rank may wait for an answer
        os._exit(0)


def with_one_stopped(transport: str) -> None:
    """Stop rank 1: messages with it time out, others do not.  The parent ends the job."""
    with rr.init(transport=transport, timeout_s=120) as comm:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        late = partial(comm.send, np.zeros(50_000), 1, 3, timeout_s=0.5)
        found: dict[str, Any] = {"text": str(error_of(rr.PeerTimeoutError, late))}
        other = 2 - comm.rank
        exchanged = comm.exchange({other: np.full(3, comm.rank)}, {other: np.empty(3, int)})
        found["exchanged"] = exchanged[other].tolist()
        report(comm.rank, found)
        time.sleep(0.5)  # the other rank may wait for an answer
        os._exit(3)


@check
def a_receive_from_any_rank_is_under_way(comm: rr.Communicator) -> None:
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    out = np.zeros(2, int)
    work = comm.recv(out, None, 6, async_op=True)
    comm.send(np.full(2, comm.rank), right, 6)  # before anybody waits for a receive
    assert work.wait() is out
    assert work.peer == left
    assert out.tolist() == [left, left]
    comm.barrier()
    if comm.rank == 0:
        outs = [np.zeros((), int) for _ in range(3)]
        works = [
            comm.recv(x, peer, 5, async_op=True)
            for x, peer in zip(outs, (None, 1, None), strict=True)
        ]
        text = str(error_of(ValueError, lambda: comm.recv(outs[0], None, 5)))
        assert "another receive writes to" in text
        comm.barrier()
        for work in reversed(works):
            work.wait()
        assert [x.item() for x in outs] == [10, 11, 20]  # in the order of the receives
        comm.barrier()
        assert comm.recv(np.zeros(1, int), None, 8).item() == 80
        waited = error_of(rr.PeerTimeoutError, lambda: comm.recv(outs[0], None, 9, timeout_s=0.05))
        assert "waited 0.05 s; no rank has sent a message with tag 9" in str(waited)
    else:
        comm.barrier()
        if comm.rank == 1:
            comm.send(10, 0, 5)
            comm.send(11, 0, 5)
            comm.send(0, 2, 1)
            sent = comm.send(np.full(1, 80), 0, 8, async_op=True)  # it arrives before its receive
            comm.barrier()
            sent.wait()
        else:
            comm.recv(np.zeros((), int), 1, 1)
            comm.send(20, 0, 5)
            comm.barrier()
    comm.barrier()


@check
def a_receive_from_any_rank_may_differ(comm: rr.Communicator) -> None:
    for _ in range(2):  # the second time by compiled code, where there is some
        if comm.rank == 0:
            error = error_of(rr.MismatchError, lambda: comm.recv(np.zeros(3), None))
            assert "rank 0 receives float64[3]" in str(error)
            assert comm.recv(np.zeros(3), None).tolist() == [0, 1, 2]
        elif comm.rank == 1:
            error_of(rr.MismatchError, lambda: comm.send(np.zeros(2), 0))
            comm.send(np.arange(3.0), 0)
        comm.barrier()


@check
def a_later_receive_from_any_rank_takes_the_later_message(comm: rr.Communicator) -> None:
    for number in range(3):
        if comm.rank == 0:
            first = comm.recv(np.zeros(()), None, 4, async_op=True)
            comm.barrier()
            assert comm.recv(np.zeros(()), None, 4) == number + 0.5
            assert first.wait() == number
        else:
            comm.barrier()
            if comm.rank == 2:
                comm.send(float(number), 0, 4)
                comm.send(number + 0.5, 0, 4)
