"""What the checks compute with: tensors that differ by rank, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
FOLDS: dict[str, Callable[[Any], Any]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
    "AVG": lambda stacked: stacked.mean(0),
}


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def of(number: int, *shape: int, dtype: Any = torch.float32) -> Any:
    """The tensor of a rank: whole numbers, other ones on each rank."""
    return ((torch.arange(torch.Size(shape).numel()) + 1) % 5 + number).reshape(shape).to(dtype)


def mine(*shape: int, dtype: Any = torch.float32) -> Any:
    return of(rank(), *shape, dtype=dtype)


def everybodys(*shape: int, dtype: Any = torch.float32) -> list[Any]:
    return [of(number, *shape, dtype=dtype) for number in range(size())]


def same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted), f"{found} in place of {wanted}"


def raises(kind: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)
