"""Plant each bug of `mutations` in a copy of the package, and run the tests, which must fail.

    python -m tests.planted_bugs [--out bench_results/planted_bugs.json] [--only NAME ...]
    python -m tests.planted_bugs --smoke [--out bench_results/planted_bugs_smoke.json]
    python -m tests.planted_bugs --markdown > docs/planted-bugs.md

With ``--only`` the record keeps the rows of all other bugs, and each row has its date.

Under the MPI of the interpreter.  Bugs in ``ringreduce/torch`` are planted only where torch is
installed, as their tests need it; elsewhere the record keeps their rows.  Exits with 1 when a bug
survives, when the suite fails without one, or when a bug cannot be planted because its old text is
gone.  With ``--smoke`` only the smoke tests of these files run; a third of the bugs may survive.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpi import ROOT, MpiJobs, processes_of
from tests.support.mutations import MUTATIONS, Mutation

QUICK = (
    "tests/planning/test_plan.py",
    "tests/devices/test_device.py",
    "tests/devices/test_device_contract.py",
    "tests/messages/test_executor.py",
    "tests/calls/test_collectives.py",
    "tests/transports/test_transports.py",
    "tests/calls/test_collectives_mpi.py",
)
"""Quickest first; each run ends at the first failure."""
_WORK = ("tests/calls/test_queue.py",)
_SHARED = ("tests/shm/test_program.py", "tests/shm/test_program_mpi.py")
_BETWEEN_HOSTS = ("tests/calls/test_collectives_mpi.py",)
_MEMBERS = ("tests/recovery/test_membership.py", "tests/recovery/test_plans.py")
_SUPERVISOR = ("tests/recovery/test_supervisor.py",)
_MESSAGES = ("tests/point_to_point/test_messages.py", "tests/point_to_point/test_messages_mpi.py")
_SHARDED = ("tests/parallel/test_sharded_parallel.py",)
_STORE = ("tests/parallel/test_parameter_store.py",)
_TORCH = ("tests/torch/test_backend.py::test_a_check_holds",)
_HAS_TORCH = importlib.util.find_spec("torch") is not None
_BY_FILE = {
    "calls/queue.py": _WORK,
    "calls/ending.py": _WORK,
    "calls/executables.py": _WORK,
    "calls/runner.py": _WORK,
    "algorithms/doubling.py": ("tests/schedules/test_check.py",),
    "algorithms/tree.py": ("tests/schedules/test_check.py",),
    "devices/float16_elements.py": ("tests/devices/test_float16.py",),
    "supervisor/membership.py": _MEMBERS,
    "supervisor/generation.py": _SUPERVISOR,
    "supervisor/elastic.py": _SUPERVISOR,
    "point_to_point/endpoint.py": _MESSAGES,
    "point_to_point/by_transport.py": _MESSAGES,
    "point_to_point/by_mailbox.py": _MESSAGES,
    "point_to_point/road.py": _MESSAGES,
    "shm/mailbox.py": ("tests/shm/test_mailbox.py", *_MESSAGES),
    "control/agreement.py": ("tests/control/test_agreement.py",),
    "compiler/object_files.py": ("tests/compiler/test_jit.py",),
    "rendezvous/stores.py": ("tests/rendezvous/test_rendezvous.py",),
    "bench/table.py": ("tests/bench/test_bench.py",),
    "picture/layout.py": ("tests/picture/test_picture.py",),
    "supervisor/launcher.py": ("tests/launch/test_launch.py",),
    "trace/traces.py": ("tests/launch/test_traces.py",),
    "launch/explain.py": ("tests/launch/test_explain.py",),
    "launch/doctor.py": ("tests/launch/test_doctor.py",),
    "transports/yielding.py": (
        "tests/transports/test_yielding.py",
        "tests/control/test_agreement.py",
        "tests/calls/test_faults.py",
    ),
    "system/place.py": ("tests/system/test_place.py",),
    "torch/group.py": _TORCH,
    "torch/works.py": _TORCH,
    "torch/shared.py": _TORCH,
    "torch/functional.py": _TORCH,
    "torch/lists.py": _TORCH,
    "torch/tensors.py": _TORCH,
    "planning/instructions.py": ("tests/planning/test_shm_instructions.py",),
    "planning/shm_instructions.py": ("tests/planning/test_shm_instructions.py",),
    "shm/allocator.py": ("tests/shm/test_allocator.py",),
    "shm/block_access.py": ("tests/shm/test_block_access.py",),
    "shm/blocks.py": ("tests/shm/test_blocks.py",),
    "system/proc.py": ("tests/system/test_proc.py",),
    "devices/folds.py": ("tests/devices/test_folds.py",),
    "devices/vectors.py": ("tests/devices/test_folds.py",),
    "pipeline/lowering.py": ("tests/pipeline/test_lowering.py", "tests/pipeline/test_proof.py"),
    "parallel/reducer.py": ("tests/parallel/test_join.py",),
    "train/tensor_parallel.py": ("tests/train/test_tensor_parallel.py",),
    "train/compare/__main__.py": ("tests/train/test_compare.py",),
    "shm/copies.py": _SHARED,
    "shm/executable.py": _BETWEEN_HOSTS,
    "shm/host_messages.py": _BETWEEN_HOSTS,
    "shm/stores.py": ("tests/shm/test_stores.py", *_SHARED),
    "shm/executor.py": ("tests/shm/test_protocol.py", *_SHARED),
    "shm/protocol.py": ("tests/shm/test_protocol.py", *_SHARED),
    "shm/entry.py": ("tests/shm/test_fast_path.py", "tests/shm/test_lists.py"),
    "shm/intervals.py": ("tests/shm/test_lists.py",),
    "shm/iovec.py": ("tests/shm/test_lists.py",),
    "parallel/buckets.py": _SHARDED,
    "parallel/sharded_parallel.py": _SHARDED,
    "parallel/stage_messages.py": ("tests/parallel/test_pipeline_parallel.py",),
    "parallel/stages.py": ("tests/parallel/test_pipeline_parallel.py",),
    "parallel/store_rule.py": ("tests/parallel/test_store_rule.py",),
    "parallel/store_replica.py": (
        "tests/parallel/test_store_chain.py",
        "tests/parallel/test_store_replicas.py",
    ),
    "parallel/store_server.py": _STORE,
    "parallel/store_messages.py": _STORE,
}
_FIRST = {
    **dict.fromkeys(
        (
            "signature-not-compared",
            "completed-calls-not-counted",
            "received-before-the-signature-is-known",
        ),
        ("tests/control/test_agreement.py",),
    ),
    **dict.fromkeys(
        ("signature-of-a-list-without-its-layout", "wire-not-signed", "persistent-call-on-a-copy"),
        _WORK,
    ),
    "given-up-but-still-coming": ("tests/calls/test_faults.py",),
    "weights-of-averages": ("tests/parallel/test_averages.py",),
}
"""Where to look for a bug first and only, if not in `QUICK`."""
_OTHERS = sorted({name for suite in (*_BY_FILE.values(), *_FIRST.values()) for name in suite})
COPIED = ("ringreduce", "tests", "benchmarks", "docs", "pyproject.toml")
_MOST_S = 240.0
"""Seconds; a suite that takes longer hangs, which counts as finding the bug."""
_MOST_S_WITHOUT = 2400.0
"""Seconds for all suites together, without a bug: more than they take on a busy machine."""
_ALLOWED = {"full": 0.0, "smoke": 1 / 3}
"""Which tests run -> the fraction of the bugs that may survive."""


def suite_for(mutation: Mutation) -> tuple[str, ...]:
    """The tests to run, the likeliest to find the bug first."""
    if mutation.file.startswith("transports/") and mutation.file not in _BY_FILE:
        return tuple(sorted(QUICK, key=lambda name: name != "tests/transports/test_transports.py"))
    return _FIRST.get(mutation.name, _BY_FILE.get(mutation.file, QUICK))


def found_by(
    folder: Path, suite: Sequence[str], tests: str = "full", most_s: float = _MOST_S
) -> str:
    """Return the first of the `tests` ("full" or "smoke") that fails in this copy, or ""."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "tests.support.unshrunk"]
    command += ["-m", tests]
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *suite],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=most_s)
    except subprocess.TimeoutExpired:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        return f"no end in {most_s:.0f} s"
    if process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else output.strip().splitlines()[-1]


