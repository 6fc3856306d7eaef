"""Lower actions to steps: what a rank sends and receives between two actions.

The steps of a pipeline are those of collectives, `Step`.  Between two actions lies one step: the
result of the first is sent, and the input of the second is received.  So a rank with n actions has
n + 1 steps.  Step i is before action i, and the last step is after all actions.

A message carries one `Payload`, and its one chunk is the name of the payload.  Messages of one
ordered pair of ranks match first in, first out within a flow.  The outputs of stages are one flow,
and the gradients of these outputs another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringreduce.pipeline.actions import Action
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.schedules.matching import RankStep, Vocabulary
from ringreduce.schedules.schedule import Chunks, Recv, Send, Step

FORWARD, BACKWARD = 0, 1
"""The flows."""
_STAGES = 1 << 32


@dataclass(frozen=True, slots=True)
class Payload:
    """What a message of a pipeline carries: an output of a stage, or the gradient of that output.

    Example:
        >>> schedule = rr.pipeline.schedule("1f1b", ranks=2, splits=3)
        >>> first, second, *_ = rr.pipeline.lower(schedule, rank=0)
        >>> rr.pipeline.Payload.of(second.sends[0].chunks[0])
        Payload(flow=0, stage=0, microbatch=0)
    """

    __module__ = "ringreduce.pipeline"

    flow: int
    """0: the output, which stage + 1 receives.  1: its gradient, which stage + 1 sends back."""
    stage: int
    """The stage whose output it is."""
    microbatch: int
    """Number of the microbatch."""

    @property
    def sender(self) -> int:
        """The stage that sends it."""
        return self.stage + self.flow

    @property
    def receiver(self) -> int:
        """The stage that receives it."""
        return self.stage + 1 - self.flow

    @property
    def chunk(self) -> int:
        """Its name, as the chunk of a `Send` and of a `Recv`."""
        return (self.microbatch * _STAGES + self.stage) * 2 + self.flow

    @classmethod
    def of(cls, chunk: int) -> Payload:
        """Return the payload of this name.

        Args:
            chunk: the chunk of a message that `lower` has made.

        Returns:
            The payload.

        Raises:
            ValueError: the chunk is negative.

        Example:
            >>> payload = rr.pipeline.Payload(flow=1, stage=2, microbatch=5)
            >>> rr.pipeline.Payload.of(payload.chunk) == payload
            True
        """
        if chunk < 0:
            raise ValueError(f"Payload.of: chunk is {chunk}; pass the chunk of a message")
        number, flow = divmod(chunk, 2)
        microbatch, stage = divmod(number, _STAGES)
        return cls(flow, stage, microbatch)

    def __str__(self) -> str:
        what = "gradient" if self.flow == BACKWARD else "output"
        return f"the {what} of {Action(self.stage, 'F', self.microbatch)}"


def lower(schedule: PipelineSchedule, rank: int) -> tuple[Step, ...]:
    """Return the steps of a rank: one before each of its actions, and one after the last.

    To execute a rank, execute step 0, action 0, step 1, action 1, and so on.  A step has at most
    one send and one receive.  Stages of one rank exchange no messages.

    Args:
        schedule: the schedule of all ranks.
        rank: number of the rank, from 0.

    Returns:
        The steps.  The chunk of a message is the name of its `Payload`.

    Raises:
        ValueError: there is no such rank.
        ScheduleError: the generator of the schedule yields something that is no action.

    Example:
        >>> schedule = rr.pipeline.schedule("1f1b", ranks=2, splits=3)
        >>> first, second, *_ = rr.pipeline.lower(schedule, rank=0)
        >>> [(send.peer, str(rr.pipeline.Payload.of(send.chunks[0]))) for send in second.sends]
        [(1, 'the output of 0F0')]
    """
    neighbours = pairwise([None, *schedule.acts(rank), None])
    return tuple(_step(schedule, before, after) for before, after in neighbours)


def _step(schedule: PipelineSchedule, before: Action | None, after: Action | None) -> Step:
    if schedule.ranks == 1:
        return Step()
    sent = result_of(before, schedule.stages) if before else None
    received = input_of(after, schedule.stages) if after else None
    return Step(
        sends=(Send(schedule.rank_of(sent.receiver), (sent.chunk,)),) if sent else (),
        recvs=(Recv(schedule.rank_of(received.sender), (received.chunk,)),) if received else (),
    )


def result_of(action: Action, stages: int) -> Payload | None:
    """Return what another stage needs of an action; None if none does."""
    if action.kind == "F" and action.stage + 1 < stages:
        return Payload(FORWARD, action.stage, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return Payload(BACKWARD, action.stage - 1, action.microbatch)
    return None


def input_of(action: Action, stages: int) -> Payload | None:
    """Return what an action needs of another stage; None if it needs nothing."""
    if action.kind == "F" and action.stage > 0:
        return Payload(FORWARD, action.stage - 1, action.microbatch)
    if action.kind in "BI" and action.stage + 1 < stages:
        return Payload(BACKWARD, action.stage, action.microbatch)
    return None


def vocabulary(acts: Sequence[Sequence[Action]]) -> Vocabulary:
    """Return the flows of the messages, and the words of errors, for the actions of all ranks."""

    def when(place: RankStep, sends: bool) -> str:
        here = acts[place.rank]
        return f"after {here[place.step - 1]}" if sends else f"before {here[place.step]}"

    def chunks(names: Chunks) -> str:
        return " and ".join(str(Payload.of(name)) for name in names)

    return Vocabulary(
        flow=lambda names: Payload.of(names[0]).flow,
        chunks=chunks,
        when=when,
        subject=lambda place, sends: f"rank {place.rank} {when(place, sends)}",
        mark=lambda place, sends: RankStep(place.rank, place.step - sends),
    )
