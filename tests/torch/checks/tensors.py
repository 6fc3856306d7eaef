"""Which tensors a communicator takes, and which a group refuses on the caller alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringreduce as rr
from ringreduce.calls import views
from ringreduce.calls.views import view_of
from tests.torch.checks.values import DTYPES, everybodys, mine, of, raises, rank, same, size


def a_communicator_takes_tensors() -> None:
    comm = rr.init(timeout_s=120)
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


@contextmanager
def _viewed_by_python() -> Iterator[list[str]]:
    """A list that gets an item for each tensor that Python views meanwhile."""
    viewed: list[str] = []
    view = views._VIEWS[torch.Tensor]

    def counted(tensor: Any) -> Any:
        viewed.append("a tensor")
        return view(tensor)

    views._VIEWS[torch.Tensor] = counted
    try:
        yield viewed
    finally:
        views._VIEWS[torch.Tensor] = view


def compiled_code_views_the_tensors_of_repeated_calls() -> None:
    comm = rr.init(timeout_s=120)
    for dtype in DTYPES:
        x, out = mine(5, dtype=dtype), torch.empty(5, dtype=dtype)
        wanted = torch.stack(everybodys(5, dtype=dtype)).amax(0)
        counts = sys.getrefcount(x), sys.getrefcount(out)
        with _viewed_by_python() as viewed:
            for turn in range(100):
                comm.all_reduce(x, "max", out=out)
                same(out, wanted)
                if turn == 2:
                    viewed.clear()  # the first calls make the later ones known to compiled code
        compiled = comm.config.memory is not None and hasattr(
            torch.Tensor, "__dlpack_c_exchange_api__"
        )
        assert not viewed or not compiled
        assert (sys.getrefcount(x), sys.getrefcount(out)) == counts
    negated = torch.complex(mine(5), mine(5)).conj().imag  # the memory has the opposite signs
    for _ in range(3):
        raises(TypeError, "NumPy cannot read the Tensor", lambda: comm.all_reduce(negated))
    raises(TypeError, "does not hold its elements", lambda: comm.all_reduce(mine(5), out=negated))
    x = mine(5)
    comm.all_reduce(x)
    raises(TypeError, "requires grad", lambda: comm.all_reduce(x.requires_grad_()))
    comm.close()


def wrong_tensors_are_refused() -> None:
    for x, words in (
        (torch.ones(3).to_sparse(), "is sparse; pass tensor.to_dense()"),
        (torch.ones(3, device="meta"), "on 'meta' has no data"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantised"),
        (torch.ones(1).expand(3), "elements of a tensor share memory"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "or to negate"),
    ):
        root = (rank() + 1) % size()
        raises(ValueError, words, lambda x=x, root=root: dist.broadcast(x, root))
    large = torch.ones(1 << 15)._neg_view()
    raises(ValueError, "or to negate", lambda: dist.all_reduce(large))
    group, conjugated = dist.group.WORLD, torch.ones(3, dtype=torch.complex64).conj()
    raises(ValueError, "yet to conjugate", lambda: group.allreduce([conjugated]))
    dist.barrier()


def tensors_can_be_resized_after_calls() -> None:
    with rr.init(timeout_s=120) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            for elements in (2, 20_000):
                x, large = (torch.ones(*n, elements, dtype=dtype) for n in ((), (size(),)))
                out, all_out = torch.empty_like(x), torch.empty_like(large)
                dist.all_reduce(x)
                dist.broadcast(x, 0)
                dist.reduce(x, 0)
                dist.all_gather_into_tensor(all_out, x)
                dist.reduce_scatter_tensor(out, large)
                dist.gather(x, list(all_out) if rank() == 0 else None, 0)
                dist.scatter(out, list(large) if rank() == 0 else None, 0)
                dist.all_to_all_single(all_out, large)
                comm.all_reduce(x, out=out)
                for each in (x, out, large, all_out):
                    assert each.untyped_storage().resizable()
        x = torch.ones(3)
        comm.plan("all_reduce", x, out=x)
        assert not x.untyped_storage().resizable()


_MAKERS: tuple[Callable[[Any], Any], ...] = (
    lambda x: torch.nn.Parameter(x.clone()),
    lambda x: torch.stack([x, x], -1)[..., 0],
    lambda x: torch.stack([x, x], -1)[..., 0].requires_grad_(),
    lambda x: x.clone().requires_grad_() * 1,
)
"""Make parameters, strided tensors, strided leaves of a graph, and results in a graph."""


def every_call_takes_parameters_and_strided_tensors() -> None:
    n, to, source = size(), (rank() + 1) % size(), (rank() - 1) % size()
    total, first, last = sum(everybodys(2 * n)), of(0, 2 * n), of(source, 2 * n)
    all_of_them = torch.stack(everybodys(2))
    for make in _MAKERS:

        def got(x: Any, wanted: Any) -> None:
            same(x.detach().reshape(wanted.shape), wanted)

        def empty(*shape: int, make: Any = make) -> Any:
            return make(torch.full(shape, -1.0))

        x = make(mine(2 * n))
        dist.broadcast(x, 0)
        got(x, first)
        for reduce in (dist.all_reduce, lambda x: dist.all_reduce_coalesced([x])):
            x = make(mine(2 * n))
            reduce(x)
            got(x, total)
        for root in range(n):
            x, out = make(mine(2 * n)), empty(2)
            pieces = [empty(2) for _ in range(n)] if rank() == root else None
            dist.reduce(x, root)
            got(x, total if rank() == root else mine(2 * n))
            dist.gather(make(mine(2)), pieces, root)
            for found, wanted in zip(pieces or [], all_of_them, strict=False):
                got(found, wanted)
            dist.scatter(out, [make(each) for each in all_of_them] if pieces else None, root)
            got(out, mine(2))
        part, whole, swapped = empty(2), empty(2 * n), empty(2 * n)
        pieces = [empty(2) for _ in range(n)]
        dist.all_gather_into_tensor(whole, make(mine(2)))
        got(whole, all_of_them.reshape(-1))
        dist.all_gather(pieces, make(mine(2)))
        got(torch.stack(pieces), all_of_them)
        dist.reduce_scatter_tensor(part, make(mine(2 * n)))
        got(part, total.reshape(n, 2)[rank()])
        dist.reduce_scatter(part, [make(mine(2) + i) for i in range(n)])
        got(part, all_of_them.sum(0) + n * rank())
        sent = torch.stack([each.reshape(n, 2)[rank()] for each in everybodys(2 * n)])
        dist.all_to_all_single(swapped, make(mine(2 * n)))
        got(swapped, sent)
        dist.all_to_all(pieces, [make(each) for each in mine(2 * n).reshape(n, 2)])
        got(torch.stack(pieces), sent)
        for peer in (source, None):
            x = empty(2 * n)
            work = dist.irecv(x, peer)
            dist.send(make(mine(2 * n)), to)
            work.wait()
            got(x, last)


def calls_read_elements_that_torch_has_yet_to_negate() -> None:
    negated = torch.complex(mine(3), mine(3)).conj().imag
    out = torch.zeros(3 * size())
    dist.all_gather_into_tensor(out, negated)
    same(out, -torch.cat(everybodys(3)))


def wrong_lengths_are_refused() -> None:
    out, world = torch.zeros(2 * size() + 1), dist.group.WORLD
    raises(ValueError, "the output needs", lambda: dist.all_gather_into_tensor(out, torch.ones(2)))
    raises(ValueError, "the input needs", lambda: dist.reduce_scatter_tensor(torch.ones(2), out))
    raises(ValueError, "pass one for each of", lambda: dist.all_gather([out], torch.ones(2)))
    raises(ValueError, "a multiple of", lambda: dist.all_to_all_single(out, out.clone()))
    x, sends = torch.zeros(4 * size()), [4] * size()
    recvs = [5, 3, *sends[2:]] if rank() == 0 else sends
    pieces = [torch.ones(2) for _ in range(size())]
    mixed = [torch.ones(2, dtype=torch.int32), *pieces[1:]]
    raises(ValueError, "all need one dtype", lambda: world.alltoall(pieces, mixed))
    scalar = torch.ones(())
    raises(ValueError, "a multiple of", lambda: dist.all_to_all_single(scalar, scalar.clone()))
    halves = [1, *[0] * (size() - 1)]
    words = "is 0-d; pass tensor.reshape(1)"
    split = scalar.clone(), scalar, halves, halves
    raises(ValueError, words, lambda: dist.all_to_all_single(*split))
    raises(ValueError, "all need one dtype", lambda: world.allgather([mixed], [pieces[0]]))
    words = "rank 0 sends 4 elements to rank 0, which expects 5"
    raises(ValueError, words, lambda: dist.all_to_all_single(x.clone(), x, recvs, sends))
    few, words = [3] * size(), f"pass {size()} lengths that add up to {4 * size()}"
    raises(ValueError, words, lambda: dist.all_to_all_single(x.clone(), x, few, few))
    gathered = torch.zeros(2 * size())
    pairs = [gathered, out], [torch.ones(2), torch.ones(2)]
    raises(ValueError, "the output needs", lambda: world.all_gather_single_coalesced(*pairs))
    same(gathered, torch.zeros(2 * size()))  # nothing was sent
    dist.barrier()
