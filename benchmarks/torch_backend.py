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
Means would be worse for Gloo, some of whose calls take milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import environment, replace

NAME = "torch"
RANKS = (2, 4)
SIZES = (*(8 << shift for shift in range(0, 24, 3)), 64 << 20)
"""Bytes of the tensor of an all-reduce, and of the larger tensor of other collectives."""
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
DTYPES = ("float32", "bfloat16")
_TURNS, _TURN_S, _MOST_CALLS = 15, 20e-3, 200
_FEWEST_CALLS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options)
        return 0
    words = [word for word in sys.argv[1:] if word != "--worker"]
    for ranks in options.ranks:
        ringreduce = Path(sys.executable).parent / "ringreduce"
        program = ["-m", "benchmarks.torch_backend", "--worker"]
        command = [ringreduce, "run", "-n", str(ranks), *program]
        done = subprocess.run([*command, *words], stdout=subprocess.PIPE, text=True, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        replace(NAME, rows, same=("cpu", "ranks", "collective", "dtype", "bytes"))
    return 0


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
                if case.count == 0:
                    continue
                times = case.times()
                if comm.rank == 0:
                    row = {"benchmark": NAME, "collective": collective, "dtype": dtype}
                    row |= {"bytes": nbytes, **times, "turns": _TURNS}
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
        self.count = nbytes // self._dtype.itemsize // comm.size * comm.size

    def times(self) -> dict[str, float]:
        """Return the median time of a call of each contender, in microseconds."""
        calls = dict(self._contenders())
        repeat = {}
        for name, call in calls.items():
            call()
            repeat[name] = self._agreed(call)
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_TURNS):
            for name, call in calls.items():
                self._comm.barrier()
                call()  # its threads sleep, and the ranks come from a barrier of ours
                for _ in range(repeat[name]):
                    began = time.perf_counter()
                    call()
                    found[name].append(time.perf_counter() - began)
        return {f"{name}_us": statistics.median(times) * 1e6 for name, times in found.items()}

    def _agreed(self, call: Callable[[], Any]) -> int:
        """Return how many calls make up a turn: the same on all ranks."""
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        calls = int(np.clip(_TURN_S / seconds, _FEWEST_CALLS, _MOST_CALLS))
        return int(self._comm.all_reduce(calls, "min"))

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
