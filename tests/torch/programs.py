"""Random programs of collectives of torch, which every rank draws alike, against torch itself.

Hypothesis draws them.  It does not shrink a program that fails: the ranks would draw apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from tests.torch.checks.values import DTYPES, FOLDS, of, rank, size

KINDS = (
    *("all_reduce", "all_reduce_list", "reduce", "broadcast", "gather", "scatter"),
    *("all_gather", "all_gather_list", "reduce_scatter", "reduce_scatter_list"),
    *("all_to_all", "all_to_all_uneven", "barrier"),
)
EXACT = {"SUM", "MIN", "MAX"}
"""Folds whose results are exact for the whole numbers of `of`, in every dtype."""


@dataclass(frozen=True)
class Call:
    """A collective, and where it is made."""

    kind: str
    dtype: Any
    elements: int
    fold: str
    root: int
    """Modulo the ranks of the group."""
    group: int
    is_strided: bool
    is_async: bool
    is_waited_for_late: bool
    """Whether the program waits for it at its end only."""


def _fits(call: Call) -> bool:
    return call.fold in EXACT or call.dtype in (torch.float32, torch.float64)


def programs(ranks: int) -> st.SearchStrategy[tuple[list[list[int]], list[Call]]]:
    """Groups, of which each holds some ranks, and calls on them."""
    members = st.sets(st.integers(0, ranks - 1), min_size=1).map(sorted)
    calls = st.builds(
        Call,
        kind=st.sampled_from(KINDS),
        dtype=st.sampled_from(DTYPES),
        elements=st.sampled_from([0, 1, 7, 1000, 40_000]),
        fold=st.sampled_from([*FOLDS]),
        root=st.integers(0, ranks - 1),
        group=st.integers(0, 1),
        is_strided=st.booleans(),
        is_async=st.booleans(),
        is_waited_for_late=st.booleans(),
    ).filter(_fits)
    return st.tuples(
        st.lists(members, min_size=2, max_size=2), st.lists(calls, min_size=5, max_size=30)
    )


def run_programs(number: str, count: str) -> int:
    """Do as `draw`, in a group of its own."""
    dist.init_process_group("ringreduce", timeout=timedelta(seconds=20))
    calls = draw(int(number), int(count))
    dist.destroy_process_group()
    return calls


def draw(number: int, count: int) -> int:
    """Run `count` programs that Hypothesis draws from a seed; return the number of calls."""
    calls = 0

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(size()))
    def each(program: Any) -> None:
        nonlocal calls
        calls += _run(*program)

    each()
    assert calls > count
    return calls


def _run(members: list[list[int]], calls: list[Call]) -> int:
    groups = [dist.new_group(each) for each in members]
    late = []
    for turn, call in enumerate(calls):
        ranks, group = members[call.group], groups[call.group]
        if rank() not in ranks:
            continue
        work, found, wanted = _make(call, ranks, group)
        where = f"call {turn} of {calls} on {members}"
        if call.is_async and call.is_waited_for_late:
            late.append((work, found, wanted, where))
            continue
        if call.is_async:
            work.wait()
        _check(found, wanted, where)
    for work, found, wanted, where in late:
        work.wait()
        _check(found, wanted, where)
    for ranks, group in zip(members, groups, strict=True):
        if rank() in ranks:
            dist.destroy_process_group(group)
    return len(calls)


def _check(found: Any, wanted: Any, where: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), where


def _make(call: Call, ranks: list[int], group: Any) -> tuple[Any, list[Any], list[Any]]:
    """Make a call; return its Work, the tensors that it writes, and what they are to become."""
    own, count, dtype, elements = ranks.index(rank()), len(ranks), call.dtype, call.elements
    # The tensor of each rank has a row for each rank.
    whole = [of(member, count, elements, dtype=dtype) for member in ranks]
    reduced = FOLDS[call.fold](torch.stack(whole)).to(dtype)
    op, options = getattr(ReduceOp, call.fold), {"group": group, "async_op": call.is_async}
    root, x = ranks[call.root % count], whole[own].clone()
    rows, row = [torch.zeros(elements, dtype=dtype) for _ in ranks], of(0, elements, dtype=dtype)
    if call.is_strided and call.kind not in ("all_gather", "reduce_scatter"):
        x = torch.zeros(count, elements, 2, dtype=dtype)[..., 0].copy_(x)
    match call.kind:
        case "all_reduce":
            return dist.all_reduce(x, op, **options), [x], [reduced]
        case "all_reduce_list":
            pieces = list(x.contiguous())
            return dist.all_reduce_coalesced(pieces, op, **options), pieces, list(reduced)
        case "reduce":
            work = dist.reduce(x, root, op, **options)
            return work, [x] if rank() == root else [], [reduced] if rank() == root else []
        case "broadcast":
            return dist.broadcast(x, root, **options), [x], [whole[ranks.index(root)]]
        case "gather":
            outs = [torch.zeros_like(each) for each in whole] if rank() == root else None
            return dist.gather(x, outs, root, **options), outs or [], whole if outs else []
        case "scatter":
            pieces = list(x) if rank() == root else None
            work = dist.scatter(rows[0], pieces, root, **options)
            return work, [rows[0]], [whole[ranks.index(root)][own]]
        case "all_gather":
            out = torch.zeros(count, count, elements, dtype=dtype)
            work = dist.all_gather_into_tensor(out, x, **options)
            return work, [out], [torch.stack(whole)]
        case "all_gather_list":
            outs = [torch.zeros_like(each) for each in whole]
            return dist.all_gather(outs, x, **options), outs, whole
        case "reduce_scatter":
            work = dist.reduce_scatter_tensor(row, x, op, **options)
            return work, [row], [reduced[own]]
        case "reduce_scatter_list":
            return dist.reduce_scatter(row, list(x), op, **options), [row], [reduced[own]]
        case "all_to_all":
            out = torch.zeros(elements, count, dtype=dtype).T if call.is_strided else x.clone()
            work = dist.all_to_all_single(out, x, **options)
            return work, [out], [torch.stack([each[own] for each in whole])]
        case "all_to_all_uneven":
            # Rank i sends i + j rows of its tensor to rank j.
            sends = [[i + j for j in range(count)] for i in range(count)]
            tensors = [of(member, sum(sends[i]), dtype=dtype) for i, member in enumerate(ranks)]
            to_me = [each.split(sends[i])[own] for i, each in enumerate(tensors)]
            takes = [lengths[own] for lengths in sends]
            out = torch.zeros(sum(takes), dtype=dtype)
            work = dist.all_to_all_single(out, tensors[own], takes, sends[own], **options)
            return work, [out], [torch.cat(to_me)]
        case _:
            return dist.barrier(**options), [], []
