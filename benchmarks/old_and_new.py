"""Compare the speed of this checkout with an older one: the same benchmarks, in alternating runs.

    python -m benchmarks.old_and_new OLD_CHECKOUT [--runs 5] [--only small_calls lists ...]

Copies both checkouts, makes an environment for each MPI, and runs every benchmark in both copies in
turns, the older one first in every other run.  A case is, for instance, one contender at one size.
Its figures are medians over the runs.  Writes ``bench_results/old_and_new.jsonl`` and prints, or
with ``--draw`` at once, for each benchmark the geometric mean of new time / old time, and the cases
that are slower than allowed by more than their runs differ.

`hosts` needs root, ``ip`` and ``tc``; without them it is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.collectives import TARGETED
from benchmarks.rows import RESULTS, replace
from benchmarks.start_up import FIRST_START

NAME = "old_and_new"
ALLOWED_MEAN, ALLOWED_CASE = 1.03, 1.08
"""New time / old time: the most over all cases of a benchmark, and the most of one case."""
_COLLECTIVES = [8 << i for i in range(0, 22, 3)]
"""Bytes."""
_LISTS = (1, 10, 160, 1000)
"""Arrays in a list."""
_ONE_HOST = [8 << i for i in range(0, 25, 3)]
_BETWEEN_HOSTS = [8, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
_SAME_PROGRAM = (
    *("benchmarks/collectives.py", "benchmarks/collectives_run.py", "benchmarks/environments.py"),
    *("benchmarks/one_host_run.py", "benchmarks/ring_and_mpi.py", "benchmarks/rows.py"),
    "ringreduce/bench/collectives.py",
    *("ringreduce/bench/contenders.py", "ringreduce/bench/environment.py"),
    *("ringreduce/bench/gloo.py", "ringreduce/bench/inputs.py", "ringreduce/bench/world.py"),
    *("ringreduce/system/cores.py", "ringreduce/system/place.py", "ringreduce/system/proc.py"),
)
"""Files of this checkout that replace those of the older one in its copy.

They call public names alone, and the time of a small call depends on the lines around the call.
"""
_LEFT_BEHIND = (".git", ".venv*", ".environments", "__pycache__", "*.egg-info", ".*_cache", "dist")

Figures = dict[tuple[str, int], float]
"""(case, bytes) -> time, in the unit of the benchmark."""


@dataclass(frozen=True)
class Checkout:
    """A copy of a checkout, and the environment of the MPI that it is measured with."""

    folder: Path
    python: str
    ranks: int

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows that the benchmark of that name has written in the copy."""
        text = (self.folder / "bench_results" / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def run(self, *command: str, **variables: str) -> str:
        """Run a Python program in the copy, by itself; its standard output."""
        return self._do([self.python, *command], variables)

    def run_ranks(self, *command: str, **variables: str) -> str:
        """Run a Python program in the copy, on all ranks; rank 0's row files are in the copy."""
        mpiexec = str(Path(self.python).with_name("mpiexec"))
        return self._do([mpiexec, "-n", str(self.ranks), self.python, *command], variables)

    def _do(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        shutil.rmtree(self.folder / "bench_results", ignore_errors=True)
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **_SETTINGS, "PYTHONPATH": str(self.folder), **variables},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout


_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "^ofi",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}
"""Both checkouts' ranks are started by mpiexec itself, with the same variables."""


# --- the benchmarks: one run each -----------------------------------------------------------------


def small_calls(checkout: Checkout) -> Figures:
    """Microseconds of small calls, planned ones among them."""
    checkout.run_ranks("-m", "benchmarks.small_calls")
    return {
        (case, row["bytes"]): us
        for row in checkout.rows("small_calls")
        for case, us in row["microseconds"].items()
        if not case.startswith("bare ")
    }


def one_host(checkout: Checkout) -> Figures:
    """The time of our all-reduce of float32, in units of the time of `Allreduce` in the same run.

    In some runs both take longer than in others.  All places and ways of calling are measured.
    """
    sizes = [str(size) for size in _ONE_HOST if 4 * checkout.ranks * size <= 8 << 30]
    rows = _written(checkout, "-m", "benchmarks.one_host_run", "FILE", "float32", *sizes)
    allreduce = {
        (row["place"], row["bytes"]): row["median_us"] for row in rows if row["contender"] == "MPI"
    }
    return {
        (f"{row['contender']}, {row['place']}", row["bytes"]): row["median_us"]
        / allreduce[row["place"], row["bytes"]]
        for row in rows
        if row["contender"].startswith(("ringreduce", "registered"))
    }


