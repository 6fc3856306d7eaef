"""The algorithms, and the table that finds them by collective and name.

The files of algorithms have generators alone.  `claims` has their claims, and `builders` makes
schedules of generators and claims.  This file gives them their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ringreduce.algorithms import claims
from ringreduce.algorithms.allgather_reduce import allgather_reduce
from ringreduce.algorithms.bruck import bruck_all_gather, bruck_all_to_all
from ringreduce.algorithms.builders import (
    Algorithm,
    Builder,
    RootedAlgorithm,
    among_all,
    each,
    each_or_five,
    each_other,
    each_pair,
    each_power,
    from_root,
    hierarchical_builder,
    none,
    one,
    two,
    whole,
    whole_rooted,
    without_data,
)
from ringreduce.algorithms.direct import (
    direct_all_gather,
    direct_all_to_all,
    direct_barrier,
    direct_reduce_scatter,
    one_shot_all_reduce,
    pairwise_all_to_all,
    two_shot_all_reduce,
    two_shot_reduce,
)
from ringreduce.algorithms.dissemination import dissemination_barrier
from ringreduce.algorithms.double_tree import (
    double_tree_all_reduce,
    double_tree_broadcast,
    double_tree_reduce,
)
from ringreduce.algorithms.doubling import doubling_all_reduce
from ringreduce.algorithms.halving_doubling import (
    doubling_all_gather,
    halving_doubling_all_reduce,
    halving_reduce_scatter,
)
from ringreduce.algorithms.hierarchical import Nodes
from ringreduce.algorithms.registry import registered
from ringreduce.algorithms.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce,
    ring_reduce_scatter,
)
from ringreduce.algorithms.scatter_gather import (
    reduce_scatter_gather_reduce,
    scatter_all_gather_broadcast,
)
from ringreduce.algorithms.star import (
    star_all_reduce,
    star_broadcast,
    star_gather,
    star_reduce,
    star_scatter,
)
from ringreduce.algorithms.torus import torus_all_reduce, torus_name
from ringreduce.algorithms.tree import (
    tree_all_reduce,
    tree_broadcast,
    tree_gather,
    tree_reduce,
    tree_scatter,
)
from ringreduce.errors import did_you_mean
from ringreduce.schedules.schedule import Schedule


def _star(servers: int) -> Algorithm:
    """Return the star with `servers` servers, or with all ranks as servers if there are fewer."""
    return Algorithm(star_all_reduce, claims.star_all_reduce, parts=lambda n: min(servers, n))


_ALL_REDUCE: Mapping[str, Algorithm] = {
    "ring": Algorithm(ring_all_reduce, claims.ring_all_reduce, each),
    "halving_doubling": Algorithm(
        halving_doubling_all_reduce, claims.halving_doubling_all_reduce, each_power
    ),
    "doubling": Algorithm(whole(doubling_all_reduce), claims.doubling_all_reduce, one),
    "one_shot": Algorithm(whole(one_shot_all_reduce), claims.one_shot_all_reduce, one),
    "allgather_reduce": Algorithm(whole(allgather_reduce), claims.allgather_reduce, one),
    "two_shot": Algorithm(two_shot_all_reduce, claims.two_shot_all_reduce, each),
    "tree": Algorithm(whole(tree_all_reduce), claims.tree_all_reduce, one),
    "double_tree": Algorithm(double_tree_all_reduce, claims.double_tree_all_reduce, two),
    "torus": Algorithm(torus_all_reduce, claims.torus_all_reduce, each, torus_name),
    "star": _star(servers=1),
}
_REDUCE_SCATTER: Mapping[str, Algorithm] = {
    "ring": Algorithm(ring_reduce_scatter, claims.ring_reduce_scatter, each),
    "halving_doubling": Algorithm(halving_reduce_scatter, claims.halving_reduce_scatter, each),
    "direct": Algorithm(direct_reduce_scatter, claims.direct_reduce_scatter, each),
}
_ALL_GATHER: Mapping[str, Algorithm] = {
    "ring": Algorithm(ring_all_gather, claims.ring_all_gather, each),
    "halving_doubling": Algorithm(doubling_all_gather, claims.doubling_all_gather, each),
    "bruck": Algorithm(bruck_all_gather, claims.bruck_all_gather, each),
    "direct": Algorithm(direct_all_gather, claims.direct_all_gather, each),
}
_ALL_TO_ALL: Mapping[str, Algorithm] = {
    "direct": Algorithm(direct_all_to_all, claims.direct_all_to_all, each_pair),
    "pairwise": Algorithm(pairwise_all_to_all, claims.pairwise_all_to_all, each_pair),
    "bruck": Algorithm(bruck_all_to_all, claims.bruck_all_to_all, each_pair),
}
_BROADCAST: Mapping[str, RootedAlgorithm] = {
    "ring": RootedAlgorithm(whole_rooted(ring_broadcast), claims.ring_broadcast, one),
    "tree": RootedAlgorithm(whole_rooted(tree_broadcast), claims.tree_broadcast, one),
    "double_tree": RootedAlgorithm(double_tree_broadcast, claims.double_tree_broadcast, two),
    "scatter_all_gather": RootedAlgorithm(
        scatter_all_gather_broadcast, claims.scatter_all_gather_broadcast, each_other
    ),
    "star": RootedAlgorithm(whole_rooted(star_broadcast), claims.star_broadcast, one),
}
_REDUCE: Mapping[str, RootedAlgorithm] = {
    "tree": RootedAlgorithm(whole_rooted(tree_reduce), claims.tree_reduce, one),
    "ring": RootedAlgorithm(whole_rooted(ring_reduce), claims.ring_reduce, one),
    "double_tree": RootedAlgorithm(double_tree_reduce, claims.double_tree_reduce, two),
    "reduce_scatter_gather": RootedAlgorithm(
        reduce_scatter_gather_reduce, claims.reduce_scatter_gather_reduce, each_other
    ),
    "star": RootedAlgorithm(whole_rooted(star_reduce), claims.star_reduce, one),
    "two_shot": RootedAlgorithm(two_shot_reduce, claims.two_shot_reduce, each_or_five),
}
_GATHER: Mapping[str, RootedAlgorithm] = {
    "star": RootedAlgorithm(star_gather, claims.star_reduce, each),
    "tree": RootedAlgorithm(tree_gather, claims.tree_gather, each),
}
_SCATTER: Mapping[str, RootedAlgorithm] = {
    "star": RootedAlgorithm(star_scatter, claims.star_broadcast, each),
    "tree": RootedAlgorithm(tree_scatter, claims.tree_scatter, each),
}
_BARRIER: Mapping[str, Algorithm] = {
    "dissemination": Algorithm(
        without_data(dissemination_barrier), claims.dissemination_barrier, none
    ),
    "direct": Algorithm(without_data(direct_barrier), claims.direct_barrier, none),
}

_IN_NODE = {"ring": "ring", "halving_doubling": "halving_doubling", "two_shot": "direct"}
"""All-reduce -> the name of the reduce-scatter and of the all-gather that it consists of."""


def _hierarchical(name: str, in_node: str, along_rails: Algorithm) -> Builder:
    halves = _IN_NODE[in_node]
    return hierarchical_builder(name, _REDUCE_SCATTER[halves], along_rails, _ALL_GATHER[halves])


def _all(collective: str, algorithms: Mapping[str, Algorithm]) -> dict[str, Builder]:
    return {name: among_all(collective, name, known) for name, known in algorithms.items()}


def _rooted(collective: str, algorithms: Mapping[str, RootedAlgorithm]) -> dict[str, Builder]:
    return {name: from_root(collective, name, known) for name, known in algorithms.items()}


ALGORITHMS: Mapping[str, Mapping[str, Builder]] = {
    "all_reduce": {
        **_all("all_reduce", _ALL_REDUCE),
        "hierarchical": _hierarchical("hierarchical", "ring", _ALL_REDUCE["ring"]),
    },
    "reduce_scatter": _all("reduce_scatter", _REDUCE_SCATTER),
    "all_gather": _all("all_gather", _ALL_GATHER),
    "broadcast": _rooted("broadcast", _BROADCAST),
    "reduce": _rooted("reduce", _REDUCE),
    "gather": _rooted("gather", _GATHER),
    "scatter": _rooted("scatter", _SCATTER),
    "all_to_all": _all("all_to_all", _ALL_TO_ALL),
    "barrier": _all("barrier", _BARRIER),
}
"""Collective -> algorithm name -> builder of its schedule.

