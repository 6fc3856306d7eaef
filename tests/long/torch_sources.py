"""Tests of torch's sources, over Gloo and over this backend in Gloo's place.

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch /tmp/pytorch
    .venv-torch/bin/python -m tests.long.torch_sources --sources /tmp/pytorch

torch's wheel lacks the tests of functional collectives, device meshes, FSDP2, DTensor, pipelines,
checkpoints and sharded optimizers.  Its sources have them.  The sources should be of the torch that
is installed.  The tests run twice:

- ``gloo``: over Gloo;
- ``instead_of_gloo``: the tests ask for Gloo, and get this backend.

Tests whose ranks are threads or simulated need no backend, and are left out.  The tests of some
files need GPUs: `ON_THE_CPU` changes copies of these files.

Prints one row for each group of files and road, with the names of the tests that Gloo passes and
this backend does not.  Exits with 1 if there are any but those in `KNOWN`, or if Gloo passes
no test of a group.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.long.faults import record
from tests.long.torch_suite import ROADS, judge, passed_of
from tests.support.mpi import ROOT, MpiJobs, environment

GROUPS = {
    "functional collectives": ("test_functional_api.py", "test_c10d_functional_native.py"),
    "device meshes": ("test_device_mesh.py",),
    "FSDP2": ("_composable/fsdp/test_*.py",),
    "DTensor": ("tensor/test_*.py", "tensor/parallel/test_*.py"),
    "pipelines": ("pipelining/test_stage.py", "pipelining/test_schedule_multiproc.py"),
    "checkpoints": ("checkpoint/test_pg_transport.py", "checkpoint/e2e/test_e2e_save_and_load.py"),
    "optimizers": ("optim/test_zero_redundancy_optimizer.py", "algorithms/test_join.py"),
}
"""Subjects of the tests, and their files in ``test/distributed``."""
_CPU = 'torch.device("cpu")'
_OF_PIPELINES = {
    '@requires_accelerator_dist_backend(["nccl", "xccl"])': "",
    "not TEST_MULTIACCELERATOR": "False",
    "torch.device(device_type, self.rank)": _CPU,
}
ON_THE_CPU = {
    "test_functional_api.py": {'\nDEVICE = "cuda"\n': '\nDEVICE = "cpu"\n'},
    "test_c10d_functional_native.py": {
        "torch.device(self.rank)": _CPU,
        "@requires_accelerator_dist_backend()\nclass": "class",
    },
    "pipelining/test_stage.py": _OF_PIPELINES,
    "pipelining/test_schedule_multiproc.py": _OF_PIPELINES,
}
"""Texts of files that are replaced in a copy, so that the tests run on the CPU."""
KNOWN = {
    "test_fully_shard_extensions.TestFullyShardAllGatherExtensionsMultiProcess."
    "test_all_gather_extensions_train_parity": "it passes scatter a tensor that holds others",
}
"""Tests that this backend does not pass, and why."""
DEVICES = 4
"""The number of devices that torch says the CPU has: most tests have as many ranks."""
MOST_RANKS = 8
"""Tests of more ranks are skipped."""
_TEST_S = 300
"""Seconds that a test may take."""
_LIMIT_S = 3600
"""Seconds that a file of tests may take."""


def pytest_configure() -> None:
    """Let the CPU have as many devices as the tests need, and let torch fork the ranks of a test.

    Ranks that are forked need not import torch again, which would take them seconds.
    """
    import torch
    from torch.distributed import distributed_c10d
    from torch.testing._internal import common_distributed, common_fsdp

    ours = hasattr(distributed_c10d._new_process_group_helper, "__wrapped__")
    assert ours == ("RINGREDUCE_INSTEAD_OF_GLOO" in os.environ)
    torch.multiprocessing.set_start_method("fork")
    common_distributed.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(
        torch.multiprocessing.get_context("fork").Process
    )
    torch.cpu.device_count = lambda: DEVICES
    torch.accelerator.device_count = lambda: MOST_RANKS
    common_fsdp.DEVICE_COUNT = common_fsdp.FSDPTestContinuous.world_size = DEVICES
    skip_if_fewer = common_distributed.skip_if_lt_x_gpu
    common_distributed.skip_if_lt_x_gpu = lambda devices, **_: skip_if_fewer(
        devices, allow_cpu=devices <= MOST_RANKS
    )


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out the tests whose ranks are threads or simulated: they need no backend."""
    from torch.testing._internal import common_distributed as theirs
    from torch.testing._internal.distributed._tensor import common_dtensor

    kinds = (theirs.MultiProcessTestCase, theirs.MultiProcContinuousTest)
    simulated = tuple(
        kind for name, kind in vars(common_dtensor).items() if name.startswith("LocalDTensor")
    )
    started = [
        item
        for item in items
        if item.cls and issubclass(item.cls, kinds) and not issubclass(item.cls, simulated)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in started])
    items[:] = started


