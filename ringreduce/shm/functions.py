"""The compiled functions of this package that are called by their addresses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ringreduce.compiler import jit, pyobjects

PROGRAMS = {
    "run": "executor",
    "enter": "entry",
    "call": "entry",
    "mail": "mailbox",
    "message": "mail_entry",
}
"""The functions that every communicator with shared memory uses: function -> module."""
MODULES = {**PROGRAMS, "access_blocks": "block_access", "tensor_view": "tensor_views"}
"""The module of this package that has each function.  It is imported only to compile."""
_WITH_KEYWORDS = ("call", "message")
"""Functions that Python calls with keyword arguments too."""


def is_available() -> bool:
    """Return whether this rank can run programs of shared memory.

    If all ranks can, all have the compiled folds of all dtypes, and make the same choices.
    """
    if not _may_be_available():
        return False
    jit.share({name: partial(_function, name) for name in PROGRAMS}, needs_float16=True)
    return all(address(name) is not None for name in PROGRAMS)


def compiles() -> bool:
    """Whether `is_available` may compile, or wait for a process that compiles."""
    return _may_be_available() and not all(map(jit.is_kept, PROGRAMS))


def would_be_available() -> bool:
    """Whether `is_available` would return True.  Compiles nothing."""
    if not _may_be_available():
        return False
    return all(jit.has_address(name, needs_float16=True) for name in PROGRAMS)


def _may_be_available() -> bool:
    return sys.platform == "linux" and _knows_arrays()


def address(name: str) -> int | None:
    """Return the address of the function `name`, compiled; None where that is impossible.

    It is impossible where there is no Numba, where Numba does not compile or the processor does not
    convert float16, and where objects are not laid out as `compiler.pyobjects` declares them.
    """
    if not _knows_arrays():
        return None
    try:
        return jit.address(name, partial(_function, name), needs_float16=True)
    except jit.CompilationError:
        return None


@cache
def _knows_arrays() -> bool:
    return pyobjects.knows_arrays()


def _function(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"ringreduce.shm.{MODULES[name]}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def python_function(
    name: str, me: Any = None, doc: str | None = None, called: str | None = None
) -> Callable[..., Any] | None:
    """Return the compiled function `name` as a function of Python; None as `address`.

    Each call passes `me` to it.  Python shows the function as `called`.
    """
    code = address(name)
    if code is None:
        return None
    return pyobjects.make_function(code, called or name, me, name in _WITH_KEYWORDS, doc)
