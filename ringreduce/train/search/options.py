"""The options of a search: its own, and those of the trainer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringreduce.picture.output import SUFFIXES
from ringreduce.train.configuration import Given, add_options, new_parser, reading
from ringreduce.train.search.candidates import KINDS, check_fits

BUDGET_S = 30.0
"""The seconds of measuring, unless others are named."""
_LEFT_OUT = ("plot", "resume")
"""Options of the trainer that a search does not take."""


@dataclass(frozen=True)
class SearchOptions:
    """What to search for."""

    kind: str
    given: Given
    """The options of the trainer that stay as they are."""
    budget_s: float = BUDGET_S
    picture: Path | None = None
    job: str | None = None
    """Options of ``ringreduce train`` that start the job, for the command that is printed."""

    def __post_init__(self) -> None:
        if not (self.budget_s > 0 and math.isfinite(self.budget_s)):
            raise ValueError(
                f"--budget-s is {self.budget_s:g}; wanted a finite number of seconds above 0"
            )
        if self.picture is not None and self.picture.suffix not in SUFFIXES:
            raise ValueError(f"--plot is {self.picture}; wanted a name that ends in .svg or .png")
        kind = KINDS[self.kind]
        strategy = self.given.values.get("strategy", "auto")
        if kind.strategy is not None and strategy != kind.strategy:
            raise ValueError(
                f"strategy is {strategy}; --for {self.kind} is for strategy {kind.strategy}"
            )
        for name in kind.options:
            if name in self.given.values:
                raise ValueError(f"{name} is given, but --for {self.kind} searches for it")
        self.given.outputs()
        self.given.settings()
        self.given.strategy()


def read(argv: Sequence[str], prog: str = "python -m ringreduce.train.search") -> SearchOptions:
    """Read the command line and its file; SystemExit with code 2 if either is wrong."""
    with reading(parser(prog), argv) as values:
        kind, budget_s = values.pop("kind"), values.pop("budget_s", BUDGET_S)
        picture, job = values.pop("picture", None), values.pop("job", None)
        values.pop("resume", None)  # it may be in the file of a run
        if KINDS[kind].strategy is not None:
            values = {"strategy": KINDS[kind].strategy, **values}
        request = SearchOptions(kind, Given(values), budget_s, picture, job)
        request.given.check_strategy()
    return request


def check_ranks(request: SearchOptions, nodes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if no candidate fits the ranks of these nodes."""
    check_fits(request.kind, request.given, nodes)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the options; `prog` is the name of the command in messages."""
    command_line = new_parser(
        prog,
        description="Search for the split size, the batch or the mesh whose steps are fastest.",
        epilog="An option of the trainer that is given stays as it is.  The last line is the "
        "command to train with.",
    )
    add = command_line.add_argument
    add(
        "--for",
        dest="kind",
        choices=tuple(KINDS),
        required=True,
        help="split_size: split size, schedule and cut of a pipeline; batch: samples a step; mesh: "
        "data x pipeline x tensor",
    )
    add(
        "--budget-s",
        type=float,
        metavar="S",
        help=f"seconds of measuring (default: {BUDGET_S:g})",
    )
    add(
        "--plot",
        dest="picture",
        type=Path,
        metavar="FILE",
        help="draw samples/s and memory of the candidates: .svg, or .png with 'ringreduce[plot]'",
    )
    add("--job", metavar="OPTIONS", help=argparse.SUPPRESS)
    add_options(command_line, without=_LEFT_OUT)
    return command_line
