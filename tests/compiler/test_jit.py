"""How kernels are compiled and their machine code kept: each test in processes of its own."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numba
import pytest
from llvmlite import binding

from ringreduce.compiler import intrinsics, jit, object_files
from ringreduce.devices import compiled, float16_kernels
from ringreduce.shm import functions
from tests.support.mpi import ROOT

pytestmark = pytest.mark.slow

FEATURES = binding.get_host_cpu_features()

PROGRAM = """
import json, sys
if "without Numba" in sys.argv:
    sys.modules["numba"] = None
import ml_dtypes
import numpy as np
from ringreduce.devices import compiled
from ringreduce.devices.cpu import CpuDevice

told = {}
for name in ["bfloat16"] + ["float16"] * ("float16" in sys.argv):
    array = np.arange(1, 1002).astype(name)
    into = np.empty_like(array)
    CpuDevice().fold("sum", name)(array, array, into)
    assert (into == array + array).all()
    kernel = compiled.kernel(f"sum-{name}")
    told[name] = {"way": type(kernel).__name__}
    if hasattr(kernel, "stats"):
        hits, path = sum(kernel.stats.cache_hits.values()), kernel.stats.cache_path
        told[name] |= {"hits": hits, "path": path}
if "numba" in sys.modules and sys.modules["numba"]:
    told["CACHE_DIR"] = sys.modules["numba"].config.CACHE_DIR
print(json.dumps(told))
"""


def start(
    home: Path, *arguments: str, program: str = PROGRAM, **variables: str
) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def told_by(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "Warning" not in err
    return json.loads(out)


def run(home: Path, *arguments: str, **variables: str) -> dict:
    return told_by(start(home, *arguments, **variables))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A home in which PROGRAM has run twice at once, and what one of the processes told."""
    home = tmp_path_factory.mktemp("home")
    first, *others = [told_by(process) for process in [start(home) for _ in range(2)]]
    assert [told["bfloat16"]["way"] for told in (first, *others)] == ["CPUDispatcher"] * 2
    return home, first


@pytest.fixture
def kept(made, tmp_path):
    """A copy of that, and what was told."""
    home, told = made
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    return json.loads(json.dumps(told).replace(str(home), str(tmp_path)))


def kept_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.nb?"))


# --- machine code is kept -------------------------------------------------------------------------


def test_machine_code_of_ranks_that_start_at_once_is_kept_for_the_next_start(tmp_path, kept):
    assert run(tmp_path)["bfloat16"]["hits"] == 1
    assert Path(kept["bfloat16"]["path"]).is_relative_to(tmp_path / ".cache" / "ringreduce")
    assert kept["CACHE_DIR"] == ""


def test_every_kernel_has_a_folder_of_its_own_which_only_the_user_can_enter(made):
    home, told = made
    folder = Path(told["bfloat16"]["path"])
    assert sorted(path.suffix for path in folder.iterdir()) == [".nbc", ".nbi"]
    private = folder.parent.parent
    assert private.parent == home / ".cache" / "ringreduce"
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [0o770, 0o705])
def test_a_folder_that_others_can_enter_is_not_read(tmp_path, kept, mode):
    private = Path(kept["bfloat16"]["path"]).parent.parent
    private.chmod(mode)
    before = kept_in(private)
    told = run(tmp_path)["bfloat16"]
    assert (told["hits"], told["path"]) == (0, None)
    assert kept_in(private) == before


def test_where_numba_is_told_to_keep_code_it_is_kept(tmp_path):
    told = run(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "here"))
    assert Path(told["bfloat16"]["path"]).is_relative_to(tmp_path / "here" / "ringreduce")
    assert told["CACHE_DIR"] == str(tmp_path / "here")


def test_but_not_where_others_can_write(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here").chmod(0o777)
    told = run(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "here"))
    assert told["bfloat16"]["path"] is None
    assert kept_in(tmp_path) == []


