"""Training with DistributedDataParallel and both FSDPs, and code that is compiled."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch.checks.values import everybodys, mine, raises, rank, same, size


def _model() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))


def _trained(wrapped: Any, inputs: Any) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()


def _reference() -> Any:
    alone = _model()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        sum(alone(x).square().mean() for x in everybodys(5, 6)).div(size()).backward()
        optimizer.step()
    return alone


def ddp_trains_as_one_process_does() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        wrapped = DistributedDataParallel(_model(), **options)
        _trained(wrapped, mine(5, 6))
        for ours, theirs in zip(wrapped.parameters(), _reference().parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def ddp_hooks_that_call_more_collectives() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapped = DistributedDataParallel(_model())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _trained(wrapped, mine(5, 6))
    wrapped = DistributedDataParallel(_model())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _trained(wrapped, mine(5, 6))


def ddp_rounds_gradients_for_messages() -> None:
    import ringreduce.torch

    for dtype in (torch.float32, torch.bfloat16):
        wrapped = DistributedDataParallel(_model().to(dtype))
        wrapped.register_comm_hook(None, ringreduce.torch.bfloat16_wire_hook)
        _trained(wrapped, mine(5, 6, dtype=dtype))
        for ours, theirs in zip(wrapped.parameters(), _reference().parameters(), strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)
            all_ours = [torch.empty_like(ours) for _ in range(size())]
            dist.all_gather(all_ours, ours.detach())
            assert all(torch.equal(each, ours) for each in all_ours)
    gloo = dist.new_group(backend="gloo")
    wrapped = DistributedDataParallel(_model())
    wrapped.register_comm_hook(gloo, ringreduce.torch.bfloat16_wire_hook)
    raises(TypeError, "pass a group of the backend", lambda: _trained(wrapped, mine(5, 6)))
    dist.destroy_process_group(gloo)


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


def fsdp_trains_as_one_process_does() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wrapped = _model()
    fully_shard(wrapped, mesh=init_device_mesh("cpu", (size(),)))
    wrapped.set_allocate_memory_from_process_group_for_comm(True)  # the group allocates none
    _trained(wrapped, mine(5, 6))
    for ours, theirs in zip(wrapped.parameters(), _reference().parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def the_first_fsdp_trains_as_one_process_does() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))
    _trained(wrapped, mine(5, 6))  # each step frees the storages of gathered parameters
    with FullyShardedDataParallel.summon_full_params(wrapped):
        ours = torch.cat([each.flatten() for each in wrapped.parameters()])
    theirs = torch.cat([each.flatten() for each in _reference().parameters()])
    torch.testing.assert_close(ours[: len(theirs)], theirs)


def checkpoints_are_saved_beside_the_training_and_loaded() -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard

    alone, model = _model(), _model()
    values = alone.state_dict() if rank() == 0 else {}
    fully_shard(model)
    whole = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for parameter in model.parameters():
        parameter.data.zero_()
    state_dict.set_model_state_dict(model, values, options=whole)
    folder = [tempfile.mkdtemp() if rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    group = dist.new_group()
    for number, save in enumerate((checkpoint.save, checkpoint.async_save)):
        path = f"{folder[0]}/{number}"
        saved = save({"model": model.state_dict()}, checkpoint_id=path, process_group=group)
        dist.all_reduce(mine(3))
        if save is checkpoint.async_save:
            saved.result()
        for parameter in model.parameters():
            parameter.data.zero_()
        loaded = {"model": model.state_dict()}
        checkpoint.load(loaded, checkpoint_id=path, process_group=group)
        model.load_state_dict(loaded["model"])
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            same(ours.full_tensor(), theirs)
    dist.destroy_process_group(group)
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(folder[0])


def code_that_is_compiled_leaves_collectives_out() -> None:
    pieces = [torch.zeros(3) for _ in range(size())]

    def step(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        dist.barrier()
        dist.gather(doubled, pieces if rank() == 0 else None, 0)
        return doubled + 1

    same(torch.compile(step, backend="eager")(mine(3)), mine(3) * 2 + 1)
    if rank() == 0:
        same(torch.stack(pieces), torch.stack(everybodys(3)) * 2)
