"""Facts that the ranks of a job on two hosts return, by MPI or without it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr
from tests.support.bits import of_hosts

LONG_S = 3600.0
"""Seconds that no test waits."""
SHORT, LONG = 100_000, 1_000_000
"""Elements of float32 of a compiled call, and of a sliced one."""


def facts() -> dict[str, Any]:
    """Return what this rank of 2,1 finds of its place, and of calls that go well and do not."""
    with rr.init(timeout_s=60) as comm:
        total = comm.all_reduce(np.arange(100_000) * (comm.rank + 1))
        assert np.array_equal(total, np.arange(100_000) * 6)
        try:
            comm.all_reduce(np.ones(2 + comm.rank // 2))
        except rr.MismatchError as error:
            mismatch = str(error)
        again = comm.all_reduce(1).item()
        with comm.split(comm.rank // 2) as here, comm.split(comm.rank % 2) as across:
            parts = [
                (part.all_reduce(comm.rank).item(), repr(part).split(", ")[-1].rstrip(">"))
                for part in (here, across)
            ]
        name = ""
        with contextlib.suppress(OSError):
            name = socket.gethostbyname(socket.gethostname())
        return {
            "name": name,
            "nodes": comm.nodes,
            "says": (repr(comm), comm.explain(1 << 20).transport),
            "mismatch": mismatch,
            "again": again,
            "bits": of_hosts(comm),
            "parts": parts,
        }


def interrupted(timeout_s: str, count: str) -> dict[str, Any]:
    """Reduce `count` float32 until an error comes; return it.  Each rank notes when it begins."""
    comm = rr.init(timeout_s=60)
    x = np.arange(int(count), dtype=np.float32)
    comm.all_reduce(x)
    Path(os.environ["RESULTS"], f"began{comm.rank}").touch()
    try:
        while True:
            comm.all_reduce(x, timeout_s=float(timeout_s))
            time.sleep(random.choice([0, 0, 1e-3]))
    except rr.RingReduceError as error:
        return {"error": type(error).__name__, "ranks": error.ranks, "at": time.time()}  # type: ignore[attr-defined]
