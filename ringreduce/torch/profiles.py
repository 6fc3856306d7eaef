"""Show collectives in `torch.profiler`, with their bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.profiler import record_function

_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Show a method of a process group as ``ringreduce:<name> <bytes> B`` where a profiler runs.

    The bytes are those of its tensors of input or of output on this rank, whichever are more.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def shown(self: Any, *args: Any, **named: Any) -> Any:
            if not _is_profiled():
                return method(self, *args, **named)
            nbytes = max((_bytes_of(argument) for argument in args), default=0)
            with record_function(f"ringreduce:{name} {nbytes} B"):
                return method(self, *args, **named)

        return shown

    return wrap


def _bytes_of(argument: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in lists; 0 for anything else."""
    if isinstance(argument, torch.Tensor):
        values = argument._values() if argument.is_sparse else argument
        return int(values.nbytes)
    if isinstance(argument, (list, tuple)):
        return sum(map(_bytes_of, argument))
    return 0
