"""Time the candidates of ``algorithm="auto"`` on this communicator: `Communicator.explain`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ringreduce.calls.collectives import Collectives
from ringreduce.planning.plan import shard_counts
from ringreduce.planning.select import Choice

_CANDIDATE_S = 0.1
"""About the seconds for which a candidate is timed."""
_LEAST, _MOST = 5, 100
"""The least and the most calls of a candidate that are timed."""
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def time_candidates(
    comm: Collectives, rank: int, size: int, choice: Choice, dtype: np.dtype[Any]
) -> Choice:
    """Return the choice with the seconds of a call by each candidate.  Collective.

    Candidates take turns.  The time of a call is the median of those after a barrier, on the rank
    where it is longest.
    """
    count = choice.nbytes // dtype.itemsize
    array, how = _arguments(choice.collective, rank, size, count, dtype)
    call = partial(getattr(comm, choice.collective), *array, **how)
    names = list(choice.predicted_s)
    calls = {name: partial(call, algorithm=name) for name in names}
    if choice.collective == "barrier":  # has no argument `algorithm`
        calls = {choice.algorithm: call}
    seconds: dict[str, list[float]] = {}
    for name, each in calls.items():
        each()  # plans it
        seconds[name] = [_time(comm, each)]
    wanted = np.array([_CANDIDATE_S / times[0] for times in seconds.values()])
    rounds = np.clip(comm.all_reduce(wanted, op="min"), _LEAST, _MOST).astype(int)
    for number in range(1, int(rounds.max())):
        for each, times, count in zip(calls.values(), seconds.values(), rounds, strict=True):
            if number < count:
                times.append(_time(comm, each))
    medians = np.array([median(times) for times in seconds.values()])
    longest = comm.all_reduce(medians, op="max").tolist()
    return replace(choice, measured_s=dict(zip(seconds, longest, strict=True)))


def _time(comm: Collectives, call: partial[Any]) -> float:
    comm.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _arguments(
    collective: str, rank: int, size: int, count: int, dtype: np.dtype[Any]
) -> tuple[list[Any], Mapping[str, Any]]:
    """Return arguments of a call on `count` elements in all, the results' arrays among them."""
    if collective == "barrier":
        return [], {}
    counts, is_root = shard_counts(count, size), rank == 0
    whole, mine = np.zeros(count, dtype), np.zeros(counts[rank], dtype)
    pieces = np.zeros(count // size**2 * size, dtype)
    array, out = {
        "all_reduce": (whole, whole),
        "reduce_scatter": (whole, mine),
        "all_gather": (mine, whole),
        "broadcast": (whole, whole),
        "reduce": (whole, whole if is_root else None),
        "gather": (mine, whole if is_root else None),
        "scatter": (whole if is_root else None, mine),
        "all_to_all": (pieces, np.empty_like(pieces)),
    }[collective]
    how: dict[str, Any] = {"out": out}
    if collective in _REDUCTIONS:
        how["op"] = "or" if dtype.kind == "b" else "sum"
    if collective in ("all_gather", "gather", "scatter"):
        how["counts"] = counts
    return [array], how
