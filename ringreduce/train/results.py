"""The results of a run, of its epochs and of its steps, and the watchers that receive them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Step:
    """The loss and the times of one step; the times are this rank's, in seconds.

    Example:
        >>> settings = rr.train.Settings(epochs=1, hidden=(8,), batch=359)
        >>> seen = []
        >>> class Collect:
        ...     def steps(self, steps): seen.extend(steps)
        ...     def epoch(self, epoch): pass
        >>> def program(comm):
        ...     split = rr.train.load(settings)
        ...     rr.train.train(comm, split, settings, watchers=[Collect()] * (comm.rank == 0))
        >>> rr.spawn(program, 2)
        [None, None]
        >>> [(step.step, step.samples) for step in seen]
        [(1, 359), (2, 359), (3, 359), (4, 359), (5, 2)]
    """

    __module__ = "ringreduce.train"

    step: int
    """Number of the step in the run, from 1."""
    epoch: int
    """Number of the epoch, from 1."""
    loss: float
    """Mean over the samples of the global batch, before the step."""
    lr: float
    """Learning rate of the step."""
    samples: int
    """Samples of the global batch."""
    step_s: float
    """The whole step."""
    compute_s: float
    """The step without exposed communication."""
    communication_s: float
    """Time in which all-reduces were under way, overlapped with computation or not."""
    exposed_s: float
    """Time in which communication kept this rank from computing."""
    generation: int = 1
    """Number of the membership of ranks that made the step; it grows when ranks are lost."""


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch over all ranks, measured by this rank's times.

    `samples_per_s` and `exposed` leave out the steps that `Result` leaves out, if others remain.

    Example:
        >>> settings = rr.train.Settings(epochs=2, hidden=(8,), batch=359)
        >>> seen = []
        >>> class Collect:
        ...     def steps(self, steps): pass
        ...     def epoch(self, epoch): seen.append(epoch)
        >>> def program(comm):
        ...     split = rr.train.load(settings)
        ...     rr.train.train(comm, split, settings, watchers=[Collect()] * (comm.rank == 0))
        >>> rr.spawn(program, 2)
        [None, None]
        >>> [(epoch.epoch, 0 < epoch.accuracy < 1) for epoch in seen]
        [(1, True), (2, True)]
    """

    __module__ = "ringreduce.train"

    epoch: int
    """Number of the epoch, from 1."""
    loss: float
    """Mean over the training samples, each with the parameters before its step."""
    accuracy: float
    """Accuracy on the held-out samples, from 0 to 1."""
    samples_per_s: float
    """Samples per second of all ranks together, while training."""
    exposed: float
    """Exposed communication divided by the time of the steps, from 0 to 1."""
    generation: int = 1
    """Number of the membership of ranks that reports the epoch."""
    staleness_mean: float | None = None
    """Mean over this rank's pushes to a parameter server; None without them."""
    staleness_max: int | None = None
    """The largest of them."""


class Watcher(Protocol):
    """Receives the steps and epochs of a run as they are made; the run does not depend on it.

    A class with these two methods is a Watcher.

    Example:
        >>> class Losses:
        ...     def __init__(self): self.losses = []
        ...     def steps(self, steps): self.losses += [step.loss for step in steps]
        ...     def epoch(self, epoch): pass
        >>> settings = rr.train.Settings(epochs=1, hidden=(8,), batch=359)
        >>> def program(comm):
        ...     watcher = Losses()
        ...     rr.train.train(comm, rr.train.load(settings), settings, watchers=[watcher])
        ...     return len(watcher.losses)
        >>> rr.spawn(program, 2)
        [5, 5]
    """

    __module__: str = "ringreduce.train"

    def steps(self, steps: Sequence[Step]) -> None:
        """Receive the steps since the last call; their losses are those of all ranks.

        Args:
            steps: in the order in which they were made.

        Example:
            >>> class Count:
            ...     made = 0
            ...     def steps(self, steps): self.made += len(steps)
            ...     def epoch(self, epoch): pass
            >>> count, settings = Count(), rr.train.Settings(epochs=2, hidden=(8,), batch=359)
            >>> def program(comm):
            ...     rr.train.train(comm, rr.train.load(settings), settings, watchers=[count])
            >>> rr.spawn(program, 1)
            [None]
            >>> count.made
            10
        """

    def epoch(self, epoch: Epoch) -> None:
        """Receive the results of an epoch, after its steps.

        Args:
            epoch: the results.

        Example:
            >>> class Print:
            ...     def steps(self, steps): pass
            ...     def epoch(self, epoch): print("epoch", epoch.epoch)
            >>> settings = rr.train.Settings(epochs=2, hidden=(8,), batch=359)
            >>> def program(comm):
            ...     rr.train.train(comm, rr.train.load(settings), settings, watchers=[Print()])
            >>> rr.spawn(program, 1)
            epoch 1
            epoch 2
            [None]
        """


@dataclass(frozen=True)
class Result:
    """The result of training, the same on every rank but for its times and bytes.

    Times are means over all ranks and over this run's steps but the first with each number of
    samples, which may compile.  A run that has no other steps gives the times of these.

    Example:
        >>> settings = rr.train.Settings(epochs=1, hidden=(8,), batch=359)
        >>> def program(comm):
        ...     return rr.train.train(comm, rr.train.load(settings), settings)
        >>> first, second = rr.spawn(program, 2)
        >>> first.digest == second.digest, 0 < first.efficiency < 1
        (True, True)
    """

    __module__ = "ringreduce.train"

    parameters: Any
    """All parameters of the model, a one-dimensional array, whichever ranks have them."""
    digest: str
    """SHA-256 of the parameters' bytes, in hexadecimal."""
    loss: float
    """Loss of the last epoch."""
    accuracy: float
    """Accuracy on the held-out samples, from 0 to 1."""
    step_s: float
    """Mean time of a step; 0 without steps."""
    communication_s: float
    """Mean time of all-reduces in a step."""
    exposed_s: float
    """Mean exposed communication of a step."""
    sent_bytes: int = 0
    """Bytes that this rank sends in a step, at most (`LocalSGD`: on average); 0 without steps."""
    held_bytes: int = 0
    """The most bytes that this rank held: of parameters, gradients, the optimizer's arrays, buffers
    and activations."""
    lost: tuple[tuple[int, int], ...] = ()
    """Ranks that were lost while others went on, each with the epoch."""

    @property
    def efficiency(self) -> float:
        """Share of a step that is not exposed communication, from 0 to 1."""
        return 1 - self.exposed_s / self.step_s if self.step_s else 1.0
