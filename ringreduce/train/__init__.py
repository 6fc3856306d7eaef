"""Training on several ranks, on the library's public API.

``python -m ringreduce.train`` trains a small network.  The function `train` does the same::

    with rr.init() as comm:
        settings = Settings(seed=1)
        result = train(comm, load(settings), settings)

The strategies of `ringreduce.train.strategies` decide which rank has which parameters.
`DataParallel`, `ShardedParallel`, `PipelineParallel` and `shard` are for models of any kind.
"""

from ringreduce.train import strategies
from ringreduce.train.batch_norm import Normalised, batch_norm, batch_norm_backward
from ringreduce.train.clipping import clip, global_norm
from ringreduce.train.data import Split, load, load_digits, load_split, shard
from ringreduce.train.data_parallel import DataParallel
from ringreduce.train.equality import DriftError, check_equal
from ringreduce.train.layers import Layer
from ringreduce.train.loop import Trainer, train
from ringreduce.train.mesh import Mesh
from ringreduce.train.pipeline_parallel import PipelineParallel
from ringreduce.train.reducer import StepTimes
from ringreduce.train.results import Epoch, Result, Step, Watcher
from ringreduce.train.sampler import Sampler
from ringreduce.train.settings import Settings
from ringreduce.train.sharded_parallel import ShardedParallel

__all__ = [
    "DataParallel",
    "DriftError",
    "Epoch",
    "Layer",
    "Mesh",
    "Normalised",
    "PipelineParallel",
    "Result",
    "Sampler",
    "Settings",
    "ShardedParallel",
    "Split",
    "Step",
    "StepTimes",
    "Trainer",
    "Watcher",
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
