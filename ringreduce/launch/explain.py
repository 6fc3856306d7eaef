"""`ringreduce explain`: show a collective in words, numbers and a picture, without running it.

It prints the messages of each step, the number of steps and bytes of each rank, and the predicted
time of every candidate.  With `--check` it also proves the schedule.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.config import Config
from ringreduce.errors import ScheduleError, did_you_mean
from ringreduce.picture import to_png, to_svg
from ringreduce.picture.words import nodes_text
from ringreduce.planning.plan import plan_parts, plan_whole, shard_counts
from ringreduce.planning.select import choose, predict, resolve, slice_count, slices_in_flight
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
    prove: bool = False
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
            _check_writable(path)
        code = _explain(request, Config())
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, for instance `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ScheduleError, ImportError, OSError) as error:
        print(f"ringreduce explain: {error}", file=sys.stderr)
        return 2 if isinstance(error, OSError) else 1


def _check_writable(path: Path) -> None:
    """Raise OSError if the file cannot be written, before anything is computed."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    place = path if path.exists() else path.parent
    if not place.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _explain(request: Request, config: Config) -> int:
    nodes, nbytes = request.layout, request.nbytes
    name = request.algorithm
    if name == "auto":
        name = resolve(request.collective, "auto", nodes, nbytes, config)
    schedule = build(request.collective, name, nodes, request.root)
    print(_headline(request, schedule))
    proven: list[str] = []
    if request.prove:
        try:
            proven = _proven(schedule, check(schedule))
        except ScheduleError as error:
            _print_section(_marked_drawing(schedule, error), "", f"NOT proven: {error}")
            return 1
    _print_section(*_drawing(schedule))
    _print_section(*_traffic(schedule, _chunk_bytes(request, schedule, config), nbytes))
    _print_section(*_prices(request, config, name, schedule))
    if proven:
        _print_section(*proven)
    for path, picture in ((request.svg, to_svg), (request.png, to_png)):
        if path:
            drawn = picture(schedule, nodes if len(nodes) > 1 else None)
            path.write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())
            _print_section(f"wrote {path}")
    return 0


def _print_section(*lines: str) -> None:
    print("", *lines, sep="\n")


def _headline(request: Request, schedule: Schedule) -> str:
    where = nodes_text([len(node) for node in request.layout])
    return (
        f"{schedule.collective} · {schedule.algorithm} · {request.ranks} ranks on {where} · "
        f"{_bytes_text(request.nbytes)} of {request.dtype}"
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


def _chunk_bytes(request: Request, schedule: Schedule, config: Config) -> list[int]:
    """Return the bytes of every chunk in all slices together, cut exactly as the planner does."""
    count, chunks = request.nbytes // request.itemsize, len(schedule.weights)
    slices = slice_count(schedule, request.nbytes, request.layout, config)
    if schedule.collective in _IN_PARTS:
        plan = plan_parts(schedule, 0, shard_counts(count, chunks), request.itemsize, slices)
    else:
        plan = plan_whole(schedule, 0, count, request.itemsize, slices)
    offsets = [plan.chunk_offsets(index) for index in range(plan.slices)]
    return [
        sum(each[chunk].count for each in offsets) * request.itemsize for chunk in range(chunks)
    ]


def _traffic(schedule: Schedule, chunk_bytes: Sequence[int], nbytes: int) -> list[str]:
    """Tabulate steps and bytes: ranks with the same numbers share a row.

    In parentheses: bytes as a multiple of the array's.
    """
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


def _prices(request: Request, config: Config, name: str, schedule: Schedule) -> list[str]:
    """Tabulate the predicted time of every candidate, the cheapest first."""
    nodes, nbytes = request.layout, request.nbytes
    auto = resolve(request.collective, "auto", nodes, nbytes, config)
    predicted_s = dict(choose(request.collective, nodes, nbytes, config).predicted_s)
    if name not in predicted_s:
        predicted_s[name] = predict(request.collective, name, nodes, nbytes, config)
    rows = [("candidate", "predicted", "")]
    for candidate in sorted(predicted_s, key=predicted_s.__getitem__):
        notes = ["auto takes it"] * (candidate == auto) + ["shown here"] * (candidate == name)
        rows.append((candidate, f"{1e6 * predicted_s[candidate]:,.1f} µs", ", ".join(notes)))
    slices = slice_count(schedule, nbytes, nodes, config)
    in_flight = slices_in_flight(nodes, config)
    how = f"in {slices} slices, {in_flight} in flight" if slices > 1 else "in one slice"
    return [*_table(rows), f"{how}; links as in the default profile"]


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
    return ["proven:", *(f"  {line}" for line in lines)]


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
