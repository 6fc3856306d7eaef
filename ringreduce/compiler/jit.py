"""Compile functions on first use, and keep their machine code for the next start.

Callers hand in a name and a callable that imports what is to be compiled.  The callable runs only
if no code of that name has been kept.

Machine code is kept in a folder that only this user can enter: under ``~/.cache/ringreduce``, or
under ``NUMBA_CACHE_DIR``.  Where there is no such folder no code is kept.  Two readers of these
files would run whatever another user had put there: the loader of machine code, and pickle, with
which Numba reads the files that it has kept.  The folder's name is a digest of the sources, the
compiler, the processor and the settings.

There are two kinds of compiled code.

* A C function, which is called by its address.  `object_files` keeps its machine code, in one file
  for each function, and loads the file without Numba.
* A loop, which Python calls with arrays.  Numba keeps its machine code, in one folder for each
  loop, with one variant.  If a folder had several variants and several ranks started at once, each
  rank would write Numba's index of the variants as if it were alone, and a variant could be taken
  for another.

Files are replaced as a whole.  Of several ranks that write a file the last one wins; all of them
have compiled the same code.  Ranks that start together divide C functions among themselves: each
compiles those that no other rank is compiling (`share`), and loads what the others have kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ringreduce.compiler import file_locks, object_files

Function = Callable[..., Any]
Result = TypeVar("Result")

_OPTIONS = {"nogil": True, "error_model": "numpy"}
"""Numba's options.  With its other error model each division would test for a zero divisor."""


class CompilationError(Exception):
    """A function cannot be compiled here."""


class _BusyError(Exception):
    """Another process is compiling the function."""


class Loop(NamedTuple):
    function: Function
    signature: tuple[Any, ...]
    needs_float16: bool = False
    """Whether it is compiled only where the processor converts float16."""


# --- C functions ----------------------------------------------------------------------------------

_ADDRESSES: dict[str, int | CompilationError | None] = {}
_LONGEST_WAIT_S = 60.0
"""Seconds to wait for a function that another process compiles.  That process may be stopped."""


def share(wanted: Mapping[str, Callable[[], Function | None]], needs_float16: bool = False) -> None:
    """Compile those of the functions `wanted` that no other process compiles; see `address`."""
    for name, described in wanted.items():
        if name not in _ADDRESSES:
            _make(_ADDRESSES, name, partial(_address, name, described, needs_float16, wait_s=0))


def address(
    name: str, described: Callable[[], Function | None], needs_float16: bool = False
) -> int | None:
    """Return the address of the compiled function `name`.  A process compiles a function once.

    `described` returns the Python function; if it returns None, so does `address`.  The
    parameters of the C function are 64-bit integers.  Its result is one too, unless the Python
    function is annotated to return None.  Raises CompilationError where there is no Numba,
    where NUMBA_DISABLE_JIT is set, where `needs_float16` and the processor does not convert
    float16, and where compiling fails.
    """
    if name not in _ADDRESSES:
        make = partial(_address, name, described, needs_float16, wait_s=_LONGEST_WAIT_S)
        _make(_ADDRESSES, name, make)
    return _result(_ADDRESSES[name])


def _address(
    name: str, described: Callable[[], Function | None], needs_float16: bool, wait_s: float
) -> int | None:
    """Load a function, or compile it.

    Waits at most `wait_s` seconds for another process that compiles it, then compiles it here
    too; with 0 raises _BusyError instead.
    """
    path = _kept_in(name)
    if (loaded := _load(path)) is not None:
        return loaded
    if path is None:
        return _compile(name, described, needs_float16, path)
    with file_locks.hold(path.with_suffix(".lock"), wait_s) as alone:
        if not alone and not wait_s:
            raise _BusyError
        return _load(path) or _compile(name, described, needs_float16, path)


def is_kept(name: str) -> bool:
    """Whether `address` need not compile the function `name`; it is loaded if it is kept."""
    if name not in _ADDRESSES and (loaded := _load(_kept_in(name))) is not None:
        _ADDRESSES[name] = loaded
    return name in _ADDRESSES


