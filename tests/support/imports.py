"""The packages of ringreduce, what they import, and what they may import."""

from __future__ import annotations

import ast
from pathlib import Path

import ringreduce as rr

PACKAGE = Path(rr.__file__).parent
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


class Parsed(dict[str, ast.Module]):
    """Module -> its syntax tree, parsed when it is first asked for."""

    def __missing__(self, module: str) -> ast.Module:
        return self.setdefault(module, ast.parse(SOURCES[module].read_text()))


TREES = Parsed()


def imports_of(module: str, tree: ast.AST) -> set[str]:
    """Every module that is named in an import statement, wherever it stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            base = node.module or ""
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & SOURCES.keys()) or {base}
    return found


GROUND = {"config", "console", "errors", "system"}
"""What every package may import."""
SYMBOLIC = {"schedules", "algorithms"}
BELOW_CALLS = {
    *("control", "devices", "messages", "planning", "point_to_point", "shm", "transports"),
}
MAY_IMPORT: dict[str, set[str]] = {
    "system": set(),
    "console": set(),
    "schedules": set(),
    "algorithms": {"schedules"},
    "picture": {"schedules"},
    "trace": {"compiler", "picture"},
    "pipeline": {"picture", "schedules"},
    "planning": SYMBOLIC,
    "compiler": set(),
    "transports": set(),
    "rendezvous": {"transports"},
    "devices": {"compiler"},
    "control": {"schedules", "transports"},
    "messages": {"control", "devices", "planning", "transports"},
    "shm": {"compiler", "control", "devices", "planning", "trace", "transports"},
    "point_to_point": {"compiler", "shm", "trace", "transports"},
    "calls": {*BELOW_CALLS, *SYMBOLIC, "trace"},
    "start": {
        *("calls", "devices", "rendezvous", "shm", "supervisor", "trace", "transports"),
    },
    "supervisor": {"recovery", "trace"},
    "launch": {
        *(*SYMBOLIC, "picture", "pipeline", "planning", "recovery", "start", "supervisor"),
        *("trace", "the public names"),
    },
    "__main__": {"launch"},
    "recovery": {"calls", "shm", "start"},
    "parallel": {"the public names"},
    "train": {"the public names", "parallel", "picture", "recovery"},
    "bench": {
        *("the public names", "algorithms", "devices", "picture", "planning", "rendezvous"),
        "schedules",
    },
    "torch": {"the public names", "calls", "start"},
    "mpi": {"the public names"},
    "keras": {"the public names"},
}
"""Which packages a package may import, besides itself and the ground."""
LAZY = {("launch.cli", "train"), ("launch.cli", "bench")}
"""The command line reads the options of the trainer and the bench when they are asked for."""


def package_of(module: str) -> str:
    """The first level: a package, or a module that is none; "" for `ringreduce` itself."""
    return module.partition(".")[2].partition(".")[0]
