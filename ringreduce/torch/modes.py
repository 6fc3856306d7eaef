"""`CommDebugMode` counts the collectives of a group that is written in Python.

For other backends torch's dispatcher shows the operator of each collective to such a mode.  torch
calls a group in Python without the dispatcher, so `in_modes` shows an object like the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d  # noqa: F401 - it makes the operators c10d
from torch.utils import _python_dispatch

_OPERATORS = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "recv_anysource": "recv_any_source_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "send": "send",
}
"""The operators of some methods.  For any other method it is the name of the method and ``_``."""
modes_are_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _Operator:
    """A call of a group, in place of torch's operator for the same collective."""

    def __init__(self, method: str, call: Callable[..., Any]) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, _OPERATORS.get(method, f"{method}_"))
        self._call = call

    def __call__(self, *args: Any, **_: Any) -> Any:
        return self._call(*args)

    def __str__(self) -> str:
        return str(self._overloadpacket.default)


def in_modes(method: str, call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Make a call, and have each `CommDebugMode` that is active count it."""
    from torch.distributed.tensor.debug import CommDebugMode

    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, CommDebugMode):
            call = partial(_in_mode, mode, _Operator(method, call))
    return call(*args)


def _in_mode(mode: Any, operator: _Operator, *args: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args)
