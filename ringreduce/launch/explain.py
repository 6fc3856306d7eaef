"""`ringreduce explain`: show a collective in words, numbers and a picture, without running it.

It prints the messages of each step, the number of steps and bytes of each rank, and the predicted
time of every candidate.  With `--check` it also proves the schedule.  With `--json` it prints the
choice of the algorithm alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.colours import Colours
from ringreduce.config import Config
from ringreduce.errors import ScheduleError, did_you_mean
from ringreduce.launch.host import VariableError, memory_of_job
from ringreduce.picture import output, to_svg
from ringreduce.picture.words import counted, nodes_text
from ringreduce.planning.plan import plan_parts, plan_whole, shard_counts
from ringreduce.planning.select import (
    Choice,
    choose,
    predict,
    priced_bytes,
    slice_count,
    slices_in_flight,
)
from ringreduce.schedules.check import Proof, check
from ringreduce.schedules.draw import draw
from ringreduce.schedules.ranges import range_texts
from ringreduce.schedules.schedule import Schedule, chunk_of
from ringreduce.topology import Nodes, parse_nodes

_IN_PARTS = frozenset(["reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"])
"""Collectives that cut the array into chunks as ``array_split`` does."""
_MOST_RANKS = 8
"""The number of ranks that are drawn side by side."""
_MOST_ROWS = 16
"""The number of rows in the table of traffic."""
_LONGEST_EXPRESSION = 60
_PLACE = re.compile(r"step (\d+): rank (\d+)|rank (\d+) in step (\d+)")
"""Matches a step and its rank in the text of a ScheduleError, which has no fields for them."""


@dataclass(frozen=True)
class Request:
    """A call to explain, and the output that is wanted.  Raises ValueError for a wrong field."""

    ranks: int
    nodes: Sequence[int] = ()
    """The number of ranks of each node.  Empty: all ranks are on one node."""
    collective: str = "all_reduce"
    algorithm: str = "auto"
    root: int = 0
    nbytes: int = 1 << 20
    dtype: str = "float32"
    transport: str | None = None
    """``"shm"`` or ``"mpi"``.  None: what a job on this host takes."""
    prove: bool = False
    json: bool = False
    svg: Path | None = None
    png: Path | None = None

    def __post_init__(self) -> None:
        if self.collective not in ALGORITHMS:
            raise ValueError(
                f"unknown collective {self.collective!r}; choose one of {', '.join(ALGORITHMS)}"
                f"{did_you_mean(self.collective, ALGORITHMS)}"
            )
        if self.ranks < 1:
            raise ValueError(f"{self.ranks} ranks; wanted at least 1")
        if self.nodes and sum(self.nodes) != self.ranks:
            raise ValueError(f"--nodes has {sum(self.nodes)} ranks, --ranks asks for {self.ranks}")
        if self.transport not in (None, "shm", "mpi"):
            meant = did_you_mean(self.transport, ("shm", "mpi"))
            raise ValueError(f"unknown transport {self.transport!r}; choose shm or mpi{meant}")
        if self.transport == "shm" and len(self.layout) > 1:
            raise ValueError("--transport shm needs all ranks on one node")
        if not 0 <= self.root < self.ranks:
            raise ValueError(f"root {self.root} is none of the ranks 0 to {self.ranks - 1}")
        if self.nbytes % self.itemsize:
            raise ValueError(
                f"{self.nbytes} bytes are no whole number of {self.dtype}, "
                f"which has {self.itemsize} bytes"
            )
        for option, path in (("--svg", self.svg), ("--png", self.png)):
            if path is not None and path.suffix != f".{option[2:]}":
                raise ValueError(f"{option} {path}: wanted a name that ends in .{option[2:]}")
        if self.algorithm != "auto":
            build(self.collective, self.algorithm, self.layout, self.root)

    @property
    def layout(self) -> Nodes:
        """The ranks of each node, by number."""
        return parse_nodes(self.nodes or (self.ranks,), self.ranks)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"unknown dtype {self.dtype!r}; wanted one such as float32") from None
        if dtype.kind not in "biufc":
            raise ValueError(f"dtype {self.dtype!r} cannot be sent; wanted numbers or bools")
        return dtype.itemsize


def main(request: Request) -> int:
    """Print the explanation and write the pictures.  Returns the exit code.

    Before a code other than 0 it prints the reason.
    """
    try:
        for path in filter(None, (request.svg, request.png)):
            output.check_writable(path)
        case = _Case.of(request)
        code = 0
        if request.json:
            _print_json(case)
        else:
            code = _explain(case)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, for instance `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ScheduleError, ImportError, OSError, VariableError) as error:
        print(f"ringreduce explain: {error}", file=sys.stderr)
        return 1 if isinstance(error, (ScheduleError, ImportError)) else 2


@dataclass(frozen=True)
class _Case:
    """A request, and what a call would find and do.

    A schedule that is wrong may have no price, so prices are computed when they are used.
    """

    request: Request
    config: Config
    """The settings of a communicator that runs the call."""

    @classmethod
    def of(cls, request: Request) -> _Case:
        one_node = len(request.layout) == 1
        memory = memory_of_job(request.ranks, request.transport) if one_node else None
        return cls(request, Config(memory=memory))

    @cached_property
    def choice(self) -> Choice:
        """What ``"auto"`` takes."""
        request = self.request
        return choose(request.collective, request.layout, request.nbytes, self.config)

    @cached_property
    def algorithm(self) -> str:
        """The algorithm that is shown."""
        named = self.request.algorithm
        return self.choice.algorithm if named == "auto" else named

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that is shown."""
        request = self.request
        return build(request.collective, self.algorithm, request.layout, request.root)

    @cached_property
    def slices(self) -> int:
        """The number of slices that the array is divided into."""
        request = self.request
        return slice_count(self.schedule, request.nbytes, request.layout, self.config)

    @cached_property
    def predicted_s(self) -> Mapping[str, float]:
        """Algorithm -> predicted seconds, of the candidates and of the algorithm that is shown.

        The cheapest comes first.
        """
        predicted_s, name, request = dict(self.choice.predicted_s), self.algorithm, self.request
        if name not in predicted_s:
            nbytes = priced_bytes(request.nbytes)
            predicted_s[name] = predict(
                request.collective, name, request.layout, nbytes, self.config
            )
        return dict(sorted(predicted_s.items(), key=lambda item: item[1]))


