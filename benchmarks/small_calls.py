"""What a call costs above its bare messages, and what the signature costs.

    mpirun -n 2 python -m benchmarks.small_calls

The bare messages are as many rounds as the ring takes (2(n-1)), or as what ``"auto"`` takes
(log2 n, by recursive doubling), from buffers that are set up once, by the quickest of three ways
that mpi4py has.  Everything else is ours: validation, agreement, plan, reduction, result.  All are
interleaved in blocks in one run; times are medians over the blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks import rows
from ringreduce.planning.operations import PlannedSlice
from ringreduce.planning.slices import plan_slice

SIZES = (8, 64 << 10, 64 << 20)
BLOCKS = 60
SECONDS_A_BLOCK = 0.02


def bare_messages(world: MPI.Comm, nbytes: int, rounds: int) -> dict[str, Callable[[], None]]:
    """Return three ways to exchange `rounds` messages with the neighbours and nothing else."""
    n, rank = world.size, world.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    sent, came = (memoryview(bytearray(max(1, nbytes))) for _ in range(2))
    out, into = [sent, MPI.BYTE], [came, MPI.BYTE]
    recv, send = world.Recv_init(into, left, 7), world.Send_init(out, right, 7)

    def persistent() -> None:
        for _ in range(rounds):
            recv.Start()
            send.Start()
            while not recv.Test():
                pass
            while not send.Test():
                pass

    def immediate() -> None:
        for _ in range(rounds):
            requests = [world.Irecv(into, left, 7), world.Isend(out, right, 7)]
            MPI.Request.Waitall(requests)

    def sendrecv() -> None:
        for _ in range(rounds):
            world.Sendrecv(out, right, 7, into, left, 7)

    return {"persistent": persistent, "immediate": immediate, "sendrecv": sendrecv}


def of_eight_bytes(comm: rr.Communicator, x: np.ndarray) -> dict[str, Callable[[], object]]:
    """Plain and planned calls by the ring, and by what auto takes."""
    out, n = np.empty_like(x), comm.size
    ring, auto = 2 * (n - 1), (n - 1).bit_length()
    calls: dict[str, Callable[[], object]] = {
        "auto all_reduce(x)": lambda: comm.all_reduce(x),
        "auto plan": comm.plan("all_reduce", x, out=out),
        "ring plan": comm.plan("all_reduce", x, out=out, algorithm="ring"),
    }
    for name, nbytes, rounds in (("ring", 8 // n, ring), ("auto", 8, auto)):
        bare = bare_messages(MPI.COMM_WORLD, nbytes, rounds)
        calls |= {f"bare {name} {how}": call for how, call in bare.items()}
    return calls


def above_bare(medians: dict[str, float]) -> dict[str, float]:
    """Microseconds of each call above the quickest way to exchange its messages bare."""
    calls = {"ring": "all_reduce(x)", "ring plan": "ring plan"}
    calls |= {"auto": "auto all_reduce(x)", "auto plan": "auto plan"}
    above = {}
    for name, call in calls.items():
        kind = name.split()[0]
        bare = min(t for way, t in medians.items() if way.startswith(f"bare {kind}"))
        above[name] = round(1e6 * (medians[call] - bare), 3)
    return above


def our_calls(comm: rr.Communicator, x: np.ndarray) -> dict[str, Callable[[], object]]:
    out = np.empty_like(x)
    return {
        "all_reduce(x)": lambda: comm.all_reduce(x, algorithm="ring"),
        "all_reduce(x, out=out)": lambda: comm.all_reduce(x, out=out, algorithm="ring"),
    }


def plan_unsigned(*arguments: Any) -> PlannedSlice:
    """`plan_slice`, with the signatures taken off its messages."""
    planned = plan_slice(*arguments)
    steps = [
        replace(
            step,
            recvs=tuple(message._replace(signature=None) for message in step.recvs),
            sends=tuple(message._replace(signature=None) for message in step.sends),
        )
        for step in planned.steps
    ]
    return planned._replace(steps=tuple(steps))


def one_shot(comm: rr.Communicator, x: np.ndarray) -> dict[str, Callable[[], object]]:
    """The algorithm that goes through shared memory, where a communicator has some."""
    out = np.empty_like(x)
    return {
        "all_reduce(x)": lambda: comm.all_reduce(x, algorithm="one_shot"),
        "plan": comm.plan("all_reduce", x, out=out, algorithm="one_shot"),
    }


def interleaved(world: MPI.Comm, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call, measured in turns; the slowest rank counts."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        for _ in range(3):
            call()
        once = (time.perf_counter() - start) / 3
        repeats[name] = world.allreduce(int(max(1, SECONDS_A_BLOCK / once)), MPI.MIN)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BLOCKS):
        for name, call in calls.items():
            world.Barrier()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            mine = (time.perf_counter() - start) / repeats[name]
            times[name].append(world.allreduce(mine, MPI.MAX))
    return {name: statistics.median(series) for name, series in times.items()}


def main() -> None:
    world = MPI.COMM_WORLD
    signed = rr.init(transport="mpi")
    unsigned = rr.init(transport="mpi")
    shared = rr.init(transport="shm")
    measured = []
    for nbytes in SIZES:
        x = np.full(nbytes // 8, world.rank + 1.0)
        assert signed.all_reduce(x)[0] == world.size * (world.size + 1) / 2
        calls: dict[str, Callable[[], object]] = dict(our_calls(signed, x))
        calls |= {f"unsigned {name}": call for name, call in our_calls(unsigned, x).items()}
        with mock.patch("ringreduce.planning.plan.plan_slice", plan_unsigned):
            assert unsigned.all_reduce(x, algorithm="ring")[0] == signed.all_reduce(x)[0]
        if nbytes == 8:
            calls |= of_eight_bytes(signed, x)
            calls |= {f"one-shot {name}": call for name, call in one_shot(signed, x).items()}
            calls |= {f"shm one-shot {name}": call for name, call in one_shot(shared, x).items()}
        medians = interleaved(world, calls)
        row = {
            "benchmark": "small_calls",
            "bytes": nbytes,
            **rows.environment(rows.command_line("small_calls")),
        }
        row["microseconds"] = {name: round(1e6 * t, 3) for name, t in medians.items()}
        out = "all_reduce(x, out=out)"
        row["signature_us"] = round(1e6 * (medians[out] - medians[f"unsigned {out}"]), 3)
        row["signature_percent"] = round(100 * (medians[out] / medians[f"unsigned {out}"] - 1), 2)
        if nbytes == 8:
            row["above_bare_us"] = above_bare(medians)
        measured.append(row)
        if world.rank == 0:
            print({key: row[key] for key in row if key in ("bytes", "microseconds")})
            print({key: row[key] for key in row if "signature" in key or "above" in key})
    if world.rank == 0:
        rows.replace("small_calls", measured, same=("mpi", "ranks", "bytes", "thread_level"))
    for comm in (signed, unsigned, shared):
        comm.close()


if __name__ == "__main__":
    main()