def lists(checkout: Checkout) -> Figures:
    """Microseconds of a list of arrays of 4 KiB."""
    printed = checkout.run_ranks("-c", f"lengths = {_LISTS}\n{_OF_LISTS}")
    return {
        (f"{name}, {arrays} arrays", 4096): 1e6 * seconds
        for name, arrays, seconds in json.loads(printed.splitlines()[-1])
        if not name.startswith("MPI")
    }


_OF_LISTS = """
import json
import ringreduce as rr
from benchmarks import lists
found = []
with rr.init() as comm:
    for arrays in lengths:
        contenders = lists._contenders(comm, arrays, 1024)
        for contender, seconds in zip(contenders, lists._measure(comm.rank, contenders)):
            found.append((contender.name, arrays, seconds))
    if comm.rank == 0: print(json.dumps(found), flush=True)
    comm.barrier(timeout_s=300)
"""
"""The benchmark itself rounds to microseconds, which is too much for short lists."""


def kernels(checkout: Checkout) -> Figures:
    """Nanoseconds for a KiB that our compiled loops read or write."""
    checkout.run("-m", "benchmarks.kernels")
    figures = {}
    for row in checkout.rows("kernels"):
        arrays = row.get("arrays")
        how = f"{arrays} arrays" if arrays else f"in place: {row['in_place']}"
        for name, rate in row["gb_per_s"].items():
            if arrays or name.endswith("ours"):
                figures[f"{name}, {how}", row["bytes"]] = 1024 / rate
    return figures


def collectives(checkout: Checkout) -> Figures:
    """Microseconds of the other collectives, call by call and in loops."""
    figures = {}
    for collective in TARGETED:
        run = ["-m", "benchmarks.collectives_run", "FILE", collective, *map(str, _COLLECTIVES)]
        for row in _written(checkout, *run):
            if row["contender"] == "ringreduce":
                case = f"{collective}, {row['place']}, {row['way']}"
                figures[case, row["bytes"]] = row["median_us"]
    return figures


def ring_and_mpi(checkout: Checkout) -> Figures:
    """The time of our ring through messages on one host, in units of the time of `Allreduce`.

    In some runs the MPI's messages take up to three times as long as in others.  Both calls use
    these messages.
    """
    checkout.run_ranks("-c", _ring_and_mpi(), RINGREDUCE_TRANSPORT="mpi")
    return {
        ("ring", row["bytes"]): row["milliseconds"]["ring"] / row["milliseconds"]["Allreduce"]
        for row in _rings(checkout)
    }


def hosts(checkout: Checkout) -> Figures:
    """Milliseconds of our ring between hosts of one rank each, joined by 1 Gbit/s."""
    ones = ",".join(["1"] * checkout.ranks)
    program = [checkout.python, "-c", _ring_and_mpi()]
    checkout.run("-m", "benchmarks.hosts", "--ranks", ones, "--rate", "1gbit", "--", *program)
    return {("ring", row["bytes"]): row["milliseconds"]["ring"] for row in _rings(checkout)}


def _ring_and_mpi() -> str:
    """A program: the benchmark of that name, at few sizes."""
    return f"from benchmarks import ring_and_mpi as b; b.SIZES = {_BETWEEN_HOSTS}; b.main()"


def _rings(checkout: Checkout) -> list[dict[str, Any]]:
    return checkout.rows("ring_and_mpi")


def start_up(checkout: Checkout) -> Figures:
    """Milliseconds to import and to begin, with machine code that is kept."""
    for _ in range(2):  # the first compiles what is not kept yet
        checkout.run_ranks("-m", "benchmarks.start_up")
    (row,) = checkout.rows("start_up")
    names = ("import_ringreduce_s", "import_and_init_cpu_s")
    return {(name.removesuffix("_s"), 0): 1e3 * row[name] for name in names}


