"""Ranks as threads of one process, each with an end of a transport that is made for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_LONGEST_S = 300.0


class Exchange:
    """Passes bytes among ranks that are threads, as a rendezvous does among processes."""

    def __init__(self, size: int) -> None:
        self._entries: list[bytes] = [b""] * size
        self._all_here = threading.Barrier(size)

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def collect(mine: bytes) -> list[bytes]:
            self._entries[rank] = mine
            self._all_here.wait()
            found = list(self._entries)
            self._all_here.wait()  # from here on it can be used again
            return found

        return collect


def on_threads(function: Callable[[int], Any], ranks: int) -> list[Any]:
    """Return what `function` returns for each rank; raise the first exception of any."""
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONGEST_S)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
