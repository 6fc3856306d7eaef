"""Tensors in registered memory."""

from __future__ import annotations

import copy
import gc
import os
from contextlib import nullcontext
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringreduce.torch.registration import SHARE
from tests.torch.checks.values import DTYPES, everybodys, mine, of, raises, rank, same, size


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


def storages_move_to_registered_memory() -> None:
    import ringreduce.torch

    group = dist.new_group()
    arena, storages = group.comm._engine.executables.arena, group.storages
    free = arena.free_bytes
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        x = torch.empty(3, 40_001, dtype=dtype)
        view = x[1:, 7:20]
        assert ringreduce.torch.share_(x, group=group) is x
        assert ringreduce.torch.share_(x, group=group) is x  # it is there already
        for _ in range(3):
            x.copy_(mine(3, 40_001, dtype=dtype))
            dist.all_reduce(x, group=group)
            same(x, sum(everybodys(3, 40_001)).to(dtype))
        assert x.data_ptr() in storages._moved
        assert arena.free_bytes < free
        view.fill_(0)
        first = x[0].clone()
        dist.all_reduce(x[1:], group=group)
        same(x[0], first)
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


def other_processes_get_copies_of_moved_storages() -> None:
    import ringreduce.torch

    x = mine(40_000)
    ringreduce.torch.share_(x)
    dist.all_reduce(x)
    assert x.data_ptr() in dist.group.WORLD.storages._moved
    sent = ForkingPickler.loads(ForkingPickler.dumps(x))
    assert sent.data_ptr() != x.data_ptr()
    same(sent, sum(everybodys(40_000)))


def a_process_that_starts_gets_files_that_are_open() -> None:
    import ringreduce.torch

    class Starting:
        """What `multiprocessing` has while it pickles the arguments of a process."""

        DupFd = staticmethod(lambda file: file)

        def __init__(self) -> None:
            self.files: list[int] = []

        def duplicate_for_child(self, file: int) -> int:
            self.files.append(file)
            return file

    starting = Starting()
    tensors = [ringreduce.torch.share_(mine(40_000)) for _ in range(2)]
    set_spawning_popen(starting)
    try:
        ForkingPickler.dumps(tensors)
    finally:
        set_spawning_popen(None)
    assert len(set(starting.files)) == 2
    assert [os.fstat(file).st_size for file in starting.files] == [160_000] * 2


def tensors_stay_while_calls_are_under_way() -> None:
    import ringreduce.torch

    x, out = mine(40_000), torch.zeros(3)
    work = dist.irecv(out, (rank() - 1) % size())
    address, words = x.data_ptr(), "calls are under way"
    raises(RuntimeError, words, lambda: ringreduce.torch.share_(x))
    assert x.data_ptr() == address
    dist.barrier()
    dist.send(mine(3), (rank() + 1) % size())
    work.wait()
    assert ringreduce.torch.share_(x).data_ptr() in dist.group.WORLD.storages._moved
    dist.barrier()


def a_forked_process_takes_no_registered_memory() -> None:
    import ringreduce.torch

    ours = ringreduce.torch.empty(1000)  # its pages are free in the copy of the allocator
    address = ours.data_ptr()
    del ours
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = ringreduce.torch.empty(1000).data_ptr() == address
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def the_default_device_of_torch_does_not_matter() -> None:
    import ringreduce.torch

    x, entries = mine(40_001), mine(4, 2).to_sparse()
    with torch.device("meta"):
        ringreduce.torch.share_(x)
        dist.all_reduce(x)
        dist.all_reduce(entries)
    same(x, sum(everybodys(40_001)))
    same(entries.to_dense(), sum(everybodys(4, 2)))


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
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for views, context in ((False, nullcontext()), (True, nullcontext()), (True, profiler)):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(200, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)]
        wrapped = DistributedDataParallel(
            torch.nn.Sequential(*layers), gradient_as_bucket_view=views, bucket_cap_mb=0.1
        )
        alone = copy.deepcopy(wrapped.module)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapped, alone)]
        with context:
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


def a_variable_keeps_buckets_where_they_are() -> None:
    for switch, moved in (("1", 1), ("0", 0)):
        os.environ[SHARE] = switch
        group = dist.new_group()
        del os.environ[SHARE]
        wrapped = DistributedDataParallel(torch.nn.Linear(200, 300), process_group=group)
        for _ in range(4):
            wrapped(mine(4, 200)).square().mean().backward()
        assert len(group.storages._moved) == moved
        dist.destroy_process_group(group)
