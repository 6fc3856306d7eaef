"""What imports what, and what is found nowhere in the package: read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from graphlib import TopologicalSorter

import pytest

import ringreduce as rr
from ringreduce.compiler import jit
from ringreduce.shm import functions
from tests.support.each import each
from tests.support.imports import (
    GROUND,
    LAZY,
    MAY_IMPORT,
    PACKAGE,
    SOURCES,
    TREES,
    imports_of,
    package_of,
)


@cache
def imports() -> dict[str, set[str]]:
    """Return what each module imports."""
    return {module: imports_of(module, TREES[module]) for module in SOURCES}


def under(name: str) -> set[str]:
    return {m for m in SOURCES if m == f"ringreduce.{name}" or m.startswith(f"ringreduce.{name}.")}


# --- the direction of imports ---------------------------------------------------------------------


def upward(module: str, tree: ast.AST) -> set[tuple[str, str]]:
    """The imports of a module that its package may not make."""
    package = package_of(module)
    allowed = MAY_IMPORT.get(package, set()) | GROUND | {package}
    found = {package_of(name) or "the public names" for name in _inner(imports_of(module, tree))}
    return {(module.removeprefix("ringreduce."), name) for name in found - allowed}


def _inner(names: set[str]) -> set[str]:
    return {name for name in names if name == "ringreduce" or name in SOURCES}


def test_no_two_modules_import_each_other():
    # `ringreduce` names its packages for type checkers alone, and imports them when they are used.
    public = imports()["ringreduce"] - {"ringreduce.pipeline", "ringreduce.train"}
    TopologicalSorter(imports() | {"ringreduce": public}).prepare()


def test_packages_import_what_stands_below_them():
    packages = (m for m in SOURCES if m != "ringreduce" and package_of(m) not in GROUND)
    found = set().union(*(upward(module, TREES[module]) for module in packages))
    assert found == LAZY


def test_of_pipelines_their_pictures_alone_import_the_code_that_draws():
    importers = {
        m for m in under("pipeline") if any(package_of(n) == "picture" for n in imports()[m])
    }
    assert importers == {"ringreduce.pipeline.picture"}


def test_the_ground_imports_nothing_outside_it_but_the_cost_of_a_profile():
    ground = (module for name in GROUND for module in under(name))
    imported = {(module, name) for module in ground for name in _inner(imports()[module])}
    found = {(module, name) for module, name in imported if package_of(name) not in GROUND}
    assert found == {("ringreduce.config", "ringreduce.schedules.cost")}


def test_every_package_stands_in_the_table_and_says_what_it_is_for():
    here = {package_of(module) for module in SOURCES} - {""}
    assert here == MAY_IMPORT.keys() | GROUND
    for path in PACKAGE.glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_trainers_use_public_names_alone():
    """Besides, its command draws, shows its progress and corrects words, as every command does."""
    for module in under("train") | under("parallel"):
        ours = {
            name
            for name in _inner(imports()[module])
            if package_of(name) not in ("train", "parallel", "picture")
        }
        assert ours <= {
            "ringreduce",
            *(f"ringreduce.{name}" for name in ("console.colours", "console.terminal", "errors")),
            "ringreduce.recovery.checkpoint",
        }, module
        assert set(_attributes_of("rr", TREES[module])) <= {*rr.__all__, "__version__"}, module


def _attributes_of(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name:
            yield node.attr


def test_every_public_name_is_there():
    assert sorted(rr.__all__) == list(rr.__all__)
    assert all(hasattr(rr, name) for name in rr.__all__)


# --- the names of classes -------------------------------------------------------------------------


def test_no_two_classes_have_one_name():
    owners: dict[str, set[str]] = {}
    for module in SOURCES:
        for node in ast.walk(TREES[module]):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, set()).add(module)
    both_public = {"Step"}  # of a schedule, and of `rr.train`
    assert {name for name, modules in owners.items() if len(modules) > 1} == both_public


# --- other packages -------------------------------------------------------------------------------


def importers_of(package: str) -> set[str]:
    return {
        module.removeprefix("ringreduce.")
        for module, names in imports().items()
        if any(name.split(".")[0] == package for name in names)
    }


BENCH = {module.removeprefix("ringreduce.") for module in under("bench")}
"""Times MPI's own collectives beside ours."""


