"""Our all-reduce between hosts beside the MPI's own Allreduce, and beside what the links allow.

    python -m benchmarks.between_hosts [--rate 1gbit] [--layouts 1,1 3,1,2] [--repeats 15]

Starts itself once for each layout on hosts of `benchmarks.hosts`, so it needs root, ``ip`` and
``tc``.  In place, float32, interleaved in one run; inputs are rewritten before each call, and sums
are verified.  Bound: each host's link carries 2 (H - 1) / H of the bytes, H hosts, at the rate that
is left after the headers of TCP.  ``--slice-bytes`` and the options after it try other settings;
such rows are printed and not written, unless ``--record`` is given.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.rows import environment, replace

LAYOUTS = ("1,1", "2,2", "1,1,1,1", "3,1,2", "2,2,2,2")
_PAYLOAD = 1448 / 1514
"""The share of a frame of Ethernet that is data of TCP."""
_BYTES_A_S = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}
_SETTINGS = ("slice_bytes", "segment_bytes", "staged_bytes", "in_flight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rate", default="1gbit", help="of each link: a number, mbit or gbit")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="ranks of each host")
    parser.add_argument("--bytes", type=int, nargs="+", default=[16 << 20])
    parser.add_argument("--repeats", type=int, default=15)
    for name in _SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--record", action="store_true", help="also with other settings")
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout:
        _measure(options)
        return 0
    for layout in options.layouts:
        hosts = [sys.executable, "-m", "benchmarks.hosts", "--ranks", layout, "--rate"]
        ranks = [sys.executable, "-m", "benchmarks.between_hosts", *sys.argv[1:], "--layout"]
        subprocess.run([*hosts, options.rate, "--", *ranks, layout], check=True)
    return 0


def bound_s(layout: str, rate: str, nbytes: int) -> float:
    """The least seconds of an all-reduce over links of that rate."""
    hosts = layout.count(",") + 1
    return 2 * (hosts - 1) / hosts * nbytes / (float(rate[:-4]) * _BYTES_A_S[rate[-4:]] * _PAYLOAD)


def _measure(options: argparse.Namespace) -> None:
    from mpi4py import MPI

    import ringreduce as rr

    given = {name: getattr(options, name) for name in _SETTINGS}
    settings = " ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    command = " ".join(["python -m benchmarks.between_hosts", *sys.argv[1:-2]])
    world, rows = MPI.COMM_WORLD, []
    with rr.init(config=rr.Config(**given)) as comm:
        for nbytes in options.bytes:
            x = np.empty(nbytes // 4, np.float32)
            pattern = np.arange(x.size, dtype=np.float32) % 1000
            calls: dict[str, Callable[[], object]] = {
                "ringreduce": lambda x=x: comm.all_reduce(x, out=x),
                "Allreduce": lambda x=x: world.Allreduce(MPI.IN_PLACE, x),
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for repeat in range(2 + options.repeats):
                for name, call in calls.items():
                    np.multiply(pattern, world.rank + 1, out=x)
                    world.Barrier()
                    start = time.perf_counter()
                    call()
                    seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
                    if repeat >= 2:
                        times[name].append(seconds)
                    wanted = pattern * (world.size * (world.size + 1) / 2)
                    assert np.array_equal(x, wanted), f"{name} gives a wrong sum"
            medians = {name: statistics.median(series) for name, series in times.items()}
            row = {"benchmark": "between_hosts", "layout": options.layout, "rate": options.rate}
            row |= {"bytes": nbytes, "settings": settings, **environment(command)}
            row["milliseconds"] = {name: round(1e3 * s, 4) for name, s in medians.items()}
            bound = bound_s(options.layout, options.rate, nbytes)
            row["of_bound"] = {name: round(bound / s, 3) for name, s in medians.items()}
            rows.append(row)
            if world.rank == 0:
                mpi = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
                print(options.layout, options.rate, nbytes, mpi, settings, end=" ")
                print(row["milliseconds"], "of the bound:", row["of_bound"], flush=True)
    if world.rank == 0 and (options.record or not settings):
        replace("between_hosts", rows, same=("mpi", "layout", "rate", "bytes", "settings"))


if __name__ == "__main__":
    sys.exit(main())
