"""Compiles the kernels, on first use, and keeps their machine code for the next start.

Numba reads what it has kept with pickle, which runs whatever it is told to.  So machine code is
kept in a folder of this user's alone, under ``~/.cache/ringreduce`` (or ``NUMBA_CACHE_DIR``), or
else not at all.

Several ranks may start at once, on several kinds of hosts that share one home.  Numba's index of a
function's variants is then written by each as if it were alone, so that a variant can be taken for
another.  Here a kernel has one variant to a folder: one signature, in a folder of its own below one
for just this code, compiler and processor.  Files are replaced whole; the last writer wins, with
what the others have written too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
    return sys.platform == "linux" and door() is not None


FOLD_BYTES = 16 << 10
"""Memory that a fold needs."""
_FUNCTIONS: dict[str, Any] = {}
"""Compiled functions that are called by their addresses."""
_DOORS: dict[str, Any] = {}


def fold(op: str, dtype: Any) -> int | None:
    """The address of the compiled fold of an operation, as in `devices.folds`; None without one.

    To be asked where `can_exchange`: then all ranks have the same folds.
    """
    op, dtype = "sum" if op == "mean" else op, np.dtype(dtype)
    name = f"fold-{op}-{dtype.name}"
    if name not in _FUNCTIONS:
        _once(_FUNCTIONS, name, lambda: _compiled_fold(name, op, dtype))
    return None if _FUNCTIONS[name] is None else int(_FUNCTIONS[name].address)


def door() -> Callable[..., int] | None:
    """`devices.door.enter`, compiled; None where that is impossible.

    That is where there is no Numba, or one that does not compile or convert float16, and where
    arrays are not laid out as it takes them to be.
    """
    _once(_DOORS, "door", _compiled_door)
    opened: Callable[..., int] | None = _DOORS["door"]
    return opened


def _compiled_door() -> Any:
    try:
        import numba

        from ringreduce.devices import door

        converts = _converts_float16(numba.config, _features(numba.config))
        if numba.config.DISABLE_JIT or not converts or not door.knows_arrays():
            return None
        signature = numba.types.int64(*(numba.types.int64,) * 3)
        function = _FUNCTIONS["door"] = _compiled_function("door", door.enter, signature)
        return door.opened(function.address)
    except Exception:  # whatever keeps Numba from compiling here
        return None


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


def _compiled_fold(name: str, op: str, dtype: Any) -> Any:
    from ringreduce.devices import folds

    found = folds.fold_of(op, dtype)
    return found and _compiled_function(name, found.function, found.signature)


def _compiled_function(name: str, function: Callable[..., Any], signature: Any) -> Any:
    """A function that C can call."""
    import numba

    _call_it(function, name)
    folder = _folder(name, numba, _features(numba.config))
    if folder is not None:
        # As with kernels: if anything is wrong with what is kept, go without.
        with contextlib.suppress(Exception), _cached_in(folder):
            return numba.cfunc(signature, cache=True, **_OPTIONS)(function)
    return numba.cfunc(signature, **_OPTIONS)(function)


def _call_it(function: Any, name: str) -> None:
    """Name a function, and those made with it that it calls, as no other is named.

    Machine code is found by that name and by a number that counts what a process has compiled.  Of
    two pieces kept by two processes under one name, a third would run one in the other's place.
    """
    function.__qualname__ = function.__name__ = name.replace("-", "_")
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        if "<locals>" in getattr(inner, "__qualname__", ""):
            _call_it(inner, f"{name}_{inner.__name__}")


@contextlib.contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    """Let Numba keep there what is compiled now."""
    import numba

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read once, when a function is marked to be kept
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _compiled(name: str) -> Callable[..., Any] | None:
    try:
        import numba

        from ringreduce.devices import kernels
    except ImportError:
        return None
    loop, signature = kernels.KERNELS[name]
    _call_it(loop, name)
    if numba.config.DISABLE_JIT:  # NUMBA_DISABLE_JIT=1: to debug, to see which lines are covered
        return _interpreted(loop)
    features = _features(numba.config)
    if "float16" in name.split("-") and not _converts_float16(numba.config, features):
        return None
    folder = _folder(name, numba, features)
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

    with _cached_in(folder):
        dispatcher: Any = numba.njit(cache=True, **_OPTIONS)(loop)
    if not Path(dispatcher.stats.cache_path).is_relative_to(folder):
        raise OSError("the user has told Numba to keep code elsewhere")
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    compiled: Callable[..., Any] = dispatcher
    return compiled


# --- what the processor can do --------------------------------------------------------------------


def _features(config: Any) -> str:
    """What the processor can do and Numba makes use of, as LLVM writes it: ``+avx2,-sse4a``."""
    if config.CPU_FEATURES is not None:
        return str(config.CPU_FEATURES)
    from llvmlite import binding

    try:
        return str(binding.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM does not know how to ask
        return ""


def _converts_float16(config: Any, features: str) -> bool:
    """Whether there are instructions for it.  Without, compiled code calls what is not there."""
    if platform.machine() == "aarch64":
        return True
    return "+f16c" in features.split(",") and bool(config.ENABLE_AVX)


# --- where code is kept ---------------------------------------------------------------------------


def _folder(name: str, numba: Any, features: str) -> Path | None:
    """Where the machine code of one kernel is kept; None if there is no safe place."""
    import llvmlite

    digest = hashlib.sha256()
    settings = (numba.config.CPU_NAME, numba.config.OPT, llvmlite.binding.get_host_cpu_name())
    versions = (sys.version, numba.__version__, llvmlite.__version__)
    try:
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
        digest.update(repr((settings, versions, features)).encode())
        base = Path(numba.config.CACHE_DIR or Path.home() / ".cache")
        private = private_folder(base / "ringreduce" / digest.hexdigest()[:16])
    except (OSError, RuntimeError):  # no source file, nowhere to write, no home
        return None
    return private and private / name


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