def test_mpi4py_is_imported_by_the_mpi_transport_by_init_and_by_wrap_alone():
    assert importers_of("mpi4py") - BENCH == {"transports.mpi", "start.init", "mpi"}
    top_level = [
        n
        for n in TREES["ringreduce.start.init"].body
        if isinstance(n, (ast.Import, ast.ImportFrom))
    ]
    assert not any("mpi4py" in ast.unparse(node) for node in top_level)


def test_cupy_is_imported_by_what_runs_on_a_gpu_alone():
    # The trainer's commands are users' programs, and choose arrays as these do.
    assert importers_of("cupy") <= {"devices.cuda", "transports.cuda", "train.inputs", "mpi"}


def test_jax_is_imported_by_what_names_it_alone():
    assert importers_of("jax") == {"train.jax_part", "keras"}


COMPILED = {
    *(
        "compiler.intrinsics",
        "devices.float16_elements",
        "devices.fixed_point_kernels",
        "devices.float16_kernels",
    ),
    *("devices.folds", "devices.vectors"),
}
"""Modules that are imported to compile them, and at no other time."""


def test_numba_is_imported_by_what_is_only_imported_to_compile():
    assert importers_of("numba") <= {"compiler.jit", "compiler.object_files", *COMPILED}
    lazily = {"numba", "llvmlite"} | {f"ringreduce.{name}" for name in COMPILED}
    for module in SOURCES.keys() - lazily:
        for node in TREES[module].body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not imports_of(module, ast.Module([node], [])) & lazily, module


def test_machine_code_is_made_from_the_sources_that_name_its_folder_alone():
    """Else an edited source would leave old machine code in use."""
    made_from = {f"ringreduce.{name}" for name in COMPILED}
    made_from |= {f"ringreduce.shm.{module}" for module in functions.MODULES.values()}
    while further := set().union(*(_inner(imports()[m]) for m in made_from)) - made_from:
        made_from |= further
    assert {package_of(module) for module in made_from} == set(jit.COMPILED_PACKAGES)


def test_the_core_needs_numpy_and_mpi4py_alone():
    standard = sys.stdlib_module_names | {"ringreduce", "numpy", "mpi4py", "cupy"}
    others = {name.split(".")[0] for names in imports().values() for name in names} - standard
    for_the_kernels = {"ml_dtypes", "numba", "llvmlite"}
    for_programs = {"matplotlib", "resvg_py", "torch", "safetensors", "tensorboard", "jax"}
    for_programs |= {"keras", "tensorflow"}
    assert others <= for_the_kernels | for_programs | {"argcomplete"}
    assert importers_of("argcomplete") == {"launch.completion"}
    for package in for_programs:
        importers = importers_of(package)
        allowed = {"bench", "train", "picture", "recovery", "torch", "keras"}
        assert {name.split(".")[0] for name in importers} <= allowed


def test_wrappers_of_models_can_be_imported_without_the_trainer():
    modules = ", ".join(sorted(under("parallel")))
    code = f"import sys, {modules}; assert 'ringreduce.train' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_none_of_its_modules_and_no_mpi():
    others = ("ringreduce.", "mpi4py", "cupy", "numba", "ml_dtypes", "matplotlib")
    code = f"import sys, ringreduce; print([m for m in sys.modules if m.startswith({others})])"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


# --- what is found nowhere ------------------------------------------------------------------------


def breaches_of_safety(tree: ast.AST) -> list[str]:
    """Uses of anything that runs or loads what others have written."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [
                n for n in names if n.split(".")[0] in ("pickle", "marshal", "shelve", "dill")
            ]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
                found.append(called)
            found += [
                ast.unparse(k)
                for k in node.keywords
                if k.arg in ("shell", "allow_pickle") and ast.unparse(k.value) != "False"
            ]
    return found


def pickling_calls(tree: ast.AST) -> list[str]:
    """mpi4py's methods of small first letter, which pickle what they send."""
    pickle = {"send", "recv", "isend", "irecv", "bcast", "gather", "scatter", "allgather"}
    pickle |= {"allreduce", "reduce", "alltoall", "sendrecv", "ssend", "issend", "bsend"}
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [f.attr for f in calls if isinstance(f, ast.Attribute) and f.attr in pickle]


