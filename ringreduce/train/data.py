"""The handwritten digits, the fixed hold-out, and who trains on what.

Everything here is a pure function of its arguments, so that ranks agree without a message.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ringreduce as rr

DIGITS = Path(__file__).with_name("digits.csv.gz")
"""1,797 rows: 64 pixels from 0 to 16, then the digit.  Source and licence: DIGITS.md."""

CLASSES = 10
PIXELS = 64
_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
_HELD_OUT_SEED = 0
# What a random stream is for is the last word of its seed, so that no two are the same.
_ORDER, _NOISE = 1, 2


@dataclass(frozen=True)
class Split:
    """The digits in two parts that share no sample.

    Images are (samples, 64) from 0 to 1, labels (samples,) int64.
    """

    train_x: NDArray[Any]
    train_labels: NDArray[np.int64]
    held_out_x: NDArray[Any]
    held_out_labels: NDArray[np.int64]


def load_digits(path: Path = DIGITS) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The digits: images (1797, 64) from 0 to 16, and labels (1797,).

    Raises FileNotFoundError if the file is missing, ValueError if it is not the file we ship.
    """
    packed = path.read_bytes()
    try:
        text = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"load_digits: {path} is damaged ({error}); install it again") from None
    if (found := hashlib.sha256(text).hexdigest()) != _SHA256:
        raise ValueError(
            f"load_digits: {path} is damaged: its contents have SHA-256 {found[:12]}…, "
            f"wanted {_SHA256[:12]}…; install it again"
        )
    table = np.loadtxt(text.decode("ascii").splitlines(), dtype=np.uint8, delimiter=",")
    return table[:, :PIXELS], table[:, PIXELS].astype(np.int64)


def held_out(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which samples are held out: a fifth of each class, always the same ones.

    They measure the result.  Nothing is chosen by them: neither a setting nor when to stop.
    """
    rng = np.random.default_rng(_HELD_OUT_SEED)
    chosen = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen[members[: round(len(members) / 5)]] = True
    return chosen


def load_split(dtype: Any = np.float32, path: Path = DIGITS) -> Split:
    """The digits as training and held-out part, pixels from 0 to 1.  Raises as `load_digits`."""
    images, labels = load_digits(path)
    x = images.astype(dtype) / 16
    out = held_out(labels)
    return Split(x[~out], labels[~out], x[out], labels[out])


def global_batches(samples: int, batch: int, seed: int, epoch: int) -> Iterator[NDArray[np.intp]]:
    """The sample indices of each global batch of one epoch; the last batch may be smaller.

    Each sample comes once.  The order depends on seed and epoch alone: every rank draws the same,
    and every epoch another.
    """
    order = np.random.default_rng((seed, epoch, _ORDER)).permutation(samples)
    for start in range(0, samples, batch):
        yield order[start : start + batch]


def shard(n: int, comm: rr.Communicator, epoch: int, seed: int = 0) -> NDArray[np.intp]:
    """This rank's part of the indices 0 to n - 1, in an order of this epoch's own.

    All ranks draw the same order from seed and epoch, and each index is in one part; parts differ
    by one in length at most.
    """
    order = np.random.default_rng((seed, epoch, _ORDER)).permutation(n)
    return part(order, comm.rank, comm.size)


def noise(samples: int, scale: float, seed: int, epoch: int) -> NDArray[np.float32]:
    """Normal noise (samples, 64) of standard deviation `scale`, for the images of one epoch.

    Like the order, the same on every rank: row i belongs to sample i, whoever computes it.
    Training with noise smooths the function that is learnt: Bishop, "Training with noise is
    equivalent to Tikhonov regularization", Neural Computation 7(1), 1995.
    """
    rng = np.random.default_rng((seed, epoch, _NOISE))
    return np.float32(scale) * rng.standard_normal((samples, PIXELS), np.float32)


def part(batch: NDArray[np.intp], rank: int, size: int) -> NDArray[np.intp]:
    """The part of a global batch that one of `size` ranks computes; empty if there are too few."""
    return np.array_split(batch, size)[rank]
