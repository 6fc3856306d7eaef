"""A pipeline schedule: the actions of every rank, and what is claimed of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ringreduce.errors import ScheduleError, counted, shown
from ringreduce.pipeline.actions import Action

Acts = Callable[[int, int, int, int], Iterable[Action | str]]
"""(ranks, rank, splits, virtual) -> the actions of the rank, in order, or their texts."""


@dataclass(frozen=True)
class PipelineClaim:
    """The figures that a schedule claims; the proof requires exactly these."""

    held: tuple[int, ...]
    """Rank -> the most activations that it holds at once, each of one stage and microbatch."""
    posted_ahead: int
    """The number of steps by which receives have to be posted ahead."""
    time: Callable[[float, float], float]
    """Times of the forward and of the backward through a rank's layers -> time of all ranks."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of `ranks` ranks on `splits` microbatches, and the claims about them.

    Example:
        >>> schedule = rr.pipeline.schedule("1f1b", ranks=2, splits=3)
        >>> schedule.stages, str(schedule)
        (2, '1f1b of 2 ranks and 3 microbatches')
    """

    __module__ = "ringreduce.pipeline"

    name: str
    """Its name, as in `schedule`."""
    ranks: int
    """Number of ranks."""
    splits: int
    """Number of microbatches."""
    virtual: int
    """Number of stages of each rank."""
    generator: Acts
    """(ranks, rank, splits, virtual) -> the actions of the rank, in order, or their texts."""
    claim: PipelineClaim | None = None
    """What the proof has to find; None if nothing is claimed."""

    def __str__(self) -> str:
        several = f" with {self.virtual} stages each" if self.virtual > 1 else ""
        return (
            f"{self.name} of {counted(self.ranks, 'rank')}{several} "
            f"and {counted(self.splits, 'microbatch')}"
        )

    @property
    def stages(self) -> int:
        """Number of stages of all ranks together."""
        return self.ranks * self.virtual

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage.

        Args:
            stage: number of the stage, from 0.

        Returns:
            The rank, ``stage % ranks``.

        Raises:
            ValueError: there is no such stage.

        Example:
            >>> rr.pipeline.schedule("interleaved", ranks=2, splits=2, virtual=2).rank_of(3)
            1
        """
        if not 0 <= stage < self.stages:
            raise ValueError(f"rank_of: stage is {stage}; there are stages 0 to {self.stages - 1}")
        return stage % self.ranks

    def acts(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank, in order.

        Args:
            rank: number of the rank, from 0.

        Returns:
            The actions.

        Raises:
            ValueError: there is no such rank.
            ScheduleError: the generator yields something that is no action.

        Example:
            >>> schedule = rr.pipeline.schedule("1f1b", ranks=2, splits=3)
            >>> " ".join(map(str, schedule.acts(0)))
            '0F0 0F1 0B0 0F2 0B1 0B2'
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"acts: rank is {rank}; there are ranks 0 to {self.ranks - 1}")
        made = self.generator(self.ranks, rank, self.splits, self.virtual)
        if not isinstance(made, Iterable):
            raise ScheduleError(f"{self.name}: acts returned {shown(made)}; yield each action")
        return tuple(self._checked(rank, action) for action in made)

    def _checked(self, rank: int, action: object) -> Action:
        if isinstance(action, Action):
            return action
        if not isinstance(action, str):
            raise ScheduleError(
                f"{self.name}: acts yielded {shown(action)}; yield actions or their texts"
            )
        try:
            return Action.from_text(action)
        except ScheduleError as error:
            raise ScheduleError(f"{self.name}: rank {rank}: {error}") from None


ClaimOf = Callable[[int, int, int], PipelineClaim]
"""(ranks, splits, virtual) -> the claim."""

REGISTERED: dict[str, tuple[Acts, ClaimOf | None]] = {}
"""Name -> generator and claim; users' schedules have no claim."""


def pipeline(name: str, claim: ClaimOf | None) -> Callable[[Acts], Acts]:
    def register(acts: Acts) -> Acts:
        REGISTERED[name] = acts, claim
        return acts

    return register