def has_address(name: str, needs_float16: bool = False) -> bool:
    return is_kept(name) or not _obstacle(needs_float16)


def _kept_in(name: str) -> Path | None:
    folder = _folder(name)
    return folder and folder.parent / f"{name}.code"


def _load(path: Path | None) -> int | None:
    # A damaged file: without kept code everything works, only slower.
    with contextlib.suppress(Exception):
        if path is not None and (kept := object_files.read(path)) is not None:
            return object_files.load(kept)
    return None


def _compile(
    name: str, described: Callable[[], Function | None], needs_float16: bool, path: Path | None
) -> int | None:
    if obstacle := _obstacle(needs_float16):
        raise CompilationError(obstacle)
    function = described()
    if function is None:
        return None
    _prepare(function, name)
    made = object_files.compile_function(function, _signature(function), _OPTIONS)
    with contextlib.suppress(Exception):  # a full disk
        if path is not None:
            object_files.write(path, made)
    return object_files.load(made)


def _obstacle(needs_float16: bool) -> str:
    """Return why no C function can be compiled here; empty if it can."""
    try:
        import numba
    except ImportError as error:
        return f"there is no Numba: {error}"
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    if needs_float16 and not _converts_float16(numba.config):
        return "the processor does not convert float16"
    return ""


def _signature(function: Function) -> Any:
    from numba import types

    returned = function.__annotations__.get("return", int)
    result = types.void if returned in (None, "None") else types.int64
    return result(*(types.int64,) * function.__code__.co_argcount)


# --- loops ----------------------------------------------------------------------------------------

_KERNELS: dict[str, Function | CompilationError | None] = {}


def kernel(name: str, described: Callable[[], Loop]) -> Function | None:
    """Return the loop `name`, compiled once in a process; as Python with NUMBA_DISABLE_JIT.

    None without Numba, and where the loop needs float16 that the processor does not convert.
    """
    if name not in _KERNELS:
        _make(_KERNELS, name, lambda: _kernel(name, described))
    return _result(_KERNELS[name])


def _kernel(name: str, described: Callable[[], Loop]) -> Function | None:
    try:
        import numba
    except ImportError:
        return None
    loop = described()
    _prepare(loop.function, name)
    if numba.config.DISABLE_JIT:  # NUMBA_DISABLE_JIT=1: to debug, to see which lines are covered
        return _interpreted(loop.function)
    if loop.needs_float16 and not _converts_float16(numba.config):
        return None
    folder = _folder(name)
    if folder is not None:
        # A full disk, a damaged file: without kept code everything works, only slower.
        with contextlib.suppress(Exception):
            return _compiled_and_kept(folder, loop)
    compiled: Function = numba.njit(loop.signature, **_OPTIONS)(loop.function)
    return compiled


def _interpreted(function: Function) -> Function:
    def run(*arguments: Any) -> None:
        with np.errstate(all="ignore"):
            function(*arguments)

    return run


def _compiled_and_kept(folder: Path, loop: Loop) -> Function:
    import numba

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read once, when a function is marked to be kept
    try:
        dispatcher: Any = numba.njit(cache=True, **_OPTIONS)(loop.function)
    finally:
        numba.config.CACHE_DIR = before
    if not Path(dispatcher.stats.cache_path).is_relative_to(folder):
        raise OSError("the user has told Numba to keep code elsewhere")
    dispatcher.compile(loop.signature)
    dispatcher.disable_compile()
    compiled: Function = dispatcher
    return compiled


# --- compiling ------------------------------------------------------------------------------------

COMPILING = threading.Lock()
"""Held while this process compiles, or waits for a process that compiles."""
_SPENT = SimpleNamespace(seconds=0.0, said=False)
"""What this process has spent on compiling, and whether the user was told."""
_SILENT_S = 5.0
"""Seconds of compiling after which a line says why nothing happens."""


