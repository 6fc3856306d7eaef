"""Collectives of torch.distributed over ringreduce, beside Gloo and mpi4py, in turns.

    .venv-torch/bin/python -m benchmarks.torch_backend

In an environment with torch's CPU wheel and an MPI.  Starts `ringreduce run` with each number of
ranks.  The contenders of a row:

- ``ours``: `torch.distributed` over ringreduce, on ordinary tensors,
- ``registered``: the same, on tensors in registered memory,
- ``gloo``: `torch.distributed` over Gloo,
- ``numpy``: the communicator itself, on arrays over the same memory,
- ``mpi``: mpi4py, on the same arrays.

Each contender's result is verified.  In a turn each contender makes some calls.  Writes
``bench_results/torch.jsonl``: the medians of the times of all calls on rank 0, in microseconds.
Means would be worse for Gloo, some of whose calls take milliseconds.  Then, or with ``--draw`` at
once, draws ``docs/torch.svg`` and prints the table of the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import RESULTS, environment, replace
from ringreduce.picture.chart import Line, Panel, chart
from ringreduce.picture.scales import logarithmic, powers_of_two, size_text
from ringreduce.picture.style import BLUE, DASHED, DOTTED, GREEN, ORANGE, in_dark

NAME = "torch"
PICTURE = Path(__file__).parent.parent / "docs" / "torch.svg"
RANKS = (2, 3, 4, 8)
SIZES = (*(8 << shift for shift in range(0, 24, 3)), 64 << 20, 256 << 20)
"""Bytes of the tensor of an all-reduce, and of the larger tensor of other collectives."""
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
_OF_WHOLE_ARRAYS = ("all_reduce", "broadcast")
"""Collectives whose arrays need no part for each rank."""
DTYPES = ("float32", "bfloat16")
_TURNS, _TURN_S, _MOST_CALLS = 15, 20e-3, 200
_FEWEST_CALLS = 5
_ROW_S = 15.0
"""Seconds that the turns of a row take, as far as there are at least `_FEWEST_TURNS`."""
_FEWEST_TURNS = 3
_MOST_BYTES = 12 << 30
"""Rows whose contenders need more memory together are left out."""
_SHOWN = (8, 32 << 10, 2 << 20, 64 << 20)
"""Sizes of the table, bytes."""
LABELS = {
    "ours": "over ringreduce",
    "registered": "over ringreduce, registered memory",
    "gloo": "over Gloo",
    "numpy": "`comm.all_reduce` on a NumPy array",
    "mpi": "mpi4py",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options)
        return 0
    if not options.draw:
        _measure(options)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    shown = newest(rows)
    svg = picture(shown)
    PICTURE.write_text(svg, encoding="utf-8")
    PICTURE.with_name("torch-dark.svg").write_text(in_dark(svg), encoding="utf-8")
    print(table(shown))
    return 0


def _measure(options: argparse.Namespace) -> None:
    words = [word for word in sys.argv[1:] if word != "--worker"]
    for ranks in options.ranks:
        ringreduce = Path(sys.executable).parent / "ringreduce"
        program = ["-m", "benchmarks.torch_backend", "--worker"]
        command = [ringreduce, "run", "-n", str(ranks), *program]
        done = subprocess.run([*command, *words], stdout=subprocess.PIPE, text=True, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        replace(NAME, rows, same=("cpu", "ranks", "collective", "dtype", "bytes"))


def newest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the all-reduces of float32 on the CPU that was measured last, by ranks and bytes."""
    reduced = [
        row for row in rows if (row["collective"], row["dtype"]) == ("all_reduce", "float32")
    ]
    cpu = max(reduced, key=lambda row: row["date"])["cpu"]
    chosen = [row for row in reduced if row["cpu"] == cpu]
    return sorted(chosen, key=lambda row: (row["ranks"], row["bytes"]))


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Return a picture of all-reduces, as SVG: a panel for each number of ranks."""
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    panels = [_panel([row for row in rows if row["ranks"] == each]) for each in ranks]
    ratios = [row["gloo_us"] / row["ours_us"] for row in rows]
    title = (
        f"dist.all_reduce over ringreduce takes 1/{min(ratios):.1f} to 1/{max(ratios):.0f} of the "
        "time over Gloo"
    )
    where = rows[-1]
    facts = (
        f"float32 on one host. {where['cpu']}, {where['cores']} cores, torch {where['torch']}, "
        f"{where['date']}; bench_results/{NAME}.jsonl."
    )
    return chart(title, facts, panels, columns=2, panel_height=170)


def _panel(rows: Sequence[dict[str, Any]]) -> Panel:
    def line(name: str, label: str, colour: str, **how: Any) -> Line:
        return Line([(row["bytes"], row[f"{name}_us"]) for row in rows], colour, label, **how)

    lines = [
        line("ours", "ringreduce", BLUE, width=2.4, has_dots=True),
        line("registered", "ringreduce, registered", BLUE, dashes=DASHED),
        line("gloo", "Gloo", ORANGE),
        line("mpi", "mpi4py, NumPy arrays", GREEN, dashes=DOTTED),
    ]
    x = powers_of_two([row["bytes"] for row in rows], size_text, most=5)
    y = logarithmic([us for each in lines for _, us in each.points])
    return Panel(f"{rows[0]['ranks']} ranks: median time of a call, µs", x, y, lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page: microseconds on two ranks."""
    two = {row["bytes"]: row for row in rows if row["ranks"] == 2}
    head = [size_text(nbytes) for nbytes in _SHOWN]
    lines = [["`dist.all_reduce`, float32", *head], ["---"] * (len(head) + 1)]
    for name, label in LABELS.items():
        times = [two[nbytes][f"{name}_us"] for nbytes in _SHOWN]
        lines.append([label, *(f"{us:.1f}" if us < 20 else f"{us:,.0f}" for us in times)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _work(options: argparse.Namespace) -> None:
    """As a rank: time all contenders of each row.  Rank 0 prints the rows."""
    import torch
    import torch.distributed as dist

    import ringreduce as rr

    torch.set_num_threads(1)
    comm = rr.init()
    dist.init_process_group("ringreduce")
    gloo = dist.new_group(backend="gloo")
    where = environment("python -m benchmarks.torch_backend")
    where |= {"torch": torch.__version__}
    for collective in options.collectives:
        for dtype in options.dtypes:
            for nbytes in options.sizes:
                case = _Case(comm, gloo, collective, dtype, nbytes)
                if case.count == 0 or case.all_bytes > _MOST_BYTES:
                    continue
                times = case.times()
                if comm.rank == 0:
                    row = {"benchmark": NAME, "collective": collective, "dtype": dtype}
                    row |= {"bytes": nbytes, **times, "turns": case.turns}
                    print(json.dumps(row | where), flush=True)
                    _show(collective, dtype, nbytes, comm.size, times)
    dist.destroy_process_group()
    comm.close()


def _show(collective: str, dtype: str, nbytes: int, ranks: int, times: dict[str, float]) -> None:
    shown = " ".join(f"{name[:-3]} {us:.1f}" for name, us in times.items())
    gloo, ours = times["gloo_us"], times["ours_us"]
    print(
        f"{collective} {dtype} {nbytes} B, {ranks} ranks, us: {shown}; Gloo's is "
        f"{gloo / ours:.1f}x ours, {gloo / times['registered_us']:.1f}x registered",
        file=sys.stderr,
    )


class _Case:
    """A row: its arrays and its contenders."""

    def __init__(self, comm: Any, gloo: Any, collective: str, dtype: str, nbytes: int) -> None:
        import ml_dtypes

        self._comm, self._gloo = comm, gloo
        self._collective = collective
        self._dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        self.count = nbytes // self._dtype.itemsize
        if collective not in _OF_WHOLE_ARRAYS:
            self.count = self.count // comm.size * comm.size
        self.turns = _TURNS

    @property
    def all_bytes(self) -> int:
        """Bytes of the tensors of all contenders on all ranks."""
        return len(LABELS) * self._comm.size * sum(self._sizes()) * self._dtype.itemsize

    def times(self) -> dict[str, float]:
        """Return the median time of a call of each contender, in microseconds."""
        calls = dict(self._contenders())
        repeat, seconds = {}, 0.0
        for name, call in calls.items():
            call()
            repeat[name], turn_s = self._agreed(call)
            seconds += turn_s
        self.turns = int(np.clip(_ROW_S / seconds, _FEWEST_TURNS, _TURNS))
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.turns):
            for name, call in calls.items():
                self._comm.barrier()
                call()  # its threads sleep, and the ranks come from a barrier of ours
                for _ in range(repeat[name]):
                    began = time.perf_counter()
                    call()
                    found[name].append(time.perf_counter() - began)
        return {f"{name}_us": statistics.median(times) * 1e6 for name, times in found.items()}

    def _agreed(self, call: Callable[[], Any]) -> tuple[int, float]:
        """Return how many calls make up a turn, and its seconds: the same on all ranks."""
        began = time.perf_counter()
        call()
        seconds = float(self._comm.all_reduce(time.perf_counter() - began, "max"))
        fewest = _FEWEST_CALLS if seconds < _ROW_S / 100 else 1
        calls = int(np.clip(_TURN_S / seconds, fewest, _MOST_CALLS))
        return calls, (calls + 1) * seconds

    def _contenders(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        import torch.distributed as dist

        for name, group, registered in (
            ("ours", None, False),
            ("registered", None, True),
            ("gloo", self._gloo, False),
        ):
            x, out = self._tensors(registered)
            call = self._of_torch(x, out, group)
            self._verify(name, x, out, call)
            yield name, call
        x, out = self._arrays()
        call = self._of_numpy(x, out)
        self._verify("numpy", x, out, call)
        yield "numpy", call
        if self._dtype.name != "bfloat16":  # MPI does not have it
            call = self._of_mpi(x, out)
            self._verify("mpi", x, out, call)
            yield "mpi", call
        assert dist.is_initialized()

    def _sizes(self) -> tuple[int, int]:
        """Return the numbers of elements of input and output; 0: the call is in place."""
        part = self.count // self._comm.size
        return {
            "all_reduce": (self.count, 0),
            "broadcast": (self.count, 0),
            "all_gather": (part, self.count),
            "reduce_scatter": (self.count, part),
            "all_to_all": (self.count, self.count),
        }[self._collective]

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        counts = self._sizes()
        return np.zeros(counts[0], self._dtype), np.zeros(counts[1], self._dtype)

    def _tensors(self, registered: bool) -> tuple[Any, Any]:
        import torch

        import ringreduce.torch

        make = ringreduce.torch.empty if registered else torch.empty
        dtype = getattr(torch, self._dtype.name)
        return tuple(make((count,), dtype=dtype).zero_() for count in self._sizes())

    def _of_torch(self, x: Any, out: Any, group: Any) -> Callable[[], Any]:
        import torch.distributed as dist

        return {
            "all_reduce": lambda: dist.all_reduce(x, group=group),
            "broadcast": lambda: dist.broadcast(x, 0, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(out, x, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        }[self._collective]

    def _of_numpy(self, x: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
        counts = [x.size] * self._comm.size
        return {
            "all_reduce": lambda: self._comm.all_reduce(x, out=x),
            "broadcast": lambda: self._comm.broadcast(x, out=x),
            "all_gather": lambda: self._comm.all_gather(x, counts=counts, out=out),
            "reduce_scatter": lambda: self._comm.reduce_scatter(x, out=out),
            "all_to_all": lambda: self._comm.all_to_all(x, out=out),
        }[self._collective]

    def _of_mpi(self, x: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        return {
            "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, x),
            "broadcast": lambda: world.Bcast(x),
            "all_gather": lambda: world.Allgather(x, out),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, out),
            "all_to_all": lambda: world.Alltoall(x, out),
        }[self._collective]

    def _verify(self, name: str, x: Any, out: Any, call: Callable[[], Any]) -> None:
        """Check the result of ones; leave zeros, whose sums stay zeros."""
        size = self._comm.size
        x[:] = 1 if self._collective != "broadcast" or self._comm.rank == 0 else 0
        call()
        found = x if self._sizes()[1] == 0 else out
        wanted = size if self._collective in ("all_reduce", "reduce_scatter") else 1
        if not bool((found == wanted).all()):
            raise ValueError(f"{name}: {self._collective} gives {found[:4]} in place of {wanted}")
        x[:] = 0


if __name__ == "__main__":
    sys.exit(main())