def copy_on_the_cpu(sources: Path, folder: Path) -> Path:
    """Copy torch's tests to a folder, changed by `ON_THE_CPU`; return where they are."""
    tests = folder / "distributed"
    shutil.copytree(sources / "test" / "distributed", tests)
    (folder / "inductor").symlink_to(sources.absolute() / "test" / "inductor")
    for file, replaced in ON_THE_CPU.items():
        text = (tests / file).read_text()
        for before, after in replaced.items():
            if before not in text:
                raise ValueError(f"{file} has no {before!r}; change ON_THE_CPU")
            text = text.replace(before, after)
        (tests / file).write_text(text)
    return tests


def run(road: str, file: Path, tests: Path) -> dict[str, str]:
    """Run a file of torch's tests over a road.

    Returns by test: passed, skipped, or the text of the error.
    """
    results = tests / f"{road}.xml"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, f"--junitxml={results}"]
    variables = {**ROADS[road], "PYTHONPATH": f"{ROOT}:{file.parent}"}
    variables["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(_TEST_S)
    with (tests / f"{road}.output").open("ab") as output:
        job = subprocess.Popen(
            [*command, str(file.relative_to(tests))],
            env=environment(**variables),
            cwd=tests,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = job.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            code = job.wait()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        return {}
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return {file.stem: f"pytest ended with {code}"}
    return {
        f"{file.stem}.{case.get('classname', '').split('.')[-1]}.{case.get('name')}": _outcome(case)
        for case in ElementTree.parse(results).iter("testcase")
    }


def _version_of(sources: Path) -> str:
    return (sources / "version.txt").read_text().strip()


def _outcome(case: ElementTree.Element) -> str:
    for what in case:
        if what.tag == "skipped":
            return "skipped"
        if what.tag in ("failure", "error"):
            return what.text or what.get("message") or what.tag
    return "passed"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.torch_sources")
    parser.add_argument("--sources", type=Path, required=True, help="the folder of torch's sources")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--out", type=Path, help="where to record the rows, as JSON")
    options = parser.parse_args(argv)
    command = "python -m tests.long.torch_sources --sources SOURCES"
    rows, failed_ever = [], False
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder), without_mpi=True)
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        where |= {"torch": version("torch"), "sources": _version_of(options.sources)}
        tests = copy_on_the_cpu(options.sources, Path(folder))
        for group in options.groups:
            files = sorted(file for pattern in GROUPS[group] for file in tests.glob(pattern))
            passed_by_gloo: set[str] = set()
            for road in ("gloo", "instead_of_gloo"):
                found: dict[str, str] = {}
                for file in files:
                    found |= run(road, file, tests)
                outcome, failed = judge(found, passed_by_gloo, KNOWN)
                failed_ever |= failed or not outcome["passed"]
                if road == "gloo":
                    passed_by_gloo = passed_of(found)
                row = {"proof": "torch_sources", "of": group, "road": road, **outcome}
                print(json.dumps(row), flush=True)
                rows.append({**where, **row})
                if options.out:
                    record(options.out, rows, ("cpu", "proof", "of", "road"))
    return int(failed_ever)


if __name__ == "__main__":
    sys.exit(main())
