"""Mistakes of programs that train: parameters or reports that differ between the ranks.

An error names ranks and parameters, and all ranks raise it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ringreduce as rr
from ringreduce.train.together import gather_words


def check_arrays(params: Any) -> None:
    """Raise TypeError unless `params` maps names to arrays of floats."""
    if not isinstance(params, Mapping) or not params:
        raise TypeError(f"DataParallel: params is {params!r}; wanted a dict of names and arrays")
    for name, array in params.items():
        if not hasattr(array, "dtype") or array.dtype.kind in "biu":
            what = array.dtype if hasattr(array, "dtype") else type(array).__name__
            raise TypeError(f"DataParallel: {name!r} is {what}; wanted an array of floats")


def check_alike(comm: rr.Communicator, params: Mapping[str, Any]) -> None:
    """Raise MismatchError on all ranks where names, shapes, dtypes or their order differ."""
    lists = gather_words(comm, [f"{name}: {a.dtype}{list(a.shape)}" for name, a in params.items()])
    for rank, listed in enumerate(lists):
        if listed != lists[0]:
            pairs = zip([*listed, "nothing"], [*lists[0], "nothing"], strict=False)
            theirs, wanted = next(pair for pair in pairs if pair[0] != pair[1])
            raise rr.MismatchError(
                f"DataParallel: rank {rank} has {theirs} where rank 0 has {wanted}; every rank "
                "must pass the same parameters in the same order"
            )


@dataclass(frozen=True)
class Reported:
    """What a rank has reported in one step."""

    weighed: bool
    """Whether it has called `weigh`."""
    missing: Sequence[str]
    """The names of the gradients that it has not reported."""


def announce(comm: rr.Communicator, mine: Reported) -> NoReturn:
    """Make a call that complete ranks do not make: raises MismatchError on all ranks."""
    _exchange(comm, mine)
    raise rr.MismatchError("finish: all ranks lack gradients")


def explained(
    comm: rr.Communicator, mine: Reported, seen: rr.MismatchError, rounds: int
) -> rr.MismatchError:
    """Return the error that names what all ranks have not reported, or else `seen`.  Collective.

    Every rank has seen an error of this step.  The ranks may have made different numbers of calls
    before, at most `rounds`.
    """
    for _ in range(rounds):
        try:
            reported = _exchange(comm, mine)
        except rr.MismatchError as error:
            seen = error  # other ranks had more calls under way than this rank
            continue
        if any(each.missing for each in reported):
            return rr.MismatchError(_who_lacks_what(reported))
        if len({each.weighed for each in reported}) > 1:
            return rr.MismatchError(_who_weighed(reported))
        break
    return seen


def _exchange(comm: rr.Communicator, mine: Reported) -> list[Reported]:
    """Return what every rank has reported."""
    words = gather_words(comm, ["weighed" if mine.weighed else "", *mine.missing])
    return [Reported(bool(weighed), missing) for weighed, *missing in words]


def _who_lacks_what(reported: Sequence[Reported]) -> str:
    lacks = "; ".join(
        f"rank {rank} has not reported {', '.join(map(repr, each.missing))}"
        for rank, each in enumerate(reported)
        if each.missing
    )
    return f"finish: {lacks}; every rank must call ready for every parameter in every step"


def _who_weighed(reported: Sequence[Reported]) -> str:
    def ranks(weighed: bool) -> str:
        return ", ".join(str(rank) for rank, each in enumerate(reported) if each.weighed == weighed)

    return (
        f"finish: rank {ranks(True)} called weigh in this step, rank {ranks(False)} did not; "
        "every rank must, or none"
    )
