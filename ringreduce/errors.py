"""The errors that a collective can raise.

Misuse that one rank can detect alone raises a plain ``TypeError`` or ``ValueError`` before anything
is sent.  The errors below take more than one rank to detect.  All ranks raise the same error with
the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, TypeVar

_ALIKE = 0.7
"""The least similarity of two words of which one may be meant by the other: not of cpu and gpu."""


def did_you_mean(word: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """Return "; did you mean 'ring'?", with the known word that is closest; "" if none is close.

    `others` maps names in other libraries, in lower case, to the names here.  Case does not count,
    nor the dashes of options, which would make all options look alike.
    """
    import difflib  # only after a mistake: the import takes a millisecond

    words, bare = {each.lower().lstrip("-"): each for each in known}, word.lower().lstrip("-")
    near = difflib.get_close_matches(bare, words, n=1, cutoff=_ALIKE) if len(bare) > 1 else []
    near = near or [each for each in words if sorted(each) == sorted(bare) != [bare]]
    meant = (others or {}).get(word.lower()) or (words[near[0]] if near else None)
    return f"; did you mean {meant!r}?" if meant else ""


def unknown(
    what: str,
    word: object,
    known: Iterable[str],
    others: Mapping[str, str] | None = None,
    unlisted: Iterable[str] = (),
) -> str:
    """Return "unknown op 'su'; choose one of 'sum', 'mean'; did you mean 'sum'?".

    `what` is the kind of thing that `known` lists; `others` are those of `did_you_mean`.  The text
    does not list the words `unlisted`, but may suggest one of them.
    """
    names = list(known)
    meant = did_you_mean(str(word), [*names, *unlisted], others)
    return f"unknown {what} {word!r}; choose one of {', '.join(map(repr, names))}{meant}"


def counted(number: object, what: str) -> str:
    """Return a number and the noun that it counts: 1 step, 2 steps, 2 losses."""
    plural = "es" if what.endswith(("batch", "s")) else "s"
    return f"{number} {what}{plural * (str(number) != '1')}"


def shown(value: Any) -> str:
    """Show a wrong argument in short: numbers, texts, None and short lists of these as they are.

    Functions and types are shown by their name, everything else by its type: arrays may be long.
    """
    if callable(value) and hasattr(value, "__name__"):
        return f"the {'type' if isinstance(value, type) else 'function'} {value.__name__!r}"
    text = repr(value) if _is_plain(value) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_SHOWN = 100
"""The most characters of a value in a text."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _SHOWN and all(map(_is_plain, value))
    return value is None or isinstance(value, (Number, str, bytes))


class RingReduceError(Exception):
    """Base class of the errors that ringreduce defines.

    Example:
        >>> issubclass(rr.MismatchError, rr.RingReduceError)
        True
    """

    __module__ = "ringreduce"


class MismatchError(RingReduceError, ValueError):
    """Ranks made different calls.  All ranks dropped the call.  The communicator stays usable.

    Attributes:
        speaks: True on the lowest of the ranks that made the same call.  Where the error ends the
            program, this rank prints it for all of them.

    Example:
        >>> def program(comm):
        ...     try:
        ...         comm.all_reduce(np.ones(2 + comm.rank))
        ...     except rr.MismatchError:
        ...         return comm.all_reduce(1).item()  # the next call works
        >>> rr.spawn(program, 2)
        [2, 2]
    """

    __module__ = "ringreduce"

    def __init__(self, text: str, speaks: bool = True) -> None:
        super().__init__(text)
        self.speaks = speaks


class PeerTimeoutError(RingReduceError, TimeoutError):
    """A rank stopped answering.  The communicator is broken: later calls raise this error again.

    If `SharedArray.add` or `SharedArray.read` raises it, nothing is broken.

    Attributes:
        ranks: the ranks that did not answer.
        job_ranks: their numbers in the communicator of `init`, from which this one was split.

    Example:
        >>> import time
        >>> def program(comm):
        ...     if comm.rank == 1:
        ...         time.sleep(1.5)  # stands for a rank that hangs
        ...     try:
        ...         comm.barrier()
        ...     except rr.PeerTimeoutError as error:
        ...         return error.ranks
        >>> rr.spawn(program, 2, timeout_s=0.5)[0]
        (1,)
    """

    __module__ = "ringreduce"

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = self.job_ranks = ranks


class AllRanksEnd(SystemExit):
    """Ends the program on all ranks of the job, in order: no rank waits for another."""


class PeerLostError(RingReduceError, ConnectionError):
    """A rank died, raised an exception, or left.  The communicator is broken.

    Attributes:
        ranks: the ranks that are known to be lost; empty if MPI does not tell.
        job_ranks: their numbers in the communicator of `init`, from which this one was split.

    Example:
        >>> def program(comm):
        ...     if comm.rank == 1:
        ...         return comm.leave("the disk is full")
        ...     try:
        ...         comm.barrier()
        ...     except rr.PeerLostError as error:
        ...         return comm.broken, error.ranks
        >>> rr.spawn(program, 2)
        [(True, (1,)), None]
    """

    __module__ = "ringreduce"

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = self.job_ranks = ranks


class ScheduleError(RingReduceError):
    """A schedule is wrong, or its text cannot be parsed.

    Attributes:
        places: the (rank, step) of each step that the proof rejects, or for a pipeline the (rank,
            index of the action); empty if the schedule is wrong as a whole.

    Example:
        >>> rr.register_algorithm("sends_nothing", lambda size, rank: ())
        >>> try:
        ...     rr.spawn(lambda comm: comm.all_reduce(1, algorithm="sends_nothing"), 2)
        ... except rr.ScheduleError:
        ...     print("refused, before anything was sent")
        refused, before anything was sent
    """

    __module__ = "ringreduce"

    def __init__(self, text: str, places: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__(text)
        self.places = tuple(places)


NAME_RANKS = (PeerTimeoutError, PeerLostError)
"""Errors that name ranks."""
_NamesRanks = TypeVar("_NamesRanks", bound=PeerTimeoutError | PeerLostError)


def numbered(error: _NamesRanks, job_ranks: Sequence[int]) -> _NamesRanks:
    """Return an error, with the numbers in the job of the ranks that it names.

    `job_ranks` has the number in the job of each rank of the communicator.
    """
    error.job_ranks = tuple(job_ranks[rank] for rank in error.ranks)
    return error