Two all-reduces with parameters, star(k) and hierarchical(a, b), are not listed: see `parse`.
"""


def build(collective: str, algorithm: str, nodes: Nodes, root: int = 0) -> Schedule:
    """Return the schedule of `collective` by `algorithm` for ranks placed on `nodes`.

    Raises ValueError if there is no such algorithm.
    """
    return parse(collective, algorithm)(nodes, root)


def parse(collective: str, algorithm: str) -> Builder:
    """Return the builder for the name of an algorithm, with its parameters if it has any.

    Two all-reduces have parameters: ``"star(k)"`` has k servers, ``"hierarchical(a, b)"`` uses a in
    the node and b along the rails.  Raises ValueError if the name or a parameter is unknown.

    >>> parse("all_reduce", "hierarchical(two_shot, doubling)")([[0, 1], [2, 3]], 0).claim(0)
    Claim(steps=3, sent=3, received=3)
    """
    known = ALGORITHMS[collective]
    if algorithm in known:
        return known[algorithm]
    if own := registered(collective, algorithm):
        return own
    if collective == "all_reduce":
        if flat := _by_name(algorithm):
            return among_all(collective, algorithm, flat)
        levels = re.fullmatch(r"hierarchical\((\w+), *(.+)\)", algorithm)
        if levels and levels[1] in _IN_NODE and (rails := _by_name(levels[2])):
            return _hierarchical(algorithm, levels[1], rails)
    raise ValueError(f"{collective}: {_what_is_wrong(collective, algorithm)}")


def _by_name(name: str) -> Algorithm | None:
    """Return the flat all-reduce of this name, ``star(k)`` included."""
    star = re.fullmatch(r"star\(([1-9][0-9]*)\)", name)
    return _star(int(star[1])) if star else _ALL_REDUCE.get(name)


def _what_is_wrong(collective: str, algorithm: str) -> str:
    name, known = algorithm.partition("(")[0], ALGORITHMS[collective]
    wanted = {
        "star": "write 'star(k)', with k servers, at least 1",
        "hierarchical": "write 'hierarchical(a, b)', where a, in the node, is one of "
        f"{_quoted(_IN_NODE)}, and b, along the rails, is one of {_quoted(_ALL_REDUCE)} or "
        "'star(k)'",
    }
    if name not in known:
        parametrised = wanted if collective == "all_reduce" else {}
        also = f"; {' and '.join(map(repr, parametrised))} take parameters" if parametrised else ""
        names = ["auto", *known]
        meant = did_you_mean(name, names)
        return f"unknown algorithm {algorithm!r}; choose one of {_quoted(names)}{also}{meant}"
    if collective == "all_reduce" and name in wanted:
        return f"unknown parameters in {algorithm!r}; {wanted[name]}"
    return f"{name!r} takes no parameters, but {algorithm!r} has some"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
