"""The choice of `ringreduce search --for split_size` beside the best of all candidates.

    ringreduce run -n 2 -m benchmarks.search
    ringreduce run -n 4 -m benchmarks.search

First a search runs, with its usual budget.  Then the exhaustive run measures every split size and
schedule with every cut of the layers into stages.  On 2 ranks these are 350 candidates, and the
search begins with 102 of them; on 4 ranks they are 705, and the search begins with 145.  The
exhaustive run has new trainers in each turn: one turn of all candidates, then turns of the 64
fastest.  The 8 fastest and the choice of the search are then measured in turns for longer, since
the least of many disturbed medians is too small.

Writes a row for each candidate of the search, and one for the choice, to
``bench_results/search.jsonl``.  Exits with 1 if the choice takes more than 1.1 times the best: it
may take 5 % longer to hold less, and medians vary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import combinations, pairwise
from statistics import median
from typing import Any

import numpy as np

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace
from ringreduce.train import inputs
from ringreduce.train.configuration import Given
from ringreduce.train.search.candidates import VIRTUAL, Candidate, Site, fitting
from ringreduce.train.search.finding import choose, find
from ringreduce.train.search.measuring import Bench
from ringreduce.train.search.options import BUDGET_S, SearchOptions, read
from ringreduce.train.search.report import CandidateRow

NAME = "search"
_HIDDEN, _BATCH = (256,) * 7, 128
_AGAIN, _FINALISTS = 64, 8
"""The fastest candidates of the exhaustive run: for its later turns, and to measure for longer."""
_MOST_OF_BEST = 1.1
"""Times the best that the choice may take."""
Times = dict[str, list[float]]
"""Name of a candidate -> seconds of its steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of the search")
    parser.add_argument("--turns", type=int, default=3, help="most, of the exhaustive run")
    parser.add_argument("--turns-s", type=float, default=180.0, help="no turn begins after these")
    parser.add_argument("--final-s", type=float, default=30.0, help="for the fastest")
    options = parser.parse_args()
    words = ["--for", "split_size", "--budget-s", str(options.budget_s), "--batch", str(_BATCH)]
    request = read([*words, "--hidden", *map(str, _HIDDEN)])
    with rr.init() as comm:
        where = environment(command_line(NAME))
        rows = find(comm, request)
        choice = choose(rows).candidate.name
        times, final = _exhaustive(comm, request, choice, options)
        verdict = _verdict(choice, rows, times, final, options.budget_s)
        if comm.rank == 0:
            found = [_row(row, times) | where for row in rows]
            _report(found, verdict)
            replace(NAME, [*found, verdict | where], same=("mpi", "ranks"))
        comm.barrier()  # the first rank that ends with a code stops the job: wait for the rows
    return int(verdict["of_best"] > _MOST_OF_BEST)


def _exhaustive(
    comm: rr.Communicator, request: SearchOptions, choice: str, options: argparse.Namespace
) -> tuple[Times, Times]:
    """Return the times of all candidates, and those of the fastest and the choice."""
    settings = request.given.settings()
    split = inputs.load(settings)
    place = Site(comm.nodes, split.widths(settings.hidden), len(split.train_labels))
    candidates = _candidates(request, place)
    order = np.random.default_rng(7)
    with closing(Bench(comm, split, np)) as bench:
        times: Times = {each.name: [] for each in candidates}

        def fastest(count: int) -> list[Candidate]:
            return sorted(candidates, key=lambda each: median(times[each.name]))[:count]

        turn = candidates
        for number in range(options.turns):
            if number and bench.clock() > options.turns_s:
                break
            for index in order.permutation(len(turn)):
                times[turn[index].name] += bench.measure(turn[index], 0.0)
                bench.drop(turn[index])
            turn = fastest(_AGAIN)
        chosen = [each for each in candidates if each.name == choice]
        last = [*dict.fromkeys([*fastest(_FINALISTS), *chosen])]
        names = [each.name for each in last]
        return times, dict(zip(names, bench.in_turns(last, options.final_s), strict=True))


def _candidates(request: SearchOptions, place: Site) -> list[Candidate]:
    """Return the candidates of the search, with every cut."""
    found: list[Candidate] = []
    for virtual in (1, VIRTUAL):
        for cut in _cuts(len(place.sizes) - 1, place.ranks * virtual):
            given = Given({**request.given.values, "cut": cut})
            found += fitting(request.kind, given, place)
    return found


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every cut of layers into stages.

    >>> [*_cuts(4, 3)]
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    for borders in combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in pairwise([0, *borders, layers]))


def _row(row: CandidateRow, times: Times) -> dict[str, Any]:
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


def _verdict(
    choice: str, rows: Sequence[CandidateRow], times: Times, final: Times, budget_s: float
) -> dict[str, Any]:
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
        "searched": len(rows),
        "choice": choice,
        "choice_ms": round(1e3 * medians[choice], 3),
        "best": best,
        "best_ms": round(1e3 * medians[best], 3),
        "of_best": round(medians[choice] / medians[best], 4),
        "finalists_ms": {name: round(1e3 * s, 3) for name, s in medians.items()},
        "steps": min(map(len, final.values())),
    }


def _report(candidates: Sequence[dict[str, Any]], verdict: dict[str, Any]) -> None:
    for row in sorted(candidates, key=lambda each: each["exhaustive_ms"]):
        print(
            f"{row['candidate']:55} predicted {row['predicted_ms']:9.3f} ms, search "
            f"{row['search_ms'] or '-':>9}, exhaustive {row['exhaustive_ms']:9.3f}"
        )
    print(f"best:   {verdict['best']}, {verdict['best_ms']} ms")
    print(f"choice: {verdict['choice']}, {verdict['choice_ms']} ms, {verdict['of_best']}x")


if __name__ == "__main__":
    sys.exit(main())
