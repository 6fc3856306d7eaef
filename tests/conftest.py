"""Fixtures, and the choice of tests: smoke, full, and those that need a GPU or JAX."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import hypothesis
import pytest

from tests.support import (
    gpus,
    unclocked,  # noqa: F401
)
from tests.support.mpi import MpiJobs

SMOKE_CASES = 2
"""The most cases of one test function that are smoke."""
SLOWEST_FILES = 12
"""How many files are named whose tests take the longest."""
SMOKE_EXAMPLES = 5
"""Examples of each property in a smoke run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test full, and some smoke; leave out tests of what is missing."""
    there = {"gpu": gpus.has_gpu()}
    there |= {name: importlib.util.find_spec(name) is not None for name in ("jax", "torch")}
    for marker in (name for name, is_there in there.items() if not is_there):
        needs_it = [item for item in items if item.get_closest_marker(marker)]
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=needs_it)
    for item in items:
        if not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.full)
    for item in chosen_for_smoke(items):
        item.add_marker(pytest.mark.smoke)


def chosen_for_smoke(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Choose some cases of each function that is not slow, starts no job and needs no library.

    Tests that are marked smoke by hand are smoke already.
    """
    never = "mpi", "slow", "long", "jax", "torch", "smoke"
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if not any(item.get_closest_marker(name) for name in never)]
        yield from cases[:: max(1, -(-len(cases) // SMOKE_CASES))]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == "smoke":
        hypothesis.settings.register_profile("smoke", max_examples=SMOKE_EXAMPLES)
        hypothesis.settings.load_profile("smoke")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the number of deselected tests on the last line of a smoke run."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.getoption("markexpr") == "smoke":
        left_out = len(reporter.stats.get("deselected", []))
        reporter.write_line(
            f"These were the smoke tests.  {left_out:,} more: all but the longest by "
            "`pytest -m full`, the longest by `pytest -m long`."
        )


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the files whose tests take the longest."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    for file, taken in seconds.most_common(SLOWEST_FILES):
        if taken > 10:
            terminalreporter.write_line(f"{taken:7.1f} s  {file}")


@pytest.fixture
def mpi(tmp_path):
    """Starts SPMD programs under the mpiexec of this environment; sweeps what is left of them."""
    jobs = MpiJobs(tmp_path)
    yield jobs
    jobs.sweep()
