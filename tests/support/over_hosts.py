"""What the ranks of a job on two hosts find, without MPI."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr

LONG_S = 3600.0
"""Seconds that no test waits."""


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
        return {
            "name": socket.gethostbyname(socket.gethostname()),
            "nodes": comm.nodes,
            "says": (repr(comm), comm.explain(1 << 20).transport),
            "mismatch": mismatch,
            "again": again,
            "parts": parts,
        }


def interrupted(timeout_s: str) -> dict[str, Any]:
    """Call until an error comes, and return it.  Each rank notes when it begins."""
    comm = rr.init(timeout_s=60)
    x = np.arange(100_000, dtype=np.float32)
    comm.all_reduce(x)
    Path(os.environ["RESULTS"], f"began{comm.rank}").touch()
    try:
        while True:
            comm.all_reduce(x, timeout_s=float(timeout_s))
            time.sleep(0.01)
    except rr.RingReduceError as error:
        return {"error": type(error).__name__, "ranks": error.ranks, "at": time.time()}  # type: ignore[attr-defined]