def plant(mutation: Mutation, folder: Path) -> None:
    """Write the bug into the copy in `folder`."""
    path = folder / "ringreduce" / mutation.file
    path.write_text(path.read_text().replace(mutation.old, mutation.new))


def copy_all(source: Path, folder: Path) -> None:
    """Copy the files that the suite needs."""
    for name in COPIED:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / name, folder / name, ignore=ignored)
        else:
            shutil.copy(source / name, folder / name)


def try_all(mutations: Sequence[Mutation], sound: Path, tests: str) -> list[dict[str, Any]]:
    """Plant each bug in a copy of `sound`; return which test found it, and after how long."""
    rows = []
    for mutation in mutations:
        start = time.monotonic()
        test, outcome = "", "CANNOT BE PLANTED"
        if mutation.occurrences(sound / "ringreduce") == 1:
            with tempfile.TemporaryDirectory() as name:
                copy_all(sound, Path(name))
                plant(mutation, Path(name))
                test = found_by(Path(name), suite_for(mutation), tests)
            outcome = test or "NOT FOUND"
        row = {**asdict(mutation), "found_by": test, "seconds": round(time.monotonic() - start, 1)}
        print(f"{row['seconds']:6.1f} s  {mutation.name}: {outcome}", flush=True)
        rows.append(row)
    return rows


