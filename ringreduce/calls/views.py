"""NumPy arrays over the memory of other libraries' arrays, such as tensors of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.shm.tensor_views import compiled_viewer

_HOST_MEMORY = (1, 3)
"""DLPack's device types of memory that the processor reads: ordinary, and pinned for a GPU."""
_OF_ML_DTYPES = (
    "bfloat16",
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""The dtypes of torch that ml_dtypes adds to NumPy."""
_View = Callable[[Any], "np.ndarray | None"]


def view_of(x: Any) -> np.ndarray | None:
    """Return a NumPy array over the memory of `x`, an array of another library in host memory.

    Returns None if `x` is something else, or if NumPy has no view of it: a GPU's array, a tensor
    that requires a gradient, a dtype that NumPy does not know.
    """
    kind = type(x)
    view = _VIEWS.get(kind) or _find_view(kind)
    return view(x)


def is_tensor(x: Any) -> bool:
    """Return whether `x` is a tensor of torch."""
    return isinstance(x, _tensors())


def has_memory(kind: type) -> bool:
    """Return whether tensors of the type `kind` certainly have elements in memory.

    They may hold other tensors in their place if the class defines operators.
    """
    dispatch: Any = "__torch_dispatch__"
    return getattr(kind, dispatch) is getattr(_tensors(), dispatch)


def forbid_resizing(x: Any) -> None:
    """Make torch refuse from now on to resize the storage of `x`, if it is a tensor on the CPU."""
    if is_tensor(x) and x.is_cpu:
        forbid_resizing_storage(x.untyped_storage())


def forbid_resizing_storage(storage: Any) -> None:
    """Make torch refuse from now on to resize a storage on the CPU."""
    torch: Any = sys.modules["torch"]
    its_bytes = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    its_bytes.numpy()  # torch resizes no storage of an array


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
    if issubclass(kind, _tensors()):
        view = _of_torch(sys.modules["torch"], kind)
    elif issubclass(kind, (np.ndarray, np.generic)):
        view = _VIEWS[np.ndarray]
    elif hasattr(kind, "__dlpack_device__") and not hasattr(kind, "__array_interface__"):
        view = _by_array if hasattr(kind, "__array__") else _by_dlpack
    else:
        view = _by_interface
    if len(_VIEWS) < _MOST_TYPES and not issubclass(kind, (list, tuple)):
        _VIEWS[kind] = view
    return view


def _tensors() -> Any:
    """Return the type of torch's tensors; no type if the program has not imported torch."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


def _of_torch(torch: Any, kind: type) -> _View:
    """Return the function that views tensors of the type `kind`.

    The program may resize the storage of a tensor later.  torch would refuse that after
    `Tensor.numpy`.  So DLPack shows the tensor, unless its class may have the elements elsewhere.
    """
    import ml_dtypes

    names = [name for name in _OF_ML_DTYPES if hasattr(torch, name)]
    of_ml_dtypes = {getattr(torch, name): getattr(ml_dtypes, name) for name in names}
    compiled = compiled_viewer() if kind is torch.Tensor else None
    tensors: Any = kind
    in_memory = has_memory(kind)
    show: Callable[[Any], np.ndarray] = np.from_dlpack if in_memory else tensors.numpy

    def view(tensor: Any) -> np.ndarray | None:
        array = None if compiled is None else compiled(tensor)
        return by_python(tensor) if array is None else array

    def by_python(tensor: Any) -> np.ndarray | None:
        try:
            # DLPack does not show that elements are yet to be negated, or that there is no memory.
            if not tensor.is_cpu or tensor.is_neg():
                return None
            if in_memory and tensor.numel() and not tensor.data_ptr():
                return None
            dtype = of_ml_dtypes.get(tensor.dtype)
            if dtype is None:
                return show(tensor)
            bits = torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8
            array: np.ndarray = show(tensor.view(bits)).view(dtype)
        except Exception:  # of torch, or of a class of tensors
            return None
        return array

    return view


def _by_interface(x: Any) -> np.ndarray | None:
    try:
        return np.asarray(x) if hasattr(x, "__array_interface__") else None
    except Exception:  # of another library
        return None


def _by_array(x: Any) -> np.ndarray | None:
    """View an array of a library whose own way is faster than DLPack, such as JAX."""
    try:
        kind, _ = x.__dlpack_device__()
        return np.asarray(x, copy=False) if kind in _HOST_MEMORY else None
    except Exception:  # of another library
        return _by_dlpack(x)


def _by_dlpack(x: Any) -> np.ndarray | None:
    try:
        kind, _ = x.__dlpack_device__()
        return np.from_dlpack(x) if kind in _HOST_MEMORY else None
    except Exception:  # of another library
        return None
