"""Which part of a model each rank has, by the strategy."""

from __future__ import annotations

from ringreduce.train import sharded_part, strategies
from ringreduce.train.parts import Part, Replica, Run


def part_of(strategy: strategies.Strategy, run: Run) -> Part:
    """Return this rank's part of the model.  Collective."""
    match strategy:
        case strategies.Zero():
            return sharded_part.zero(run, strategy.stage)
        case strategies.CentralStorage():
            return sharded_part.Central(run)
    return Replica(run)
