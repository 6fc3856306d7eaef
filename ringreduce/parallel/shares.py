"""The share of a rank in a step: its samples divided by the samples of all ranks."""

from __future__ import annotations

import numpy as np

import ringreduce as rr


class Share:
    """A rank's share.  An all-reduce adds up the samples of all ranks while this rank computes."""

    def __init__(self, comm: rr.Communicator, samples: float, *more: float) -> None:
        self._samples = samples
        self.work = comm.all_reduce(np.array([samples, *more], np.float64), async_op=True)
        self._value: float | None = None

    def value(self) -> float:
        """Return the share, from 0 to 1.  Gradients times shares add up to the mean.

        Waits until all ranks have begun.  After a MismatchError the share is 0: `finish` then
        raises the same error on all ranks.
        """
        if self._value is None:
            try:
                # Sums over samples, to be divided in the end, could overflow 16 bits on the wire.
                self._value = self._samples / (float(self.work.wait()[0]) or 1.0)
            except rr.MismatchError:
                self._value = 0.0
        return self._value


class JoinedBatch(Share):
    """A turn of the loop of `DataParallel.join`, in which this rank may have a batch or not."""

    def __init__(
        self, comm: rr.Communicator, number: int, samples: float, *, has_batch: bool, sums: bool
    ) -> None:
        super().__init__(comm, samples, float(has_batch))
        self.number = number
        """Number of the turn, from 1."""
        self.has_batch = has_batch
        self._sums = sums
        self.ended: rr.MismatchError | None = None
        """The error that has ended the loop on all ranks."""

    def value(self) -> float:
        """Return the share; 1 for a batch whose gradients are shares already."""
        return float(self.has_batch) if self._sums else super().value()

    def anyone(self) -> bool:
        """Return whether any rank has a batch in this turn.  Raises MismatchError."""
        return bool(self.work.wait()[1])
