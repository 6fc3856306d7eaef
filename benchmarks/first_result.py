"""Time a new user's way from an empty environment to the first result, by the README's own lines.

    python -m benchmarks.first_result

Installs a copy of this checkout into a new virtual environment, without pip's cache.  Then starts
the README's program for processes twice, with no machine code kept before the first start.  What
the program prints must be what the README says.  Writes ``bench_results/first_result.jsonl``:
seconds of each part.  Exits with 1 if install and first start take two minutes or more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rows
from benchmarks.environments import ROOT

MOST_S = 120.0
"""Seconds from the empty environment to the first result."""
_COMMAND = "python -m benchmarks.first_result"
_ORIGIN = f"""
import json
from ringreduce.bench.environment import environment
print(json.dumps(environment({_COMMAND!r})))
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds, origin = _first_result(folder)
    total = round(sum(seconds.values()) - seconds["second_start_s"], 2)
    row = {"benchmark": "first_result", **seconds, "first_result_s": total, **origin}
    rows.replace("first_result", [row], ("mpi", "cpu"))
    for part, taken in {**seconds, "first_result_s": total}.items():
        print(f"{part:>16} {taken:6.1f}")
    return int(total >= MOST_S)


def _first_result(folder: Path) -> tuple[dict[str, float], dict[str, object]]:
    """Install and start in `folder`; return the seconds of each part, and where they come from."""
    install, start, program, printed = _of_the_readme()
    checkout, environment = folder / "checkout", folder / "environment"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    (folder / "script.py").write_text(program)
    variables = {**os.environ, "PIP_NO_CACHE_DIR": "1", "HOME": str(folder)}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "NUMBA_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"):
        variables.pop(name, None)

    def timed(command: str | Sequence[str], where: Path) -> tuple[float, str]:
        began = time.perf_counter()
        done = subprocess.run(
            command,
            shell=isinstance(command, str),
            cwd=where,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return round(time.perf_counter() - began, 2), done.stdout

    seconds = {}
    seconds["environment_s"], _ = timed([sys.executable, "-m", "venv", str(environment)], folder)
    seconds["install_s"], _ = timed(install, checkout)
    for part in ("first_start_s", "second_start_s"):
        seconds[part], answer = timed(start, folder)
        if answer != printed:
            raise SystemExit(f"the README's program printed {answer!r}, not {printed!r}")
    _, origin = timed(["python", "-c", _ORIGIN], folder)
    return seconds, json.loads(origin)


def _of_the_readme() -> tuple[str, str, str, str]:
    """Return the line that installs, the line that starts, the program, and its output."""
    readme = (ROOT / "README.md").read_text()
    install = re.search(r"^\$ (pip install .*)$", readme, re.M)
    start = re.search(r"`(ringreduce run -n \d+ script\.py)`", readme)
    program = re.search(
        r"^```python\n([^`]*?rr\.init\([^`]*?)^```\n\n```text\n(.*?)^```$", readme, re.M | re.S
    )
    if not (install and start and program):
        raise SystemExit("README.md: no line that installs, no line that starts, or no program")
    return install[1], start[1], program[1], program[2]


if __name__ == "__main__":
    sys.exit(main())
