"""What ranks find out together: each other's words, and whether what each has done went well."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

import ringreduce as rr

T = TypeVar("T")
REFUSED = (OSError, ValueError, ImportError, MemoryError)
"""What is wrong with what was asked for, or with where it is to run."""


def gather_words(comm: rr.Communicator, words: Sequence[str]) -> list[list[str]]:
    """Every rank's words.  Collective."""
    text = np.frombuffer(json.dumps(list(words)).encode(), np.uint8)
    lengths = comm.all_gather(np.array([len(text)])).tolist()
    whole = comm.all_gather(text).tobytes()
    ends = np.cumsum(lengths).tolist()
    return [json.loads(whole[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def nothing() -> None:
    """What other ranks do while rank 0 does something."""


def together(comm: rr.Communicator, do: Callable[[], T]) -> T:
    """What `do` gives on this rank.  Collective.

    Raises ValueError on all ranks alike, saying where what went wrong, if it did on any.
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
        told = list(dict.fromkeys(filter(None, problems)))
        if len(told) == 1 and (all(problems) or problems[0]):
            raise ValueError(told[0])
        raise ValueError("; ".join(f"rank {rank}: {p}" for rank, p in enumerate(problems) if p))
    return made[0]


def from_rank_0(comm: rr.Communicator, value: Any) -> Any:
    """What rank 0 passes, on all ranks; it is something that JSON can hold."""
    return json.loads(gather_words(comm, [json.dumps(value)])[0][0])


def said(error: BaseException) -> str:
    """Its words; MemoryError has none."""
    return str(error) or "there is not enough memory for this"
