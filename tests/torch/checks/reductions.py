"""Reductions: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ringreduce as rr
from tests.torch.checks.values import DTYPES, FOLDS, everybodys, mine, of, raises, rank, same, size


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
    multiply = dist._make_nccl_premul_sum(0.5)
    whole = mine(7, dtype=torch.int32)
    raises(ValueError, "PREMUL_SUM is for floats", lambda: dist.all_reduce(whole, multiply))
    same(whole, mine(7, dtype=torch.int32))
    x = mine(7)
    dist.group.WORLD.reduce([x], 1, dist._make_nccl_premul_sum(2.0)).wait()
    same(x, 2 * sum(everybodys(7)) if rank() == 1 else mine(7))


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
    raises(TypeError, "AVG is for floats", lambda: dist.all_reduce(whole, ReduceOp.AVG))
    longer = torch.zeros(7 + rank(), 2).to_sparse()
    words = "sparse tensors of different shapes"
    raises(rr.MismatchError, words, lambda: dist.all_reduce(longer))
    work = dist.all_reduce(longer, async_op=True)
    for _ in range(2):
        raises(rr.MismatchError, words, work.wait)
    assert isinstance(work.exception(), rr.MismatchError)
    both = [mine(4, 2).to_sparse(), mine(3), mine(5).to_sparse()]
    dist.group.WORLD.allreduce(both).wait()
    for each in both:
        wanted = torch.stack(everybodys(*each.shape)).sum(0)
        same(each.to_dense() if each.is_sparse else each, wanted)


def reduce_scatter_of_other_lengths_in_place_and_into_another_shape() -> None:
    whole = torch.arange(4.0 * size()) + rank()
    total = sum(torch.arange(4.0 * size()) + number for number in range(size()))
    wanted = total.chunk(size())[rank()]
    uneven = [mine(1 + number) for number in range(size())]
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.zeros(1 + rank(), dtype=dtype)
        dist.reduce_scatter(part, [each.to(dtype) for each in uneven])
        same(part, sum(everybodys(1 + rank())).to(dtype))
    strided = torch.zeros(1 + rank(), 2)[:, 0]
    dist.reduce_scatter(strided, uneven, async_op=True).wait()
    same(strided, sum(everybodys(1 + rank())))
    same(uneven[0], mine(1))  # the input stays as it is
    inside = whole.clone()
    part = inside.chunk(size())[rank()]
    dist.reduce_scatter_tensor(part, inside, ReduceOp.AVG)
    same(part, wanted / size())
    other = torch.zeros(2, 2)
    dist.reduce_scatter_tensor(other, whole.clone())
    same(other.reshape(-1), wanted)