@pytest.mark.usefixtures("kept")
def test_what_is_damaged_is_compiled_again(tmp_path):
    for path in kept_in(tmp_path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(tmp_path)["bfloat16"]["way"] == "CPUDispatcher"


def test_where_nothing_can_be_kept_everything_works():
    assert run(Path("/dev/null"))["bfloat16"]["path"] is None


# --- and loaded without Numba ---------------------------------------------------------------------

LOADS = """
import json, sys
import numpy as np
from ringreduce.devices import compiled
from ringreduce.shm import functions

can = "all" not in sys.argv or functions.is_available()
left, right = np.arange(9, dtype=np.float32), np.ones(9, np.float32)
if can:
    import ctypes
    address = compiled.fold("sum", "float32")
    sources = np.array([left.ctypes.data, right.ctypes.data])
    memory = np.empty(compiled.FOLD_BYTES, np.uint8)
    fold = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 6)(address)
    fold(left.ctypes.data, sources.ctypes.data, 2, 9, 0, memory.ctypes.data)
print(json.dumps({"can": can, "imported": "numba" in sys.modules, "sum": left.tolist()}))
"""
WITHOUT, WITH = [
    {"can": True, "imported": imported, "sum": list(range(1, 10))} for imported in (False, True)
]


def loads(home: Path, *arguments: str, **variables: str) -> dict:
    return told_by(start(home, *arguments, program=LOADS, **variables))


def code_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.code"))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A home with the code that this process keeps: all but the folds', and one fold's."""
    home, here = tmp_path_factory.mktemp("home"), jit._folder("code")
    if here and functions.is_available() and compiled.fold("sum", "float32"):
        folder = jit.private_folder(home / ".cache/ringreduce" / here.parent.name)
        for path in here.parent.glob("*.code"):
            shutil.copy(path, folder)
    assert loads(home, "all") in (WITH, WITHOUT)  # it makes what this process does not keep
    return home


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """A home for which one fold's code is made and no other."""
    home = tmp_path_factory.mktemp("home")
    assert loads(home) == WITH
    return home


@pytest.fixture
def fold(folded, tmp_path):
    """A copy of that."""
    shutil.copytree(folded, tmp_path, dirs_exist_ok=True)


def test_kept_machine_code_is_loaded_without_numba(loaded):
    wanted = {f"{name}.code" for name in (*functions.PROGRAMS, "fold-sum-float32")}
    assert wanted <= {path.name for path in code_in(loaded)}
    assert loads(loaded, "all") == WITHOUT


@pytest.mark.parametrize("keep", [0, 20, 4000, -1])
@pytest.mark.usefixtures("fold")
def test_a_damaged_file_is_not_read(tmp_path, keep):
    (path,) = code_in(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    assert object_files.read(path) is None


@pytest.mark.usefixtures("fold")
def test_a_damaged_file_is_made_again(tmp_path):
    (path,) = code_in(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert loads(tmp_path) == WITH
    assert len(path.read_bytes()) == len(whole)
    assert loads(tmp_path) == WITHOUT


@pytest.mark.usefixtures("fold")
def test_code_that_needs_what_is_not_there_is_not_loaded(tmp_path):
    (path,) = code_in(tmp_path)
    made = object_files.read(path)
    assert made is not None
    with pytest.raises(OSError, match="no nowhere_to_be_found in this process"):
        object_files.load(replace(made, needs=(*made.needs, "nowhere_to_be_found")))
    object_files.write(path, replace(made, needs=("nowhere_to_be_found",)))
    assert loads(tmp_path) == WITH
    assert loads(tmp_path) == WITHOUT


@pytest.mark.usefixtures("fold")
def test_code_in_a_folder_that_others_can_enter_is_not_loaded(tmp_path):
    code_in(tmp_path)[0].parent.chmod(0o755)
    assert loads(tmp_path) == WITH


def test_where_no_code_can_be_kept_it_is_made():
    assert loads(Path("/proc")) == WITH


@pytest.mark.usefixtures("fold")
def test_other_settings_have_other_code(tmp_path):
    assert loads(tmp_path, NUMBA_OPT="2") == WITH
    assert loads(tmp_path, NUMBA_NUM_THREADS="1") == WITHOUT
    assert len(code_in(tmp_path)) == 2


def test_nothing_is_loaded_that_numba_is_told_not_to_compile(loaded):
    assert not loads(loaded, "all", NUMBA_DISABLE_JIT="1")["can"]


# --- and foreseen without compiling ---------------------------------------------------------------

FORESEES = """
import json, sys
if "without Numba" in sys.argv:
    sys.modules["numba"] = None
from ringreduce.shm import functions
told = {"can": functions.would_be_available()}
print(json.dumps(told | {"imported": sys.modules.get("numba") is not None}))
"""


def foresees(home: Path, *arguments: str, **variables: str) -> dict:
    return told_by(start(home, *arguments, program=FORESEES, **variables))


def test_functions_that_can_be_compiled_are_foreseen_without_compiling(tmp_path):
    assert foresees(tmp_path) == {"can": True, "imported": True}
    assert code_in(tmp_path) == []


def test_functions_that_are_kept_are_foreseen_without_numba(loaded):
    assert foresees(loaded) == {"can": True, "imported": False}


def test_where_numba_is_missing_or_does_not_compile_no_functions_are_foreseen(tmp_path):
    assert not foresees(tmp_path, "without Numba")["can"]
    assert not foresees(tmp_path, NUMBA_DISABLE_JIT="1")["can"]


# --- what is compiled -----------------------------------------------------------------------------


def call(address: int | None, *words: int) -> int:
    assert address is not None
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * len(words))(address)
    return int(function(*words))


@pytest.fixture
def nothing_kept(tmp_path, monkeypatch):
    """Functions are compiled in this process, and it knows none of them yet."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_ADDRESSES", {})


@pytest.mark.usefixtures("nothing_kept")
def test_parameters_and_the_result_are_words():
    def difference(left: int, right: int) -> int:
        return left - right

    assert call(jit.address("difference", lambda: difference), 1, 3 << 40) == 1 - (3 << 40)


@pytest.mark.usefixtures("nothing_kept")
def test_what_is_not_there_has_no_address():
    assert jit.address("nothing", lambda: None) is None


@pytest.mark.usefixtures("nothing_kept")
def test_a_function_that_does_not_compile_is_tried_once():
    tried = []

    def described():
        tried.append(1)
        return lambda: "no word"

    for _ in range(2):
        with pytest.raises(jit.CompilationError, match="text cannot be compiled: "):
            jit.address("text", described)
    assert tried == [1]


# --- processes that start together ----------------------------------------------------------------


def double(word: int) -> int:
    return 2 * word


COMPILES = """
import time
from ringreduce.compiler import jit

def double(word: int) -> int:
    return 2 * word

def described():
    print("began", flush=True)
    time.sleep(1)
    return double

assert jit.address("double", described) is not None
"""


@pytest.fixture
def another(nothing_kept, tmp_path):
    """Another process, which has begun to compile `double`."""
    process = start(tmp_path, program=COMPILES, NUMBA_CACHE_DIR=str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("another")
def test_a_process_compiles_what_no_other_one_is_compiling():
    asked = []
    wanted = {name: lambda name=name: asked.append(name) or double for name in ("double", "twice")}
    jit.share(wanted)
    assert asked == list(jit._ADDRESSES) == ["twice"]


def test_a_process_loads_what_another_one_has_compiled(another):
    asked = []
    assert call(jit.address("double", lambda: asked.append("double") or double), 21) == 42
    assert asked == []
    assert another.wait(timeout=60) == 0


def test_a_process_that_is_killed_leaves_its_functions_to_the_others(another):
    another.kill()
    assert call(jit.address("double", lambda: double), 21) == 42


def test_a_process_that_is_stopped_is_not_waited_for_for_ever(another, monkeypatch):
    another.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(jit, "_LONGEST_WAIT_S", 0.1)
    assert call(jit.address("double", lambda: double), 21) == 42


# --- which sources machine code is made from ------------------------------------------------------


EDITED = {
    "compiler/memory.py": True,
    "devices/vectors.py": True,
    "shm/executor.py": True,
    "shm/layout.py": True,
    "calls/engine.py": False,
}
EDITS = """
import sys
from ringreduce.compiler import jit
print(jit._folder("name").parent)
for file in sys.argv[1:]:
    open("ringreduce/" + file, "a").write("# edited")
    print(jit._folder("name").parent)
"""


def test_an_edited_source_has_another_folder(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ringreduce", tmp_path / "ringreduce", ignore=ignored)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", EDITS, *EDITED]
    folders = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True).split()
    assert [before != after for before, after in pairwise(folders)] == list(EDITED.values())


# --- which folders are safe -----------------------------------------------------------------------


def test_a_private_folder_is_made_with_all_that_lead_to_it(tmp_path):
    folder = jit.private_folder(tmp_path / "a" / "b")
    assert folder == (tmp_path / "a" / "b").resolve()
    assert [place.stat().st_mode & 0o777 for place in (folder, folder.parent)] == [0o700, 0o700]
    assert jit.private_folder(tmp_path / "a" / "b") == folder


@pytest.mark.parametrize(
    ("mode", "safe"), [(0o755, True), (0o1777, True), (0o777, False), (0o775, False)]
)
def test_nobody_else_can_put_another_folder_in_its_place(tmp_path, mode, safe):
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent").chmod(mode)
    assert bool(jit.private_folder(tmp_path / "parent" / "mine")) is safe


def test_what_counts_is_where_a_link_leads(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert jit.private_folder(tmp_path / "link" / "mine") is None


# --- where kernels cannot be compiled -------------------------------------------------------------


def test_without_numba_numpy_does_the_work(tmp_path):
    told = run(tmp_path, "without Numba", "float16")
    assert [told[name]["way"] for name in ("float16", "bfloat16")] == ["NoneType", "NoneType"]


def test_without_instructions_for_float16_numpy_does_its_work(tmp_path):
    told = run(tmp_path, "float16", NUMBA_CPU_NAME="generic")
    ways = {name: told[name]["way"] for name in ("float16", "bfloat16")}
    by_numpy = "CPUDispatcher" if platform.machine() == "aarch64" else "NoneType"
    assert ways == {"float16": by_numpy, "bfloat16": "CPUDispatcher"}


def test_the_kernels_are_python_too():
    """All that is true of them compiled; this also shows which of their lines are covered."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/devices/test_float16.py"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


# --- machine code is good -------------------------------------------------------------------------

PACKED = {
    "sum-float16": ("vcvtph2ps", "vaddps", "vcvtps2ph"),
    "prod-float16": ("vcvtph2ps", "vmulps", "vcvtps2ph"),
    "sum-bfloat16-pairs": ("vaddps",),
    "prod-bfloat16-pairs": ("vmulps",),
    "min-bfloat16": ("vpminsw",),
    "max-float16": ("vpmaxsw",),
    "accumulate-sum-float16": ("vcvtph2ps", "vaddps"),
    "accumulate-sum-bfloat16": ("vaddps",),
    "divide-float16": ("vdivps",),
    "float32-float16": ("vcvtps2ph",),
    "float32-bfloat16": ("vpsrld",),
    "float64-bfloat16": ("vcvtpd2ps",),
    "float16-float64": ("vcvtps2pd",),
}
"""Kernel -> instructions that work on whole vectors in its loops."""
if FEATURES.get("avx512fp16"):  # which computes with 16-bit floats, and rounds to the same bits
    PACKED |= {
        "sum-float16": ("vaddph",),
        "prod-float16": ("vmulph",),
        "accumulate-sum-float16": ("vcvtph2psx", "vaddps"),
        "float32-float16": ("vcvtps2phx",),
        "float16-float64": ("vcvtph2pd",),
    }
VECTOR = r"{}(?:\s[^\n]*%[yz]mm|y\s)"
"""On registers of a whole vector, or on one in memory."""


@pytest.mark.skipif(
    not (FEATURES.get("f16c") and FEATURES.get("avx2")), reason="other instructions elsewhere"
)
@pytest.mark.few(5)
@pytest.mark.parametrize("name", PACKED)
def test_the_loops_are_vectorised(name):
    loop, signature = float16_kernels.KERNELS[name]
    intrinsics.register()
    dispatcher = numba.njit(signature, nogil=True, error_model="numpy")(loop)
    assembly = "".join(dispatcher.inspect_asm().values())
    # Folds have a loop apart and one in place; those of pairs compute twice in each.
    times = 4 if name.endswith("pairs") else 2 if "folding" in loop.__qualname__ else 1
    for instruction in PACKED[name]:
        assert len(re.findall(VECTOR.format(instruction), assembly)) >= times, instruction


@pytest.mark.parametrize("what", ["kernel", "function"])
def test_what_a_signal_brings_while_something_is_compiled_is_not_lost(what, monkeypatch):
    class AlarmError(Exception):
        pass

    def slow(*_: object, **__: object) -> object:
        try:
            for _ in range(300):
                time.sleep(0.001)
        except Exception:  # as where what is kept may be damaged
            return None
        return print

    def handler(number: int, frame: object) -> None:
        raise AlarmError

    def ask() -> object:
        return compiled.kernel("sum-float16") if what == "kernel" else functions.is_available()

    monkeypatch.setattr(jit, "_kernel" if what == "kernel" else "_address", slow)
    monkeypatch.setattr(jit, "_KERNELS" if what == "kernel" else "_ADDRESSES", {})
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(AlarmError):
            ask()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ask() is (print if what == "kernel" else True)
