"""Read the data of a run, and choose its device."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.parallel.consensus import gather_words
from ringreduce.train import data
from ringreduce.train.settings import Settings


def load(settings: Settings) -> data.Split:
    """Return the data that the settings name; equal data are read once."""
    names = ["data", "dtype"]
    if settings.data == "synthetic":
        names += ["samples", "inputs", "classes", "seed"]
    split = _read_data(tuple((name, getattr(settings, name)) for name in names))
    data.check_batch(split, settings)
    return split


@functools.lru_cache(maxsize=1)
def _read_data(asked: tuple[tuple[str, Any], ...]) -> data.Split:
    return data.read(Settings(**dict(asked)))


def check_same(comm: rr.Communicator, split: data.Split) -> None:
    """Raise ValueError on all ranks if they have read different data.  Collective."""
    digests = [words[0] for words in gather_words(comm, [split.digest])]
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(
            f"the data of rank {', '.join(others)} are not those of rank 0; all hosts need the "
            "same files"
        )


def module(device: str, comm: rr.Communicator) -> ModuleType:
    """Return the array module of `device`; for CUDA, also choose a GPU for this rank.

    Raises ImportError without CuPy, ValueError without a GPU.
    """
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError:
        raise ImportError("device cuda needs CuPy: pip install 'ringreduce[gpu]'") from None
    try:
        gpus = cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(comm.local_rank % gpus).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ValueError(f"no GPU can be used: {error}") from None
    module: ModuleType = cupy
    return module
