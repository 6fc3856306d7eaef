"""The settings of a run, and its outputs: two frozen values, checked when made.

The command line, TOML files and checkpoints use the names of their fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ringreduce.errors import did_you_mean
from ringreduce.picture.output import SUFFIXES

DTYPES = ("float32", "float64")
OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("linear", "constant")
WIRES = ("none", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")


def setting(default: Any, explained: str, choices: Sequence[str] = (), **more: Any) -> Any:
    """Return a field with its default, its help, its choices, and in `more` its `least` number."""
    return field(default=default, metadata={"help": explained, "choices": choices, **more})


_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    bool: "true or false",
    tuple: "a list of whole numbers, such as [64]",
}


class _NoDataError(FileNotFoundError, ValueError):
    """A data set that does not exist."""


def checked(about: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value in the type of the field's default; ValueError for one it cannot have."""
    name, choices = about.name, about.metadata["choices"]
    is_path = about.default is None
    kind: Any = str if is_path or choices else type(about.default)
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and about.metadata.get("words"):  # the strategy checks it
        return value
    if not _is(kind, value):
        quotes = ", without quotes" if isinstance(value, str) else ""
        raise ValueError(f"{name} is {_written(value)}; wanted {_KINDS[kind]}{quotes}")
    if choices and value not in choices:
        meant = did_you_mean(value, choices)
        raise ValueError(f"{name} is {_written(value)}; wanted one of {', '.join(choices)}{meant}")
    if kind is tuple:
        return tuple(map(int, value))
    return Path(value).expanduser() if is_path else kind(value)


