"""Data to train on: digits, the files of MNIST, or synthetic samples; and each rank's part of them.

All functions here are pure functions of their arguments, so ranks agree without messages.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringreduce.errors import shown
from ringreduce.parallel.over_ranks import bytes_of
from ringreduce.train import idx
from ringreduce.train.settings import Settings

DIGITS = Path(__file__).with_name("digits.csv.gz")
"""1,797 rows: 64 pixels from 0 to 16, then the digit.  Source and licence: DIGITS.md."""

CLASSES = 10
PIXELS = 64
_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
_HELD_OUT_SEED = 0
# The purpose of a random stream is the last word of its seed, so that no two streams are equal.
_NOISE, _SYNTHETIC = 2, 3  # `sampler.order` has 1
_FAR = 4.0
"""Distance of a synthetic class's centre from the origin, in standard deviations of the samples."""


@dataclass(frozen=True)
class Split:
    """Samples in two disjoint parts: one to train on, one held out.

    Example:
        >>> split = rr.train.load(rr.train.Settings())
        >>> split.name, split.train_x.shape, split.held_out_x.shape
        ('digits', (1438, 64), (359, 64))
    """

    __module__ = "ringreduce.train"

    name: str
    """Name of the data."""
    train_x: NDArray[Any]
    """Samples to train on, (samples, inputs)."""
    train_labels: NDArray[np.int64]
    """Their classes, (samples,), from 0 to classes - 1."""
    held_out_x: NDArray[Any]
    """Samples that are held out, (samples, inputs)."""
    held_out_labels: NDArray[np.int64]
    """Their classes, (samples,)."""
    classes: int = CLASSES
    """Number of classes."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all samples and labels, in hexadecimal."""
        state = hashlib.sha256(f"{self.classes} {self.train_x.shape}".encode())
        for array in (self.train_x, self.train_labels, self.held_out_x, self.held_out_labels):
            state.update(bytes_of(array).data)
        return state.hexdigest()

    def widths(self, hidden: Sequence[int]) -> tuple[int, ...]:
        """Return the widths of a network with these hidden layers, from inputs to classes.

        Args:
            hidden: the width of each hidden layer.

        Returns:
            The widths of all layers.

        Example:
            >>> rr.train.load(rr.train.Settings()).widths([128])
            (64, 128, 10)
        """
        return (self.train_x.shape[1], *hidden, self.classes)

    def check(self, batch: int) -> None:
        """Raise ValueError if a global batch has more samples than there are to train on.

        Args:
            batch: samples of a step, over all ranks.

        Raises:
            ValueError: there are fewer samples to train on.

        Example:
            >>> rr.train.load(rr.train.Settings()).check(32)
        """
        samples = len(self.train_labels)
        if batch > samples:
            raise ValueError(f"batch is {batch}; wanted at most the {samples} training samples")


def load(settings: Settings) -> Split:
    """Return the data that the settings name.

    Args:
        settings: `data` names the data; the other fields are for synthetic data.

    Returns:
        The samples to train on, and those that are held out.

    Raises:
        TypeError: `settings` is something else.
        OSError: a file cannot be read.
        ValueError: a file is damaged, or a global batch has more samples than there are to train
            on.

    Example:
        >>> settings = rr.train.Settings(data="synthetic", samples=1000, inputs=20)
        >>> rr.train.load(settings).train_x.shape
        (1000, 20)
    """
    split = read(settings)
    check_batch(split, settings)
    return split


def check_batch(split: Split, settings: Settings) -> None:
    """Raise ValueError if a fixed global batch has more samples than there are to train on.

    :meta private:
    """
    if not settings.batch_per_rank:
        split.check(settings.batch)


def read(settings: Settings) -> Split:
    """Return the data that the settings name, which may be too few for their batch.

    Raises OSError if a file cannot be read, and ValueError if it is damaged.
    """
    if not isinstance(settings, Settings):
        raise TypeError(f"load: got {shown(settings)}; pass rr.train.Settings(data=...)")
    dtype = settings.dtype
    if settings.data == "digits":
        return load_split(dtype)
    if settings.data == "synthetic":
        shape = settings.samples, settings.inputs
        return synthetic(*shape, settings.classes, settings.seed, dtype)
    return load_mnist(Path(settings.data).expanduser(), dtype)


