"""Actions: what a rank of a pipeline does with one microbatch, on one of its stages.

A *stage* is a run of layers, and a *microbatch* a part of the batch.  As text an action is its
stage, its kind and its microbatch, such as 2F5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from ringreduce.errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]
KINDS: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}
"""The kinds of actions.  A backward is the gradients of the input and of the weights in one."""
_HELD = {"F": 1, "B": -1, "I": 0, "W": -1}
"""Kind -> the change in the number of activations held: the gradient of the weights needs them."""
_TEXT = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of a microbatch through a stage, forward or backward.

    The backward of a stage computes the gradient of its input, which the stage before needs, and
    the gradient of its weights.  It is one action (B), or two (I and then W).

    Example:
        >>> action = rr.pipeline.Action(stage=2, kind="F", microbatch=5)
        >>> str(action)
        '2F5'
    """

    __module__ = "ringreduce.pipeline"

    stage: int
    """Number of the stage, from 0."""
    kind: Kind
    """F: forward.  B: backward.  I: gradient of the input alone.  W: of the weights alone."""
    microbatch: int
    """Number of the microbatch, from 0."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Read an action that `str` wrote.

        Args:
            text: the stage, the kind and the microbatch, such as "2F5".

        Returns:
            The action.

        Raises:
            ScheduleError: the text is none of an action.

        Example:
            >>> rr.pipeline.Action.from_text("2F5").microbatch
            5
        """
        found = _TEXT.fullmatch(text)
        if not found:
            raise ScheduleError(
                f"{text!r} is no action; write the stage, F, B, I or W, and the microbatch, as in "
                "2F5"
            )
        return cls(int(found[1]), cast(Kind, found[2]), int(found[3]))


def held_after(actions: Iterable[Action]) -> Iterator[int]:
    """Yield the number of activations that a rank holds after each of its actions.

    An activation is that of one stage and one microbatch.  A rank holds it from the forward to the
    gradient of the weights.
    """
    held = 0
    for action in actions:
        held += _HELD[action.kind]
        yield held
