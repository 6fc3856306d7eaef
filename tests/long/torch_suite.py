"""torch's own tests of process groups, over this backend and over Gloo.

    .venv-torch/bin/python -m tests.long.torch_suite --out bench_results/torch_suite.json

torch's wheel brings them: `torch.testing._internal.distributed.distributed_test`.  They run on 2, 3
and 4 ranks that find each other by a file, three times:

- ``gloo``: over Gloo;
- ``instead_of_gloo``: the tests ask for Gloo, and get this backend;
- ``ringreduce``: the tests ask for this backend; tests that name other backends are left out.

The suite lists the backends whose events in the profiler have Gloo's names.  Where this backend is
in Gloo's place, Gloo is taken off these lists.

Prints one row for each, with the names of the tests that Gloo passes and this backend does not.
Exits with 1 if any test failed that is not in `WORDS_OF_GLOO`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tests.long.faults import record
from tests.support.mpi import ROOT, MpiJobs, environment

WORDS_OF_GLOO = {
    "test_ddp_logging_data_cpu": "the log of DDP is to say that the backend is Gloo",
    "test_monitored_barrier_gloo": "'failed to pass monitoredBarrier'; ours: 'stopped answering'",
    "test_monitored_barrier_gloo_subgroup": "the same words",
    "test_monitored_barrier_gloo_rank_0_timeout": "'timed out in monitoredBarrier'",
}
"""Tests that compare a text of Gloo, and this text."""
ROADS = {
    "gloo": {"BACKEND": "gloo"},
    "instead_of_gloo": {"BACKEND": "gloo", "RINGREDUCE_INSTEAD_OF_GLOO": "1"},
    "ringreduce": {"BACKEND": "ringreduce"},
}
LIMIT_S = 1200


def outcomes(pattern: str) -> dict[str, str]:
    """Run torch's tests whose names contain `pattern`, by the variables of `ROADS`.

    Returns by test: passed, skipped, or the text of the error.
    """
    import torch
    from torch.testing._internal.distributed import distributed_test as theirs

    if os.environ.get("RINGREDUCE_INSTEAD_OF_GLOO"):
        theirs.PROFILING_SUPPORTED_BACKENDS.clear()
        theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()

    class TestBackend(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    found: dict[str, str] = {}

    class Result(unittest.TestResult):
        def addSuccess(self, test: Any) -> None:  # noqa: N802 - unittest's names
            found[test._testMethodName] = "passed"

        def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
            found[test._testMethodName] = "skipped"

        def addFailure(self, test: Any, error: Any) -> None:  # noqa: N802
            found[test._testMethodName] = self._exc_info_to_string(error, test)  # type: ignore

        addError = addFailure  # noqa: N815

    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*{pattern}*"]
    loader.loadTestsFromTestCase(TestBackend).run(Result())
    return found


def run(road: str, ranks: int, pattern: str, folder: Path) -> dict[str, str]:
    """Run torch's tests over a road on some ranks; return what each came to."""
    place = folder / f"{road}{ranks}"
    place.mkdir()
    answer = place / "outcomes.json"
    command = [sys.executable, "-m", __spec__.name, "--one", str(answer), "--tests", pattern]
    variables = {**ROADS[road], "WORLD_SIZE": str(ranks), "TEMP_DIR": str(place)}
    with (place / "output").open("wb") as output:
        subprocess.run(
            command,
            env=environment(**variables),
            cwd=ROOT,
            stdout=output,
            stderr=output,
            timeout=LIMIT_S,
            check=True,
        )
    result: dict[str, str] = json.loads(answer.read_text())
    return result


def judge(
    found: dict[str, str], wanted: set[str], known: Collection[str]
) -> tuple[dict[str, Any], bool]:
    """Compare the outcomes of tests with the set of those that have to pass.

    Prints the errors of those that do not pass, except the `known`.  Returns the columns of a row,
    and whether an error was printed.
    """
    passed = passed_of(found)
    failed = [what for what in found.values() if what not in ("passed", "skipped")]
    missing = sorted(wanted - passed)
    unknown = [name for name in missing if name not in known]
    for name in unknown:
        print(f"{name}: {found.get(name, 'not run')[-3000:]}", file=sys.stderr, flush=True)
    row = {"tests": len(found), "passed": len(passed), "failed": len(failed), "not_passed": missing}
    return row, bool(unknown)


def passed_of(found: dict[str, str]) -> set[str]:
    return {name for name, what in found.items() if what == "passed"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.torch_suite")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--tests", default="", help="only tests whose names contain this")
    parser.add_argument("--out", type=Path, help="where to record the rows, as JSON")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        options.one.write_text(json.dumps(outcomes(options.tests)))
        return 0
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.long.torch_suite {arguments}".strip()
    rows, failed_ever = [], False
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder), without_mpi=True)
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        for ranks in options.ranks:
            passed_by_gloo: set[str] = set()
            for road in ROADS:
                found = run(road, ranks, options.tests, Path(folder))
                if road == "gloo":
                    passed_by_gloo = passed_of(found)
                wanted = {name for name, what in found.items() if what != "skipped"}
                if road == "instead_of_gloo":
                    wanted |= passed_by_gloo
                outcome, failed = judge(found, wanted, WORDS_OF_GLOO)
                failed_ever |= failed
                row = {"proof": "torch_suite", "ranks": ranks, "road": road, **outcome}
                print(json.dumps(row), flush=True)
                rows.append({**where, **row})
    if options.out:
        record(options.out, rows, ("cpu", "proof", "ranks", "road"))
    return int(failed_ever)


if __name__ == "__main__":
    sys.exit(main())
