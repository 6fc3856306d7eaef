"""Our all-reduce between hosts beside the MPI's own Allreduce, and beside what the links allow.

    python -m benchmarks.between_hosts [--rate 1gbit] [--layouts 1,1 3,1,2] [--bytes 8 1024]

Starts itself once for each layout on hosts of `benchmarks.hosts`, so it needs root, ``ip`` and
``tc``.  The contenders of a row:

- ``auto``: ours over MPI,
- ``MPI``: the same MPI's Allreduce,
- ``tcp``: ours without MPI.

They take turns: single calls, each after a barrier, and calls in a loop.  Results are verified.
Long arrays are reduced by single calls alone.  Bound: each host's link carries 2 (H - 1) / H of the
bytes, H hosts, at the rate of plain streams from all hosts at once, which the same run measures.
`predicted_us` is the price of each candidate, told that rate.  Rows go to
``bench_results/hosts.jsonl``.  With ``--by-name`` the contenders are the candidates of ``"auto"``,
and rows go to ``hosts_by_name.jsonl``.  With ``--gloo`` they are ``tcp`` and Gloo by way of torch,
and rows go to ``hosts_gloo.jsonl``: while torch is loaded, all single calls take longer.

Then, or with ``--draw`` at once, draws ``docs/hosts.svg`` and prints the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import RESULTS, environment, replace
from ringreduce.picture.chart import Line, Panel, chart
from ringreduce.picture.scales import logarithmic, powers_of_two, size_text
from ringreduce.picture.style import BLUE, DASHED, DOTTED, GREEN, ORANGE, in_dark
from ringreduce.planning.select import predict
from ringreduce.schedules.cost import Profile
from ringreduce.system.topology import Nodes

PICTURE = Path(__file__).parent.parent / "docs" / "hosts.svg"

LAYOUTS = ("1,1", "2,2", "1,1,1,1", "3,1,2", "2,2,2,2")
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
_IN_LOOPS = 1 << 20
"""The most bytes of arrays that are also reduced in a loop."""
_LOOP, _FEWEST_TURNS, _ROW_S = 20, 5, 3.0
"""Calls of a loop; turns of a row at least, and seconds of the others."""
_STREAM_BYTES = 32 << 20
_PREDICTED = 64 << 10, 16 << 20
"""The least and the most bytes of calls whose predictions are compared with their times."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rate", default="1gbit", help="of each link: a number, mbit or gbit")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="ranks of each host")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--by-name", action="store_true", help="every candidate of auto alone")
    parser.add_argument("--gloo", action="store_true", help="without MPI beside Gloo")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout:
        _measure(options)
        return 0
    for layout in () if options.draw else options.layouts:
        hosts = [sys.executable, "-m", "benchmarks.hosts", "--ranks", layout, "--rate"]
        ranks = [sys.executable, "-m", "benchmarks.between_hosts", *sys.argv[1:], "--layout"]
        subprocess.run([*hosts, options.rate, "--", *ranks, layout], check=True)
    _show()
    return 0


def _measure(options: argparse.Namespace) -> None:
    command = " ".join(["python -m benchmarks.between_hosts", *sys.argv[1:-2]])
    rows, name = [], "hosts_by_name" if options.by_name else "hosts" + "_gloo" * options.gloo
    with rr.init() as comm, rr.init(transport="sockets") as tcp:
        stream_s_per_byte = _slowest_stream(MPI.COMM_WORLD, comm.nodes)
        gloo = _gloo(MPI.COMM_WORLD) if options.gloo else None
        link = with_changes(Profile().between_nodes, beta_s_per_byte=stream_s_per_byte)
        told = with_changes(comm.config, profile=Profile(between_nodes=link))
        count = len(comm.nodes)
        for nbytes in options.bytes:
            choice = comm.explain(nbytes)
            predicted = {
                each: predict("all_reduce", each, comm.nodes, nbytes, told)
                for each in choice.predicted_s
            }
            calls: dict[str, Callable[[Any], object]] = {
                "auto": _in_place(comm),
                "MPI": lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x),
                "tcp": _in_place(tcp),
            }
            if gloo is not None:
                calls = {"tcp": _in_place(tcp), "Gloo": gloo}
            if options.by_name:
                calls = {each: _in_place(comm, each) for each in predicted}
            single, loop = _medians_s(MPI.COMM_WORLD, nbytes, calls)
            bound_s = 2 * (count - 1) / count * nbytes * stream_s_per_byte
            row = {"benchmark": name, "layout": options.layout, "rate": options.rate}
            row |= {"bytes": nbytes, **environment(command)}
            row["stream_mb_per_s"] = round(1e-6 / stream_s_per_byte, 2)
            row["algorithm"] = choice.algorithm
            row["predicted_us"] = {each: round(1e6 * s, 2) for each, s in predicted.items()}
            row["single_us"], row["loop_us"] = (
                {name: round(1e6 * s, 2) for name, s in medians.items()}
                for medians in (single, loop)
            )
            for theirs, ours in (("MPI", "auto"), ("Gloo", "tcp")):
                if theirs in single:
                    row[f"of_{theirs.lower()}"] = {ours: _better(single, loop, ours, theirs)}
            row["of_bound"] = {each: round(bound_s / s, 3) for each, s in single.items()}
            rows.append(row)
            if comm.rank == 0:
                print(*(row[key] for key in ("layout", "rate", "bytes", "algorithm")), end=" ")
                print(*[row.get(key) for key in ("single_us", "loop_us", "of_mpi", "of_gloo")])
                sys.stdout.flush()
    if comm.rank == 0:
        replace(name, rows, same=("mpi", "layout", "rate", "bytes", "cpu"))


