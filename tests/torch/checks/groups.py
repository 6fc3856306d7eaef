"""Groups of some ranks, their ends, and the ways to call a group."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_map_only

import ringreduce as rr
from tests.torch.checks.values import everybodys, mine, of, raises, rank, same, size


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


def a_group_ends_although_a_message_never_comes() -> None:
    group = dist.new_group(timeout=timedelta(hours=1))
    with _short_ends():
        if rank() == 0:
            dist.irecv(torch.zeros(1), 1, group=group)
            dist.destroy_process_group(group)
            dist.barrier()
        else:
            dist.barrier()
            dist.destroy_process_group(group)


def a_group_that_another_thread_aborts_ends_the_call_under_way() -> None:
    for asynchronous in (False, True):
        group = dist.new_group(timeout=timedelta(hours=1))
        if rank() == 0:
            work = dist.all_reduce(mine(3), group=group, async_op=True) if asynchronous else None
            threading.Timer(0.2, group.abort).start()
            call = work.wait if work else lambda group=group: dist.barrier(group)
            raises(rr.PeerLostError, "its process group was aborted", call)
        dist.barrier()
        dist.destroy_process_group(group)


def a_receive_that_fails_leaves_its_tensor_as_it_is() -> None:
    group, x = dist.new_group(), torch.zeros(1 << 20)
    if rank() == 0:
        first, second = (dist.irecv(x, 1, group=group) for _ in range(2))
        dist.barrier()
        first.wait()
        dist.barrier()
        raises(rr.PeerLostError, "rank 1", second.wait)
        assert (x == 7).all()
    else:
        dist.barrier()
        if rank() == 1:
            dist.send(torch.full((1 << 20,), 7.0), 0, group=group)
        dist.barrier()
    dist.destroy_process_group(group)


def a_forked_process_waits_for_no_message() -> None:
    work = dist.irecv(torch.zeros(1), 1) if rank() == 0 else None
    child = os.fork() if work else 1
    if child == 0:
        status = 1
        try:
            work.wait()
        except ValueError as error:
            status = "forked" not in str(error)
        finally:
            os._exit(status)
    if work:
        assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    if rank() == 1:
        dist.send(torch.zeros(1), 0)
    if work:
        work.wait()


@contextmanager
def _short_ends() -> Iterator[None]:
    """Let ends of groups wait for other ranks for a short time."""
    from ringreduce.torch import group as module

    before, module.ENDING_S = module.ENDING_S, 0.2
    dist.barrier()
    try:
        yield
    finally:
        module.ENDING_S = before


def a_call_of_a_group_that_a_rank_has_destroyed_is_an_error() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    if rank() == 0:
        dist.destroy_process_group(group)
    else:
        text = "rank 0 reached the end of its process group"
        raises(rr.MismatchError, text, lambda: dist.all_reduce(mine(3), group=group))
        text = "rank 0 has left the communicator: its process group was destroyed"
        raises(rr.PeerLostError, text, lambda: dist.all_reduce(mine(3), group=group))
        dist.destroy_process_group(group)


def groups_leave_nothing_behind() -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("memfd")

    for turn in range(25):
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


def the_operators_of_compiled_code() -> None:
    ops, group, others = torch.ops._c10d_functional, dist.group.WORLD, size()
    total, each = sum(everybodys(2, 3)), torch.cat(everybodys(2, 3))
    x, name = mine(2, 3), group.group_name
    not_contiguous = mine(2, 3).t().contiguous().t()
    for operator in ops.all_reduce, ops.all_reduce_:
        same(ops.wait_tensor(operator(x.clone(), "sum", name)), total)
    for operator in ops.all_reduce_coalesced, ops.all_reduce_coalesced_:
        for found in operator([x.clone(), x.clone()], "sum", name):
            same(ops.wait_tensor(found), total)
    for operator in ops.broadcast, ops.broadcast_:
        same(ops.wait_tensor(operator(x.clone(), others - 1, name)), of(others - 1, 2, 3))
    same(ops.wait_tensor(ops.all_gather_into_tensor(x, others, name)), each)
    (found,) = ops.all_gather_into_tensor_coalesced([x], others, name)
    same(ops.wait_tensor(found), each)
    for given in (x, not_contiguous):
        out = torch.empty(2 * others, 3)
        found = ops.all_gather_into_tensor_out(given, others, name, out=out)
        same(ops.wait_tensor(found), each)
        assert found.data_ptr() == out.data_ptr()
    parts = [2] * others
    found = ops.all_to_all_single(mine(2 * others), parts, parts, name)
    wanted = [of(other, 2 * others)[2 * rank() :][:2] for other in range(others)]
    same(ops.wait_tensor(found), torch.cat(wanted))
    wanted = sum(everybodys(2 * others))[2 * rank() :][:2]
    same(ops.wait_tensor(ops.reduce_scatter_tensor(mine(2 * others), "sum", others, name)), wanted)
    (found,) = ops.reduce_scatter_tensor_coalesced([mine(2 * others)], "sum", others, name)
    same(ops.wait_tensor(found), wanted)
    if not hasattr(ops, "batch_p2p_ops"):  # torch 2.9
        return
    found = ops.reduce_scatter_tensor_out(mine(2 * others), "sum", others, name, out=torch.empty(2))
    same(ops.wait_tensor(found), wanted)
    found = ops.all_gather_into_tensor_out(x, others, group.boxed(), out=torch.empty(2 * others, 3))
    same(ops.wait_tensor(found), each)
    before, after = (rank() - 1) % others, (rank() + 1) % others
    raises(ValueError, "'recv'", lambda: ops.batch_p2p_ops(["recv"], [before], [7], [x], name))
    sent, received = ops.batch_p2p_ops(
        ["isend", "irecv"], [after, before], [7, 7], [x, torch.empty(2, 3)], name
    )
    assert ops.wait_tensor(sent).numel() == 0
    same(ops.wait_tensor(received), of(before, 2, 3))
    ops.wait_tensor(x)  # the tensor that is sent can be waited for, too


def debug_modes_count_collectives() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    ops, x = torch.ops.c10d, mine(3)
    pieces = [torch.zeros(3) for _ in range(size())]
    with CommDebugMode() as outer, torch.profiler.profile(), CommDebugMode() as inner:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather(pieces, x)
        dist.barrier()
        dist.all_gather_into_tensor(torch.zeros(3 * size()), x)
        dist.all_to_all_single(torch.zeros(size()), mine(size()))
        dist.reduce_scatter_tensor(torch.zeros(1), mine(size()))
    same(torch.stack(pieces), x.expand(size(), 3))
    counts = dict.fromkeys((ops.allreduce_, ops.broadcast_, ops.allgather_), 1)
    counts |= dict.fromkeys(
        (ops._allgather_base_, ops.alltoall_base_, ops._reduce_scatter_base_), 1
    )
    assert outer.get_comm_counts() == inner.get_comm_counts() == counts
    model = torch.nn.Linear(3, 3 * size())
    fully_shard(model)
    with CommDebugMode() as mode:
        model(mine(3)).sum().backward()
    assert mode.get_comm_counts() == {ops._allgather_base_: 1, ops._reduce_scatter_base_: 1}


class _Holder(torch.Tensor):
    """A tensor that holds another one."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _Holder:
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        wrapped = func(*tree_map_only(cls, lambda holder: holder.held, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, cls, wrapped)


def tensors_that_hold_others() -> None:
    from torch.distributed import _functional_collectives as functional

    for length in 3, 100_000:  # large ones might move to registered memory
        under_way = functional.all_reduce(mine(length), "sum", dist.group.WORLD)
        dist.all_reduce(under_way)
        same(functional.wait_tensor(under_way), sum(everybodys(length)) * size())
        gathered = torch.zeros(size() * length)
        under_way = functional.all_reduce(mine(length), "sum", dist.group.WORLD)
        dist.all_gather_into_tensor(gathered, under_way)
        same(gathered, sum(everybodys(length)).repeat(size()))
        holder = _Holder(mine(length))
        raises(TypeError, "pass the tensors that it holds", partial(dist.all_reduce, holder))
        raises(TypeError, "a _Holder has no", partial(dist.broadcast, holder, 0))
        gather = partial(dist.all_gather_into_tensor, gathered)
        raises(TypeError, "a _Holder has no", partial(gather, holder))
        raises(
            TypeError, "a _Holder has no", partial(dist.all_gather, [holder] * size(), mine(length))
        )
        same(holder.held, mine(length))


def groups_in_the_place_of_gloo() -> None:
    import ringreduce.torch
    from ringreduce.torch.group import RingReduceGroup

    with ringreduce.torch.instead_of("gloo"):
        group = dist.new_group(backend="gloo")
        part = dist.new_group([0, 1], backend="gloo")
        unnamed = dist.new_group(backend="undefined")  # what torch passes for no backend
    assert isinstance(unnamed, RingReduceGroup)
    dist.destroy_process_group(unnamed)
    assert isinstance(group, RingReduceGroup)
    assert dist.get_backend(group) == "gloo"
    dist.monitored_barrier(group, timedelta(seconds=20))
    if rank() < 2:
        x = mine(3)
        dist.all_reduce(x, group=part)
        same(x, of(0, 3) + of(1, 3))
        dist.destroy_process_group(part)
    dist.destroy_process_group(group)
    first, second = (ringreduce.torch.instead_of("gloo") for _ in range(2))
    first.close()
    group = dist.new_group(backend="gloo")
    assert isinstance(group, RingReduceGroup)
    dist.destroy_process_group(group)
    second.close()
    other = dist.new_group(backend="gloo")
    assert not isinstance(other, RingReduceGroup)
    dist.destroy_process_group(other)
    raises(ValueError, "only 'gloo' can be replaced", lambda: ringreduce.torch.instead_of("nccl"))


def groups_end_in_any_order() -> None:
    groups = [dist.new_group() for _ in range(3)]
    with _short_ends():
        for number in (0, 1) if rank() == 0 else (1, 0):
            dist.destroy_process_group(groups[number])
        if rank() == 0:
            dist.destroy_process_group(groups[2])
        dist.barrier()
    if rank():
        x = mine(3)
        raises(rr.RingReduceError, "rank", lambda: dist.all_reduce(x, group=groups[2]))
        dist.destroy_process_group(groups[2])
    dist.barrier()


def an_error_that_nobody_waited_for_ends_no_other_group() -> None:
    group = dist.new_group()
    dist.all_reduce(mine(2 + rank() % 2), group=group, async_op=True)
    dist.destroy_process_group(group)  # logs the error
    dist.barrier()


def a_group_has_no_other_backends_and_is_not_split() -> None:
    raises(RuntimeError, "split", partial(dist.split_group, dist.group.WORLD, [[0], [1]]))
    mixed = "cpu:ringreduce,cuda:nccl"
    raises(ValueError, "several backends, cpu:ring", partial(dist.new_group, backend=mixed))
    group = dist.new_group(backend="cpu:ringreduce")
    x = mine(3)
    dist.all_reduce(x, group=group)
    same(x, sum(everybodys(3)))
    dist.destroy_process_group(group)


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
    for reduce in (
        lambda tensor: group.allreduce(tensors=[tensor]),
        lambda tensor: group.allreduce(tensor=tensor, timeout=seconds),
        lambda tensor: group.allreduce(opts=dist.AllreduceOptions(), tensors=[tensor]),
    ):
        found = x.clone()
        reduce(found).wait()
        same(found, total)
    group.allgather(output_tensors=[pieces], input_tensors=[x]).wait()
    same(torch.stack(pieces), torch.stack(everybodys(4)))
    sent = group.send([x], dstRank=(rank() + 1) % size(), tag=1)
    group.recv(tensors=[found], srcRank=(rank() - 1) % size(), tag=1).wait()
    sent.wait()
    same(found, of((rank() - 1) % size(), 4))
    counted = dist.new_group()
    assert counted._get_sequence_number_for_group() == 0
    dist.all_reduce(found, group=counted)
    dist.barrier(counted)
    assert counted._get_sequence_number_for_group() == 2
    options = dist.BroadcastOptions()
    raises(TypeError, "unknown arguments: to", lambda: group.send([x], to=1))
    raises(TypeError, "passed twice", lambda: group.send([x], 1, 0, tag=1))
    raises(TypeError, "root was passed twice", lambda: group.broadcast(x, 0, root=1))
    raises(TypeError, "either opts, or", lambda: group.broadcast(x, 0, opts=options))
    raises(TypeError, "unknown argument 'rot'", lambda: group.broadcast(x, rot=1))
    raises(TypeError, "pass root, timeout", lambda: group.broadcast(x, 1, seconds, 3))
    raises(TypeError, "missing 1 required", lambda: group.allreduce())
