"""A stand-in for CuPy in tests of the trainer: NumPy that refuses arrays which are not its own.

CuPy's functions and operators raise TypeError for a NumPy array.  So code that mixes the two is
found without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

NAME = "strict_arrays"
_CONVERTERS = ("asarray", "array")


class DeviceArray(np.ndarray):
    """An array of the stand-in."""

    __module__ = NAME

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        outs = options.get("out", ())
        _refuse_foreign([*inputs, *outs])
        if outs:
            options["out"] = tuple(each.view(np.ndarray) for each in outs)
        result = getattr(ufunc, method)(*map(_plain, inputs), **options)
        return outs[0] if outs else _own(result)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_foreign([value])
        super().__setitem__(key, value)

    def get(self) -> np.ndarray:
        """Return a copy in host memory."""
        return np.array(self)


def _refuse_foreign(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is np.ndarray and value.ndim:
            raise TypeError("Unsupported type numpy.ndarray")


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, DeviceArray) else value


def _own(value: Any) -> Any:
    return value.view(DeviceArray) if type(value) is np.ndarray else value


class _Module(ModuleType):
    """The functions of NumPy, for arrays of the stand-in."""

    ndarray = DeviceArray

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            if name not in _CONVERTERS:
                parts = [list(each) if isinstance(each, (list, tuple)) else [each] for each in args]
                _refuse_foreign(value for part in parts for value in part)
            return _own(found(*args, **options))

        return call


MODULE = sys.modules.setdefault(NAME, _Module(NAME))
"""To pass as `xp`."""


class Ranks:
    """A communicator that takes arrays of the stand-in, and returns such arrays for them."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            taken: list[DeviceArray] = []
            result = found(*_given(args, taken), **_given(options, taken))
            if name == "split" and result is not None:
                return Ranks(result)
            return _returned(result) if taken else result

        return call

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *how: Any) -> None:
        self._comm.__exit__(*how)


class _Work:
    """A Work whose result is an array of the stand-in."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        return _returned(self._work.wait(*args))


def _given(value: Any, taken: list[DeviceArray]) -> Any:
    """Return what the communicator is to get; append the arrays of the stand-in to `taken`."""
    if isinstance(value, DeviceArray):
        taken.append(value)
        return _plain(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_given(each, taken) for each in value)
    if isinstance(value, dict):
        return {key: _given(each, taken) for key, each in value.items()}
    return value


def _returned(value: Any) -> Any:
    if isinstance(value, list):
        return [_returned(each) for each in value]
    return _Work(value) if hasattr(value, "wait") else _own(value)
