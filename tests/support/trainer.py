"""The trainer's command, or another, on ranks that are threads, so that no MPI is needed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import pytest

import ringreduce as rr
from ringreduce.train.__main__ import main as train

RUN = ("--epochs", "4", "--batch", "100", "--check-every", "7")
"""60 steps of 15 an epoch."""


def command(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    *arguments: str,
    main: Callable[[Sequence[str]], int] = train,
) -> list[int]:
    """The exit code of each rank."""
    here = threading.local()

    def run(comm: rr.Communicator) -> int:
        here.comm = comm
        return main(arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rr, "init", lambda: contextlib.nullcontext(here.comm))
        return rr.spawn(run, ranks, timeout_s=120)