def first_start(checkout: Checkout) -> Figures:
    """Milliseconds of the first start of all, which compiles everything."""
    with tempfile.TemporaryDirectory() as cache:
        printed = checkout.run_ranks("-c", FIRST_START, NUMBA_CACHE_DIR=cache)
    return {("init and all_reduce", 0): 1e3 * float(printed.split()[-1])}


def _written(checkout: Checkout, *command: str) -> list[dict[str, Any]]:
    """The rows that a program on all ranks writes to the file that stands for FILE."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        checkout.run_ranks(*(str(file) if word == "FILE" else word for word in command))
        return [json.loads(line) for line in file.read_text().splitlines()]


BENCHMARKS: dict[str, tuple[Callable[[Checkout], Figures], str]] = {
    "small_calls": (small_calls, "µs"),
    "one_host": (one_host, "of Allreduce's time"),
    "lists": (lists, "µs"),
    "kernels": (kernels, "ns a KiB"),
    "collectives": (collectives, "µs"),
    "ring_and_mpi": (ring_and_mpi, "of Allreduce's time"),
    "hosts": (hosts, "ms"),
    "start_up": (start_up, "ms"),
    "first_start": (first_start, "ms"),
}
"""Name -> one run, and the unit of its figures."""
_OF_ONE_RANK = ("kernels",)
_OF_TWO_RANKS = ("hosts", "ring_and_mpi", "start_up", "first_start")


def _ranks_of(name: str, asked: Sequence[int]) -> Sequence[int]:
    if name in _OF_ONE_RANK:
        return [1]
    return [2] if name in _OF_TWO_RANKS else asked


# --- alternating runs -----------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the older checkout")
    parser.add_argument("--runs", type=int, default=5, help="of each checkout")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument(
        "--mpis", nargs="+", choices=environments.WHEELS, default=["MPICH", "Open MPI"]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--environments", type=Path, default=environments.ROOT / ".environments")
    parser.add_argument("--draw", action="store_true", help="from the results that there are")
    options = parser.parse_args()
    if not options.draw:
        _measure_all(options)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    print(summary(rows))


def _measure_all(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folders = Path(scratch) / "old", Path(scratch) / "new"
        for source, folder in zip((options.old, environments.ROOT), folders, strict=True):
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*_LEFT_BEHIND))
        for name in _SAME_PROGRAM:
            (folders[0] / name).parent.mkdir(exist_ok=True)
            shutil.copy(environments.ROOT / name, folders[0] / name)
        for mpi in options.mpis:
            environments.make(options.environments, mpi, [])
            python = environments.command(options.environments.resolve(), mpi, "python")
            for name in options.only:
                if name == "hosts" and (why := _no_hosts()):
                    print(f"hosts: left out, for {why}", flush=True)
                    continue
                for ranks in _ranks_of(name, options.ranks):
                    old, new = (Checkout(folder, python, ranks) for folder in folders)
                    _measure(name, old, new, options, mpi)


def _no_hosts() -> str:
    """Why no hosts can be made here; "" if they can."""
    if os.geteuid():
        return "only root makes network namespaces"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    return f"there is no {', '.join(missing)}" if missing else ""


def _measure(
    name: str, old: Checkout, new: Checkout, options: argparse.Namespace, mpi: str
) -> None:
    benchmark, unit = BENCHMARKS[name]
    for checkout in (old, new):
        _check_source(checkout)
    runs: dict[Path, list[Figures]] = {old.folder: [], new.folder: []}
    for number in range(options.runs):
        for checkout in (old, new) if number % 2 == 0 else (new, old):
            which = checkout.folder.name
            print(f"=== {name}, {mpi}, {new.ranks} ranks, run {number + 1}, {which}", flush=True)
            runs[checkout.folder].append(benchmark(checkout))
    where = json.loads(new.run_ranks("-c", _WHERE).splitlines()[-1])
    words = ("OLD_CHECKOUT" if word == str(options.old) else word for word in sys.argv[1:])
    where["command"] = f"python -m benchmarks.{NAME} {' '.join(words)}"
    where |= {"mpi_wheel": environments.WHEELS[mpi], "old": _commit(options.old)}
    where["new"] = _commit(environments.ROOT)
    rows = [
        {"benchmark": name, "case": case, "bytes": nbytes, "unit": unit, **times, **where}
        for (case, nbytes), times in compared(runs[old.folder], runs[new.folder])
    ]
    if not rows:
        raise SystemExit(f"{name}: no case is in both checkouts")
    replace(NAME, rows, same=("benchmark", "mpi_wheel", "ranks"))


_WHERE = """
import json
from mpi4py import MPI
from benchmarks.rows import environment
where = environment("")
if MPI.COMM_WORLD.rank == 0: print(json.dumps(where))
"""


def _check_source(checkout: Checkout) -> None:
    """Raise SystemExit unless it is the copy's own package that runs there."""
    found = Path(checkout.run("-c", "import ringreduce; print(ringreduce.__file__)").strip())
    if not found.resolve().is_relative_to(checkout.folder.resolve()):
        raise SystemExit(f"{checkout.folder} runs {found}")