def reads_of_the_environment(tree: ast.AST) -> list[str]:
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv", "os.putenv")
    ]


def mentions_of_proc(tree: ast.AST) -> list[str]:
    """Return the strings that begin with a path in /proc."""
    words = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    return [w for w in words if isinstance(w, str) and f"{w}/".startswith("/proc/")]


def work_at_import(tree: ast.Module) -> list[str]:
    """Statements at the top of a module that do more than define something."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    found = []
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
        ):
            continue
        if not isinstance(node, allowed):
            found.append(ast.unparse(node))
    return found


def module_state(tree: ast.AST) -> list[str]:
    return [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Global)]


WRITES_CODE = "ringreduce.messages.unrolled"
"""Compiles lines of its own, and nothing else: `test_nothing_of_a_flow_gets_into_its_code`."""


ALLOWED = {
    (WRITES_CODE, breaches_of_safety): ["exec", "compile"],
    # Where torch loads no backends by itself, this import registers one.
    ("ringreduce.torch", work_at_import): ["_register()"],
}


@each("module", SOURCES)
@pytest.mark.parametrize("search", [breaches_of_safety, work_at_import, module_state])
def test_it_is_found_nowhere(module, search):
    assert search(TREES[module]) == ALLOWED.get((module, search), [])


def test_nothing_is_pickled_between_ranks():
    assert pickling_calls(TREES["ringreduce.transports.mpi"]) == []
    assert importers_of("pickle") == set()


def test_the_environment_is_read_in_few_places():
    readers = {m.removeprefix("ringreduce.") for m in SOURCES if reads_of_the_environment(TREES[m])}
    of_jobs = under("launch") | under("start") | under("supervisor")
    # jit reads Numba's settings, console the kind of the terminal and NO_COLOR,
    # system.cores a variable of its own, recovery.wire the launcher's address, recovery.elastic
    # whether the job goes on after losses.
    others = {"config", "system.cores", "compiler.jit", "console.colours", "console.terminal"}
    # transports.mpi whether its MPI was started so that ranks can.
    others |= {"recovery.wire", "recovery.elastic", "transports.mpi"}
    # rendezvous what torchrun sets.
    others |= {"rendezvous", "rendezvous.env", "system.place"}
    # torch.registration whether programs that ask for Gloo get this backend.
    others |= {"torch.registration"}
    assert readers <= {*others, *(m.removeprefix("ringreduce.") for m in of_jobs)}


def test_one_module_reads_proc():
    assert [module for module in SOURCES if mentions_of_proc(TREES[module])] == [
        "ringreduce.system.proc"
    ]


# --- and would be found ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "code"),
    [
        (partial(upward, "ringreduce.shm.x"), "from ringreduce.messages import binding"),
        (partial(upward, "ringreduce.schedules.x"), "import ringreduce"),
        (breaches_of_safety, "import pickle"),
        (breaches_of_safety, "def f():\n    from pickle import loads"),
        (breaches_of_safety, "eval('1')"),
        (breaches_of_safety, "os.system('ls')"),
        (breaches_of_safety, "subprocess.run('ls', shell=True)"),
        (breaches_of_safety, "np.load(path, allow_pickle=True)"),
        (pickling_calls, "comm.send(x, 1)"),
        (pickling_calls, "self._data.allgather(x)"),
        (reads_of_the_environment, "x = os.environ.get('A')"),
        (reads_of_the_environment, "os.getenv('A')"),
        (mentions_of_proc, "open(f'/proc/{process}/stat')"),
        (work_at_import, "print('hello')"),
        (work_at_import, "for i in range(3): x = i"),
        (module_state, "def f():\n    global x\n    x = 1"),
    ],
)
def test_what_must_not_be_there_is_noticed(search, code):
    assert search(ast.parse(code))
