"""What a collective of torch returns: a Work that is over, or one of a call that goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringreduce as rr

_A_LOOK_S = 1e-6
"""Seconds to wait for a message that is only asked about."""


class Finished(dist._Work):  # type: ignore[misc]  # torch has no types here
    """A call that is over."""

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


class FromAnyRank(dist._Work):  # type: ignore[misc]
    """A receive that takes the first message with its tag, whichever rank sends it."""

    def __init__(self, comm: rr.Communicator, out: np.ndarray, tag: int, tensors: Any) -> None:
        super().__init__()
        self._comm, self._out, self._tag, self._tensors = comm, out, tag, tensors
        self._source = -1

    def wait(self, timeout: Any = None) -> bool:
        seconds = None if timeout is None else timeout.total_seconds()
        self._take(seconds if seconds and seconds > 0 else None)
        return True

    def _take(self, timeout_s: float | None) -> None:
        if self._source < 0:
            source = self._comm.probe(self._tag, timeout_s=timeout_s)
            self._comm.recv(self._out, source, self._tag)
            self._source = source

    def is_completed(self) -> bool:
        try:
            self._take(_A_LOOK_S)
        except rr.PeerTimeoutError:
            return False
        return True

    def is_success(self) -> bool:
        return self._source >= 0

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return list(self._tensors)

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Any:
        self.wait()
        return Finished(self._tensors).get_future()


class UnderWay(dist._Work):  # type: ignore[misc]
    """A message between two ranks that may be under way."""

    def __init__(self, work: Any, tensors: Any, source: int) -> None:
        super().__init__()
        self._work, self._tensors, self._source = work, tensors, source

    def wait(self, timeout: Any = None) -> bool:
        seconds = None if timeout is None else timeout.total_seconds()
        self._work.wait(seconds if seconds and seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.done())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        error: BaseException | None = self._work.unseen_error
        return error

    def result(self) -> list[Any]:
        return list(self._tensors)

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Any:
        self.wait()
        return Finished(self._tensors).get_future()