def _commit(folder: Path) -> str:
    """The commit that a checkout is of, with "+" where files differ from it."""
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(asked, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def compared(
    old: Sequence[Figures], new: Sequence[Figures]
) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Each case that both checkouts have: its times of all runs, their medians and the ratio."""
    for case in old[0]:
        if not all(case in figures for figures in (*old, *new)):
            continue
        before, after = [run[case] for run in old], [run[case] for run in new]
        medians = statistics.median(before), statistics.median(after)
        yield (
            case,
            {
                "old_median": round(medians[0], 4),
                "new_median": round(medians[1], 4),
                "ratio": round(medians[1] / medians[0], 4),
                "old_runs": [round(time, 4) for time in before],
                "new_runs": [round(time, 4) for time in after],
            },
        )


# --- what comes of it -----------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each benchmark, MPI and number of ranks, then the cases that are too slow.

    The column "shortest" is the mean of the ratios of the shortest runs.  On a virtual machine
    whole runs are slower than others, in either checkout.  A median depends on how many were.
    """
    heads = ("benchmark", "MPI", "ranks", "cases", "new / old", "shortest", "highest", "")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    slow = []
    for name, wheel, ranks in dict.fromkeys(map(_group, rows)):
        of = [row for row in rows if _group(row) == (name, wheel, ranks)]
        mean = statistics.geometric_mean(row["ratio"] for row in of)
        shortest = statistics.geometric_mean(
            min(row["new_runs"]) / min(row["old_runs"]) for row in of
        )
        highest = max(of, key=lambda row: row["ratio"])
        verdict = f"more than {ALLOWED_MEAN}" if mean > ALLOWED_MEAN else ""
        text = f"{highest['ratio']:.2f}, {_case(highest)}"
        lines.append(
            f"| {name} | {wheel} | {ranks} | {len(of)} | {mean:.3f} | {shortest:.3f} "
            f"| {text} | {verdict} |"
        )
        slow += [row for row in of if is_slower(row)]
    lines += ["", f"more than {ALLOWED_CASE} times, and by more than the runs differ:"]
    for row in sorted(slow, key=lambda row: -row["ratio"]):
        times = f"{row['old_median']:g} to {row['new_median']:g} {row['unit']}"
        where = f"{row['benchmark']}, {row['mpi_wheel']}, {row['ranks']} ranks"
        lines.append(f"  {row['ratio']:.2f}  {where}: {_case(row)}, {times}")
    return "\n".join(lines if slow else [*lines, "  none"])


def _group(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["benchmark"], row["mpi_wheel"], row["ranks"]


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['case']}, {row['bytes']} B" if row["bytes"] else row["case"]


def is_slower(row: Mapping[str, Any]) -> bool:
    """Whether a case is slower than allowed, outside the spread of its runs.

    The spread is the middle half of the runs: three of the four quarters of the new checkout's runs
    take longer than three quarters of the old one's.
    """
    if row["ratio"] <= ALLOWED_CASE:
        return False
    return _quartile(row["new_runs"], 1) > _quartile(row["old_runs"], 3)


def _quartile(values: Sequence[float], number: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=4, method="inclusive")[number - 1]


if __name__ == "__main__":
    main()