def _explain(case: _Case) -> int:
    """Print every section.  Returns the exit code."""
    schedule, colours = case.schedule, Colours.of(sys.stdout)
    print(colours.strong(_headline(case)))
    proven: list[str] = []
    if case.request.prove:
        try:
            proven = _proven(schedule, check(schedule))
        except ScheduleError as error:
            failure = colours.bad(f"NOT proven: {error}")
            _print_section(_marked_drawing(schedule, error), "", failure)
            return 1
    _print_section(*_drawing(schedule))
    _print_section(*_traffic(case))
    _print_section(*_prices(case, colours))
    if proven:
        _print_section(colours.good("proven:"), *(f"  {line}" for line in proven))
    for path in _written(case):
        _print_section(f"wrote {path}")
    return 0


def _print_json(case: _Case) -> None:
    """Print the choice alone.  Raises ScheduleError if a proof is asked for, and fails."""
    if case.request.prove:
        check(case.schedule)
    _written(case)
    found = {
        "algorithm": case.algorithm,
        "cheapest": case.choice.cheapest,
        "transport": case.choice.transport,
        "predicted_s": case.predicted_s,
    }
    print(json.dumps(found))


def _written(case: _Case) -> list[Path]:
    """Write the pictures that are asked for, and return their paths."""
    paths = [path for path in (case.request.svg, case.request.png) if path]
    if paths:
        nodes = case.request.layout if len(case.request.layout) > 1 else None
        picture = to_svg(case.schedule, nodes)
        for path in paths:
            output.write(path, picture)
    return paths


def _print_section(*lines: str) -> None:
    print("", *lines, sep="\n")


def _headline(case: _Case) -> str:
    request, memory = case.request, case.config.memory
    where = nodes_text([len(node) for node in request.layout])
    how = "by messages"
    if memory is not None:
        how = "through shared memory" + ", more ranks than cores" * memory.crowded
    return " · ".join(
        [
            *(case.schedule.collective, case.schedule.algorithm),
            f"{counted(request.ranks, 'rank')} on {where}",
            *[f"{_bytes_text(request.nbytes)} of {request.dtype}"] * bool(case.schedule.weights),
            how,
        ]
    )


# --- the drawing ----------------------------------------------------------------------------------


def _drawing(schedule: Schedule) -> list[str]:
    """Draw the first steps of as many ranks as fit side by side into the terminal."""
    lines: list[str] = []
    for ranks in range(min(schedule.size, _MOST_RANKS), 0, -1):
        lines = draw(schedule, max_ranks=ranks).splitlines()
        grid = [line for line in lines if not line.startswith((">", "…"))]
        if not sys.stdout.isatty() or max(map(len, grid)) <= shutil.get_terminal_size().columns:
            break
    left_out = any(line.endswith("not drawn") for line in lines)
    return lines + ["--svg FILE draws all of it"] * left_out


def _marked_drawing(schedule: Schedule, error: ScheduleError) -> str:
    """Draw the schedule, with the steps marked that the text of `error` names."""
    failed = {
        int(rank_after or rank_before): int(step_before or step_after)
        for step_before, rank_after, rank_before, step_after in _PLACE.findall(str(error))
    }
    return draw([schedule.steps(rank) for rank in range(schedule.size)], failed=failed)


