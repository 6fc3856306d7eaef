"""Data-parallel training on the library's public API: handwritten digits, in a second.

``python -m ringreduce.train`` runs it; `train` is the same as a function::

    with rr.init() as comm:
        result = train(comm, load_split(), Settings(seed=1))
"""

from ringreduce.train.data import Split, load_digits, load_split, shard
from ringreduce.train.data_parallel import DataParallel
from ringreduce.train.loop import (
    DriftError,
    Epoch,
    Replica,
    Result,
    Settings,
    check_equal,
    train,
)

__all__ = [
    "DataParallel",
    "DriftError",
    "Epoch",
    "Replica",
    "Result",
    "Settings",
    "Split",
    "check_equal",
    "load_digits",
    "load_split",
    "shard",
    "train",
]
