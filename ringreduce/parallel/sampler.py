"""The samples of each rank in each step: a pure function, for any number of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import ringreduce as rr
from ringreduce.errors import counted
from ringreduce.parallel.arrays import check_comm, whole

_ORDER = 1
"""The last word of the seeds of orders, so that no random stream of another purpose is equal."""


class Sampler:
    """The samples of each global batch, and the part of it that a rank has.

    An epoch has each sample once, in an order that depends on the seed and the epoch alone.
    Batches do not depend on the number of ranks, so ranks may join and leave between two steps.
    The last batch of an epoch is shorter if the samples do not divide evenly.

    Args:
        samples: number of samples, at least 1.
        batch: samples of a global batch, at least 1 and at most `samples`.
        seed: seed of the orders, at least 0.

    Attributes:
        epoch_steps: number of steps in an epoch.

    Raises:
        TypeError: a number is not whole.
        ValueError: a number is out of its range.

    Example:
        >>> sampler = rr.train.Sampler(samples=10, batch=4, seed=1)
        >>> def program(comm):
        ...     return [sampler.indices(step, comm) for step in range(sampler.steps(epochs=1))]
        >>> parts = rr.spawn(program, 3)
        >>> sorted(int(index) for of_rank in parts for indices in of_rank for index in indices)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    __module__ = "ringreduce.train"

    def __init__(self, samples: int, batch: int, seed: int = 0) -> None:
        self.samples = whole("samples", samples, least=1)
        self.batch = whole("batch", batch, least=1)
        self.seed = whole("seed", seed, least=0)
        if self.batch > self.samples:
            are = "is" if samples == 1 else "are"
            raise ValueError(f"batch is {batch}; there {are} {counted(samples, 'sample')}")
        self.epoch_steps = -(-self.samples // self.batch)
        self._order: tuple[int, NDArray[np.intp]] = (0, np.empty(0, np.intp))
        """The epoch that was asked for last, and its order."""

    def steps(self, epochs: int) -> int:
        """Return the number of steps in some epochs.

        Args:
            epochs: number of epochs, at least 0.

        Returns:
            The number of steps.

        Raises:
            TypeError: `epochs` is not a whole number.
            ValueError: `epochs` is negative.

        Example:
            >>> rr.train.Sampler(samples=10, batch=4).steps(epochs=2)
            6
        """
        return whole("epochs", epochs, least=0) * self.epoch_steps

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step.

        Args:
            step: number of the step; the first is 0.

        Returns:
            The number of the epoch; the first is 1.

        Raises:
            TypeError: `step` is not a whole number.
            ValueError: `step` is negative.

        Example:
            >>> sampler = rr.train.Sampler(samples=10, batch=4)
            >>> [sampler.epoch_of(step) for step in range(5)]
            [1, 1, 1, 2, 2]
        """
        return whole("step", step, least=0) // self.epoch_steps + 1

    def batch_of(self, step: int) -> NDArray[np.intp]:
        """Return the indices of the samples in the global batch of a step.

        Args:
            step: number of the step; the first is 0.

        Returns:
            A one-dimensional, read-only array of indices, from 0 to `samples` - 1.

        Raises:
            TypeError: `step` is not a whole number.
            ValueError: `step` is negative.

        Example:
            >>> sampler = rr.train.Sampler(samples=10, batch=4)
            >>> [len(sampler.batch_of(step)) for step in range(3)]
            [4, 4, 2]
        """
        first = step % self.epoch_steps * self.batch
        return self.order_of(self.epoch_of(step))[first : first + self.batch]

    def order_of(self, epoch: int) -> NDArray[np.intp]:
        """Return the indices of all samples in the order of an epoch.

        :meta private:
        """
        known = self._order
        if known[0] != epoch:
            drawn = order(self.samples, self.seed, epoch)
            drawn.flags.writeable = False
            self._order = known = epoch, drawn
        return known[1]

    def indices(self, step: int, comm: rr.Communicator) -> NDArray[np.intp]:
        """Return the indices of this rank's samples in a step.

        Each index of the global batch is in the part of exactly one rank.  The lengths of parts
        differ by at most one.  With more ranks than samples, some ranks have none.

        Args:
            step: number of the step; the first is 0.
            comm: the communicator of the ranks.  Nothing is sent.

        Returns:
            A one-dimensional, read-only array of indices, from 0 to `samples` - 1.

        Raises:
            TypeError: `step` is not a whole number.
            ValueError: `step` is negative.

        Example:
            >>> sampler = rr.train.Sampler(samples=10, batch=4)
            >>> rr.spawn(lambda comm: len(sampler.indices(0, comm)), 3)
            [2, 1, 1]
        """
        batch = self.batch_of(step)
        return batch[part(len(batch), comm.rank, comm.size)]


def order(samples: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """Return the indices of all samples in the order of one epoch.

    The order depends on seed and epoch alone: all ranks draw the same order, and every epoch
    another.
    """
    return np.random.default_rng((seed, epoch, _ORDER)).permutation(samples)


def shard(n: int, comm: rr.Communicator, epoch: int, seed: int = 0) -> NDArray[np.intp]:
    """Return this rank's part of the indices 0 to n - 1, in an order that every epoch draws anew.

    All ranks draw the same order from seed and epoch, and each index is in the part of exactly one
    rank.  The lengths of parts differ by at most one.

    Args:
        n: number of samples, at least 0.
        comm: the communicator of the ranks.
        epoch: number of the epoch, at least 0.
        seed: seed of the order, at least 0.

    Returns:
        This rank's indices, a one-dimensional array.

    Raises:
        ValueError: a number is negative.
        TypeError: a number is not whole, or `comm` is no communicator.

    Example:
        >>> parts = rr.spawn(lambda comm: rr.train.shard(7, comm, epoch=0), 3)
        >>> [len(part) for part in parts], sorted(np.concatenate(parts).tolist())
        ([3, 2, 2], [0, 1, 2, 3, 4, 5, 6])
    """
    n, epoch, seed = (
        whole(f"shard: {name}", value, least=0)
        for name, value in (("n", n), ("epoch", epoch), ("seed", seed))
    )
    check_comm("shard", comm)
    return order(n, seed, epoch)[part(n, comm.rank, comm.size)]


def part(count: int, rank: int, size: int) -> slice:
    """Return the slice of `count` samples of one of `size` ranks; lengths differ by one at most."""
    short, longer = divmod(count, size)
    start = rank * short + min(rank, longer)
    return slice(start, start + short + (rank < longer))
