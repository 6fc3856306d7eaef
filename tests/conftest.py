"""Fixtures, and the choice of tests: smoke, full, and those that need a GPU or JAX."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import pytest

from tests.support import (
    gpus,
    unclocked,  # noqa: F401
)
from tests.support.mpi import MpiJobs

SMOKE_CASES = 2
"""The most cases of one test function that are smoke."""
LEFT_OUT = pytest.StashKey[int]()
"""How many tests the run leaves out."""
SLOWEST_FILES = 12
"""How many files are named whose tests take the longest."""
BEGIN_WITH = "test_docs.py", "test_site.py", "test_faults.py", "test_launch_jobs.py", "test_jit.py"
"""Files that take the longest: a worker that began them last would end alone."""
SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps the settings of a property: it has no public way to change them."""
SMOKE_SHARE = 10
"""A smoke run draws one of so many examples of a property, and at least so many."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script in the background ignores Ctrl-C, and so would the jobs that tests send it to.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test full, and some smoke; leave out tests of what is missing."""
    there = {"gpu": gpus.has_gpu()}
    libraries = "jax", "keras", "tensorflow", "torch"
    there |= {name: importlib.util.find_spec(name) is not None for name in libraries}
    for marker in (name for name, is_there in there.items() if not is_there):
        needs_it = [item for item in items if item.get_closest_marker(marker)]
        if needs_it:
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=needs_it)
    for item in beyond_few(items):
        item.add_marker(pytest.mark.long)
    for item in items:
        if not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.full)
    for item in chosen_for_smoke(items):
        item.add_marker(pytest.mark.smoke)
    items.sort(key=lambda item: item.path.name not in BEGIN_WITH)
    if config.getoption("markexpr") == "smoke":
        for test in {item.obj for item in items if hypothesis.is_hypothesis_test(item.obj)}:
            draw_fewer_examples(test)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage meanwhile, and later never among the thousands of tests."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def draw_fewer_examples(test: Callable[..., object]) -> None:
    """Draw a tenth of the examples that the property asks for."""
    asked = vars(test)[SETTINGS]
    fewer = max(SMOKE_SHARE, asked.max_examples // SMOKE_SHARE)
    if fewer < asked.max_examples:
        setattr(test, SETTINGS, hypothesis.settings(asked, max_examples=fewer))


def beyond_few(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Choose the cases of functions marked `few` that are more than the marker allows."""
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        if marker := cases[0].get_closest_marker("few"):
            stays = {len(cases) * n // marker.args[0] for n in range(marker.args[0])}
            yield from (case for index, case in enumerate(cases) if index not in stays)


def chosen_for_smoke(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Choose some cases of each function that is not slow, starts no job and needs no library.

    Tests that are marked smoke by hand are smoke already.
    """
    never = "mpi", "slow", "long", "jax", "keras", "tensorflow", "torch", "smoke"
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if not any(item.get_closest_marker(name) for name in never)]
        yield from cases[:: max(1, -(-len(cases) // SMOKE_CASES))]


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what is left out; a worker of pytest-xdist hands the number on."""
    config = items[0].config
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the number of deselected tests on the last line of a smoke run."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.getoption("markexpr") == "smoke":
        reporter.write_line(
            f"These were the smoke tests.  {config.stash.get(LEFT_OUT, 0):,} more: all but the "
            "longest by `pytest -m full`, the longest by `pytest -m long`."
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


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Starts jobs on two hosts, which are network namespaces."""
    from tests.support.hosts import jobs_on_hosts

    with jobs_on_hosts(tmp_path_factory.mktemp("hosts")) as jobs:
        yield jobs
