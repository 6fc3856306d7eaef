"""Collectives that copy."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import ringreduce as rr
from tests.torch.checks.values import DTYPES, everybodys, mine, of, raises, rank, same, size


def broadcast_from_every_rank() -> None:
    for root, dtype in itertools.product(range(size()), (*DTYPES, torch.bool, torch.complex64)):
        x = mine(5, dtype=dtype)
        dist.broadcast(x, root)
        same(x, of(root, 5, dtype=dtype))


def floats_of_8_bits_are_copied() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        x = torch.full((3,), 2.0 ** rank()).to(dtype)
        out = torch.empty(size(), 3, dtype=dtype)
        dist.all_gather_into_tensor(out, x)
        assert out.float().tolist() == [[2.0**member] * 3 for member in range(size())]
        dist.broadcast(x, size() - 1)
        assert x.float().tolist() == [2.0 ** (size() - 1)] * 3
    x = x.view(torch.float8_e5m2 if rank() else torch.float8_e4m3fn)
    out = out.view(x.dtype)
    raises(rr.MismatchError, "float8_e5m2", lambda: dist.all_gather_into_tensor(out, x))


def all_gather_in_place() -> None:
    out = torch.zeros(size(), 2, 3)
    out[rank()] = mine(2, 3)
    dist.all_gather_into_tensor(out, out[rank()])
    same(out, torch.stack(everybodys(2, 3)))


def all_gather_of_tensors_of_other_lengths() -> None:
    pieces = [torch.zeros(number + 1) for number in range(size())]
    dist.all_gather(pieces, mine(rank() + 1))
    for number, piece in enumerate(pieces):
        same(piece, of(number, number + 1))


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


def tensors_that_do_not_fit_are_refused() -> None:
    if rank() == 0:
        wrong = [torch.zeros(2)] * size()
        words = "float32[4], float32[2]; all need the same size and dtype"
        raises(ValueError, words, lambda: dist.gather(torch.ones(4), wrong, 0))
    part = torch.zeros(4 if rank() == 0 else 2)
    parts = [torch.ones(4)] * size() if rank() == 0 else None
    words = "must pass the same counts"  # a rank that has done its part hears of it afterwards
    raises(ValueError, words, lambda: (dist.scatter(part, parts), dist.barrier()))
    raises(
        ValueError,
        "without split sizes they have as many",
        lambda: dist.all_to_all_single(torch.zeros(size(), 2), torch.zeros(size(), 3)),
    )


def ranks_lay_out_their_tensors_as_they_like() -> None:
    x, out = torch.arange(2.0 * size()) + 100 * rank(), torch.zeros(2 * size())
    if rank() == 0:
        x, out = torch.stack([x, x], 1)[:, 0], torch.zeros(2 * size(), 2)[:, 0]
    dist.all_to_all_single(out, x)
    sent = [torch.arange(2.0) + 2 * rank() + 100 * peer for peer in range(size())]
    same(out, torch.cat(sent))


def objects_of_any_kind() -> None:
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank()})
    assert [each["rank"] for each in found] == list(range(size()))
    box = [("only", rank())]
    dist.broadcast_object_list(box, src=1)
    assert box == [("only", 1)]
