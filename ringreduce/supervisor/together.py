"""What all ranks of a generation do together: each asks the supervisor and waits for the others."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ringreduce.config import LONGEST_S
from ringreduce.recovery.wire import Message
from ringreduce.supervisor.ranks import Rank


class Together:
    """The ranks that wait for the others, and what each has asked."""

    def __init__(self, timeout_s: float) -> None:
        self._asking: dict[Rank, Message] = {}
        self._timeout_s = min(timeout_s, LONGEST_S)
        self.until: float | None = None
        """When ranks count as stopped that have not asked by then; None: no rank waits."""

    def ask(self, rank: Rank, message: Message) -> None:
        """Let a rank wait for the others."""
        if self.until is None:
            self.until = time.monotonic() + self._timeout_s
        self._asking[rank] = message

    @property
    def asking(self) -> list[Rank]:
        """The ranks that wait."""
        return list(self._asking)

    def have_asked(self, ranks: Collection[Rank]) -> bool:
        """Return whether all these ranks wait."""
        return self._asking.keys() >= set(ranks)

    def silent(self, ranks: Iterable[Rank]) -> list[Rank]:
        """Return those of the ranks that do not wait, though others do."""
        return [rank for rank in ranks if rank not in self._asking] if self._asking else []

    def asked(self, ranks: Iterable[Rank]) -> list[tuple[str, int]]:
        """Return the kinds of the messages with which these ranks have asked.

        Each with the size of the communicator that the rank has made; 0: it has made none.
        """
        asked = (self._asking[rank] for rank in ranks)
        return [(message.kind, int(message.fields.get("size", 0))) for message in asked]

    def who_asked(self, kind: str) -> list[Rank]:
        """Return the ranks that have asked with a message of this kind."""
        return [rank for rank, message in self._asking.items() if message.kind == kind]

    def answer(
        self, ranks: Sequence[Rank], kind: str, files: Sequence[int] = (), **fields: Any
    ) -> None:
        """Answer ranks that wait."""
        for rank in ranks:
            del self._asking[rank]
        if not self._asking:
            self.until = None
        for rank in ranks:
            rank.connection.send(kind, files, **fields)

    def forget(self, ranks: Iterable[Rank]) -> None:
        """Let these ranks wait no longer: they are lost."""
        for rank in ranks:
            self._asking.pop(rank, None)
        if not self._asking:
            self.until = None
