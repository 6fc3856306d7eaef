"""Where a trainer keeps the arrays that steps change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class Store(Protocol):
    """Arrays that an update changes together.  `ringreduce.State` is one."""

    @property
    def step(self) -> int:
        """Number of updates made."""

    @property
    def generation(self) -> int:
        """Number of the membership of ranks; the first is 1."""

    def __getitem__(self, name: str) -> Any:
        """Return an array: inside an update the new one, which begins with the old values."""

    def empty(self, name: str) -> Any:
        """Return the new array of the update, to write all of its values."""

    def update(self) -> AbstractContextManager[None]:
        """Change arrays, all at once."""

    def restore(self, arrays: Mapping[str, Any], step: int) -> None:
        """Begin after `step` updates, with these arrays."""


class InPlace:
    """Arrays that an update changes where they are: on a GPU, or those that ranks divide.

    They are lost with the process.
    """

    generation = 1

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = dict(arrays)
        self.step = 0

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def empty(self, name: str) -> Any:
        return self._arrays[name]

    @contextmanager
    def update(self) -> Iterator[None]:
        """Count the update."""
        yield
        self.step += 1

    def restore(self, arrays: Mapping[str, Any], step: int) -> None:
        for name, array in arrays.items():
            self._arrays[name][...] = array
        self.step = step
