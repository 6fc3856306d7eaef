"""Works, futures, messages between two ranks, barriers, and what a profiler shows of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ringreduce as rr
from tests.torch.checks.values import everybodys, mine, of, raises, rank, same, size


def messages_between_neighbours() -> None:
    left, right = (rank() - 1) % size(), (rank() + 1) % size()
    out = torch.zeros(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(3), right), dist.P2POp(dist.irecv, out, left)]
    )
    for work in works:
        work.wait()
    same(out, of(left, 3))
    if rank() == 0:
        dist.send(torch.ones(2), 1, tag=5)
    elif rank() == 1:
        two = torch.zeros(2)
        assert dist.recv(two, 0, tag=5) == 0
        assert two.tolist() == [1.0, 1.0]


def messages_from_any_rank() -> None:
    if rank() == 0:
        x = torch.zeros(2)
        sources = []
        for _ in range(size() - 1):
            sources.append(dist.recv(x))
            assert x.tolist() == [sources[-1]] * 2
        assert sorted(sources) == list(range(1, size()))
    else:
        dist.send(torch.full((2,), float(rank())), 0)
    dist.barrier()  # the next check sends messages with this tag, too


def receives_may_write_to_leaves_and_to_the_same_tensor() -> None:
    """As those of torch.distributed.pipelining do."""
    left, right = (rank() - 1) % size(), (rank() + 1) % size()
    out, group = torch.zeros(3, requires_grad=True), dist.group.WORLD
    works = [group.recv([out], left, tag) for tag in (1, 2, 3)]
    for tag in (1, 2, 3):
        dist.send(mine(3) * tag, right, tag=tag)
    for work in works:
        work.wait()
    assert any(torch.equal(out, of(left, 3) * tag) for tag in (1, 2, 3))
    work = group.recv([out], left, 4)  # the memory is free again
    dist.send(mine(3), right, tag=4)
    work.wait()
    same(out.detach(), of(left, 3))


def receives_from_any_rank_are_under_way() -> None:
    peer = (rank() + 1) % size()
    x = torch.zeros(2)
    work = dist.irecv(x)
    dist.send(mine(2), peer)  # before anybody waits for the receive
    work.wait()
    same(x, of((rank() - 1) % size(), 2))
    assert work._source_rank() == (rank() - 1) % size()
    if rank() == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        works = [dist.irecv(first, tag=3), dist.irecv(second, tag=3)]
        dist.barrier()
        works[1].wait()
        works[0].wait()
        assert (first.item(), second.item()) == (1.0, 2.0)
    else:
        if rank() == 1:
            for number in (1.0, 2.0):
                dist.send(torch.tensor([number]), 0, tag=3)
        dist.barrier()


def results_are_there_once_a_call_is_completed() -> None:
    x, root = mine(2), rank() == 0
    every = torch.stack(everybodys(2))
    lists = [list(torch.zeros(size(), 2)) for _ in range(4)]
    part, strided, sparse = torch.zeros(2), torch.zeros(2, 2)[:, 0], mine(2).to_sparse()
    total = sum(everybodys(2))
    for begin, found, wanted in (
        (lambda: dist.all_gather(lists[0], x, async_op=True), lists[0], every),
        (lambda: dist.gather(x, lists[1] if root else None, 0, async_op=True), lists[1], every),
        (lambda: dist.scatter(part, list(every) if root else None, async_op=True), [part], x[None]),
        (lambda: dist.all_to_all(lists[2], [x] * size(), async_op=True), lists[2], every),
        (
            lambda: dist.reduce_scatter(strided, [x] * size(), async_op=True),
            [strided],
            total[None],
        ),
    ):
        work = begin()
        while not work.is_completed():
            pass
        if root or found is not lists[1]:
            same(torch.stack(list(found)), wanted)
        work.wait()
    work = dist.all_reduce(sparse, async_op=True)
    while not work.is_completed():
        pass
    same(sparse.to_dense(), total)
    work = dist.all_gather(lists[3], x, async_op=True)
    dist.all_reduce(lists[3][0])  # behind the gathering call
    work.wait()
    same(lists[3][0], of(0, 2) * size())


def a_call_keeps_the_memory_of_its_tensors() -> None:
    x = mine(100_000)
    if rank() == 0:
        work = dist.broadcast(x, 0, async_op=True)
        x.data = torch.empty(0)
    dist.barrier(dist.new_group())
    if rank():
        work = dist.broadcast(x, 0, async_op=True)
    work.wait()
    if rank():
        same(x, of(0, 100_000))


def a_wait_that_is_interrupted_leaves_the_call_under_way() -> None:
    pieces = list(torch.zeros(size(), 3))
    if rank() == 0:
        work = dist.all_gather(pieces, mine(3), async_op=True)
        waited, wait = work._works[0], work._works[0].wait

        def interrupt(_: object) -> None:
            waited.wait = wait
            raise KeyboardInterrupt

        waited.wait = interrupt
        raises(KeyboardInterrupt, "", work.wait)
    dist.barrier(dist.new_group())
    if rank():
        work = dist.all_gather(pieces, mine(3), async_op=True)
    work.wait()
    assert work.is_success()
    same(torch.stack(pieces), torch.stack(everybodys(3)))


def a_failed_work_stays_failed() -> None:
    group, options = dist.new_group(), dist.AllreduceOptions()
    options.asyncOp, options.timeout = True, timedelta(seconds=0.5)
    if rank() == 0:
        work = group.allreduce([torch.ones(2)], options)
        raises(rr.PeerTimeoutError, "rank 1", work.wait)
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), rr.PeerTimeoutError)
    dist.barrier()
    dist.destroy_process_group(group)


def the_timeout_of_a_wait_is_that_of_all_calls() -> None:
    tensors = [mine(2) for _ in range(4)]
    if rank():
        for x in tensors:
            time.sleep(0.2)
            dist.broadcast(x, 1)
    else:
        work = dist.group.WORLD.broadcast(tensors, 1)
        raises(TimeoutError, "", lambda: work.wait(timedelta(seconds=0.4)))
        work.wait()


def a_work_has_a_result_and_a_future() -> None:
    x = mine(3)
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait()
    assert work.is_completed()
    same(doubled.wait(), 2 * sum(everybodys(3)))
    same(work.result()[0], sum(everybodys(3)))


def asynchronous_calls_on_two_groups_come_in_any_order() -> None:
    groups = [dist.new_group(), dist.new_group()]
    tensors = [mine(5), mine(100_000)]
    works = {}
    for number in (0, 1) if rank() % 2 else (1, 0):
        works[number] = dist.all_reduce(tensors[number], group=groups[number], async_op=True)
    for number, tensor in enumerate(tensors):
        assert works[number].wait(timedelta(seconds=20))
        same(tensor, sum(everybodys(*tensor.shape)))
    for group in groups:
        dist.destroy_process_group(group)


def lists_and_sparse_tensors_are_under_way_as_other_calls_are() -> None:
    other = dist.new_group()
    sends = [torch.full((1 + (rank() + peer) % 3,), float(rank())) for peer in range(size())]
    outs = [torch.zeros(2, len(each))[0] for each in sends]
    sparse = mine(4, 2).to_sparse()
    begin = [
        lambda: dist.all_to_all(outs, sends, async_op=True),
        lambda: dist.all_reduce(sparse, async_op=True, group=other),
    ]
    for work in [call() for call in (begin if rank() == 0 else begin[::-1])]:
        work.wait()
    for peer, each in enumerate(outs):
        same(each, of(0, len(each)) * 0 + float(peer))
    same(sparse.to_dense(), torch.stack(everybodys(4, 2)).sum(0))
    dist.destroy_process_group(other)


def a_group_ends_after_the_calls_under_way() -> None:
    before = set(threading.enumerate())
    group = dist.new_group()
    tensors, token = [mine(10_000) for _ in range(20)], torch.zeros(1)
    others = [peer for peer in range(dist.get_world_size()) if peer != 1]
    for peer in others if rank() == 1 else ():
        dist.recv(token, peer)  # that rank has made its calls
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)
    threads = set(threading.enumerate()) - before
    assert threads or rank() == 1
    if rank() != 1:
        dist.send(token, 1)
    dist.destroy_process_group(group)
    for tensor in tensors:
        same(tensor, sum(everybodys(10_000)))
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def an_error_comes_out_of_wait_and_of_the_future() -> None:
    work = dist.all_reduce(torch.ones(3 + rank()), async_op=True)
    future = work.get_future()
    raises(rr.MismatchError, "rank 1", work.wait)
    raises(RuntimeError, "MismatchError", future.wait)
    assert isinstance(work.exception(), rr.MismatchError)
    assert not work.is_success()
    x = mine(3)
    dist.all_reduce(x)
    same(x, sum(everybodys(3)))


def a_call_from_a_future_runs_before_later_calls() -> None:
    found = []

    def squares(future: Any) -> Any:
        (total,) = future.value()
        dist.all_reduce(total.square_())
        found.append(total.clone())
        return total

    futures = []
    for number in range(10):
        work = dist.all_reduce(mine(2000) + number, async_op=True)
        futures.append(work.get_future().then(squares))
        time.sleep(random.choice([0, 1e-3]))
    last = mine(2)
    dist.all_reduce(last)
    for number, future in enumerate(futures):
        same(future.wait(), size() * sum(each + number for each in everybodys(2000)) ** 2)
    same(last, sum(everybodys(2)))
    assert len(found) == 10


def barriers() -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    later = dist.barrier(async_op=True)
    if rank() == 0:
        dist.send(mine(1), 1)
    elif rank() == 1:
        dist.recv(torch.empty(1), 0)
    later.wait()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))


def the_profiler_shows_calls_and_their_bytes() -> None:
    x, out = mine(4), torch.empty(4 * size())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)
        dist.all_gather(list(out.chunk(size())), x)
        dist.broadcast(torch.zeros(3, dtype=torch.float64), 0)
        dist.barrier()
    found = {row.key: row.count for row in profile.key_averages() if "ringreduce:" in row.key}
    gathered = f"ringreduce:all_gather {16 * size()} B"
    assert found == {
        "ringreduce:all_reduce 16 B": 1,
        gathered: 2,
        "ringreduce:broadcast 24 B": 1,
        "ringreduce:barrier 0 B": 1,
    }


def the_profiler_shows_asynchronous_calls_until_they_are_over() -> None:
    x = mine(2, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.barrier()
        if rank() == 1:
            time.sleep(0.2)
        work = dist.all_reduce(x, async_op=True)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        work.wait()
    (event,) = [each for each in profile.events() if each.name == "ringreduce:all_reduce 24 B"]
    if rank() == 0:
        assert event.is_async
        assert event.cpu_time >= 100_000  # microseconds


def a_call_may_end_after_the_profiler() -> None:
    _end_a_call_of_a_profiler_in(nullcontext)


def a_call_may_end_in_the_next_profiler() -> None:
    _end_a_call_of_a_profiler_in(_profiler)


def _profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def _end_a_call_of_a_profiler_in(context: Callable[[], AbstractContextManager[Any]]) -> None:
    x = mine(2, 3)
    for _ in range(5):
        dist.barrier()
        with _profiler() as profile:
            if rank() == 0:
                work = dist.all_reduce(x, async_op=True)
        profile.events()
        # They lie where the profiler's records lay.
        blocks = [bytes(size) for size in range(100, 40_000, 100)]
        with context():
            if rank() != 0:
                time.sleep(0.02)
                work = dist.all_reduce(x, async_op=True)
            work.wait()
            dist.barrier()  # the group's thread is past the end of the call
        assert not any(map(any, blocks)), "written to freed memory"


def a_wait_returns_after_the_function_for_the_end() -> None:
    dist.barrier()
    if rank() == 0:
        time.sleep(0.1)
    ended = []
    work = dist.group.WORLD.allreduce([mine(3)])

    def end() -> None:
        time.sleep(0.1)
        ended.append(work.is_completed())

    work.at_end(end)
    work.wait()
    assert ended == [False], "a work is completed before its function has run"
    assert work.is_completed()
