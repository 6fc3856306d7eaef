"""The examples for torch over ringreduce and over Gloo, in turns.

    .venv-torch/bin/python -m benchmarks.torch_examples

In an environment with torch's CPU wheel, Accelerate and Lightning.  Each example prints how long
its training takes.  Each example runs as it is, and without the line for ringreduce, which has the
comment ``# before``.

Writes ``bench_results/torch_examples.jsonl``: medians over the turns, in seconds.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rows import environment, replace

NAME = "torch_examples"
COMMAND = "python -m benchmarks.torch_examples"
EXAMPLES = Path(__file__).parent.parent / "examples" / "torch"
RANKS = (2,)
_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    rows = []
    for path in sorted(EXAMPLES.glob("*.py")):
        for ranks in options.ranks:
            times = _times(path.read_text(), ranks)
            seconds = {f"{name}_s": statistics.median(found) for name, found in times.items()}
            print(path.stem, ranks, seconds)
            row = {"benchmark": NAME, "example": path.stem, **seconds, "turns": _TURNS}
            rows.append(row | environment(COMMAND) | {"ranks": ranks})
    replace(NAME, rows, same=("cpu", "ranks", "example"))


def _times(text: str, ranks: int) -> dict[str, list[float]]:
    """Return the seconds of training in each turn, over ringreduce and over Gloo."""
    times: dict[str, list[float]] = {"ours": [], "gloo": []}
    ringreduce = Path(sys.executable).parent / "ringreduce"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        for _ in range(_TURNS):
            for name, found in times.items():
                program.write_text(text if name == "ours" else over_gloo(text))
                done = subprocess.run(
                    [ringreduce, "run", "-n", str(ranks), program],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    check=True,
                )
                seconds = re.search(r"in ([\d.]+) s", done.stdout)
                if seconds is None:
                    raise ValueError(f"the example printed {done.stdout!r}")
                found.append(float(seconds[1]))
    return times


def over_gloo(text: str) -> str:
    """Return the program of an example without the line for ringreduce."""
    text, replaced = re.subn(r'"ringreduce"(.*)  # before: "gloo"$', r'"gloo"\1', text, flags=re.M)
    text, removed = re.subn(r"^.*  # before: nothing\n", "", text, flags=re.M)
    if replaced + removed != 1:
        raise ValueError("an example has to have one line with a comment '# before: '")
    return text


if __name__ == "__main__":
    main()
