"""The algorithms: each is a file with its generators and their claims.

Importing this package imports all its files, which register their algorithms.  `definition` has the
table, and says what an algorithm is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ringreduce.algorithms.definition import REGISTERED, Algorithm, Builder, Nodes, algorithm
from ringreduce.algorithms.hierarchical import IN_NODE, hierarchical
from ringreduce.algorithms.star import star_of
from ringreduce.errors import ScheduleError, did_you_mean, shown, unknown
from ringreduce.schedules.collectives import COLLECTIVES
from ringreduce.schedules.schedule import Schedule, Step, Steps

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

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
    the node and b along the rails.  Raises ValueError if the name or a parameter is unknown.

    >>> parse("all_reduce", "hierarchical(two_shot, doubling)")([[0, 1], [2, 3]], 0).claim(0)
    Claim(steps=3, sent=3, received=3)
    """
    if known := REGISTERED.get((collective, algorithm)):
        return known
    if collective == "all_reduce":
        if star := _flat(algorithm):
            return star
        levels = re.fullmatch(r"hierarchical\((\w+), *(.+)\)", algorithm)
        if levels and levels[1] in IN_NODE and (rails := _flat(levels[2])):
            return hierarchical(algorithm, levels[1], rails)
    raise ValueError(f"{collective}: {_what_is_wrong(collective, algorithm)}")


def register_algorithm(
    name: str,
    steps: Callable[..., Iterable[Step]],
    *,
    collective: str = "all_reduce",
    chunks: Callable[[int], int] | None = None,
) -> None:
    """Make your own schedule available as ``algorithm=name``.  Register the same on every rank.

    The schedule is proven when it is first built for a number of ranks: a wrong schedule raises
    ScheduleError on every rank, and nothing is sent.  A later registration under the same name
    replaces the earlier one.

    Args:
        name: an identifier that no algorithm of this collective has.
        steps: ``steps(size, rank)`` yields the steps of `rank`; for broadcast, reduce, gather and
            scatter the call is ``steps(size, rank, root)``.
        collective: the collective that the schedule carries out.
        chunks: ``chunks(size)`` is the number of equal chunks that all_reduce, broadcast or reduce
            divides the array into; by default one for each rank.  In the other collectives chunk i
            belongs to rank i, and in all_to_all chunk ``i * size + j`` goes from rank i to rank j.

    Raises:
        ValueError: the name is taken or is no identifier, or the collective is unknown.
        TypeError: `steps` or `chunks` is no function.

    Example:
        >>> from ringreduce.schedules.schedule import Recv, Send, Step
        >>> def hub(size, rank):
        ...     others = range(1, size)
        ...     if rank == 0:
        ...         yield Step(recvs=tuple(Recv(peer, (0,), reduce=True) for peer in others))
        ...         yield Step(sends=tuple(Send(peer, (0,)) for peer in others))
        ...     else:
        ...         yield Step(sends=(Send(0, (0,)),))
        ...         yield Step(recvs=(Recv(0, (0,)),))
        >>> rr.register_algorithm("hub", hub, chunks=lambda size: 1)
        >>> rr.spawn(lambda comm: comm.all_reduce(comm.rank, algorithm="hub").item(), 3)
        [3, 3, 3]
    """
    known = [each for each in COLLECTIVES if each != "barrier"]
    if collective not in known:
        raise ValueError(f"register_algorithm: {unknown('collective', collective, known)}")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(
            f"register_algorithm: name is {name!r}; "
            "choose letters, digits and _, with no digit first"
        )
    if name in ALGORITHMS[collective] or name == "auto":
        raise ValueError(
            f"register_algorithm: {name!r} is taken by the library; choose another name"
        )
    functions = {"steps": steps} if chunks is None else {"steps": steps, "chunks": chunks}
    for what, function in functions.items():
        if not callable(function):
            kind = type(function).__name__
            raise TypeError(f"register_algorithm: {what} is {kind}; pass a function")

    @algorithm(collective, name, None, chunks)
    def in_group(group: Sequence[int], me: int, *given: Any) -> Steps:
        *root, _ = given  # without the chunks, which have the same numbers in every group
        made = steps(len(group), group[me], *(group[place] for place in root))
        return _checked(f"{collective} {name}", made)


def _flat(name: str) -> Algorithm | None:
    """Return the all-reduce of this name for the ranks of any group, ``star(k)`` included."""
    star = re.fullmatch(r"star\(([1-9][0-9]*)\)", name)
    known = star_of(int(star[1])) if star else REGISTERED.get(("all_reduce", name))
    return known if isinstance(known, Algorithm) else None


def _what_is_wrong(collective: str, algorithm: str) -> str:
    name, known = algorithm.partition("(")[0], ALGORITHMS[collective]
    along_rails = [each for each in ALGORITHMS["all_reduce"] if each != "hierarchical"]
    wanted = {
        "star": "write 'star(k)', with k servers, at least 1",
        "hierarchical": "write 'hierarchical(a, b)', where a, in the node, is one of "
        f"{_quoted(IN_NODE)}, and b, along the rails, is one of {_quoted(along_rails)} or "
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


def _checked(where: str, steps: object) -> Steps:
    """Yield the steps of a rank.  Raises ScheduleError if they are anything else."""
    if not isinstance(steps, Iterable):
        raise ScheduleError(f"{where}: steps returned {shown(steps)}; yield a Step for each step")
    for step in steps:
        if not isinstance(step, Step):
            raise ScheduleError(f"{where}: steps yielded {shown(step)}; yield a Step for each step")
        yield step
