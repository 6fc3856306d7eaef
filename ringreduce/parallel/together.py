"""Exchange texts and errors between ranks, so that all ranks go on, or fail, together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

import ringreduce as rr

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
