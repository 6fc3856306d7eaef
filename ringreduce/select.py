"""Which algorithm is the cheapest: the cost model's answer, and its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.config import Config
from ringreduce.cost import price
from ringreduce.topology import Nodes

_PRICED_SLICES = 8
"""Slices that are priced at most: beyond, a pipeline is filled and time grows with bytes alone."""


@dataclass(frozen=True)
class Choice:
    """What ``algorithm="auto"`` chose, and the predicted seconds of every candidate."""

    collective: str
    nbytes: int
    algorithm: str
    predicted_s: Mapping[str, float]

    def __str__(self) -> str:
        ranked = sorted(self.predicted_s.items(), key=lambda item: item[1])
        priced = ", ".join(f"{name} {seconds * 1e6:.1f} µs" for name, seconds in ranked)
        return f"{self.collective} of {self.nbytes} bytes: {self.algorithm} (predicted: {priced})"


def slice_count(nbytes: int, nodes: Nodes, config: Config) -> int:
    """How many slices an array of `nbytes` is cut into."""
    slice_bytes = config.slice_bytes or (64 << 20 if len(nodes) == 1 else 1 << 20)
    return max(1, min(-(-nbytes // slice_bytes), config.most_slices))


def slices_in_flight(nodes: Nodes, config: Config) -> int:
    """How many slices are under way at once."""
    return config.in_flight or (1 if len(nodes) == 1 else 4)


def choose(collective: str, nodes: Nodes, nbytes: int, config: Config) -> Choice:
    """Price every algorithm of `collective` and take the cheapest.

    A pure function of its arguments, so all ranks choose alike.  Sizes are priced as the next power
    of two, so that similar calls are carried out alike.
    """
    names = list(ALGORITHMS[collective])
    rounded = 1 << max(nbytes - 1, 0).bit_length()
    slices = min(slice_count(rounded, nodes, config), _PRICED_SLICES)
    predicted = {
        name: price(
            build(collective, name, nodes),
            nodes,
            rounded,
            config.profile,
            slices=slices,
            in_flight=slices_in_flight(nodes, config),
        )
        for name in names
    }
    return Choice(collective, nbytes, min(names, key=predicted.__getitem__), predicted)


def resolve(collective: str, algorithm: str, nodes: Nodes, nbytes: int, config: Config) -> str:
    """The name of the algorithm to run: `algorithm` itself, unless it is ``"auto"``.

    Raises ValueError when there is none of that name.
    """
    known = ALGORITHMS[collective]
    if algorithm == "auto":
        only = len(known) == 1 or len(nodes) == 1
        return next(iter(known)) if only else choose(collective, nodes, nbytes, config).algorithm
    if algorithm not in known:
        raise ValueError(
            f"{collective}: unknown algorithm {algorithm!r}; "
            f"choose one of {', '.join(map(repr, ('auto', *known)))}"
        )
    return algorithm
