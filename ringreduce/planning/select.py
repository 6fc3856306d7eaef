"""Which algorithm is the cheapest: the cost model's answer, and its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringreduce.algorithms import ALGORITHMS, build, parse
from ringreduce.config import Config
from ringreduce.schedules.cost import price
from ringreduce.topology import Nodes

STAGED_BYTES = 4 << 20
"""The longest slice that is staged in shared memory."""
_PRICED_SLICES = 8
"""Slices that are priced at most: beyond, a pipeline is filled and time grows with bytes alone."""
_AS_GOOD_AS_EQUAL = 0.02
_DIRECT, _MOST_DIRECT = ("one_shot", "two_shot", "direct", "star", "pairwise"), 32


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
    large = 64 << 20 if len(nodes) == 1 else 1 << 20
    if config.memory is not None and not config.pulls(nbytes):
        large = STAGED_BYTES
    slice_bytes = config.slice_bytes or large
    return max(1, min(-(-nbytes // slice_bytes), config.most_slices))


def slices_in_flight(nodes: Nodes, config: Config) -> int:
    """How many slices are under way at once."""
    return config.in_flight or (1 if len(nodes) == 1 else 4)


def candidates(collective: str, nodes: Nodes, in_memory: bool = False) -> list[str]:
    """The algorithms that are worth a price among these ranks.

    With very many ranks those in which everybody talks to everybody are not, and take longest to
    price.  Between nodes the first to be tried is the one that knows of them, in shared memory
    those of the fewest steps.
    """
    names = list(ALGORITHMS[collective])
    if sum(map(len, nodes)) > _MOST_DIRECT and len(names) > 2:
        names = [name for name in names if name not in _DIRECT]
    if len(nodes) == 1 and in_memory:
        names.sort(key=lambda name: name not in _DIRECT)
    if len(nodes) == 1:
        return [name for name in names if name != "hierarchical"]
    return sorted(names, key=lambda name: name != "hierarchical")


def choose(collective: str, nodes: Nodes, nbytes: int, config: Config) -> Choice:
    """Price every algorithm of `collective` and take the cheapest.

    Of those that are as good as equal, the first candidate.  A pure function of its arguments, so
    all ranks choose alike.  Sizes are priced as the next power of two, so that similar calls are
    carried out alike.
    """
    names = candidates(collective, nodes, config.memory is not None)
    rounded = 1 << max(nbytes - 1, 0).bit_length()
    predicted = {name: predict(collective, name, nodes, rounded, config) for name in names}
    enough = min(predicted.values()) * (1 + _AS_GOOD_AS_EQUAL)
    chosen = next(name for name in names if predicted[name] <= enough)
    return Choice(collective, nbytes, chosen, predicted)


def predict(collective: str, algorithm: str, nodes: Nodes, nbytes: int, config: Config) -> float:
    """The seconds that a call should take.  Raises ValueError for an unknown algorithm."""
    schedule, profile = build(collective, algorithm, nodes), config.profile
    if config.memory is not None:
        profile = profile.of_memory(config.memory.crowded)
    slices, in_flight = slice_count(nbytes, nodes, config), slices_in_flight(nodes, config)
    if in_flight == 1:
        return slices * price(schedule, nodes, nbytes / slices, profile)
    priced = min(slices, _PRICED_SLICES)
    return price(schedule, nodes, nbytes, profile, slices=priced, in_flight=in_flight)


def resolve(collective: str, algorithm: str, nodes: Nodes, nbytes: int, config: Config) -> str:
    """The name of the algorithm to run: `algorithm` itself, unless it is ``"auto"``.

    Raises ValueError when there is none of that name.
    """
    if algorithm != "auto":
        parse(collective, algorithm)
        return algorithm
    if len(ALGORITHMS[collective]) == 1:
        return next(iter(ALGORITHMS[collective]))
    return choose(collective, nodes, nbytes, config).algorithm
