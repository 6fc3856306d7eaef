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
from ringreduce.train import strategies
from ringreduce.train.configuration import (
    GROUPS,
    Given,
    add_options,
    from_plain,
    new_parser,
    reading,
)
from ringreduce.train.settings import Outputs
from ringreduce.train.strategies import OPTIONS, OneDevice, ParameterServer, Strategy

_NOT_TAKEN = {"batch_per_rank", "ramp_steps", "batch_shards"}
_TAKEN = {*GROUPS["what is trained"], "seeds", "device"} - _NOT_TAKEN
"""Options of the trainer that a comparison takes: all strategies have the same batches."""


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison; `given` are those of the trainer."""

    given: Given
    strategies: tuple[Strategy, ...] = ()  # (): all
    to: float = 90.0
    slowdown: tuple[int, float] = (0, 1.0)
    jitter: float = 0.0
    compute_ms: float = 0.0
    json: Path | None = None
    picture: Path | None = None
    ranks: int = 0
    """The ranks that compute, the first ones; 0: all."""

    def rows(self, nodes: Sequence[Sequence[int]]) -> list[Strategy]:
        """Return the strategies for the ranks of these nodes, which compute; one device is first.

        Raises ValueError for one that they cannot have, and for a slow rank that there is not.
        """
        ranks, (slow, factor) = sum(map(len, nodes)), self.slowdown
        if not (0 <= slow < ranks and 0 < factor < math.inf):
            wanted = f"a rank from 0 to {ranks - 1}, and a factor above 0"
            raise ValueError(f"--slowdown is {slow}:{factor:g}; wanted {wanted}")
        found = [OneDevice(), *self.strategies]
        for strategy in found[1:]:
            self._check(strategy, nodes)
        for strategy in () if self.strategies else _all(ranks):
            with suppress(ValueError, ImportError):
                self._check(strategy, nodes)
                found.append(strategy)
        return [*dict.fromkeys(found)]

    def _check(self, strategy: Strategy, nodes: Sequence[Sequence[int]]) -> None:
        if strategy != OneDevice():
            more = range(strategy.servers)  # beside the ranks of the last node
            strategy.check_installed()
            strategy.check_device(self.given.outputs().device)
            strategy.check([*nodes[:-1], [*nodes[-1], *more]], self.given.settings())


def _all(ranks: int) -> list[Strategy]:
    """Return every strategy, some of them with several values of an option."""
    several: dict[type[Strategy], list[Strategy]] = {
        strategies.Zero: [strategies.Zero(stage) for stage in (1, 2, 3)],
        strategies.Hybrid: [strategies.Hybrid(data=2, pipeline=max(1, ranks // 2))],
        ParameterServer: [ParameterServer(staleness=bound) for bound in (0, 2, None)],
    }
    kinds = strategies.STRATEGIES.values()
    return [each for kind in kinds for each in several.get(kind) or [kind()]]


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


def read(argv: Sequence[str], prog: str = "python -m ringreduce.train.compare") -> CompareOptions:
    """Read the command line and its file; SystemExit with code 2 if either is wrong."""
    with reading(parser(prog), argv) as values:
        own = {name: values.pop(name) for name in CompareOptions.__annotations__ if name in values}
        if "strategies" in own:
            words = own["strategies"]
            own["strategies"] = () if words == "all" else tuple(map(_strategy, words.split(",")))
        for name in own.keys() & {"compute_ms", "jitter"}:
            if not 0 <= own[name] < math.inf:
                raise ValueError(f"{name} is {own[name]:g}; wanted a finite number of at least 0")
        # A file may have options of one run: a comparison takes none of them.
        request = CompareOptions(Given({n: v for n, v in values.items() if n in _TAKEN}), **own)
        request.given.outputs(), request.given.settings(), Outputs(plot=request.picture)
        if not request.compute_ms and (request.jitter or "slowdown" in own):
            raise ValueError("--slowdown and --jitter change what --compute-ms makes; add it")
    return request


def check_ranks(request: CompareOptions, nodes: Sequence[Sequence[int]]) -> int:
    """Return how many servers the strategies need beside the ranks, or raise ValueError."""
    return max(strategy.servers for strategy in request.rows(nodes))


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the options; `prog` is the name of the command in messages."""

    def slowdown(text: str) -> tuple[int, float]:
        rank, factor = text.split(":")
        return int(rank), float(factor)

    command_line = new_parser(
        prog,
        description="Train with several strategies in turns, and print their figures.",
        epilog="All strategies have the same samples, seeds and first parameters.",
    )
    for flag, kind, metavar, text in (
        ("strategies", str, "LIST", "NAME[:option=value]... with commas between, or all"),
        ("to", float, "PERCENT", "accuracy to be reached (default: 90)"),
        ("compute-ms", float, "T", "time of a batch on one device; ranks sleep for their share"),
        ("slowdown", slowdown, "RANK:FACTOR", "this rank computes longer"),
        ("jitter", float, "CV", "coefficient of variation of the time of computing"),
        ("json", Path, "FILE", "write a line of JSON for each strategy"),
        ("plot", Path, "FILE", "draw speed, bytes and accuracy: .svg, or .png"),
        ("ranks", int, "N", argparse.SUPPRESS),
    ):
        dest = "picture" if flag == "plot" else None  # a file has the plot of a run
        command_line.add_argument(f"--{flag}", dest=dest, type=kind, metavar=metavar, help=text)
    left_out = [name for fields in GROUPS.values() for name in fields if name not in _TAKEN]
    add_options(command_line, without=left_out)
    return command_line
