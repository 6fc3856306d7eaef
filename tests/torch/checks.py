"""What every rank of a job checks about the backend of torch, one function a fact.

`over_torch` runs all of them in one job, and reports what each came to.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import random
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import ringreduce as rr
from ringreduce.calls.views import view_of
from ringreduce.transports import mesh

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
FOLDS: dict[str, Callable[[Any], Any]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
    "AVG": lambda stacked: stacked.mean(0),
}


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def of(number: int, *shape: int, dtype: Any = torch.float32) -> Any:
    """The tensor of a rank: whole numbers, other ones on each rank."""
    return ((torch.arange(torch.Size(shape).numel()) + 1) % 5 + number).reshape(shape).to(dtype)


def mine(*shape: int, dtype: Any = torch.float32) -> Any:
    return of(rank(), *shape, dtype=dtype)


def everybodys(*shape: int, dtype: Any = torch.float32) -> list[Any]:
    return [of(number, *shape, dtype=dtype) for number in range(size())]


def same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted), f"{found} in place of {wanted}"


def raises(kind: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


# --- reductions ---


def all_reduce_of_every_dtype_and_op() -> None:
    for dtype, (name, fold) in itertools.product(DTYPES, FOLDS.items()):
        if name == "AVG" and not dtype.is_floating_point:
            continue
        x = mine(3, 5, dtype=dtype)
        dist.all_reduce(x, getattr(ReduceOp, name))
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        wanted = fold(torch.stack(everybodys(3, 5, dtype=dtype)).to(wide)).to(dtype)
        if dtype.itemsize == 2 and dtype.is_floating_point:
            torch.testing.assert_close(x, wanted)
        else:
            same(x, wanted)


def all_reduce_of_bits_and_truth_values() -> None:
    for name, fold in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or)):
        x = mine(9, dtype=torch.int32)
        dist.all_reduce(x, getattr(ReduceOp, name))
        wanted = everybodys(9, dtype=torch.int32)
        for each in wanted[1:]:
            wanted[0] = fold(wanted[0], each)
        same(x, wanted[0])
    for op, wanted in ((ReduceOp.SUM, [True, True]), (ReduceOp.PRODUCT, [True, False])):
        x = torch.tensor([True, rank() == 0])
        dist.all_reduce(x, op)
        assert x.tolist() == wanted


def all_reduce_of_complex_numbers() -> None:
    x = torch.complex(mine(4), -mine(4))
    dist.all_reduce(x)
    total = sum(everybodys(4))
    same(x, torch.complex(total, -total))


def all_reduce_multiplies_before_it_adds() -> None:
    x = mine(7)
    dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
    same(x, 2 * sum(everybodys(7)))


def all_reduce_of_tensors_that_are_not_contiguous() -> None:
    wide = torch.zeros(6, 8)
    for part in (wide[:, ::2], wide.t()[1:4], wide[2:3, 4:5]):
        wide.zero_()
        part.copy_(mine(*part.shape))
        dist.all_reduce(part)
        total = sum(everybodys(*part.shape))
        same(part, total)
        assert wide.sum() == total.sum(), "memory between the elements was changed"


def all_reduce_of_nothing_and_of_a_number() -> None:
    empty, number = torch.empty(0), torch.tensor(rank() + 1.0)
    dist.all_reduce(empty)
    dist.all_reduce(number)
    assert number.item() == size() * (size() + 1) / 2


def coalesced_all_reduces_are_one_call() -> None:
    xs = [mine(4), mine(2, 3), mine(5, dtype=torch.float64)]
    with dist._coalescing_manager():
        for x in xs[:2]:
            dist.all_reduce(x)
    dist.all_reduce(xs[2])
    for x, shape in zip(xs, ((4,), (2, 3), (5,)), strict=True):
        same(x, sum(everybodys(*shape, dtype=x.dtype)))


def reduce_gives_the_root_alone_the_result() -> None:
    for root in range(size()):
        x = mine(4)
        dist.reduce(x, root)
        same(x, sum(everybodys(4)) if rank() == root else mine(4))


def reduce_scatter_in_all_forms() -> None:
    whole = torch.arange(4.0 * size()) + rank()
    total = sum(torch.arange(4.0 * size()) + number for number in range(size()))
    wanted = total.chunk(size())[rank()]
    out = torch.zeros(4)
    dist.reduce_scatter_tensor(out, whole.clone())
    same(out, wanted)
    out.zero_()
    dist.reduce_scatter(out, list(whole.chunk(size())))
    same(out, wanted)
    inside = whole.clone()
    part = inside.chunk(size())[rank()]
    dist.reduce_scatter_tensor(part, inside, ReduceOp.AVG)
    same(part, wanted / size())
    other = torch.zeros(2, 2)
    dist.reduce_scatter_tensor(other, whole.clone())
    same(other.reshape(-1), wanted)


# --- copies ---


def broadcast_from_every_rank() -> None:
    for root, dtype in itertools.product(range(size()), (*DTYPES, torch.bool, torch.complex64)):
        x = mine(5, dtype=dtype)
        dist.broadcast(x, root)
        same(x, of(root, 5, dtype=dtype))
    eight = torch.full((3,), float(rank())).to(torch.float8_e4m3fn)
    dist.broadcast(eight, size() - 1)
    assert eight.float().tolist() == [size() - 1.0] * 3


def all_gather_in_all_forms() -> None:
    wanted = torch.stack(everybodys(2, 3))
    pieces = [torch.zeros(2, 3) for _ in range(size())]
    dist.all_gather(pieces, mine(2, 3))
    same(torch.stack(pieces), wanted)
    out = torch.zeros(size(), 2, 3)
    dist.all_gather_into_tensor(out, mine(2, 3))
    same(out, wanted)
    out.zero_()
    out[rank()] = mine(2, 3)
    dist.all_gather_into_tensor(out, out[rank()])
    same(out, wanted)


def all_gather_of_tensors_of_other_lengths() -> None:
    pieces = [torch.zeros(number + 1) for number in range(size())]
    dist.all_gather(pieces, mine(rank() + 1))
    for number, piece in enumerate(pieces):
        same(piece, of(number, number + 1))


def gather_and_scatter() -> None:
    for root in range(size()):
        pieces = [torch.zeros(2, 2) for _ in range(size())] if rank() == root else None
        dist.gather(mine(2, 2), pieces, root)
        if pieces is not None:
            same(torch.stack(pieces), torch.stack(everybodys(2, 2)))
        out = torch.zeros(2, 2)
        dist.scatter(out, everybodys(2, 2) if rank() == root else None, root)
        same(out, mine(2, 2))


def all_to_all_with_equal_and_unequal_lengths() -> None:
    out = torch.zeros(2 * size())
    dist.all_to_all_single(out, torch.arange(2.0 * size()) + 100 * rank())
    begin = 2 * rank()
    pairs = [[begin + 100.0 * number, begin + 1 + 100.0 * number] for number in range(size())]
    same(out.reshape(-1, 2), torch.tensor(pairs))
    sends = [(rank() + peer) % 3 for peer in range(size())]
    out = torch.zeros(sum(sends), 2)
    dist.all_to_all_single(out, torch.full((sum(sends), 2), float(rank())), sends, sends)
    wanted = torch.tensor([float(peer) for peer, n in enumerate(sends) for _ in range(n)])
    same(out[:, 0], wanted)
    wide = torch.zeros(sum(sends), 4)
    x = torch.full((sum(sends), 2), float(rank()))
    dist.all_to_all_single(wide[:, ::2], x, sends, sends)
    same(wide[:, 2], wanted)
    dist.all_to_all_single(x, x, sends, sends)
    same(x[:, 1], wanted)
    outs = [torch.zeros(n) for n in sends]
    dist.all_to_all(outs, [torch.full((n,), float(rank())) for n in sends])
    for peer, each in enumerate(outs):
        assert each.tolist() == [float(peer)] * sends[peer]


def objects_of_any_kind() -> None:
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank()})
    assert [each["rank"] for each in found] == list(range(size()))
    box = [("only", rank())]
    dist.broadcast_object_list(box, src=1)
    assert box == [("only", 1)]


# --- messages, barriers, works ---


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


def a_group_ends_after_the_calls_under_way() -> None:
    before = set(threading.enumerate())
    group = dist.new_group()
    tensors = [mine(10_000) for _ in range(20)]
    if rank() == 1:
        time.sleep(0.1)  # the others' calls have left their callers' threads by then
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)
    threads = set(threading.enumerate()) - before
    assert threads or rank() == 1
    dist.destroy_process_group(group)
    for tensor in tensors:
        same(tensor, sum(everybodys(10_000)))
    for thread in threads:
        thread.join(10)
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


def registered_memory() -> None:
    import ringreduce.torch

    for dtype in (*DTYPES, torch.bool, torch.complex64):
        x = ringreduce.torch.empty((2, 300), dtype)
        assert (x.shape, x.dtype) == ((2, 300), dtype)
        x.copy_(mine(2, 300, dtype=dtype))
        dist.broadcast(x, 1)
        same(x, of(1, 2, 300, dtype=dtype))
    large = ringreduce.torch.empty(1 << 20)
    large.fill_(rank() + 1)
    dist.all_reduce(large)
    assert (large == size() * (size() + 1) / 2).all()
    raises(TypeError, "pass a group of the backend", lambda: ringreduce.torch.empty(3, group=7))


# --- groups ---


def storages_move_to_registered_memory() -> None:
    import ringreduce.torch

    group = dist.new_group()
    arena, storages = group.comm._arena, group.storages
    free = arena.free_bytes
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        x = torch.empty(3, 40_001, dtype=dtype)
        view = x[1:, 7:20]
        assert ringreduce.torch.share_(x, group=group) is x
        for _ in range(3):
            x.copy_(mine(3, 40_001, dtype=dtype))
            dist.all_reduce(x, group=group)
            same(x, sum(everybodys(3, 40_001)).to(dtype))
        assert x.data_ptr() in storages._moved
        assert arena.free_bytes < free
        view.fill_(0)
        dist.all_reduce(x[1:], group=group)
        same(view, torch.zeros(2, 13, dtype=dtype))
    del x, view
    small = ringreduce.torch.share_(mine(100), group=group)
    dist.all_reduce(small, group=group)
    same(small, sum(everybodys(100)))
    assert len(storages._moved) == 1  # the memory of the others is free again
    del small
    ringreduce.torch.share_(mine(100), group=group)
    gc.collect()
    assert arena.free_bytes >= free - 4096
    dist.destroy_process_group(group)


def storages_that_others_use_stay_where_they_are() -> None:
    import ringreduce.torch

    viewed, array = torch.empty(40_000), np.empty(40_000, np.float32)
    seen = viewed.numpy()
    kept = mine(40_000)
    tensors = [viewed, torch.from_numpy(array), mine(40_000).share_memory_()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        for _ in range(3):
            tensor.copy_(mine(40_000))
            dist.all_reduce(tensor)
            same(tensor, sum(everybodys(40_000)))
        raises(ValueError, "cannot move", lambda tensor=tensor: ringreduce.torch.share_(tensor))
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    same(torch.from_numpy(seen), sum(everybodys(40_000)))
    address, moved = kept.data_ptr(), dist.group.WORLD.storages._moved
    for _ in range(3):
        kept.copy_(mine(40_000))
        dist.all_reduce(kept)
    assert kept.data_ptr() == address
    assert address not in moved
    assert ringreduce.torch.share_(kept).data_ptr() in moved
    same(kept, sum(everybodys(40_000)))
    raises(ValueError, "not dense", lambda: ringreduce.torch.share_(mine(4).to_sparse()))


def a_moved_storage_outlives_its_group() -> None:
    import ringreduce.torch

    group = dist.new_group()
    x = ringreduce.torch.share_(mine(40_000), group=group)
    dist.all_reduce(x, group=group)
    expected = x.clone()
    dist.destroy_process_group(group)
    gc.collect()
    raises(RuntimeError, "not resizable", lambda: x[:].resize_(80_000))
    same(x, expected)
    dist.broadcast(x, 0)
    x.add_(1)
    same(x, expected + 1)


def ddp_reduces_its_buckets_in_registered_memory() -> None:
    storages, moved = dist.group.WORLD.storages, []
    move = storages.move
    storages.move = lambda storage: moved.append(move(storage))
    for views in (False, True):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(200, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)]
        wrapped = DistributedDataParallel(
            torch.nn.Sequential(*layers), gradient_as_bucket_view=views, bucket_cap_mb=0.1
        )
        alone = copy.deepcopy(wrapped.module)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapped, alone)]
        for step in range(5):
            inputs = mine(4, 200) / (step + 1)
            everything = torch.cat(everybodys(4, 200)) / (step + 1)
            for each, batch, optimizer in zip(
                (wrapped, alone), (inputs, everything), optimizers, strict=True
            ):
                optimizer.zero_grad()
                each(batch).square().mean().backward()
                optimizer.step()
        assert moved
        assert all(moved)
        moved.clear()
        for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    del storages.move


def groups_of_some_ranks() -> None:
    for members in ([0, 1], [size() - 1], list(range(1, size()))):
        group = dist.new_group(members)
        if rank() in members:
            x = mine(3)
            dist.all_reduce(x, group=group)
            same(x, sum(of(member, 3) for member in members))
            dist.broadcast(x, members[-1], group=group)
            dist.destroy_process_group(group)


def a_broken_group_can_be_destroyed() -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank() == 0:
        raises(rr.PeerTimeoutError, "rank", lambda: dist.barrier(group))
    else:
        time.sleep(1)
    dist.destroy_process_group(group)
    x = mine(3)
    dist.all_reduce(x)
    same(x, sum(everybodys(3)))


def groups_leave_nothing_behind() -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("memfd")

    for turn in range(12):
        group = dist.new_group(list(range(size())))
        dist.all_reduce(mine(1000), group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        if turn == 1:
            before = held()
    assert held() == before


def functional_collectives_and_meshes() -> None:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size(),))
    total = functional.all_reduce(mine(3), "sum", mesh)
    same(functional.wait_tensor(total), sum(everybodys(3)))
    whole = torch.arange(12.0 * size()).reshape(size() * 3, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    same(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    same(sharded.sum().full_tensor(), whole.sum())


def groups_in_the_place_of_gloo() -> None:
    import ringreduce.torch
    from ringreduce.torch.group import RingReduceGroup

    with ringreduce.torch.instead_of("gloo"):
        group = dist.new_group(backend="gloo")
        part = dist.new_group([0, 1], backend="gloo")
    assert isinstance(group, RingReduceGroup)
    assert dist.get_backend(group) == "gloo"
    dist.monitored_barrier(group, timedelta(seconds=20))
    if rank() < 2:
        x = mine(3)
        dist.all_reduce(x, group=part)
        same(x, of(0, 3) + of(1, 3))
        dist.destroy_process_group(part)
    dist.destroy_process_group(group)
    other = dist.new_group(backend="gloo")
    assert not isinstance(other, RingReduceGroup)
    dist.destroy_process_group(other)
    raises(ValueError, "only 'gloo' can be replaced", lambda: ringreduce.torch.instead_of("nccl"))


def sparse_tensors_are_added() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        dense = [torch.zeros(7, 2, dtype=dtype) for _ in range(size())]
        for number, each in enumerate(dense):  # one entry on rank 0, and one more on each next
            each[: number + 1] = of(number, number + 1, 2, dtype=dtype)
        x = dense[rank()].to_sparse(1)
        dist.all_reduce(x)
        same(x.to_dense(), torch.stack(dense).sum(0).to(dtype))
        x = dense[rank()].to_sparse()
        dist.all_reduce(x, async_op=True).wait()
        same(x.to_dense(), torch.stack(dense).sum(0).to(dtype))
    x = dense[rank()].float().to_sparse()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    torch.testing.assert_close(x.to_dense(), torch.stack(dense).float().mean(0))
    nothing = torch.zeros(7, 2).to_sparse()
    dist.all_reduce(nothing)
    same(nothing.to_dense(), torch.zeros(7, 2))
    raises(ValueError, "sparse tensors have SUM and AVG", lambda: dist.all_reduce(x, ReduceOp.MAX))
    whole = dense[0].to_sparse()
    raises(ValueError, "AVG is for floats", lambda: dist.all_reduce(whole, ReduceOp.AVG))
    longer = torch.zeros(7 + rank(), 2).to_sparse()
    raises(rr.MismatchError, "sparse tensors of different shapes", lambda: dist.all_reduce(longer))


def ddp_trains_with_sparse_gradients() -> None:
    torch.manual_seed(1)
    layers = torch.nn.EmbeddingBag(9, 4, sparse=True), torch.nn.Linear(4, 2)
    alone = torch.nn.Sequential(*layers)
    wrapped = DistributedDataParallel(copy.deepcopy(alone))
    places = [torch.tensor([[number, number + 1, 8]]) for number in range(size())]
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    wrapped(places[rank()]).square().mean().backward()
    assert wrapped.module[0].weight.grad.is_sparse
    optimizer.step()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    sum(alone(each).square().mean() for each in places).div(size()).backward()
    optimizer.step()
    for ours, theirs in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def a_list_of_several_dtypes_is_reduced() -> None:
    dtypes = (torch.float32, torch.bool, torch.int64, torch.bfloat16)
    tensors = [mine(5, dtype=dtype) for dtype in dtypes]
    truth = tensors[1]
    truth[:] = torch.arange(5) == rank()
    # dist.all_reduce_coalesced takes tensors of one dtype alone.
    options = dist.AllreduceCoalescedOptions()
    dist.group.WORLD.allreduce_coalesced(tensors, options).wait()
    for found, dtype in zip(tensors, dtypes, strict=True):
        if dtype is torch.bool:
            same(found, torch.arange(5) < size())
        else:
            same(found, torch.stack(everybodys(5, dtype=dtype)).sum(0).to(dtype))


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


def programs_call_groups_themselves() -> None:
    group, x, seconds = dist.group.WORLD, mine(4), timedelta(seconds=15)
    total, first = sum(everybodys(4)), of(0, 4)
    for reduce in (
        lambda tensor: group.allreduce(tensor),
        lambda tensor: group.allreduce([tensor]),
        lambda tensor: group.allreduce(tensor, ReduceOp.SUM, seconds),
        lambda tensor: group.allreduce([tensor], op=ReduceOp.SUM),
        lambda tensor: group.allreduce([tensor], opts=dist.AllreduceOptions()),
        lambda tensor: group.allreduce_coalesced([tensor]),
    ):
        found = x.clone()
        reduce(found).wait()
        same(found, total)
    found = x.clone()
    group.broadcast(found, 0).wait()
    same(found, first)
    found = x.clone()
    group.broadcast(found, root=1, timeout=seconds).wait()
    same(found, of(1, 4))
    found = x.clone()
    group.reduce(found, 0, ReduceOp.MAX).wait()
    if rank() == 0:
        same(found, torch.stack(everybodys(4)).amax(0))
    pieces = [torch.empty(4) for _ in range(size())]
    group.allgather(pieces, x).wait()
    same(torch.stack(pieces), torch.stack(everybodys(4)))
    group.gather(pieces if rank() == 0 else [], x, 0).wait()
    part = torch.empty(4)
    group.scatter(part, pieces if rank() == 1 else [], 1).wait()
    same(part, x)
    group.reduce_scatter(part, pieces).wait()
    same(part, x * size())
    group._allgather_base(torch.empty(4 * size()), x).wait()
    found = torch.empty(4 * size())
    group.alltoall_base(found, torch.stack(pieces).reshape(-1), [], [], seconds).wait()
    same(found.reshape(size(), 4), torch.stack([x] * size()))
    group.barrier().wait()
    group.barrier(timeout=seconds).wait()
    raises(TypeError, "unknown argument 'rot'", lambda: group.broadcast(x, rot=1))
    raises(TypeError, "pass root, timeout", lambda: group.broadcast(x, 1, seconds, 3))
    raises(TypeError, "missing 1 required", lambda: group.allreduce())


def tensors_of_several_shapes_are_gathered_together() -> None:
    xs = [mine(3), mine(2, 2, dtype=torch.int64)]
    outs = [[torch.empty_like(x) for x in xs] for _ in range(size())]
    options = dist.distributed_c10d.AllgatherOptions()
    dist.group.WORLD.allgather_coalesced(outs, xs, options).wait()
    for member, found in enumerate(outs):
        same(found[0], of(member, 3))
        same(found[1], of(member, 2, 2, dtype=torch.int64))
    few = [[] for _ in range(size())]
    raises(ValueError, "each needs 2", lambda: dist.group.WORLD.allgather_coalesced(few, xs))


# --- training ---


def model() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))


def trained(wrapped: Any, inputs: Any) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()


def reference() -> Any:
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        sum(alone(x).square().mean() for x in everybodys(5, 6)).div(size()).backward()
        optimizer.step()
    return alone


def ddp_trains_as_one_process_does() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        wrapped = DistributedDataParallel(model(), **options)
        trained(wrapped, mine(5, 6))
        for ours, theirs in zip(wrapped.parameters(), reference().parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def ddp_hooks_that_call_more_collectives() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapped = DistributedDataParallel(model())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    trained(wrapped, mine(5, 6))
    wrapped = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    trained(wrapped, mine(5, 6))


def ddp_rounds_gradients_for_messages() -> None:
    import ringreduce.torch

    for dtype in (torch.float32, torch.bfloat16):
        wrapped = DistributedDataParallel(model().to(dtype))
        wrapped.register_comm_hook(None, ringreduce.torch.bfloat16_wire_hook)
        trained(wrapped, mine(5, 6, dtype=dtype))
        for ours, theirs in zip(wrapped.parameters(), reference().parameters(), strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)
            all_ours = [torch.empty_like(ours) for _ in range(size())]
            dist.all_gather(all_ours, ours.detach())
            assert all(torch.equal(each, ours) for each in all_ours)
    gloo = dist.new_group(backend="gloo")
    wrapped = DistributedDataParallel(model())
    wrapped.register_comm_hook(gloo, ringreduce.torch.bfloat16_wire_hook)
    raises(TypeError, "pass a group of ringreduce", lambda: trained(wrapped, mine(5, 6)))
    dist.destroy_process_group(gloo)


def fsdp_trains_as_one_process_does() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wrapped = model()
    fully_shard(wrapped, mesh=init_device_mesh("cpu", (size(),)))
    trained(wrapped, mine(5, 6))
    for ours, theirs in zip(wrapped.parameters(), reference().parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


# --- refusals, on the caller alone: nothing is sent ---


def wrong_tensors_are_refused() -> None:
    for x, words in (
        (torch.ones(3).to_sparse(), "is sparse; pass tensor.to_dense()"),
        (torch.ones(3, device="meta"), "on 'meta' has no data"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantised"),
        (torch.ones(1).expand(3), "elements of a tensor share memory"),
        (torch.ones(3, requires_grad=True), "would be written in place"),
    ):
        root = (rank() + 1) % size()
        raises(ValueError, words, lambda x=x, root=root: dist.broadcast(x, root))
    dist.barrier()


def wrong_lengths_are_refused() -> None:
    out = torch.zeros(2 * size() + 1)
    raises(ValueError, "the output needs", lambda: dist.all_gather_into_tensor(out, torch.ones(2)))
    raises(ValueError, "the input needs", lambda: dist.reduce_scatter_tensor(torch.ones(2), out))
    raises(ValueError, "pass one for each of", lambda: dist.all_gather([out], torch.ones(2)))
    raises(ValueError, "no multiple of", lambda: dist.all_to_all_single(out, out.clone()))
    x, sends = torch.zeros(4 * size()), [4] * size()
    recvs = [5, 3, *sends[2:]] if rank() == 0 else sends
    words = "rank 0 sends 4 elements to rank 0, which expects 5"
    raises(ValueError, words, lambda: dist.all_to_all_single(x.clone(), x, recvs, sends))
    dist.barrier()


def a_communicator_takes_tensors() -> None:
    comm = rr.init(timeout_s=20)
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        x, out = mine(3, 4, dtype=dtype), torch.empty(3, 4, dtype=dtype)
        wanted = torch.stack(everybodys(3, 4, dtype=dtype)).sum(0).to(dtype)
        for _ in range(3):
            result = comm.all_reduce(x)
            assert (result == view_of(wanted)).all()
            assert comm.all_reduce(x, out=out) is out
            same(out, wanted)
            both = [torch.empty(3, 4, dtype=dtype), torch.empty(12, dtype=dtype)]
            assert comm.all_reduce([x, x.reshape(-1)], out=both) is both
            same(both[1].reshape(3, 4), wanted)
            same(both[0], wanted)
            assert comm.broadcast(out, 0, out=out) is out
            again = x.clone()
            assert comm.all_reduce(again, out=again) is again
            same(again, wanted)
            strided = torch.zeros(4, 3, dtype=dtype).t()
            comm.all_reduce(x, out=strided)
            same(strided.contiguous(), wanted)
    work = comm.all_reduce(x, out=out, async_op=True)
    assert work.wait() is out
    same(out, wanted)
    gathered = torch.empty(size(), *x.shape, dtype=x.dtype)
    same(comm.all_gather(x[None], out=gathered), torch.stack(everybodys(3, 4, dtype=x.dtype)))
    to, source = (rank() + 1) % size(), (rank() - 1) % size()
    sending = comm.send(x, to, async_op=True)
    assert comm.recv(out, source) is out
    sending.wait()
    same(out, of(source, 3, 4, dtype=x.dtype))
    for wrong, said in (
        (torch.ones(3, requires_grad=True), "requires grad"),
        (torch.ones(3, device="meta"), "NumPy cannot read the Tensor"),
    ):
        with pytest.raises(TypeError, match=said):
            comm.all_reduce(wrong)
        with pytest.raises(TypeError, match="NumPy cannot write to out"):
            comm.all_reduce(torch.ones(3), out=wrong)
    comm.close()


CHECKS = [
    a_communicator_takes_tensors,
    all_reduce_of_every_dtype_and_op,
    all_reduce_of_bits_and_truth_values,
    all_reduce_of_complex_numbers,
    all_reduce_multiplies_before_it_adds,
    all_reduce_of_tensors_that_are_not_contiguous,
    all_reduce_of_nothing_and_of_a_number,
    coalesced_all_reduces_are_one_call,
    reduce_gives_the_root_alone_the_result,
    reduce_scatter_in_all_forms,
    broadcast_from_every_rank,
    all_gather_in_all_forms,
    all_gather_of_tensors_of_other_lengths,
    gather_and_scatter,
    all_to_all_with_equal_and_unequal_lengths,
    objects_of_any_kind,
    messages_between_neighbours,
    messages_from_any_rank,
    a_work_has_a_result_and_a_future,
    asynchronous_calls_on_two_groups_come_in_any_order,
    a_group_ends_after_the_calls_under_way,
    an_error_comes_out_of_wait_and_of_the_future,
    a_call_from_a_future_runs_before_later_calls,
    barriers,
    registered_memory,
    storages_move_to_registered_memory,
    storages_that_others_use_stay_where_they_are,
    a_moved_storage_outlives_its_group,
    ddp_reduces_its_buckets_in_registered_memory,
    groups_of_some_ranks,
    a_broken_group_can_be_destroyed,
    groups_leave_nothing_behind,
    functional_collectives_and_meshes,
    groups_in_the_place_of_gloo,
    sparse_tensors_are_added,
    a_list_of_several_dtypes_is_reduced,
    the_profiler_shows_calls_and_their_bytes,
    the_profiler_shows_asynchronous_calls_until_they_are_over,
    programs_call_groups_themselves,
    tensors_of_several_shapes_are_gathered_together,
    ddp_rounds_gradients_for_messages,
    ddp_trains_with_sparse_gradients,
    ddp_trains_as_one_process_does,
    ddp_hooks_that_call_more_collectives,
    fsdp_trains_as_one_process_does,
    wrong_tensors_are_refused,
    wrong_lengths_are_refused,
]


def over_torch(backend: str = "ringreduce") -> dict[str, str]:
    """On each rank: what every check came to, ``"ok"`` or a traceback."""
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    outcomes = {}
    for check in CHECKS:
        torch.manual_seed(0)
        try:
            check()
            outcomes[check.__name__] = "ok"
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
            break  # the ranks may be in different calls
    dist.destroy_process_group()
    return outcomes


def moved_buckets() -> int:
    """Train with DDP; return how many storages the group has moved to registered memory."""
    dist.init_process_group("ringreduce", timeout=timedelta(seconds=20))
    wrapped = DistributedDataParallel(torch.nn.Linear(200, 300))
    for _ in range(4):
        wrapped(mine(4, 200)).square().mean().backward()
    moved = len(dist.group.WORLD.storages._moved)
    dist.destroy_process_group()
    return moved


IN_SHARED_MEMORY = (
    storages_move_to_registered_memory,
    a_moved_storage_outlives_its_group,
    storages_that_others_use_stay_where_they_are,
    ddp_reduces_its_buckets_in_registered_memory,
)


def over_mpi() -> dict[str, str]:
    """Do as `over_torch`, on ranks of MPI of which each seems to have a host of its own."""
    mesh._machine = lambda: f"host {os.getpid()}"
    CHECKS.remove(a_broken_group_can_be_destroyed)  # its process would end with status 1
    return over_torch()


def over_hosts() -> None:
    """Do as `over_torch`, on ranks of several hosts; rank 0 prints what all checks came to."""
    for check in (*IN_SHARED_MEMORY, a_broken_group_can_be_destroyed):
        CHECKS.remove(check)
    outcomes = over_torch()
    if os.environ["RANK"] == "0":
        print(json.dumps(outcomes), flush=True)
