"""Strategies by their names, and their options: as on the command line and in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from ringreduce.errors import did_you_mean
from ringreduce.train.settings import setting
from ringreduce.train.strategies import (
    COMMUNICATION,
    CROSS_DEVICE,
    TPU,
    CentralStorage,
    Hybrid,
    Mirrored,
    MultiWorkerMirrored,
    OneDevice,
    Pipeline,
    Strategy,
    Tensor,
    Zero,
    name_of,
)

PIPELINES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "sequential")
STRATEGIES: dict[str, type[Strategy]] = {
    name_of(kind): kind
    for kind in (
        OneDevice,
        Mirrored,
        MultiWorkerMirrored,
        CentralStorage,
        Zero,
        Pipeline,
        Tensor,
        Hybrid,
        TPU,
    )
}
"""Name -> class, in the order of the pages."""


@dataclass(frozen=True)
class Options:
    """The name of a strategy and the options of all strategies, as on the command line.

    A default stands for an option that is not given.
    """

    strategy: str = setting(
        "auto",
        "where parameters are, and how gradients meet; help prints all; auto: mirrored, or on "
        "several nodes multi_worker_mirrored",
    )
    cross_device: str = setting(
        "auto", "mirrored: all-reduce among ranks of one node", tuple(CROSS_DEVICE)
    )
    communication: str = setting(
        "auto", "multi_worker_mirrored: all-reduce among ranks of all nodes", tuple(COMMUNICATION)
    )
    zero: int = setting(1, "zero: 1 divides the optimizer, 2 gradients too, 3 parameters too")
    stages: int = setting(0, "pipeline, hybrid: runs of layers; pipeline: 0, one for each rank")
    splits: int = setting(0, "pipeline, hybrid: microbatches of a batch; 0: as many as stages")
    split_size: int = setting(0, "pipeline: samples of a microbatch, in the place of splits")
    schedule: str = setting("1f1b", "pipeline, hybrid: order of microbatches", PIPELINES)
    virtual: int = setting(1, "pipeline: stages of each rank, for the interleaved schedule")
    cut: tuple[int, ...] = setting(
        (), "pipeline: layers of each stage; none: as even as possible", metavar="LAYERS"
    )
    data_parallel: int = setting(0, "hybrid: replicas of the model; 0: the ranks that are left")
    tensor: int = setting(1, "hybrid: ranks that share each layer")


def options(kind: type[Strategy]) -> dict[str, Field[Any]]:
    """Return the fields of a strategy by the names of their options."""
    return {each.metadata["option"]: each for each in fields(kind)}


def by_name(name: str, given: Mapping[str, Any]) -> Strategy | None:
    """Return the strategy with the options `given`, by their names; None for "auto".

    Raises ValueError for an unknown strategy, or an option of another one; it names both.
    """
    if name == "auto" and not given:
        return None
    kind = Strategy if name == "auto" else STRATEGIES.get(name)
    if kind is None:
        meant = did_you_mean(name, STRATEGIES)
        raise ValueError(f"strategy is {name!r}; wanted one of {', '.join(STRATEGIES)}{meant}")
    takes = options(kind)
    for option in given:
        if option not in takes:
            owners = [other for other, each in STRATEGIES.items() if option in options(each)]
            raise ValueError(
                f"{option} is an option of strategy {' and '.join(owners)}; strategy is {name}"
            )
    unset = {each.name: each.default for each in fields(Options)}
    return kind(**{takes[option].name: v for option, v in given.items() if v != unset[option]})


def to_plain(strategy: Strategy) -> dict[str, Any]:
    """Return the name of a strategy and its options, as values for JSON and TOML."""
    values = {
        option: getattr(strategy, each.name)
        for option, each in options(type(strategy)).items()
        if getattr(strategy, each.name) != each.default
    }
    lists = {option: list(v) if isinstance(v, tuple) else v for option, v in values.items()}
    return {"strategy": strategy.name, **lists}


def table() -> str:
    """Return where, how, when and the options of each strategy, a fact a line."""
    lines = []
    for name, kind in STRATEGIES.items():
        flags = " ".join("--" + option.replace("_", "-") for option in options(kind))
        facts = ("parameters", kind.where), ("gradients", kind.how), ("when", kind.when)
        lines.append(name)
        lines += [f"  {head:<10}  {text}" for head, text in (*facts, ("options", flags)) if text]
    return "\n".join(lines)
