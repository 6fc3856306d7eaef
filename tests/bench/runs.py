"""Runs of the benchmark, one after another in a job of ranks, and what came of each of them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any
from unittest import mock

import ringreduce as rr
from ringreduce.bench.collectives import COLLECTIVES
from ringreduce.calls import cache

QUICKLY = ("-b", "32", "-e", "512K", "-f", "128", "--iters", "3", "-w", "1", "-c", "3")
ONE_CALL = ("-b", "8", "-e", "8", "--iters", "1")
RUNS = {
    **{name: (*QUICKLY, "--collective", name, "--json", f"{name}.jsonl") for name in COLLECTIVES},
    "bfloat16": (*QUICKLY, "-d", "bfloat16"),
    "half avg": (*QUICKLY, "-d", "half", "-o", "avg"),
    "bool xor": (*QUICKLY, "-d", "bool", "-o", "xor"),
    "prod": (*QUICKLY, "-o", "prod"),
    "wide": (*QUICKLY, "-c", "0", "--wide"),
    "auto": ONE_CALL,
    "ring": (*ONE_CALL, "--algorithm", "ring"),
    "wrong result": QUICKLY,
    "no library": ("--plot", "run.png"),
    "wrong option": ("--collectiv", "ringing"),
    "help": ("--help",),
    "no folder": ("--json", "no/such/folder.jsonl"),
}
"""The command line of each run."""


def over_mpi(folder: str) -> dict[str, dict[str, Any]]:
    """Make all runs in this folder; return what came of each of them on this rank."""
    os.chdir(folder)
    return {name: _made(name) for name in RUNS}


def _made(name: str) -> dict[str, Any]:
    """Return the exit code, the texts, the algorithms by size, and the arguments of a last call."""
    from ringreduce.bench.__main__ import main  # which initialises MPI

    used, told, resolve, right = {}, [[]], cache.resolve, rr.Communicator.all_reduce

    def resolved(collective, algorithm, nodes, nbytes, config):
        chosen = resolve(collective, algorithm, nodes, nbytes, config)
        used[f"{collective} {nbytes}"] = chosen
        return chosen

    def all_reduce(self, x, *arguments, **named):
        told.append(sorted(named))
        y = right(self, x, *arguments, **named)
        if name == "wrong result" and self.rank == 1 and y.size > 9:
            y[9] += 1
        return y

    # Only there, as the end of the block forgets all modules that were imported in it.
    without = mock.patch.dict(sys.modules, {"resvg_py": None})
    with (
        mock.patch.object(cache, "resolve", resolved),
        mock.patch.object(rr.Communicator, "all_reduce", all_reduce),
        without if name == "no library" else contextlib.nullcontext(),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main(RUNS[name])
        except SystemExit as stop:
            code = stop.code
    texts = {"out": out.getvalue(), "err": err.getvalue()}
    return {"code": code, **texts, "used": used, "named": told[-1]}
