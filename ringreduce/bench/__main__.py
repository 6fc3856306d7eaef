"""Time collectives: ``python -m ringreduce.bench``, under mpirun, on every rank."""

from __future__ import annotations

import io
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import numpy as np

import ringreduce as rr
from ringreduce.bench.collectives import COLLECTIVES, IN_PLACE, OURS
from ringreduce.bench.environment import environment
from ringreduce.bench.fit import Fit, Point, fit, profile_text
from ringreduce.bench.measure import Measurement, Timing
from ringreduce.bench.options import Options, read
from ringreduce.bench.plot import plot
from ringreduce.bench.table import SizeRow, Table, digits
from ringreduce.bench.world import MPI
from ringreduce.console.terminal import LiveLine, print_error, replace_unencodable
from ringreduce.devices.cpu import CpuDevice
from ringreduce.errors import counted
from ringreduce.picture import output
from ringreduce.picture.drawing import nodes_text
from ringreduce.planning.select import predict
from ringreduce.schedules.cost import Profile

_BAR = 24
_COLUMNS = 80
"""The most characters of a line, but for the table with all columns."""
_FOLDS = 5
"""Sizes at which adding in one rank is timed."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m ringreduce.bench") -> int:
    """Measure as the command line says, on every rank of MPI's world.

    Returns 1 if a result was wrong, 2 if the algorithm cannot be had or a file cannot be written,
    else 0.  Raises SystemExit with code 2 if the command line is wrong; one rank prints the reason.
    """
    replace_unencodable()
    given = list(sys.argv[1:] if argv is None else argv)
    world = MPI.COMM_WORLD
    options = _read_once(world, given, prog)
    with rr.init() as comm:
        if problem := _problem(comm, options):
            if comm.rank == 0:
                print_error(f"{prog}: error: {problem}")
            comm.barrier()  # the job is stopped when the first rank ends: wait for the text
            return 2
        measurement = Measurement(comm, world, options)
        command = f"mpirun -n {world.size} {prog} {' '.join(given)}".strip()
        try:
            with LiveLine(sys.stdout) as live:
                run = _BenchRun(measurement, options, command, live)
                run.measure()
        finally:
            measurement.close()
        return run.end()


def _read_once(world: MPI.Intracomm, given: Sequence[str], prog: str) -> Options:
    """Read the command line on all ranks; one rank prints the error or the help.

    Raises SystemExit on all ranks if it is wrong on any, or asks for help.
    """
    printed, stop, options = io.StringIO(), None, None
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            options = read(given, prog)
        except SystemExit as error:
            stop = error
    speaker = np.array([world.rank if stop else world.size])
    world.Allreduce(MPI.IN_PLACE, speaker, MPI.MIN)
    if options is not None and speaker[0] == world.size:
        return options
    if stop is not None and speaker[0] == world.rank:
        print(printed.getvalue(), end="", file=sys.stderr if stop.code else sys.stdout, flush=True)
    world.Barrier()  # the job is stopped when the first rank ends: wait for the text
    raise stop or SystemExit(2)


def _problem(comm: rr.Communicator, options: Options) -> str:
    """Return the reason why nothing can be measured, "" if all is well.  Collective.

    All ranks return "", or none; the reason itself is rank 0's.
    """
    problem = _cannot_write(options) if comm.rank == 0 else ""
    if comm.all_reduce(int(bool(problem))):
        return problem or "rank 0 cannot write its files"
    try:
        _warm(comm, options)
    except ValueError as error:
        return str(error)
    return ""


def _cannot_write(options: Options) -> str:
    if options.plot is not None:
        try:
            output.check(options.plot)
        except ImportError as error:
            return f"--plot {options.plot}: {error}"
    for path in filter(None, (options.json, options.plot)):
        try:
            output.check_writable(path)
        except OSError as error:
            return str(error)
    return ""


def _warm(comm: rr.Communicator, options: Options) -> None:
    """Make the call once, so that a refusal comes before any output."""
    tiny = np.zeros(comm.size, options.dtype)
    how = {"algorithm": options.algorithm}
    call = getattr(comm, options.collective)
    if COLLECTIVES[options.collective].reduces:
        call(tiny, op=options.op, **how)
    elif COLLECTIVES[options.collective].moves:
        call(None if options.collective == "scatter" and comm.rank else tiny, **how)
    else:
        call()


class _BenchRun:
    """One run on one rank; only rank 0 prints."""

    def __init__(
        self, measurement: Measurement, options: Options, command: str, live: LiveLine
    ) -> None:
        self._measurement, self._options, self._live = measurement, options, live
        self._where = environment(command)
        self._comm, self._world = measurement.comm, measurement.world
        self._rows: list[list[Timing]] = []

    def measure(self) -> None:
        table: Table | None = None
        counts = self._options.counts(self._world.size)
        self._print(*self._introduction())
        self._progress(0, len(counts))
        for done, timings in enumerate(self._measurement.run(), 1):
            row = SizeRow(self._measurement.algorithm(timings[0].nbytes), timings)
            if table is None:
                table = Table(self._options, self._world.size, row)
                self._print(*_comment(*table.legend()), "#", *table.head())
            self._rows.append(timings)
            self._print(table.line(row))
            self._progress(done, len(counts))

    def end(self) -> int:
        options, wrong = self._options, sum(t.wrong or 0 for row in self._rows for t in row)
        ours_wrong = sum(t.wrong or 0 for row in self._rows for t in row if t.contender == OURS)
        rates = [t.busbw(options.collective, self._world.size) for t in self._ours()]
        lines = [f"average busbw of {OURS}: {digits(float(np.mean(rates)) / 1e9)} GB/s"]
        if options.checks:
            lines.append(
                f"wrong elements: {ours_wrong} of {OURS}, {wrong - ours_wrong} of baselines"
            )
        fitted = self._fit()
        if fitted is not None:
            lines += _fit_text(fitted)
            across, shared = len(self._comm.nodes) > 1, self._comm.config.memory is not None
            lines += [
                "as the profile of a communicator, rr.Config(profile=...), alike on all ranks:",
                *profile_text(fitted.profile, across, shared),
            ]
        self._print(*_comment(*lines))
        if self._world.rank == 0:
            if options.json is not None:
                options.json.write_text(
                    "".join(json.dumps(row) + "\n" for row in self._json()), "utf-8"
                )
            if options.plot is not None:
                self._plot(fitted)
        return int(ours_wrong > 0)

    # --- words ---

    def _introduction(self) -> list[str]:
        where = self._where
        options = self._options
        return _comment(
            f"{OURS} {rr.__version__}: {options.collective} of {options.dtype}, op "
            f"{options.redop}, algorithm {options.algorithm}; "
            f"{counted(self._world.size, 'rank')} on "
            f"{nodes_text([len(node) for node in self._comm.nodes])}",
            f"{' '.join(where['mpi'].split())}, thread level {where['thread_level']}, "
            f"{where['cpu']}, {counted(where['cores'], 'core')}",
            f"{counted(options.warmup, 'call')} untimed, {options.iterations} timed, in "
            "turns with the baselines; new inputs for each; time: the median",
        )

    def _print(self, *lines: str) -> None:
        if self._world.rank == 0:
            self._live.print(*lines)

    def _progress(self, done: int, of: int) -> None:
        if self._world.rank == 0:
            bar = "█" * (_BAR * done // of)
            self._live.show(f"[{bar:{_BAR}}] {done} of {counted(of, 'size')}" if done < of else "")

    # --- results ---

    def _ours(self) -> list[Timing]:
        found = [{t.place: t for t in row if t.contender == OURS} for row in self._rows]
        return [places.get(IN_PLACE) or next(iter(places.values())) for places in found]

    def _fit(self) -> Fit | None:
        points: list[Point] = [(t.nbytes, t.median_s) for t in self._ours()]
        if self._world.size < 2 or len(points) < 4:
            return None
        options, nodes, config = self._options, self._comm.nodes, self._comm.config

        def predicted(nbytes: int, profile: Profile) -> float:
            # What "auto" takes does not depend on the fit: it is what ran.
            name = self._measurement.algorithm(nbytes)
            fitted = replace(config, profile=profile.also_in_memory())
            return predict(options.collective, name, nodes, nbytes, fitted)

        return fit(points, self._folds(), predicted, across=len(nodes) > 1)

    def _folds(self) -> list[Point]:
        """Return (bytes, seconds) of adding two arrays in a rank: the slowest rank's median."""
        options = self._options
        fold = CpuDevice().fold(options.op, options.dtype)
        sizes = np.geomspace(options.min_bytes, options.max_bytes, _FOLDS)
        points = []
        for nbytes in sizes:
            count = max(1, int(nbytes) // options.itemsize)
            a, b = np.ones(count, options.dtype), np.ones(count, options.dtype)
            seconds = []
            for _ in range(7):
                begin = time.perf_counter()
                fold(a, b, b)
                seconds.append(time.perf_counter() - begin)
            median = np.array([np.median(seconds)])
            self._world.Allreduce(MPI.IN_PLACE, median, MPI.MAX)
            points.append((count * options.itemsize, float(median[0])))
        return points

    def _json(self) -> list[dict[str, object]]:
        options, ranks = self._options, self._world.size
        return [
            {
                "benchmark": "bench",
                "collective": options.collective,
                "algorithm": options.algorithm if t.contender == OURS else None,
                "contender": t.contender,
                "place": t.place,
                "bytes": t.nbytes,
                "count": t.count,
                "dtype": options.dtype,
                "op": options.redop,
                "iterations": options.iterations,
                "min_us": round(1e6 * t.min_s, 3),
                "median_us": round(1e6 * t.median_s, 3),
                "p99_us": round(1e6 * t.p99_s, 3),
                "algbw_gb_s": round(t.algbw() / 1e9, 4),
                "busbw_gb_s": round(t.busbw(options.collective, ranks) / 1e9, 4),
                "wrong": t.wrong,
                **self._where,
            }
            for row in self._rows
            for t in row
        ]

    def _plot(self, fitted: Fit | None) -> None:
        options, where = self._options, self._where
        ranks = self._world.size
        title = f"{options.collective}, {options.dtype} {options.redop}, {counted(ranks, 'rank')}"
        mpi = " ".join(where["mpi"].split())
        facts = f"{mpi}, {where['cpu']}, {counted(where['cores'], 'core')}, {where['date']}"
        assert options.plot is not None
        factor = COLLECTIVES[options.collective].busbw(ranks)
        plot(options.plot, title, facts, self._rows, fitted, factor)


def _comment(*texts: str) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, _COLUMNS, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )
    ]


def _fit_text(fitted: Fit) -> list[str]:
    link = fitted.profile.in_node
    return [
        f"the cost model, fitted to every other size: alpha {digits(1e6 * link.alpha_s)} us, "
        f"beta {digits(1e9 * link.beta_s_per_byte)} ns/B, "
        f"gamma {digits(1e9 * fitted.profile.gamma_s_per_byte)} ns/B",
        f"it is off by {fitted.error:.0%} at those sizes and by {fitted.error_checked:.0%} at "
        "the others (medians)",
    ]


if __name__ == "__main__":
    sys.exit(main())