def load_digits(path: Path = DIGITS) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the 1,797 digits of the package.

    Args:
        path: the file; by default that of the package.

    Returns:
        The images, (1797, 64) uint8 from 0 to 16, and the labels, (1797,) int64.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is not the one of the package.

    Example:
        >>> images, labels = rr.train.load_digits()
        >>> images.shape, labels[:5]
        ((1797, 64), array([0, 1, 2, 3, 4]))
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
    """Return a mask of the held-out samples: a fifth of each class, always the same samples.

    They measure the result.  Nothing is chosen by them: no setting, and not when to stop.
    """
    rng = np.random.default_rng(_HELD_OUT_SEED)
    chosen = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen[members[: round(len(members) / 5)]] = True
    return chosen


def load_split(dtype: Any = np.float32, path: Path = DIGITS) -> Split:
    """Return the digits as a Split, pixels from 0 to 1.  A fifth of each class is held out.

    Args:
        dtype: dtype of the pixels.
        path: the file; by default that of the package.

    Returns:
        The `Split`; the same samples are held out each time.

    Raises:
        FileNotFoundError, ValueError: as for `load_digits`.

    Example:
        >>> split = rr.train.load_split(np.float64)
        >>> split.train_x.dtype, split.train_x.max().item()
        (dtype('float64'), 1.0)
    """
    images, labels = load_digits(path)
    x = images.astype(dtype) / 16
    out = held_out(labels)
    return Split("digits", x[~out], labels[~out], x[out], labels[out])


def load_mnist(folder: Path, dtype: Any = np.float32) -> Split:
    """Return MNIST, or data in the same files, as pixels from 0 to 1; the test part is held out."""
    train_x, train_labels = _images_and_labels(folder, "train", dtype)
    held_x, held_labels = _images_and_labels(folder, "t10k", dtype)
    if train_x.shape[1] != held_x.shape[1]:
        raise ValueError(
            f"{folder}: images to train with have {train_x.shape[1]} pixels, those held out "
            f"{held_x.shape[1]}"
        )
    return Split(folder.resolve().name, train_x, train_labels, held_x, held_labels)


def _images_and_labels(
    folder: Path, part: str, dtype: Any
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    image_file = idx.find(folder, f"{part}-images-idx3-ubyte")
    label_file = idx.find(folder, f"{part}-labels-idx1-ubyte")
    images, labels = idx.read(image_file, 3), idx.read(label_file, 1)
    if not len(images):
        raise ValueError(f"{image_file} has no images")
    if len(images) != len(labels):
        raise ValueError(f"{image_file} has {len(images)} images, {label_file} {len(labels)}")
    if labels.max() >= CLASSES:
        raise ValueError(f"{label_file} has a label {labels.max()}; wanted 0 to {CLASSES - 1}")
    x = images.reshape(len(images), -1).astype(dtype)
    x /= 255
    return x, labels.astype(np.int64)


def synthetic(samples: int, inputs: int, classes: int, seed: int, dtype: Any = np.float32) -> Split:
    """Return `samples` to train on, and a fifth as many held out, normal around class centres."""
    rng = np.random.default_rng((seed, _SYNTHETIC))
    centres = rng.standard_normal((classes, inputs), np.float32)
    centres *= np.float32(_FAR) / np.linalg.norm(centres, axis=1, keepdims=True)
    labels = rng.integers(0, classes, samples + max(1, samples // 5))
    x = rng.standard_normal((len(labels), inputs), np.float32)
    x += centres[labels]
    x = x.astype(dtype, copy=False)
    return Split("synthetic", x[:samples], labels[:samples], x[samples:], labels[samples:], classes)


# --- each rank's part -----------------------------------------------------------------------------


def noise(rows: slice, width: int, scale: float, key: tuple[int, int, int]) -> NDArray[np.float32]:
    """Return normal noise of standard deviation `scale`, (rows, width), for `rows` of a batch.

    `key` is (seed, epoch, number of the batch); row i of the global batch is the same on every
    rank that computes it.  Training with noise smooths the function that is learnt.

    Sources: Bishop, "Training with noise is equivalent to Tikhonov regularization", Neural
    Computation 7(1), 1995; Box & Muller, "A note on the generation of random normal deviates",
    1958.  Their method takes the same number of draws for each value, so the generator can skip to
    any row.
    """
    half = (width + 1) // 2
    bits = np.random.PCG64((*key, _NOISE))
    bits.advance(2 * half * rows.start)
    uniform = np.random.Generator(bits).random((rows.stop - rows.start, 2, half))
    radius = np.float32(scale) * np.sqrt(-2 * np.log1p(-uniform[:, 0]))
    angle = 2 * np.pi * uniform[:, 1]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return normal[:, :width].astype(np.float32)
