"""NumPy arrays over the memory of other libraries' arrays, such as tensors of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

_HOST_MEMORY = (1, 3)
"""DLPack's device types of memory that the processor reads: ordinary, and pinned for a GPU."""
_OF_TORCH = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))
"""Modules and names of the types of tensors."""
_View = Callable[[Any], "np.ndarray | None"]


def view_of(x: Any) -> np.ndarray | None:
    """Return a NumPy array over the memory of `x`, an array of another library in host memory.

    Returns None if `x` is something else, or if NumPy has no view of it: a GPU's array, a tensor
    that requires a gradient, a dtype that NumPy does not know.
    """
    kind = type(x)
    view = _VIEWS.get(kind) or _find_view(kind)
    return view(x)


def view_of_all(x: Any) -> Any:
    """Return a view of an array, or a list with views in the place of the arrays of a list.

    Members of which `view_of` has no view stay as they are.  Returns None if nothing has a view.
    """
    view = _VIEWS.get(type(x))
    if view is not None:
        return view(x)
    if not isinstance(x, (list, tuple)):
        return view_of(x)
    views = [view_of(member) for member in x]
    if all(view is None for view in views):
        return None
    return [member if view is None else view for member, view in zip(x, views, strict=True)]


_VIEWS: dict[type, _View] = {np.ndarray: lambda _: None}
"""The function that views objects of a type, for the types that came first."""
_MOST_TYPES = 256


def _find_view(kind: type) -> _View:
    """Find the function that views objects of a type, and keep it."""
    if (kind.__module__, kind.__name__) in _OF_TORCH:
        view = _of_torch(sys.modules["torch"])
    elif issubclass(kind, (np.ndarray, np.generic)):
        view = _VIEWS[np.ndarray]
    elif hasattr(kind, "__dlpack_device__") and not hasattr(kind, "__array_interface__"):
        view = _by_dlpack
    else:
        view = _by_interface
    if len(_VIEWS) < _MOST_TYPES and not issubclass(kind, (list, tuple)):
        _VIEWS[kind] = view
    return view


def _of_torch(torch: ModuleType) -> _View:
    """Return the function that views tensors: `Tensor.numpy` takes less time than DLPack."""
    import ml_dtypes

    bfloat16, int16 = torch.bfloat16, torch.int16

    def view(tensor: Any) -> np.ndarray | None:
        array: np.ndarray
        try:
            if tensor.dtype is not bfloat16:
                array = tensor.numpy()
                return array
            array = tensor.view(int16).numpy()
            array = array.view(ml_dtypes.bfloat16)
        except (RuntimeError, TypeError):
            return None
        return array

    return view


def _by_interface(x: Any) -> np.ndarray | None:
    try:
        return np.asarray(x) if hasattr(x, "__array_interface__") else None
    except Exception:  # of another library
        return None


def _by_dlpack(x: Any) -> np.ndarray | None:
    try:
        kind, _ = x.__dlpack_device__()
        return np.from_dlpack(x) if kind in _HOST_MEMORY else None
    except Exception:  # of another library
        return None
