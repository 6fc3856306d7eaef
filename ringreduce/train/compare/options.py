"""The options of a comparison: its own, and those of the trainer."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce.errors import did_you_mean
from ringreduce.picture.output import SUFFIXES
from ringreduce.train import strategies
from ringreduce.train.configuration import (
    GROUPS,
    Given,
    add_options,
    from_plain,
    new_parser,
    reading,
)
from ringreduce.train.strategies import OPTIONS, OneDevice, ParameterServer, Strategy

_TAKEN = {*GROUPS["what is trained"], "seeds", "device"} - {"batch_per_rank", "ramp_steps"}
"""Options of the trainer that a comparison takes: all strategies have the same batches."""


@dataclass(frozen=True)
class Request:
    """What to compare."""

    given: Given
    """The options of the trainer."""
    strategies: tuple[Strategy, ...] = ()
    """(): all."""
    to: float = 90.0
    """The accuracy in percent that is to be reached."""
    slowdown: tuple[int, float] = (0, 1.0)
    """A rank, and how many times longer it computes."""
    jitter: float = 0.0
    compute_ms: float = 0.0
    json: Path | None = None
    plot: Path | None = None
    ranks: int = 0
    """The ranks that compute, the first ones; 0: all."""

    def rows(self, nodes: Sequence[Sequence[int]]) -> list[Strategy]:
        """Return the strategies for the ranks of these nodes, which compute; one device is first.

        Raises ValueError for one that they cannot have, and for a slow rank that there is not.
        """
        ranks, found = sum(map(len, nodes)), list(self.strategies)
        if self.slowdown[0] >= ranks:
            raise ValueError(f"--slowdown names rank {self.slowdown[0]}; -n is {ranks}")
        for strategy in found:
            self._check(strategy, nodes)
        for strategy in () if found else _all(ranks):
            with suppress(ValueError, ImportError):
                self._check(strategy, nodes)
                found.append(strategy)
        return [*dict.fromkeys([OneDevice(), *found])]

    def _check(self, strategy: Strategy, nodes: Sequence[Sequence[int]]) -> None:
        if strategy != OneDevice():
            more = range(servers_of(strategy))  # servers are beside the ranks of the last node
            strategy.check_installed()
            strategy.check_device(self.given.outputs().device)
            strategy.check([*nodes[:-1], [*nodes[-1], *more]], self.given.settings())


def servers_of(strategy: Strategy) -> int:
    return strategy.servers if isinstance(strategy, ParameterServer) else 0


def _all(ranks: int) -> list[Strategy]:
    """Return every strategy, some of them with several values of an option."""
    several: dict[type[Strategy], list[Strategy]] = {
        strategies.Zero: [strategies.Zero(stage) for stage in (1, 2, 3)],
        strategies.Hybrid: [strategies.Hybrid(data=2, pipeline=max(1, ranks // 2))],
        ParameterServer: [ParameterServer(staleness=bound) for bound in (0, 2, None)],
    }
    kinds = strategies.STRATEGIES.values()
    return [each for kind in kinds for each in several.get(kind) or [kind()]]


def _named(words: str) -> tuple[Strategy, ...]:
    try:
        return () if words == "all" else tuple(map(_strategy, words.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _strategy(words: str) -> Strategy:
    """Return the strategy of words such as ``parameter_server:staleness=none:servers=2``."""
    name, *given = words.split(":")
    values = {}
    for word in given:
        option, _, text = word.partition("=")
        if option not in OPTIONS or not text:
            meant = did_you_mean(option, OPTIONS)
            raise ValueError(f"{word!r} is no option of a strategy with its value{meant}")
        value: Any = text
        with suppress(json.JSONDecodeError):  # a word, and no number
            numbers = [*map(json.loads, text.split())]
            value = numbers if isinstance(OPTIONS[option].default, tuple) else numbers[0]
        values[option] = from_plain(option, value)
    found = strategies.by_name(name, values)
    if found is None:
        raise ValueError(f"strategy is {name}; name one")
    return found


def _at_least_0(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; wanted a finite number of at least 0")
    return float(text)


def _slowdown(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    with suppress(ValueError):
        if int(rank) >= 0 and 0 < float(factor) < math.inf:
            return int(rank), float(factor)
    raise argparse.ArgumentTypeError(f"{text}; wanted RANK:FACTOR, such as 1:4")


def _picture(text: str) -> Path:
    if Path(text).suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}; wanted a name that ends in .svg or .png")
    return Path(text)


def read(argv: Sequence[str], prog: str = "python -m ringreduce.train.compare") -> Request:
    """Read the command line, and the file that it may name.

    Prints the error and raises SystemExit with code 2 if either is wrong.
    """
    with reading(parser(prog), argv) as values:
        own = {name: values.pop(name) for name in Request.__annotations__ if name in values}
        # What a file says of one run does not hold here.
        request = Request(Given({n: v for n, v in values.items() if n in _TAKEN}), **own)
        request.given.outputs(), request.given.settings()
        if not request.compute_ms and (request.jitter or "slowdown" in own):
            raise ValueError("--slowdown and --jitter change what --compute-ms makes; add it")
    return request


def check_ranks(request: Request, nodes: Sequence[Sequence[int]]) -> int:
    """Return how many servers the strategies need beside the ranks of these nodes.

    Raises ValueError if a strategy cannot be used.
    """
    return max(map(servers_of, request.rows(nodes)))


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the options; `prog` is the name of the command in messages."""
    command_line = new_parser(
        prog,
        description="Train with several strategies in turns, and print their figures.",
        epilog="All strategies have the same samples, seeds and first parameters.",
    )
    for flag, kind, metavar, text in (
        ("strategies", _named, "LIST", "NAME[:option=value]... with commas between, or all"),
        ("to", _at_least_0, "PERCENT", "accuracy to be reached (default: 90)"),
        ("compute-ms", _at_least_0, "T", "time of a batch on one device; ranks sleep their share"),
        ("slowdown", _slowdown, "RANK:FACTOR", "the rank computes longer"),
        ("jitter", _at_least_0, "CV", "coefficient of variation of the time of computing"),
        ("json", Path, "FILE", "write a line of JSON for each strategy"),
        ("plot", _picture, "FILE", "draw speed, bytes, accuracy: .svg, .png with [plot]"),
        ("ranks", int, "N", argparse.SUPPRESS),
    ):
        command_line.add_argument(f"--{flag}", type=kind, metavar=metavar, help=text)
    left_out = [name for fields in GROUPS.values() for name in fields if name not in _TAKEN]
    add_options(command_line, without=left_out)
    return command_line
