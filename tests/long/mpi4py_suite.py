"""Run mpi4py's own tests of collectives on wrapped communicators, and on MPI's.

    python -m tests.long.mpi4py_suite --ranks 1 2 3 4 5

Fetches mpi4py's source archive of the installed version from the package index.  Exits with 1 if a
test has another outcome on a wrapped communicator than on MPI's, or if the archive is not there.
"""

# ruff: noqa: N802 - the names of methods are unittest's

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.mpi import MpiJobs

MODULES = (
    *("test_cco_buf", "test_cco_vec", "test_cco_nb_buf", "test_cco_nb_vec", "test_cco_pr_buf"),
    *("test_cco_obj", "test_comm", "test_subclass"),
)


class Outcomes(unittest.TestResult):
    """Notes the outcome of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.found[test.id()] = "passed"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.found[test.id()] = "failed"

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.found[test.id()] = "error"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.found[test.id()] = "skipped"

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:
        if err is not None:
            self.found[test.id()] = "failed"


def outcomes(folder: str, wrapped: str) -> tuple[dict[str, str], int]:
    """Run the tests on this rank: their outcomes, and how many calls ringreduce made."""
    from mpi4py import MPI

    import ringreduce as rr

    sys.path.insert(0, folder)
    import arrayimpl

    without_gpu = [each for each in arrayimpl.ArrayBackends if each.backend != "numba"]
    arrayimpl.ArrayBackends[:] = without_gpu
    plain = MPI.COMM_WORLD, MPI.COMM_SELF
    if wrapped:
        MPI.COMM_WORLD, MPI.COMM_SELF = map(rr.wrap, plain)  # classes of tests take them from there
    routes = [comm.routes for comm in (MPI.COMM_WORLD, MPI.COMM_SELF) if wrapped]
    suite = unittest.defaultTestLoader.loadTestsFromNames(MODULES)
    MPI.COMM_WORLD, MPI.COMM_SELF = plain
    result = Outcomes()
    suite.run(result)
    calls = sum((Counter(each) for each in routes), Counter())
    return result.found, sum(n for (_, by), n in calls.items() if by == "ringreduce")


def fetch(folder: Path) -> Path:
    """Fetch and unpack the archive; return the folder of its tests."""
    wanted = f"mpi4py=={version('mpi4py')}"
    how = ["download", "-q", "--no-deps", "--no-binary", "mpi4py"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *how, "-d", str(folder), wanted],
        capture_output=True,
        text=True,
    )
    archives = [*folder.glob("mpi4py-*.tar.gz")]
    if not archives:
        sys.exit(f"{wanted}: its source archive cannot be had\n{done.stderr}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / archives[0].name.removesuffix(".tar.gz") / "test"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.mpi4py_suite")
    parser.add_argument("--ranks", type=int, nargs="+", default=[3])
    options = parser.parse_args(argv)
    differ = 0
    with tempfile.TemporaryDirectory() as name:
        jobs, tests = MpiJobs(Path(name)), fetch(Path(name))
        for ranks in options.ranks:
            function = "tests.long.mpi4py_suite:outcomes"
            plain, wrapped = (
                jobs.run_ok("call", ranks, function, str(tests), which) for which in ("", "wrapped")
            )
            for (wanted, _), (found, _) in zip(plain, wrapped, strict=True):
                wrong = {test for test in wanted if wanted[test] != found.get(test)}
                differ += len(wrong)
                for test in sorted(wrong):
                    print(f"{test}: {wanted[test]} on MPI, {found.get(test)} if wrapped")
            counted = ", ".join(f"{n} {what}" for what, n in Counter(found.values()).items())
            print(f"{ranks} ranks: {counted}; {wrapped[0][1]} calls by ringreduce", flush=True)
            if not wrapped[0][1]:
                sys.exit("ringreduce made no call")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