def _is(kind: type, value: Any) -> bool:
    """Whether `value` is one of `kind`; numbers may be NumPy's, and a tuple a list."""
    if kind is tuple:
        return isinstance(value, (list, tuple)) and all(_is(int, each) for each in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _written(value: Any) -> str:
    """Write a value as TOML does, or else its type."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return type(value).__name__


def _check_fields(settings: Any) -> None:
    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        if value is not None or each.default is not None:
            object.__setattr__(settings, each.name, checked(each, value))
        if type(each.default) is int:
            least = each.metadata.get("least", 0)
            _want(value >= least, each.name, value, f"at least {least}")


@dataclass(frozen=True)
class Settings:
    """All settings that decide the result of a run, besides the number of ranks.

    Raises:
        ValueError: a value that cannot work, of another type, or none of its choices; or data that
            do not exist.

    Example:
        >>> settings = rr.train.Settings(epochs=5, hidden=(256, 128), optimizer="adam", lr=0.003)
        >>> settings.batch
        32
    """

    __module__ = "ringreduce.train"

    # The defaults, for the digits, were chosen without the held-out samples: by cross-validation in
    # the other four fifths, in 4 stratified folds.
    data: str = setting("digits", "digits, synthetic, or a folder with the four files of MNIST")
    samples: int = setting(10_000, "samples of synthetic data", least=2)
    inputs: int = setting(64, "numbers in a sample of synthetic data", least=1)
    classes: int = setting(10, "classes of synthetic data", least=2)
    hidden: tuple[int, ...] = setting((128,), "width of each hidden layer", fixed=True)
    batch_norm: bool = setting(
        False, "normalise each hidden layer over the batch of all ranks", fixed=True
    )
    dtype: str = setting("float32", "type of parameters and gradients", DTYPES, fixed=True)
    epochs: int = setting(30, "passes over the training samples", least=1)
    batch: int = setting(32, "samples a step, over all ranks", fixed=True, least=1)
    batch_per_rank: int = setting(
        0,
        "samples a step on each rank, in place of batch: the batch follows the number of ranks, "
        "and lr in proportion; 0: batch is fixed",
        fixed=True,
    )
    batch_shards: int = setting(
        0,
        "compute each batch in so many parts, and add their gradients exactly: the parameters have "
        "the same bits for any number of ranks up to it; 0: one part for each rank",
        fixed=True,
    )
    ramp_steps: int = setting(
        0, "steps in which lr changes evenly when the number of ranks has changed"
    )
    optimizer: str = setting("sgd", "sgd with momentum, or adam", OPTIMIZERS, fixed=True)
    lr: float = setting(0.2, "learning rate after warming up")
    lr_batch: int = setting(
        0, "global batch that lr is meant for; with another, lr is scaled in proportion; 0: any"
    )
    lr_schedule: str = setting(
        "linear", "learning rate falls evenly to 0, or stays constant", SCHEDULES
    )
    warm_up: int = setting(0, "steps in which the learning rate rises evenly from 0")
    momentum: float = setting(0.9, "momentum of sgd, from 0 to below 1")
    weight_decay: float = setting(
        0.0, "this times the parameters is added to the gradient, with adam to the step alone"
    )
    clip: float = setting(
        0.0, "scale a gradient down if its norm over all parameters is larger; 0: any norm"
    )
    noise: float = setting(0.2, "standard deviation of noise on the inputs while training")
    seed: int = setting(
        0, "seed of the first parameters, the order of samples, and noise", fixed=True
    )
    algorithm: str = setting("ring", "algorithm of the all-reduce; auto lets the library choose")
    wire: str = setting("none", "send gradients in 16 bits; they are computed in dtype", WIRES)
    first_bucket_bytes: int = setting(1 << 20, "bytes of gradients that are reduced first", least=1)
    bucket_bytes: int = setting(
        25 << 20, "bytes of gradients that are reduced at once, later", least=1
    )
    check_every: int = setting(100, "steps between proofs that ranks have equal parameters; 0: end")

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.data not in ("digits", "synthetic") and not Path(self.data).expanduser().is_dir():
            meant = did_you_mean(self.data, ("digits", "synthetic"))
            raise _NoDataError(
                f"data is {self.data}; wanted digits, synthetic, or a folder with the files of "
                f"MNIST{meant}"
            )
        for name in ("weight_decay", "clip", "noise"):
            value = getattr(self, name)
            _want(0 <= value < math.inf, name, value, "a finite number of at least 0")
        if self.batch_norm and self.batch == 1:
            raise ValueError("batch is 1; batch_norm takes at least two samples a step")
        if self.batch_shards:
            self._check_shards()
        if self.ramp_steps and not self.batch_per_rank:
            raise ValueError(f"ramp_steps is {self.ramp_steps}; it is for batch_per_rank")
        _want(0 < self.lr < math.inf, "lr", self.lr, "a finite number above 0")
        _want(0 <= self.momentum < 1, "momentum", self.momentum, "from 0 up to, but not, 1")
        _want(min(self.hidden, default=1) >= 1, "hidden", self.hidden, "widths of at least 1")

    def for_ranks(self, ranks: int) -> Settings:
        """Return the settings with the global batch of so many ranks.

        :meta private:
        """
        if not self.batch_per_rank:
            return self
        return dataclasses.replace(self, batch=self.batch_per_rank * ranks)

    def _check_shards(self) -> None:
        """Raise ValueError for a setting that makes the bits depend on the ranks."""
        refused = {
            "batch_per_rank": (self.batch_per_rank > 0, "the batch follows the ranks"),
            "batch_norm": (self.batch_norm, "the means of all ranks are rounded"),
            "wire": (self.wire != "none", "gradients are added as whole numbers"),
        }
        for name, (given, why) in refused.items():
            if given:
                raise ValueError(f"{name} cannot be combined with batch_shards: {why}")


@dataclass(frozen=True)
class Outputs:
    """Where a run writes, and on which device it runs: none of these changes the result."""

    seeds: int = setting(1, "train with so many seeds, counting from seed", least=1)
    device: str = setting("cpu", "cuda: CuPy, with a GPU for each rank of a host", DEVICES)
    checkpoint_dir: Path | None = setting(None, "folder for checkpoints", metavar="FOLDER")
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: one after each epoch")
    keep: int = setting(3, "number of last checkpoints that are kept", least=1)
    resume: bool = setting(False, "continue from the last usable checkpoint, if there is one")
    verbose: bool = setting(False, "print all settings, and the parts of a step's time")
    metrics: Path | None = setting(None, "write a line of JSON for each step and epoch")
    tensorboard: Path | None = setting(
        None, "folder for TensorBoard's event files", metavar="FOLDER"
    )
    plot: Path | None = setting(
        None,
        "draw loss, accuracy and times; with resume, earlier ones are read from metrics",
        metavar="SVG",
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.checkpoint_dir is None and self.resume:
            raise ValueError("resume from where? name a checkpoint_dir")
        if self.checkpoint_dir is None and (self.checkpoint_every or self.keep != Outputs.keep):
            raise ValueError("checkpoint_every and keep are of no use without a checkpoint_dir")
        if self.plot is not None and self.plot.suffix not in SUFFIXES:
            raise ValueError(f"plot is {self.plot}; wanted a name that ends in .svg or .png")
        written = (self.checkpoint_dir, self.metrics, self.tensorboard, self.plot)
        if self.seeds > 1 and any(written):
            raise ValueError(
                f"seeds is {self.seeds}; checkpoint_dir, metrics, tensorboard and plot are for one"
            )


def _want(holds: bool, name: str, came: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {came}; wanted {wanted}")
