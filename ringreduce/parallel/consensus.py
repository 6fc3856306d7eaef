"""Exchange texts and errors between ranks, so that all ranks go on, or fail, together.

If parameters or reports differ, all ranks raise an error that names ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

import ringreduce as rr
from ringreduce.parallel.arrays import by_name

T = TypeVar("T")
REFUSED = (OSError, ValueError, ImportError, MemoryError)
"""Errors of wrong options, files or environment: reported without a traceback."""


def gather_words(comm: rr.Communicator, words: Sequence[str]) -> list[list[str]]:
    """Return the words of every rank.  Collective."""
    text = np.frombuffer(json.dumps(list(words)).encode(), np.uint8)
    lengths = comm.all_gather(np.array([len(text)])).tolist()
    whole = comm.all_gather(text).tobytes()
    ends = np.cumsum(lengths).tolist()
    return [json.loads(whole[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def nothing() -> None:
    """Do nothing: for the other ranks while rank 0 acts."""


def together(comm: rr.Communicator, do: Callable[[], T]) -> T:
    """Call `do` on every rank, and return its result on this rank.  Collective.

    If `do` fails on any rank, raises the same ValueError on all ranks, with the ranks that failed
    unless the error concerns all.
    """
    made: list[T] = []
    problem = ""
    try:
        made.append(do())
    except rr.RingReduceError:
        raise  # all ranks have it, or the communicator is broken
    except REFUSED as error:
        problem = said(error)
    problems = [words[0] for words in gather_words(comm, [problem])]
    if any(problems):
        reasons = list(dict.fromkeys(filter(None, problems)))
        if len(reasons) == 1 and (all(problems) or problems[0]):
            raise ValueError(reasons[0])
        raise ValueError("; ".join(f"rank {rank}: {p}" for rank, p in enumerate(problems) if p))
    return made[0]


def from_rank_0(comm: rr.Communicator, value: Any) -> Any:
    """Return rank 0's `value` on all ranks; JSON must be able to represent it."""
    return json.loads(gather_words(comm, [json.dumps(value)])[0][0])


def said(error: BaseException) -> str:
    """Return the text of an error; MemoryError has none of its own."""
    return str(error) or "there is not enough memory for this"


def check_arrays(where: str, params: Any) -> dict[str, Any]:
    """Return names and arrays of floats that can be written, or raise TypeError or ValueError."""
    if not isinstance(params, Mapping) or not params:
        passed = "an empty dict" if params == {} else type(params).__name__
        raise TypeError(f"{where}: params is {passed}; wanted a dict of names and arrays")
    return by_name(where, params, changed=True)


def check_alike(
    where: str, comm: rr.Communicator, params: Mapping[str, Any], **options: object
) -> None:
    """Raise MismatchError on all ranks where options, names, shapes, dtypes or an order differ."""
    mine = [f"{name} = {value}" for name, value in options.items()]
    mine += [f"{name}: {a.dtype}{list(a.shape)}" for name, a in params.items()]
    lists = gather_words(comm, mine)
    for rank, listed in enumerate(lists):
        if listed != lists[0]:
            pairs = zip([*listed, "nothing"], [*lists[0], "nothing"], strict=False)
            theirs, wanted = next(pair for pair in pairs if pair[0] != pair[1])
            raise rr.MismatchError(
                f"{where}: rank {rank} has {theirs} where rank 0 has {wanted}; every rank "
                "must pass the same arguments, and parameters in the same order"
            )


@dataclass(frozen=True)
class Reported:
    """What a rank tells the others after an error in a step."""

    place: str
    """``"finish"``; ``"join"`` at the end of a turn; ``"left"`` after it has left the loop."""
    turn: int
    """Number of the turn in the loop of `join`, from 1; 0 outside of a loop."""
    weighed: bool
    missing: Sequence[str]


def settle(
    comm: rr.Communicator, mine: Reported, seen: rr.MismatchError | None, rounds: int
) -> tuple[rr.MismatchError | None, bool]:
    """Return the error that names ranks, or else `seen`, and whether a loop of `join` has to end.

    Collective: every rank has seen an error of this step, lacks gradients, or has left the loop of
    `join`.  The ranks may have made different numbers of calls before, at most `rounds`.
    """
    for _ in range(rounds):
        try:
            reported = _exchange(comm, mine)
        except rr.MismatchError as error:
            seen = error  # other ranks had more calls under way than this rank
            continue
        text = _complaint(reported)
        turns, places = {each.turn for each in reported}, {each.place for each in reported}
        if text:
            seen = rr.MismatchError(text)
        elif places == {"left"}:
            seen = None  # all ranks have left in the same turn
        return seen, len(turns) > 1 or places != {"finish"}
    return seen, True


def _exchange(comm: rr.Communicator, mine: Reported) -> list[Reported]:
    head = [mine.place, str(mine.turn), "weighed" if mine.weighed else ""]
    return [
        Reported(place, int(turn), bool(weighed), missing)
        for place, turn, weighed, *missing in gather_words(comm, [*head, *mine.missing])
    ]


def _complaint(reported: Sequence[Reported]) -> str:
    """Return the text of the error; "" if the ranks have reported alike."""
    if len({(each.place == "left", each.turn) for each in reported}) > 1:
        return _who_is_where(reported)
    if any(each.missing for each in reported) and reported[0].place != "left":
        return _who_lacks_what(reported)
    if len({each.weighed for each in reported}) > 1:
        return _who_weighed(reported)
    return ""


def _ranks(chosen: Iterable[bool]) -> str:
    return ", ".join(str(rank) for rank, is_chosen in enumerate(chosen) if is_chosen)


def _who_is_where(reported: Sequence[Reported]) -> str:
    """Name the ranks that have left; if no rank has, the turn of every rank."""
    left = [each.place == "left" for each in reported]
    who = []
    for turn in sorted({each.turn for each in reported}, reverse=True):
        here = [each.turn == turn for each in reported]
        if any(left):
            here = [a and b for a, b in zip(here, left, strict=True)]
        if any(here):
            where = f"in turn {turn}" if turn else "in no loop"
            who.append(f"rank {_ranks(here)} {'left the loop' if any(left) else 'is'} {where}")
    wanted = (
        "stay until the loop ends: without batches it gets None"
        if any(left)
        else "call finish in every turn, also if it gets None"
    )
    return f"join: {', '.join(who)}; every rank must {wanted}"


def _who_lacks_what(reported: Sequence[Reported]) -> str:
    lacks = "; ".join(
        f"rank {rank} has not reported {', '.join(map(repr, each.missing))}"
        for rank, each in enumerate(reported)
        if each.missing
    )
    return f"finish: {lacks}; every rank must call ready for every parameter in every step"


def _who_weighed(reported: Sequence[Reported]) -> str:
    weighed, not_weighed = (
        _ranks(each.weighed == which for each in reported) for which in (True, False)
    )
    return (
        f"finish: rank {weighed} called weigh in this step, rank {not_weighed} did not; every rank "
        "must, or none"
    )