def _make(
    results: dict[str, Result | CompilationError], name: str, make: Callable[[], Result]
) -> None:
    """Put the result of `make`, or its failure, into `results`: in a thread of its own.

    If `make` raises _BusyError there is no result yet.  On the main thread a signal's handler
    may raise at any moment, also inside code that takes every exception for a fault of the kept
    file.  The handler's exception would be lost there, and this rank alone would go without the
    compiled function.
    """

    def work() -> None:
        with COMPILING:
            if name in results:
                return
            try:
                results[name] = make()
            except _BusyError:
                return
            except Exception as error:
                failure = CompilationError(f"{name} cannot be compiled: {error}")
                failure.__cause__ = error
                results[name] = failure

    thread = threading.Thread(target=work, name="ringreduce compiles")
    begin = time.monotonic()
    thread.start()
    thread.join(None if _SPENT.said else max(_SILENT_S - _SPENT.seconds, 0.0))
    if thread.is_alive():
        _SPENT.said = True
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
            sys.stderr.write(
                "ringreduce: compiling for this processor; later starts load what a cache folder "
                "keeps\n"
            )
        thread.join()
    _SPENT.seconds += time.monotonic() - begin


def _result(result: Result | CompilationError) -> Result:
    if isinstance(result, CompilationError):
        raise result
    return result


def _prepare(function: Function, name: str) -> None:
    from ringreduce.compiler import intrinsics

    intrinsics.register()
    _rename(function, name)


def _rename(function: Function, name: str) -> None:
    """Give `function`, and the local functions that it calls, names that no other function has.

    Numba names machine code by the function's name and by a count of this process's functions.
    Two processes could keep different code under one name, and a third process could load the
    wrong one.
    """
    function.__qualname__ = function.__name__ = name.replace("-", "_")
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        if isinstance(inner, FunctionType) and "<locals>" in inner.__qualname__:
            _rename(inner, f"{name}_{inner.__name__}")


def _converts_float16(config: Any) -> bool:
    """Whether the processor converts float16: otherwise Numba's code needs missing functions."""
    if platform.machine() == "aarch64":
        return True
    return "+f16c" in object_files.target(config)[1].split(",") and bool(config.ENABLE_AVX)


# --- where code is kept ---------------------------------------------------------------------------

COMPILED_PACKAGES = ("compiler", "devices", "shm", "trace")
_CHANGES_NO_CODE = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS")


def _folder(name: str) -> Path | None:
    """Return the folder for the machine code `name`, by a digest of its sources, if one is safe."""
    digest = hashlib.sha256()
    try:
        for source in (*_sources(), *_compiler_files()):
            digest.update(source.read_bytes())
        digest.update(repr((sys.version, object_files.host(), _settings())).encode())
        base = Path(os.environ.get("NUMBA_CACHE_DIR") or Path.home() / ".cache")
        private = private_folder(base / "ringreduce" / digest.hexdigest()[:16])
    except (OSError, RuntimeError, ImportError):  # no source file, nowhere to write, no home
        return None
    return private and private / name


def _sources() -> Iterator[Path]:
    for package in COMPILED_PACKAGES:
        yield from sorted((Path(__file__).parent.parent / package).glob("*.py"))


def _compiler_files() -> Iterator[Path]:
    """The files with the versions of Numba and LLVM, and Numba's settings in this folder."""
    for package in ("numba", "llvmlite"):
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise ImportError(f"no {package}")
        yield Path(found.origin).parent / "_version.py"
    settings = Path(".numba_config.yaml")
    if settings.exists():
        yield settings


def _settings() -> list[tuple[str, str]]:
    given = ((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_"))
    return sorted((name, value) for name, value in given if name not in _CHANGES_NO_CODE)


def private_folder(folder: Path) -> Path | None:
    """Make `folder` if need be, and return it if no other user can put a file into it, else None.

    No other user may be able to replace the folder or one above it.  Raises OSError if it
    cannot be made.
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
