"""Compiles the kernels, on first use, and keeps their machine code for the next start.

Machine code is kept in a folder of this user's alone, under ``~/.cache/ringreduce`` (or
``NUMBA_CACHE_DIR``), or else not at all: it runs whatever somebody has put there, and so does
pickle, with which Numba reads what it has kept.  There is a folder for just this code, compiler,
processor and settings.

What is called by its address is kept as `object_files` has it, a file each, and loaded
without Numba.  Kernels that Python calls with arrays are kept by Numba, each in a folder of its own
with one variant: several ranks that start at once write Numba's index of a function's variants each
as if it were alone, so that a variant could be taken for another.  Files are replaced whole; the
last writer wins, with what the others have written too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import platform
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from ringreduce.compiler import object_files, pyobjects

_OPTIONS = {"nogil": True, "error_model": "numpy"}
"""Without the other error model each division would ask whether it divides by zero."""

_COMPILED: dict[str, Callable[..., Any] | None] = {}
"""A process compiles a kernel once, whichever communicator asks first."""
_COMPILING = threading.Lock()


def kernel(name: str) -> Callable[..., Any] | None:
    """The kernel of that name, compiled; None where that is impossible.

    Without Numba nothing is possible; float16 needs a processor that converts it.
    """
    _once(_COMPILED, name, lambda: _compiled(name))
    return _COMPILED[name]


def can_exchange() -> bool:
    """Whether there is all that ranks of one host need to exchange messages through memory.

    Then all of them have the folds of all dtypes, so that they decide alike which to use.
    """
    names = (name for names in _IN_MODULES.values() for name in names)
    return sys.platform == "linux" and all(_compiled_door(name) for name in names)


FOLD_BYTES = 64
"""Memory that a fold needs: a chunk, as `devices.vectors` has it."""
_FOLDS: dict[str, int | None] = {}
"""Addresses."""
_DOORS: dict[str, int | None] = {}


def fold(op: str, dtype: Any) -> int | None:
    """The address of the compiled fold of an operation, as in `devices.folds`; None without one.

    To be asked where `can_exchange`: then all ranks have the same folds.
    """
    op, dtype = "sum" if op == "mean" else op, np.dtype(dtype)
    name = f"fold-{op}-{dtype.name}"
    if name not in _FOLDS:
        _once(_FOLDS, name, lambda: _address(name, lambda: _fold(op, dtype)))
    return _FOLDS[name]


def _fold(op: str, dtype: Any) -> Any:
    from ringreduce.devices import folds

    return folds.fold_of(op, dtype)


def machine() -> int | None:
    """The address of `shm.executor.run`, compiled; None where that is impossible.

    That is where there is no Numba, or one that does not compile or convert float16, and where
    arrays are not laid out as `pyobjects` takes them to be.
    """
    return _compiled_door("run")


def door(
    name: str, me: Any = None, doc: str | None = None, called: str | None = None
) -> Callable[..., Any] | None:
    """A compiled function of `shm.entry`, for Python under the name `called`; None as `machine`.

    It is given `me` with each call.
    """
    address = _compiled_door(name)
    if address is None:
        return None
    return pyobjects.make_function(address, called or name, me, name in _NAMED, doc)


_IN_MODULES = {
    "shm.executor": ("run",),
    "shm.entry": ("enter", "call"),
}
_NAMED = ("call",)


def _compiled_door(name: str) -> int | None:
    _once(_DOORS, name, lambda: _address_of_door(name))
    return _DOORS[name]


def _address_of_door(name: str) -> int | None:
    try:
        return _address(name, lambda: _door(name)) if pyobjects.knows_arrays() else None
    except Exception:  # whatever keeps Numba from compiling here
        return None


def _door(name: str) -> Any:
    import numba

    if numba.config.DISABLE_JIT or not _converts_float16(numba.config):
        return None
    (module,) = (module for module, names in _IN_MODULES.items() if name in names)
    function = getattr(importlib.import_module(f"ringreduce.{module}"), name)
    takes = function.__code__.co_argcount
    return function, numba.types.int64(*(numba.types.int64,) * takes)


def _once(results: dict[Any, Any], key: Any, compile_: Callable[[], Any]) -> None:
    """Compile what is not there yet, apart from the main thread.

    There a signal's handler may raise at any moment, in between those who take whatever is raised
    for a fault of what is kept: its exception would be lost, and one rank go without a kernel.
    """
    failed: list[BaseException] = []

    def make() -> None:
        try:
            with _COMPILING:
                if key not in results:
                    results[key] = compile_()
        except BaseException as error:
            failed.append(error)

    if key in results:
        return
    thread = threading.Thread(target=make, name="ringreduce compiles")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _address(name: str, described: Callable[[], Any]) -> int | None:
    """Where the compiled function of that name is.

    If it has been kept, Numba is not imported; else `described` tells the function and the types
    that it takes, or None.
    """
    folder = _folder(name)
    path = folder and folder.parent / f"{name}.code"
    # A full disk, a damaged file: whatever is wrong with what is kept, the rest goes without.
    with contextlib.suppress(Exception):
        if path is not None and (kept := object_files.kept(path)) is not None:
            return object_files.loaded(kept)
    found = described()
    if found is None:
        return None
    from ringreduce.compiler import intrinsics

    intrinsics.register()
    function, signature = found
    _call_it(function, name)
    made = object_files.compiled(function, signature, _OPTIONS)
    with contextlib.suppress(Exception):
        if path is not None:
            object_files.keep(path, made)
    return object_files.loaded(made)


def _call_it(function: Any, name: str) -> None:
    """Name a function, and those made with it that it calls, as no other is named.

    Machine code is found by that name and by a number that counts what a process has compiled.  Of
    two pieces kept by two processes under one name, a third would run one in the other's place.
    """
    function.__qualname__ = function.__name__ = name.replace("-", "_")
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        if isinstance(inner, FunctionType) and "<locals>" in inner.__qualname__:
            _call_it(inner, f"{name}_{inner.__name__}")


def _compiled(name: str) -> Callable[..., Any] | None:
    try:
        import numba

        from ringreduce.devices import float16_kernels
    except ImportError:
        return None
    loop, signature = float16_kernels.KERNELS[name]
    _call_it(loop, name)
    if numba.config.DISABLE_JIT:  # NUMBA_DISABLE_JIT=1: to debug, to see which lines are covered
        return _interpreted(loop)
    if "float16" in name.split("-") and not _converts_float16(numba.config):
        return None
    folder = _folder(name)
    if folder is not None:
        # A full disk, a damaged file: whatever is wrong with what is kept, the rest goes without.
        with contextlib.suppress(Exception):
            return _compiled_and_kept(folder, loop, signature)
    compiled: Callable[..., Any] = numba.njit(signature, **_OPTIONS)(loop)
    return compiled


def _interpreted(loop: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> None:
        with np.errstate(all="ignore"):
            loop(*arguments)

    return run


def _compiled_and_kept(
    folder: Path, loop: Callable[..., Any], signature: Any
) -> Callable[..., Any]:
    import numba

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read once, when a function is marked to be kept
    try:
        dispatcher: Any = numba.njit(cache=True, **_OPTIONS)(loop)
    finally:
        numba.config.CACHE_DIR = before
    if not Path(dispatcher.stats.cache_path).is_relative_to(folder):
        raise OSError("the user has told Numba to keep code elsewhere")
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    compiled: Callable[..., Any] = dispatcher
    return compiled


# --- what the processor can do --------------------------------------------------------------------


def _converts_float16(config: Any) -> bool:
    """Whether there are instructions for it.  Without, compiled code calls what is not there."""
    if platform.machine() == "aarch64":
        return True
    return "+f16c" in object_files.target(config)[1].split(",") and bool(config.ENABLE_AVX)


# --- where code is kept ---------------------------------------------------------------------------

_COMPILED_PACKAGES = ("compiler", "devices", "shm")
_CHANGES_NO_CODE = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS")


def _folder(name: str) -> Path | None:
    """Where the machine code of one kernel is kept; None if there is no safe place."""
    digest = hashlib.sha256()
    try:
        for source in (*_sources(), *_compiler()):
            digest.update(source.read_bytes())
        digest.update(repr((sys.version, object_files.host(), _settings())).encode())
        base = Path(os.environ.get("NUMBA_CACHE_DIR") or Path.home() / ".cache")
        private = private_folder(base / "ringreduce" / digest.hexdigest()[:16])
    except (OSError, RuntimeError, ImportError):  # no source file, nowhere to write, no home
        return None
    return private and private / name


def _sources() -> Iterator[Path]:
    """The source files of every package that has compiled code."""
    for package in _COMPILED_PACKAGES:
        yield from sorted((Path(__file__).parent.parent / package).glob("*.py"))


def _compiler() -> Iterator[Path]:
    """Files that tell the versions of Numba and LLVM, and Numba's settings in this folder."""
    for package in ("numba", "llvmlite"):
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise ImportError(f"no {package}")
        yield Path(found.origin).parent / "_version.py"
    settings = Path(".numba_config.yaml")
    if settings.exists():
        yield settings


def _settings() -> list[tuple[str, str]]:
    """What the user has told Numba."""
    told = ((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_"))
    return sorted((name, value) for name, value in told if name not in _CHANGES_NO_CODE)


def private_folder(folder: Path) -> Path | None:
    """The folder, made if need be, if nobody but this user can put anything there; else None.

    It must be closed to all others, and no other user may be able to put another in its place.
    Raises OSError when it cannot be made.
    """
    for place in reversed((folder, *folder.parents)):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve(strict=True)
    for place in (folder, *folder.parents):
        status = place.stat()
        if status.st_uid not in (0, os.geteuid()):
            return None
        kept_by_owners = place != folder and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not kept_by_owners:
            return None
    return folder if not folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) else None