def with_earlier(rows: Sequence[dict[str, Any]], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows, and those of a record for all other bugs that there still are."""
    earlier = {row["name"]: {"date": record["date"], **row} for row in record["bugs"]}
    known = {**earlier, **{row["name"]: row for row in rows}}
    return [known[each.name] for each in MUTATIONS if each.name in known]


def environment_of(command: str) -> dict[str, Any]:
    """Where the record comes from, as a rank of a job sees it."""
    with tempfile.TemporaryDirectory() as name:
        jobs = MpiJobs(Path(name))
        (where,) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        jobs.sweep()
    return where


def markdown() -> str:
    """The table as a page of the documentation."""
    lines = [
        "# Planted bugs",
        "",
        "A suite that never fails proves little. `python -m tests.planted_bugs` plants each of",
        "these bugs in a copy of the package and runs the tests, which must fail.",
        "[planted_bugs.json](../bench_results/planted_bugs.json) names the test that found each",
        "bug. With `--smoke` only the smoke tests run, which must find two thirds of the bugs:",
        "see [planted_bugs_smoke.json](../bench_results/planted_bugs_smoke.json).",
        "",
        "This page is made by `python -m tests.planted_bugs --markdown`; a test compares the two.",
        "",
        "| bug | planted in | what it breaks |",
        "|---|---|---|",
        *(f"| {m.name} | `{m.file}` | {m.breaks} |" for m in MUTATIONS),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_bugs")
    parser.add_argument("--out", type=Path, help="where to record the run, as JSON")
    parser.add_argument("--only", nargs="*", help="plant these alone")
    parser.add_argument("--smoke", action="store_true", help="run the smoke tests only")
    parser.add_argument("--markdown", action="store_true", help="print the list and plant nothing")
    options = parser.parse_args(argv)
    if options.markdown:
        print(markdown(), end="")
        return 0
    tests = "smoke" if options.smoke else "full"
    wanted = [m for m in MUTATIONS if not options.only or m.name in options.only]
    chosen = [m for m in wanted if _HAS_TORCH or suite_for(m) != _TORCH]
    for mutation in (each for each in wanted if each not in chosen):
        print(f"{mutation.name}: not run: torch is not installed")
    with tempfile.TemporaryDirectory() as name:
        # All copies are of one moment, whatever is edited meanwhile.
        sound = Path(name)
        copy_all(ROOT, sound)
        everything = [*QUICK, *(name for name in _OTHERS if _HAS_TORCH or name not in _TORCH)]
        failing = "" if options.only else found_by(sound, everything, tests, _MOST_S_WITHOUT)
        if failing:
            print(f"the suite fails without any bug: {failing}", file=sys.stderr)
            return 1
        rows = try_all(chosen, sound, tests)
    missed = [row["name"] for row in rows if not row["found_by"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} bugs found", *missed, sep="\n  missed: ")
    if options.out:
        where = environment_of(f"python -m tests.planted_bugs{' --smoke' * options.smoke}")
        if len(chosen) < len(MUTATIONS):
            rows = with_earlier(rows, json.loads(options.out.read_text()))
        record = {
            **where,
            "tests": tests,
            "seconds": round(sum(row["seconds"] for row in rows), 1),
            "planted": len(rows),
            "missed": [row["name"] for row in rows if not row["found_by"]],
            "bugs": [{"date": where["date"], **row} for row in rows],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(len(missed) > _ALLOWED[tests] * len(rows))


if __name__ == "__main__":
    sys.exit(main())
