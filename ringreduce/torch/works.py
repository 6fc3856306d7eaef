"""Subclasses of torch's Work: of a call that is over, and of messages between two ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringreduce as rr

_A_LOOK_S = 1e-6
"""Seconds for which `is_completed` waits for a message."""


class Finished(dist._Work):  # type: ignore[misc]  # torch has no types here
    """The Work of a call that is over."""

    def __init__(self, tensors: Any = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return list(self._tensors)

    def synchronize(self) -> None:
        pass

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class _Message(dist._Work):  # type: ignore[misc]
    """A message between two ranks that may be under way."""

    def __init__(self, tensors: Any, source: int) -> None:
        super().__init__()
        self._tensors, self._source = tensors, source

    def finish(self, timeout_s: float | None) -> None:
        """Wait for the message; None: without a limit of its own."""
        raise NotImplementedError

    def wait(self, timeout: Any = None) -> bool:
        self.finish(seconds_of(timeout))
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        return list(self._tensors)

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Any:
        self.wait()
        return Finished(self._tensors).get_future()


class FromAnyRank(_Message):
    """A receive of the first message with its tag, from any rank."""

    def __init__(self, comm: rr.Communicator, out: np.ndarray, tag: int, tensors: Any) -> None:
        super().__init__(tensors, source=-1)
        self._comm, self._out, self._tag = comm, out, tag

    def finish(self, timeout_s: float | None) -> None:
        if self._source < 0:
            source = self._comm.probe(self._tag, timeout_s=timeout_s)
            self._comm.recv(self._out, source, self._tag)
            self._source = source

    def is_completed(self) -> bool:
        try:
            self.finish(_A_LOOK_S)
        except rr.PeerTimeoutError:
            return False
        return True

    def is_success(self) -> bool:
        return self._source >= 0

    def exception(self) -> None:
        return None


class UnderWay(_Message):
    """A send to one rank, or a receive from one rank."""

    def __init__(self, work: Any, tensors: Any, source: int) -> None:
        super().__init__(tensors, source)
        self._work = work

    def finish(self, timeout_s: float | None) -> None:
        self._work.wait(timeout_s)

    def is_completed(self) -> bool:
        return bool(self._work.done())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        error: BaseException | None = self._work.unseen_error
        return error


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch in seconds; None if it stands for the group's."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None
