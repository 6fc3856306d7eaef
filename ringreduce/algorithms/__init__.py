"""The algorithms: each is a file with its generators and their claims.

Importing this package imports all its files, which register their algorithms.  `definition` has the
table, and says what an algorithm is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

from ringreduce.algorithms.definition import REGISTERED, Algorithm, Builder, Nodes
from ringreduce.algorithms.hierarchical import IN_NODE, LEADER, hierarchical
from ringreduce.algorithms.star import star_of
from ringreduce.errors import did_you_mean
from ringreduce.schedules.collectives import COLLECTIVES
from ringreduce.schedules.schedule import Schedule

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]

_PREFERRED = {
    "all_reduce": (
        *("ring", "halving_doubling", "doubling", "one_shot", "allgather_reduce", "two_shot"),
        *("tree", "double_tree", "torus", "star", "hierarchical"),
    ),
    "reduce_scatter": ("ring", "halving_doubling", "direct"),
    "all_gather": ("ring", "halving_doubling", "bruck", "direct"),
    "broadcast": ("ring", "tree", "double_tree", "scatter_all_gather", "star"),
    "reduce": ("tree", "ring", "double_tree", "reduce_scatter_gather", "star", "two_shot"),
    "gather": ("star", "tree"),
    "scatter": ("star", "tree"),
    "all_to_all": ("direct", "pairwise", "bruck"),
    "barrier": ("dissemination", "direct"),
}
"""Collective -> algorithms of which ``"auto"`` takes the first if several are equally fast.

Other algorithms of the library follow these.
"""


def _of(collective: str) -> Iterator[str]:
    yield from _PREFERRED.get(collective, ())
    yield from (name for known, name in REGISTERED if known == collective)


ALGORITHMS: Mapping[str, Mapping[str, Builder]] = {
    collective: {name: REGISTERED[collective, name] for name in _of(collective)}
    for collective in COLLECTIVES
}
"""Collective -> algorithm of the library -> builder of its schedule.

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
    the node and b along the rails; where a is "leader", b is among one rank of each node.  Raises
    ValueError if the name or a parameter is unknown.

    >>> parse("all_reduce", "hierarchical(two_shot, doubling)")([[0, 1], [2, 3]], 0).claim(0)
    Claim(steps=3, sent=3, received=3)
    """
    if known := REGISTERED.get((collective, algorithm)):
        return known
    if collective == "all_reduce":
        if star := _flat(algorithm):
            return star
        levels = re.fullmatch(r"hierarchical\((\w+), *(.+)\)", algorithm)
        if levels and levels[1] in (*IN_NODE, LEADER) and (rails := _flat(levels[2])):
            return hierarchical(algorithm, levels[1], rails)
    raise ValueError(f"{collective}: {_what_is_wrong(collective, algorithm)}")


def _flat(name: str) -> Algorithm | None:
    """Return the all-reduce of this name for any group, ``star(k)`` included."""
    star = re.fullmatch(r"star\(([1-9][0-9]*)\)", name)
    known = star_of(int(star[1])) if star else REGISTERED.get(("all_reduce", name))
    return known if isinstance(known, Algorithm) else None


def _what_is_wrong(collective: str, algorithm: str) -> str:
    name, known = algorithm.partition("(")[0], ALGORITHMS[collective]
    along_rails = [each for each in ALGORITHMS["all_reduce"] if each != "hierarchical"]
    wanted = {
        "star": "write 'star(k)', with k servers, at least 1",
        "hierarchical": "write 'hierarchical(a, b)', where a, in the node, is one of "
        f"{_quoted((*IN_NODE, LEADER))}, and b, along the rails, is one of "
        f"{_quoted(along_rails)} or 'star(k)'",
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
