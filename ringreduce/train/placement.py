"""Which part of a model each rank has, by the strategy."""

from __future__ import annotations

from ringreduce.train import sharded_part, strategies
from ringreduce.train.divided_part import Divided
from ringreduce.train.exact_replica import ExactReplica
from ringreduce.train.nccl import NcclCommunicator
from ringreduce.train.parts import Part, Replica, Run


def part_of(strategy: strategies.Strategy, run: Run) -> Part:
    """Return this rank's part of the model.  Collective."""
    device = "cpu" if run.xp.__name__ == "numpy" else "cuda"
    strategy.check_device(device)
    if run.settings.batch_shards:
        strategies.check_shards(strategy, run.settings.batch_shards, run.comm.size, device)
        return ExactReplica(run)
    match strategy:
        case strategies.Mirrored(cross_device="nccl"):
            return Replica(run, NcclCommunicator(run.comm, run.xp.cuda))
        case strategies.Zero():
            return sharded_part.zero(run, strategy.stage)
        case strategies.CentralStorage():
            return sharded_part.Central(run)
        case strategies.Pipeline():
            return Divided(
                run,
                strategy.sizes(run.comm.size),
                schedule=strategy.schedule,
                splits=strategy.splits,
                split_size=strategy.split_size,
                virtual=strategy.virtual,
                cut=strategy.cut,
            )
        case strategies.Tensor():
            return Divided(run, strategy.sizes(run.comm.size))
        case strategies.Hybrid():
            sizes = strategy.sizes(run.comm.size)
            return Divided(run, sizes, schedule=strategy.schedule, splits=strategy.splits)
        case strategies.TPU():
            return _on_jax(run)
    return Replica(run)


def _on_jax(run: Run) -> Part:
    """Return a replica on JAX's device.  Raises ImportError without JAX."""
    strategies.check_jax()
    from ringreduce.train.jax_part import JaxReplica

    return JaxReplica(run)
