"""Operators of compiled code, for groups that are written in Python.

`torch.compile` replaces collectives by operators.  The kernels that torch has for most operators
call the group.  Those of two operators call a backend in C++, and a group in Python has none.  The
kernels of this module call the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

_NAMESPACE = torch.ops._c10d_functional


def register_kernels() -> Any:
    """Have groups of all backends use these kernels on the CPU, while the result is kept."""
    library = torch.library.Library(_NAMESPACE.name, "IMPL", "CPU")
    for kernel in all_gather_into_tensor_out, batch_p2p_ops:
        if hasattr(_NAMESPACE, kernel.__name__):  # torch 2.9 has the first alone
            library.impl(kernel.__name__, kernel)
    return library


def all_gather_into_tensor_out(x: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    """Gather the tensors of all ranks in `out`.  `wait_tensor` waits for the result, `out`."""
    work = _group(group_name)._allgather_base(out, x.contiguous(), c10d.AllgatherOptions())
    _distributed_c10d._register_work(out, work)
    return out


def batch_p2p_ops(
    ops: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    tensors: Sequence[Any],
    group_name: Any,
) -> list[Any]:
    """Send tensors ("isend") and receive tensors ("irecv").

    Returns the received tensor of each operation, or an empty one for a send.  `wait_tensor`
    waits for either.  Raises ValueError for another operation.
    """
    for op in ops:
        if op not in ("isend", "irecv"):
            raise ValueError(f"batch_p2p_ops: unknown operation {op!r}; pass 'isend' or 'irecv'")
    group, results = _group(group_name), []
    for op, peer, tag, x in zip(ops, peers, tags, tensors, strict=True):
        if op == "irecv":
            work, result = group.recv([x], peer, tag), x
        else:
            work, result = group.send([x], peer, tag), x.new_empty(0)
            _distributed_c10d._register_work(x, work)
        _distributed_c10d._register_work(result, work)
        results.append(result)
    return results


def _group(name: Any) -> Any:
    """Find the group of a name.  Since torch 2.13 operators also take groups themselves."""
    if isinstance(name, str):
        return c10d._resolve_process_group(name)
    return c10d.ProcessGroup.unbox(name)
