"""Our all-reduce between hosts beside the MPI's own Allreduce, and beside what the links allow.

    python -m benchmarks.between_hosts [--rate 1gbit] [--layouts 1,1 3,1,2] [--bytes 8 1024]

Starts itself once for each layout on hosts of `benchmarks.hosts`, so it needs root, ``ip`` and
``tc``.  Contenders take turns: single calls, each after a barrier, and calls in a loop.  Results
are verified.  Long arrays are reduced by single calls alone.  Bound: each host's link carries
2 (H - 1) / H of the bytes, H hosts, at the rate of plain streams from all hosts at once, which the
same run measures.  Rows go to ``bench_results/hosts.jsonl``.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import environment, replace
from ringreduce.system.topology import Nodes

LAYOUTS = ("1,1", "2,2", "1,1,1,1", "3,1,2", "2,2,2,2")
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
_IN_LOOPS = 1 << 20
"""The most bytes of arrays that are also reduced in a loop."""
_LOOP, _FEWEST_TURNS, _ROW_S = 20, 5, 3.0
"""Calls of a loop; turns of a row at least, and seconds of the others."""
_STREAM_BYTES = 32 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rate", default="1gbit", help="of each link: a number, mbit or gbit")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="ranks of each host")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES)
    parser.add_argument(
        "--algorithms", nargs="+", default=["auto"], help="others: rows not written"
    )
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


def _measure(options: argparse.Namespace) -> None:
    command = " ".join(["python -m benchmarks.between_hosts", *sys.argv[1:-2]])
    rows = []
    with rr.init() as comm:
        stream_s_per_byte = _slowest_stream(MPI.COMM_WORLD, comm.nodes)
        count = len(comm.nodes)
        for nbytes in options.bytes:
            calls: dict[str, Callable[[Any], object]] = {
                name: lambda x, name=name: comm.all_reduce(x, out=x, algorithm=name)
                for name in options.algorithms
            }
            calls["MPI"] = lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)
            single, loop = _medians_s(MPI.COMM_WORLD, nbytes, calls)
            bound_s = 2 * (count - 1) / count * nbytes * stream_s_per_byte
            row = {"benchmark": "hosts", "layout": options.layout, "rate": options.rate}
            row |= {"bytes": nbytes, **environment(command)}
            row["stream_mb_per_s"] = round(1e-6 / stream_s_per_byte, 2)
            row["algorithm"] = comm.explain(nbytes).algorithm
            row["single_us"], row["loop_us"] = (
                {name: round(1e6 * s, 2) for name, s in medians.items()}
                for medians in (single, loop)
            )
            row["of_mpi"] = {
                name: round(max(each["MPI"] / each[name] for each in (single, loop) if each), 3)
                for name in options.algorithms
            }
            row["of_bound"] = {name: round(bound_s / s, 3) for name, s in single.items()}
            rows.append(row)
            if comm.rank == 0:
                print(*(row[key] for key in ("layout", "rate", "bytes", "algorithm")), end=" ")
                print(*(row[key] for key in ("single_us", "loop_us", "of_mpi", "of_bound")))
                sys.stdout.flush()
    if comm.rank == 0 and options.algorithms == ["auto"]:
        replace("hosts", rows, same=("mpi", "layout", "rate", "bytes", "cpu"))


def _medians_s(
    world: MPI.Intracomm, nbytes: int, calls: Mapping[str, Callable[[Any], object]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds of single calls, and of a call in a loop; empty for long arrays.

    The slowest rank counts.  A loop reduces sums again, and its result is not verified.
    """
    x, pattern = np.empty(nbytes // 4, np.float32), np.arange(nbytes // 4, dtype=np.float32) % 1000
    wanted = pattern * (world.size * (world.size + 1) / 2)
    single: dict[str, list[float]] = {name: [] for name in calls}
    loop: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    turn, goes_on = -2, True
    while goes_on:
        for name, call in calls.items():
            np.multiply(pattern, world.rank + 1, out=x)
            for times, number in ((single, 1), (loop, _LOOP)):
                if times is loop and nbytes > _IN_LOOPS:
                    continue
                world.Barrier()
                start = time.perf_counter()
                for _ in range(number):
                    call(x)
                seconds = world.allreduce(time.perf_counter() - start, MPI.MAX) / number
                if turn >= 0:
                    times[name].append(seconds)
                assert times is loop or np.array_equal(x, wanted), f"{name} gives a wrong sum"
                x[:] = 0
        turn += 1
        more = turn < _FEWEST_TURNS or time.perf_counter() < begun + _ROW_S
        goes_on = world.bcast(more)
    medians = [
        {name: statistics.median(series) for name, series in times.items() if series}
        for times in (single, loop)
    ]
    return medians[0], medians[1]


def _slowest_stream(world: MPI.Intracomm, nodes: Nodes) -> float:
    """Return the seconds a byte of the slowest of plain streams from each host to the next one."""
    here = next(index for index, node in enumerate(nodes) if world.rank in node)
    speaks = world.rank == nodes[here][0]
    listener = socket.create_server(("0.0.0.0", 0)) if speaks else None
    address = None
    if listener is not None:
        host = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()[0]
        address = host, listener.getsockname()[1]
    addresses = world.allgather(address)
    seconds = 0.0
    if listener is not None:
        out = socket.create_connection(addresses[nodes[(here + 1) % len(nodes)][0]])
        into, _ = listener.accept()
        start = time.perf_counter()
        sender = threading.Thread(target=out.sendall, args=(bytes(_STREAM_BYTES),))
        sender.start()
        left = _STREAM_BYTES
        while left:
            left -= len(into.recv(1 << 18))
        sender.join()
        seconds = time.perf_counter() - start
        for each in (out, into, listener):
            each.close()
    over = world.Ibarrier()
    while not over.Test():  # a rank that polls would take the cores from the streams
        time.sleep(1e-3)
    return float(world.allreduce(seconds, MPI.MAX)) / _STREAM_BYTES


if __name__ == "__main__":
    sys.exit(main())
