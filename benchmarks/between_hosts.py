"""Our all-reduce between hosts beside the MPI's own Allreduce, and beside what the links allow.

    python -m benchmarks.between_hosts [--rate 1gbit] [--layouts 1,1 3,1,2] [--repeats 15]

Starts itself once for each layout on hosts of `benchmarks.hosts`, so it needs root, ``ip`` and
``tc``.  Measures as `benchmarks.ring_and_mpi`.  Bound: each host's link carries 2 (H - 1) / H of
the bytes, H hosts, at the rate that is left after the headers of TCP.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.rows import environment, replace

LAYOUTS = ("1,1", "2,2", "1,1,1,1", "3,1,2", "2,2,2,2")
_PAYLOAD = 1448 / 1514
"""The share of a frame of Ethernet that is data of TCP."""
_BYTES_A_S = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rate", default="1gbit", help="of each link: a number, mbit or gbit")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="ranks of each host")
    parser.add_argument("--bytes", type=int, nargs="+", default=[16 << 20])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--config", nargs="*", default=[], help="NAME=NUMBER; rows are not written")
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
    import ringreduce as rr
    from benchmarks.ring_and_mpi import medians_s, of_mpi  # which initialises MPI

    command = " ".join(["python -m benchmarks.between_hosts", *sys.argv[1:-2]])
    config = rr.Config(**{n: int(value) for n, value in (w.split("=") for w in options.config)})
    rows = []
    with rr.init(config=config) as comm:
        for nbytes in options.bytes:
            calls = {"ringreduce": lambda x: comm.all_reduce(x, out=x), "Allreduce": of_mpi}
            medians = medians_s(nbytes, options.repeats, calls)
            row = {"benchmark": "between_hosts", "layout": options.layout, "rate": options.rate}
            row |= {"bytes": nbytes, **environment(command)}
            row["milliseconds"] = {name: round(1e3 * s, 4) for name, s in medians.items()}
            bound = bound_s(options.layout, options.rate, nbytes)
            row["of_bound"] = {name: round(bound / s, 3) for name, s in medians.items()}
            rows.append(row)
            if comm.rank == 0:
                print(options.layout, options.rate, nbytes, row["mpi"], *options.config, end=" ")
                print(row["milliseconds"], "of the bound:", row["of_bound"], flush=True)
    if comm.rank == 0 and not options.config:
        replace("between_hosts", rows, same=("mpi", "layout", "rate", "bytes"))


if __name__ == "__main__":
    sys.exit(main())