# --- steps and bytes of each rank -----------------------------------------------------------------


def _chunk_bytes(case: _Case) -> list[int]:
    """Return the bytes of every chunk in all slices together, cut exactly as the planner does."""
    schedule, itemsize = case.schedule, case.request.itemsize
    count, chunks = case.request.nbytes // itemsize, len(schedule.weights)
    if schedule.collective in _IN_PARTS:
        plan = plan_parts(schedule, 0, shard_counts(count, chunks), itemsize, case.slices)
    else:
        plan = plan_whole(schedule, 0, count, itemsize, case.slices)
    offsets = [plan.chunk_offsets(index) for index in range(plan.slices)]
    return [sum(each[chunk].count for each in offsets) * itemsize for chunk in range(chunks)]


def _traffic(case: _Case) -> list[str]:
    """Tabulate steps and bytes: ranks with the same numbers share a row.

    In parentheses: bytes as a multiple of the array's.
    """
    schedule, nbytes, chunk_bytes = case.schedule, case.request.nbytes, _chunk_bytes(case)
    alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank in range(schedule.size):
        steps = list(schedule.steps(rank))
        sends = [chunk for step in steps for send in step.sends for chunk in send.chunks]
        recvs = [chunk for step in steps for recv in step.recvs for chunk in recv.chunks]
        sent, received = (
            sum(chunk_bytes[chunk_of(c)] for c in chunks) for chunks in (sends, recvs)
        )
        alike[len(steps), sent, received].append(rank)
    rows = [("ranks", "steps", "sends bytes", "", "receives bytes", "")]
    for (count, sent, received), ranks in list(alike.items())[:_MOST_ROWS]:
        amounts = [(f"{n:,}", f"({n / nbytes:.2f}x)" if nbytes else "") for n in (sent, received)]
        rows.append((",".join(range_texts(ranks)), str(count), *amounts[0], *amounts[1]))
    more = len(alike) - _MOST_ROWS
    return [*_table(rows), *[f"… {more} more that differ"] * (more > 0)]


# --- how long it takes ----------------------------------------------------------------------------


def _prices(case: _Case, colours: Colours) -> list[str]:
    """Tabulate the predicted time of every candidate, the cheapest first."""
    rows = [("candidate", "predicted")]
    rows += [(name, f"{1e6 * seconds:,.1f} µs") for name, seconds in case.predicted_s.items()]
    heading, *lines = _table(rows)
    marked = [
        _marked(line, name, case, colours)
        for line, name in zip(lines, case.predicted_s, strict=True)
    ]
    nbytes, slices = case.request.nbytes, case.slices
    in_flight = slices_in_flight(case.request.layout, case.config)
    how = f"in {slices} slices, {in_flight} in flight" if slices > 1 else "in one slice"
    priced = priced_bytes(nbytes)
    size = "" if priced == nbytes else f"; the times are those of {_bytes_text(priced)}"
    return [heading, *marked, f"{how}; links as in the default profile{size}"]


def _marked(line: str, name: str, case: _Case, colours: Colours) -> str:
    """Add to the line of an algorithm whether it is taken, cheapest or shown, and why."""
    choice = case.choice
    taken, cheapest = name == choice.algorithm, name == choice.cheapest
    notes = ["cheapest"] * (cheapest and choice.is_tie)
    notes += [f"auto takes it: {choice.reason}"] * taken
    notes += ["auto does not price it"] * (name not in choice.predicted_s)
    notes += ["shown here"] * (name == case.algorithm)
    text = f"{line}  {'; '.join(notes)}".rstrip()
    return colours.good(text) if taken else colours.strong(text) if cheapest else text


# --- why it is right ------------------------------------------------------------------------------


def _proven(schedule: Schedule, proof: Proof) -> list[str]:
    """List the properties that the check has proven, one a line."""
    lines = []
    if proof.results:
        chunk, expression = next(iter(proof.results.items()))
        text = textwrap.shorten(str(expression), _LONGEST_EXPRESSION, placeholder=" …")
        lines += [
            "every result holds every contribution exactly once",
            f"all ranks form the same expression, hence the same bits; chunk {chunk} is {text}",
        ]
    lines += [
        f"every send meets one receive of the same chunks: {proof.messages} messages, none left",
        "no deadlock, even when every send waits for its receive",
        "no step races with itself",
        f"steps and chunks are as claimed: up to {proof.steps} steps, {proof.chunks} chunks moved",
        f"chunks are held before and after by those whom {schedule.collective} promises them",
    ]
    if schedule.collective == "barrier":
        lines.append("nobody leaves before having heard from everybody")
    return lines


# --- words ----------------------------------------------------------------------------------------


def _bytes_text(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that divides it, such as 64 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} bytes"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as columns: the first is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
