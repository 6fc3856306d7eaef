"""Which part of a model each rank has, by the strategy."""

from __future__ import annotations

from ringreduce.train import strategies
from ringreduce.train.parts import Part, Replica, Run


def part_of(strategy: strategies.Strategy, run: Run) -> Part:
    """Return this rank's part of the model.  Collective."""
    return Replica(run)
