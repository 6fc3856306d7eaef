"""The choice of `ringreduce search --for split_size` beside the best of all candidates.

    OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m benchmarks.search
    OPENBLAS_NUM_THREADS=1 mpirun -n 4 python -m benchmarks.search

First a search runs, with its usual budget.  Then the exhaustive run measures every split size,
schedule and cut, in turns that all begin with new trainers.  The fastest of them and the choice of
the search are then measured in turns for longer, since the least of many disturbed medians is too
small.  Writes a row for each candidate, and one for the choice, to ``bench_results/search.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any

import numpy as np

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace
from ringreduce.train import inputs
from ringreduce.train.search.candidates import Place, fitting
from ringreduce.train.search.finding import choose, find
from ringreduce.train.search.measuring import Bench
from ringreduce.train.search.options import BUDGET_S, Request, read
from ringreduce.train.search.report import Row

NAME = "search"
_HIDDEN, _BATCH = (256,) * 7, 128
_FINALISTS = 8
"""The fastest candidates of the exhaustive run that are measured for longer."""
Times = dict[str, list[float]]
"""Name of a candidate -> seconds of its steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of the search")
    parser.add_argument("--turns", type=int, default=3, help="of the exhaustive run")
    parser.add_argument("--final-s", type=float, default=30.0, help="for the fastest")
    options = parser.parse_args()
    words = ["--for", "split_size", "--budget-s", str(options.budget_s), "--batch", str(_BATCH)]
    request = read([*words, "--hidden", *map(str, _HIDDEN)])
    with rr.init() as comm:
        where = environment(command_line(NAME))
        rows = find(comm, request)
        choice = choose(rows, request.kind).candidate.name
        times, final = _exhaustive(comm, request, choice, options.turns, options.final_s)
        if comm.rank == 0:
            found = [_row(row, times) | where for row in rows]
            found.append(_verdict(choice, times, final, options.budget_s) | where)
            _report(found)
            replace(NAME, found, same=("mpi", "ranks", "candidate"))
        comm.barrier()


def _exhaustive(
    comm: rr.Communicator, request: Request, choice: str, turns: int, final_s: float
) -> tuple[Times, Times]:
    """Return the times of all candidates, and those of the fastest and the choice."""
    settings = request.given.settings()
    split = inputs.load(settings)
    place = Place(comm.nodes, split.widths(settings.hidden), len(split.train_labels))
    candidates = fitting(request.kind, request.given, place)
    order = np.random.default_rng(7)
    with closing(Bench(comm, split, np)) as bench:
        times: Times = {each.name: [] for each in candidates}
        for _ in range(turns):
            for index in order.permutation(len(candidates)):
                times[candidates[index].name] += bench.measure(candidates[index], 0.0)
                bench.drop(candidates[index])
        fastest = sorted(candidates, key=lambda each: median(times[each.name]))[:_FINALISTS]
        chosen = [each for each in candidates if each.name == choice]
        last = [*dict.fromkeys([*fastest, *chosen])]
        names = [each.name for each in last]
        return times, dict(zip(names, bench.in_turns(last, final_s), strict=True))


def _row(row: Row, times: Times) -> dict[str, Any]:
    """A candidate: what was predicted, what the search measured, and the exhaustive run."""
    seconds = times[row.candidate.name]
    return {
        "benchmark": NAME,
        "candidate": row.candidate.name,
        "predicted_ms": round(1e3 * row.predicted_s, 3),
        "search_ms": round(1e3 * row.step_s, 3) if row.steps else None,
        "search_steps": row.steps,
        "exhaustive_ms": round(1e3 * median(seconds), 3),
        "exhaustive_steps": len(seconds),
        "held_bytes": row.held_bytes or None,
    }


def _verdict(choice: str, times: Times, final: Times, budget_s: float) -> dict[str, Any]:
    """The choice beside the best of the candidates that were measured for longer."""
    medians = {name: median(seconds) for name, seconds in final.items()}
    best = min(medians, key=medians.__getitem__)
    return {
        "benchmark": NAME,
        "candidate": "choice",
        "hidden": list(_HIDDEN),
        "batch": _BATCH,
        "budget_s": budget_s,
        "candidates": len(times),
        "choice": choice,
        "choice_ms": round(1e3 * medians[choice], 3),
        "best": best,
        "best_ms": round(1e3 * medians[best], 3),
        "of_best": round(medians[choice] / medians[best], 4),
        "finalists_ms": {name: round(1e3 * s, 3) for name, s in medians.items()},
        "steps": min(map(len, final.values())),
    }


def _report(rows: Sequence[dict[str, Any]]) -> None:
    *candidates, verdict = rows
    for row in sorted(candidates, key=lambda each: each["exhaustive_ms"]):
        print(
            f"{row['candidate']:55} predicted {row['predicted_ms']:9.3f} ms, search "
            f"{row['search_ms'] or '-':>9}, exhaustive {row['exhaustive_ms']:9.3f}"
        )
    print(f"best:   {verdict['best']}, {verdict['best_ms']} ms")
    print(f"choice: {verdict['choice']}, {verdict['choice_ms']} ms, {verdict['of_best']}x")


if __name__ == "__main__":
    main()
