"""Training on several ranks: a trainer for all strategies, and wrappers of any model.

``python -m ringreduce.train`` trains a small network.  The function `train` does the same::

    with rr.init() as comm:
        settings = Settings(seed=1)
        result = train(comm, load(settings), settings)

The strategies of `ringreduce.train.strategies` decide which rank has which parameters.
`DataParallel`, `ShardedParallel`, `CentralParallel`, `PipelineParallel` and `shard` are for models
of any kind.
"""

from ringreduce.parallel.batch_norm import Normalised, batch_norm, batch_norm_backward
from ringreduce.parallel.data_parallel import DataParallel, average
from ringreduce.parallel.layers import Layer
from ringreduce.parallel.mesh import Mesh
from ringreduce.parallel.over_ranks import DriftError, check_equal, clip, global_norm
from ringreduce.parallel.parameter_store import ParameterStore
from ringreduce.parallel.pipeline_parallel import PipelineParallel
from ringreduce.parallel.reducer import StepTimes
from ringreduce.parallel.sampler import Sampler, shard
from ringreduce.parallel.sharded_parallel import CentralParallel, ShardedParallel
from ringreduce.parallel.store_messages import StoreStats
from ringreduce.train import strategies
from ringreduce.train.data import Split, load, load_digits, load_split
from ringreduce.train.loop import Trainer, train
from ringreduce.train.results import Epoch, Result, Step, Watcher
from ringreduce.train.settings import Settings

__all__ = [
    "CentralParallel",
    "DataParallel",
    "DriftError",
    "Epoch",
    "Layer",
    "Mesh",
    "Normalised",
    "ParameterStore",
    "PipelineParallel",
    "Result",
    "Sampler",
    "Settings",
    "ShardedParallel",
    "Split",
    "Step",
    "StepTimes",
    "StoreStats",
    "Trainer",
    "Watcher",
    "average",
    "batch_norm",
    "batch_norm_backward",
    "check_equal",
    "clip",
    "global_norm",
    "load",
    "load_digits",
    "load_split",
    "shard",
    "strategies",
    "train",
]
