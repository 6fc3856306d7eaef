"""Count the machine instructions of each compiled function, from the kept object files.

    python -m benchmarks.instructions [--against OTHER_CHECKOUT]

Starts two ranks that find no machine code and compile everything: the functions of shared memory
and the loops that reduce.  Disassembles what they keep with ``objdump`` (Debian: binutils), and
writes ``bench_results/instructions.json``: function -> instructions, without the
padding between functions.  With ``--against`` the other checkout is compiled too, by this
environment, and the ratio new / old of each function is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, ROOT

_FILE = RESULTS / "instructions.json"
_RANKS = 2
_USE_ALL = """
import json
import ml_dtypes
import numpy as np
import ringreduce as rr
from benchmarks.rows import environment

OPS = {"biu": ("sum", "min", "max", "prod", "and", "or", "xor"), "f": ("sum", "min", "max", "prod")}
OPS |= {"c": ("sum", "prod"), "V": OPS["f"]}
NAMES = [f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)]
NAMES = [*NAMES[:8], *NAMES[9:], "bool", "complex64", "complex128", "bfloat16"]
with rr.init() as comm:
    for name in NAMES:
        dtype = np.dtype(name)
        for op in next(ops for kinds, ops in OPS.items() if dtype.kind in kinds):
            if dtype.kind == "b" and op in ("sum", "prod"):
                continue
            comm.all_reduce(np.ones(3, dtype), op)
    x = np.ones(3, np.float32)
    comm.all_reduce([x, x.copy()])
    planned = comm.plan("all_reduce", x, out=x)
    planned()
    planned()
    if hasattr(comm, "shared"):
        comm.shared(3, np.float32).add(x)
    where = environment("")
    if comm.rank == 0: print(json.dumps(where), flush=True)
    comm.barrier(timeout_s=300)
"""
"""A program that makes the library compile all its functions."""
_ELF = b"\x7fELF"
_INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\t(.+)$", re.MULTILINE)
_FILLS = re.compile(r"(?:(?:data16|cs|ds|es|ss)\s+)*(?:nop[wl]?|int3|xchg\s+%ax,%ax|udf)\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="an older one")
    options = parser.parse_args()
    if shutil.which("objdump") is None:
        raise SystemExit("no objdump here: apt-get install binutils")
    counts, where = of_checkout(ROOT)
    where["command"] = f"python -m benchmarks.instructions {' '.join(sys.argv[1:])}".strip()
    where |= {name: version(name) for name in ("numba", "llvmlite")}
    _FILE.write_text(json.dumps({**where, "instructions": counts}, indent=1) + "\n")
    if options.against is None:
        for name, count in counts.items():
            print(f"{count:8}  {name}")
    else:
        print(comparison(of_checkout(options.against)[0], counts))


def of_checkout(folder: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Function -> instructions of all that a checkout compiles, and the origin of the figures."""
    with tempfile.TemporaryDirectory() as cache:
        program = Path(cache) / "program.py"
        program.write_text(_USE_ALL)
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        done = subprocess.run(
            [mpiexec, "-n", str(_RANKS), sys.executable, str(program)],
            cwd=folder,
            env={**os.environ, **_ROOT_MAY, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        kept = sorted(Path(cache).rglob("*.code"))
        if not kept:
            raise SystemExit(f"{folder} keeps no machine code here: see `ringreduce doctor`")
        counts = {file.stem: count(disassembled(file.read_bytes())) for file in kept}
    return dict(sorted(counts.items())), json.loads(done.stdout.splitlines()[-1])


_ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def disassembled(kept: bytes) -> str:
    """The disassembly, by ``objdump``, of the object file at the end of a kept file."""
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(kept[kept.index(_ELF) :])
        file.flush()
        command = ["objdump", "--disassemble", "--no-show-raw-insn", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(disassembly: str) -> int:
    """Count the instructions of all functions in an object file, without padding."""
    lines = _INSTRUCTION.findall(disassembly)
    return sum(1 for line in lines if not _FILLS.match(line.strip()))


def comparison(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """A line for each function: old, new, new / old; then all together."""
    lines = [f"{'old':>8} {'new':>8} {'new/old':>8}  function"]
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        ratio = f"{after / before:.3f}" if before and after else ""
        lines.append(f"{before or '-':>8} {after or '-':>8} {ratio:>8}  {name}")
    before, after = sum(old.values()), sum(new.values())
    lines.append(f"{before:8} {after:8} {after / before:8.3f}  all together")
    ratios = [new[name] / old[name] for name in old.keys() & new.keys()]
    if ratios:
        lines.append(f"geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
