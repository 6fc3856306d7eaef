"""Find out where an array is, in host memory or on a GPU, without importing CuPy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ringreduce.calls.arguments import (
    as_host_array,
    as_host_out,
    check_overlap,
    overlap_error,
    same_memory,
)
from ringreduce.devices.base import Device
from ringreduce.errors import shown

_GPU_MEMORY = (2, 13)
"""DLPack's device types of CUDA memory: of a GPU, and managed."""


def gpu_of(x: Any) -> int | None:
    """Return the number of the GPU whose memory holds `x`; None if `x` is not on a GPU."""
    if type(x) is np.ndarray or not hasattr(x, "__dlpack_device__"):
        return None
    try:
        kind, number = x.__dlpack_device__()
    except Exception:  # of another library, such as torch for a tensor on 'meta'
        return None
    return int(number) if kind in _GPU_MEMORY else None


def gpu_of_name(where: str, device: Any) -> int:
    """Return the number of the GPU that `device` names: ``"cuda"`` is 0, ``"cuda:1"`` is 1.

    Raises ValueError for anything else.
    """
    name, _, number = str(device).partition(":")
    if name != "cuda" or not (number or "0").isdecimal():
        raise ValueError(
            f"{where}: unknown device {shown(device)}; choose 'cpu', 'cuda' or 'cuda:1'"
        )
    return int(number or 0)


def open_gpu(number: int) -> Device:
    """Make a device for arrays on the GPU `number`, with a stream of its own."""
    device: Device = _cuda("a call").CudaDevice(number)
    return device


def as_array(where: str, x: Any) -> Any:
    """View `x` as an array without a copy: of CuPy if `x` is on a GPU, else of NumPy.

    Raises TypeError unless `x` is an array or a number, ImportError if it is on a GPU and CuPy is
    missing.
    """
    return as_host_array(where, x) if gpu_of(x) is None else _cuda(where).as_gpu_array(x)


def as_out(where: str, out: Any, x: Any) -> Any:
    """View `out` as an array without a copy.

    Raises TypeError if `out` exposes no memory, or is not in the same place as `x`.
    """
    place, gpu = gpu_of(x), gpu_of(out)
    view = as_host_out(where, out) if gpu is None else _cuda(where).as_gpu_array(out)
    if place != gpu:
        raise TypeError(f"{where}: out is {_place(gpu)}, the array is {_place(place)}")
    return view


def as_writable(where: str, out: Any) -> Any:
    """View `out` as an array without a copy: of CuPy if `out` is on a GPU, else of NumPy.

    Raises TypeError if `out` exposes no memory, ImportError if it is on a GPU and CuPy is missing.
    """
    return as_host_out(where, out) if gpu_of(out) is None else _cuda(where).as_gpu_array(out)


def to_host(where: str, array: Any) -> np.ndarray:
    """Return an array in host memory: `array` itself, or a copy if it is on a GPU."""
    if isinstance(array, np.ndarray):
        return array
    host: np.ndarray = _cuda(where).to_host(array)
    return host


def from_host(where: str, host: np.ndarray, into: Any) -> None:
    """Copy an array of host memory to `into`, in host memory or on a GPU."""
    if isinstance(into, np.ndarray):
        into[...] = host
    else:
        _cuda(where).from_host(host, into)


def check_together(where: str, arrays: list[Any]) -> None:
    """Check that all `arrays` of a list are in the same place.  Raises TypeError."""
    places: dict[int | None, int] = {}
    for index, array in enumerate(arrays):
        places.setdefault(gpu_of(array), index)
    if len(places) > 1:
        said = ", ".join(f"member {i} is {_place(gpu)}" for gpu, i in places.items())
        raise TypeError(f"{where}: {said}; pass lists of arrays in the same place")


def is_input(where: str, device: Device, x: Any, out: Any, allowed: bool) -> bool:
    """Whether `out` is the input `x` itself, where `allowed` says that it may be.

    Raises ValueError if `x` and `out` share memory in any other way.
    """
    if device.stream is None:
        if allowed and same_memory(x, out):
            return True
        check_overlap(where, x, out, allowed)
    elif device.overlap(x, out):
        layouts = [(a.shape, a.strides, device.address(a)) for a in (x, out)]
        if allowed and layouts[0] == layouts[1]:
            return True
        raise overlap_error(where, allowed)
    return False


def is_part(device: Device, x: Any, out: Any, begin: int) -> bool:
    """Whether the smaller of two arrays is the part of the other that begins at element `begin`."""
    if not (x.flags.c_contiguous and out.flags.c_contiguous):
        return False
    part, whole = (x, out) if x.size <= out.size else (out, x)
    return bool(device.address(part) == device.address(whole) + begin * whole.dtype.itemsize)


def _place(gpu: int | None) -> str:
    return "in host memory" if gpu is None else f"on GPU {gpu}"


def _cuda(where: str) -> ModuleType:
    try:
        from ringreduce.devices import cuda
    except ImportError as error:
        raise ImportError(
            f"{where}: the array is on a GPU; pip install 'ringreduce[gpu]' ({error})"
        ) from None
    return cuda