def _in_place(comm: rr.Communicator, algorithm: str = "auto") -> Callable[[Any], object]:
    return lambda x: comm.all_reduce(x, out=x, algorithm=algorithm)


def _better(
    single: Mapping[str, float], loop: Mapping[str, float], ours: str, theirs: str
) -> float:
    """Return their time over ours, of single calls or of loops: the greater one."""
    return round(max(each[theirs] / each[ours] for each in (single, loop) if each), 3)


def _gloo(world: MPI.Intracomm) -> Callable[[Any], object]:
    """Return Gloo's all-reduce in place."""
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = None
    if world.rank == 0:
        store = distributed.TCPStore("0.0.0.0", 0, world.size, True, wait_for_workers=False)
    host, port = world.bcast((_address_here(), store and store.port))
    if store is None:
        store = distributed.TCPStore(host, port, world.size, False)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return lambda x: distributed.all_reduce(torch.from_numpy(x))


def _address_here() -> str:
    return subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()[0]


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
    port = None if listener is None else listener.getsockname()[1]
    addresses = world.allgather((_address_here(), port))
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


def _show() -> None:
    """Draw the times of each layout at 1 Gbit/s, and print the tables of the page."""
    texts = [(RESULTS / f"{name}.jsonl").read_text() for name in ("hosts", "hosts_gloo")]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    rows = [row for row in rows if row["rate"] == "1gbit"]
    if not rows:
        return
    newest = max(rows, key=lambda row: row["date"])["cpu"]
    rows = sorted((row for row in rows if row["cpu"] == newest), key=lambda row: row["bytes"])
    measured = {row["layout"] for row in rows}
    of_mpi = [row["of_mpi"]["auto"] for row in rows if "of_mpi" in row]
    svg = chart(
        f"all_reduce between hosts takes 1/{max(of_mpi):.1f} to {1 / min(of_mpi):.2f} of the time "
        "of the MPI's Allreduce",
        f"Links of 1 Gbit/s; all ranks share {rows[0]['cores']} cores of {newest}; "
        "bench_results/hosts.jsonl.",
        [
            _panel(layout, [row for row in rows if row["layout"] == layout])
            for layout in LAYOUTS
            if layout in measured
        ],
        columns=2,
        panel_height=170,
    )
    PICTURE.write_text(svg, encoding="utf-8")
    PICTURE.with_name("hosts-dark.svg").write_text(in_dark(svg), encoding="utf-8")
    for made, of in (("auto", "of_mpi"), ("tcp", "of_gloo")):
        head = ["layout", "MPI", *map(size_text, SIZES)]
        print(f"\n{made}\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for layout in LAYOUTS:
            for mpi in ("MPICH", "Open MPI"):
                found = [row for row in rows if row["layout"] == layout and mpi in row["mpi"]]
                figures = [f"{row[of][made]:.2f}" for row in found if of in row]
                if figures:
                    print(f"| {' | '.join([layout, mpi, *figures])} |")
    _show_prices(rows)


def _show_prices(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print how well ``"auto"`` predicts and chooses, by MPI."""
    text = (RESULTS / "hosts_by_name.jsonl").read_text()
    same = rows[0]["cpu"], "1gbit"
    by_name = [
        row for row in map(json.loads, text.splitlines()) if (row["cpu"], row["rate"]) == same
    ]
    for mpi in ("MPICH", "Open MPI"):
        errors = [
            abs(row["predicted_us"][row["algorithm"]] / row["single_us"]["auto"] - 1)
            for row in rows
            if mpi in row["mpi"] and "auto" in row["single_us"]
            if _PREDICTED[0] <= row["bytes"] <= _PREDICTED[1]
        ]
        to_best = [
            statistics.geometric_mean(
                times[row["algorithm"]] / min(times.values())
                for times in (row["single_us"], row["loop_us"])
                if times
            )
            for row in by_name
            if mpi in row["mpi"]
        ]
        if not errors or not to_best:
            continue
        near = sum(ratio <= 1.1 for ratio in to_best)
        mean, error = statistics.geometric_mean(to_best), statistics.median(errors)
        print(f"\n{mpi}: the median error of predictions from 64 KiB to 16 MiB is {error:.1%}.")
        print(f"The choice of auto takes {mean:.2f} times the best candidate's time,", end=" ")
        print(f"in {near} of {len(to_best)} cases at most 1.1 times.")


def _panel(layout: str, rows: Sequence[Mapping[str, Any]]) -> Panel:
    kinds = {
        "ringreduce over MPICH": ("auto", "MPICH", BLUE, ""),
        "MPICH": ("MPI", "MPICH", GREEN, ""),
        "ringreduce over Open MPI": ("auto", "Open MPI", BLUE, DASHED),
        "Open MPI": ("MPI", "Open MPI", GREEN, DASHED),
        "ringreduce without MPI": ("tcp", "MPICH", BLUE, DOTTED),  # of the run beside Gloo
        "Gloo": ("Gloo", "MPICH", ORANGE, ""),
    }
    lines = []
    for label, (contender, mpi, colour, dashes) in kinds.items():
        points = [
            (row["bytes"], row["single_us"][contender])
            for row in rows
            if mpi in row["mpi"] and contender in row["single_us"]
            if contender != "tcp" or "Gloo" in row["single_us"]
        ]
        if points:
            lines.append(Line(points, colour, label, dashes=dashes))
    x = powers_of_two([row["bytes"] for row in rows], size_text, most=5)
    y = logarithmic([us for each in lines for _, us in each.points])
    return Panel(f"{layout}: median time of a call, µs", x, y, lines)


if __name__ == "__main__":
    sys.exit(main())
