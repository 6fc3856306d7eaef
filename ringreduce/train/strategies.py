"""Strategies of synchronous training, by name.

A strategy answers three questions: where parameters and the optimizer's arrays are, how gradients
meet, and when.  Each is a frozen value, for `ringreduce.train.train`::

    result = rr.train.train(comm, split, settings, strategy=strategies.Zero(stage=2))

All strategies compute what one process computes with the same batches, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

import ringreduce as rr
from ringreduce.errors import did_you_mean, shown
from ringreduce.parallel.mesh import Coordinates, check_fits
from ringreduce.parallel.stages import splits_of_size
from ringreduce.train import sharded_part
from ringreduce.train.divided_part import Divided
from ringreduce.train.exact_replica import ExactReplica
from ringreduce.train.nccl import NcclCommunicator
from ringreduce.train.parts import Part, Replica, Run
from ringreduce.train.settings import Settings

__all__ = [
    "TPU",
    "CentralStorage",
    "Hybrid",
    "Mirrored",
    "MultiWorkerMirrored",
    "OneDevice",
    "Pipeline",
    "Strategy",
    "Tensor",
    "Zero",
]

COMMUNICATION: dict[str, str | None] = {
    "auto": None,
    "ring": "ring",
    "hierarchical": "hierarchical",
}
"""Value of `MultiWorkerMirrored.communication` -> algorithm; None: that of the settings."""
CROSS_DEVICE: dict[str, str | None] = {
    "auto": None,
    "reduce_to_one": "star",
    "hierarchical": "hierarchical",
    "two_shot": "two_shot",
    "nccl": None,
}
"""Value of `Mirrored.cross_device` -> algorithm; None: the settings', or NCCL's."""


def _field(default: Any, option: str) -> Any:
    """Return a field of a strategy that is set by this option."""
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True)
class Strategy:
    """Where parameters are, how gradients meet, and when.  Subclasses are the strategies.

    Example:
        >>> rr.train.strategies.Zero.where
        'optimizer, gradients, parameters in shards (stages 1, 2, 3)'
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str]
    """Where parameters and the optimizer's arrays are."""
    how: ClassVar[str]
    """How gradients meet."""
    when: ClassVar[str] = "every step"
    """When gradients meet."""

    @property
    def name(self) -> str:
        """Name of the strategy on the command line: the class in snake case.

        Example:
            >>> rr.train.strategies.MultiWorkerMirrored().name
            'multi_worker_mirrored'
        """
        return name_of(type(self))

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        """Check that the strategy can be used on these ranks with these settings.

        Args:
            nodes: the ranks of each node.
            settings: the settings of the run.

        Raises:
            ValueError: it cannot.

        Example:
            >>> strategy = rr.train.strategies.Mirrored()
            >>> strategy.check([[0, 1], [2, 3]], rr.train.Settings())
            Traceback (most recent call last):
              ...
            ValueError: mirrored is for the ranks of one node; there are 2 nodes: choose \
multi_worker_mirrored (MultiWorkerMirrored)
        """

    def check_device(self, device: str) -> None:
        """Check that the strategy can be used on a device.

        Args:
            device: ``"cpu"`` or ``"cuda"``.

        Raises:
            ValueError: it cannot.

        Example:
            >>> rr.train.strategies.Mirrored("nccl").check_device("cpu")
            Traceback (most recent call last):
              ...
            ValueError: cross_device is nccl, which reduces on GPUs; add device cuda
        """

    def algorithm(self, settings: Settings) -> str:
        """Return the algorithm of the all-reduces.

        Args:
            settings: the settings of the run.

        Returns:
            The name of the algorithm.

        Raises:
            ValueError: the settings name another algorithm than the strategy.

        Example:
            >>> rr.train.strategies.Mirrored("two_shot").algorithm(rr.train.Settings())
            'two_shot'
        """
        return settings.algorithm

    def sizes(self, ranks: int) -> Coordinates:
        """Return how many ranks share data, a pipeline and the layers.

        Args:
            ranks: number of ranks.

        Returns:
            The three sizes, whose product is `ranks`.

        Raises:
            ValueError: the sizes of the strategy do not fit the ranks.

        Example:
            >>> rr.train.strategies.Hybrid(data=2, pipeline=2).sizes(4)
            Coordinates(data=2, pipeline=2, tensor=1)
        """
        return Coordinates(ranks, 1, 1)

    def part(self, run: Run) -> Part:
        """Return what this rank has of the model.  Collective.

        :meta private:
        """
        return ExactReplica(run) if run.settings.batch_shards else Replica(run)


@dataclass(frozen=True)
class OneDevice(Strategy):
    """One rank trains alone.

    Example:
        >>> rr.train.strategies.OneDevice().sizes(1)
        Coordinates(data=1, pipeline=1, tensor=1)
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "all on the one rank"
    how: ClassVar[str] = "one rank has all gradients"
    when: ClassVar[str] = "never"

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        ranks = sum(map(len, nodes))
        if ranks > 1:
            raise ValueError(f"one_device is for one rank; there are {ranks}: choose mirrored")


@dataclass(frozen=True)
class Mirrored(Strategy):
    """Every rank of one node has all parameters; an all-reduce adds up the gradients.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> strategy = rr.train.strategies.Mirrored(cross_device="two_shot")
        >>> def program(comm):
        ...     split = rr.train.load(settings)
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "all on every rank of one node"
    how: ClassVar[str] = "all-reduce"

    cross_device: str = _field("auto", "cross_device")
    """``"reduce_to_one"``, ``"hierarchical"``, ``"two_shot"`` or ``"nccl"``; ``"auto"``: the
    algorithm of the settings."""

    def __post_init__(self) -> None:
        _check_choice(self, "cross_device", tuple(CROSS_DEVICE))

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        if len(nodes) > 1:
            raise ValueError(
                f"{self.name} is for the ranks of one node; there are {len(nodes)} nodes: choose "
                "multi_worker_mirrored (MultiWorkerMirrored)"
            )
        self.algorithm(settings)
        if self.cross_device == "nccl" and settings.wire != "none":
            raise ValueError(f"wire {settings.wire} cannot be combined with cross_device nccl")

    def check_device(self, device: str) -> None:
        if self.cross_device == "nccl" and device != "cuda":
            raise ValueError("cross_device is nccl, which reduces on GPUs; add device cuda")

    def algorithm(self, settings: Settings) -> str:
        return _agreed(settings, "cross_device", self.cross_device, CROSS_DEVICE)

    def part(self, run: Run) -> Part:
        if self.cross_device == "nccl":
            return Replica(run, NcclCommunicator(run.comm, run.xp.cuda))
        return super().part(run)


@dataclass(frozen=True)
class MultiWorkerMirrored(Strategy):
    """Every rank of all nodes has all parameters; an all-reduce adds up the gradients.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> strategy = rr.train.strategies.MultiWorkerMirrored("hierarchical")
        >>> def program(comm):
        ...     split = rr.train.load(settings)
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 4, nodes=(2, 2))
        [True, True, True, True]
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "all on every rank of all nodes"
    how: ClassVar[str] = "all-reduce"

    communication: str = _field("auto", "communication")
    """``"ring"`` or ``"hierarchical"``; ``"auto"``: the algorithm of the settings."""

    def __post_init__(self) -> None:
        _check_choice(self, "communication", tuple(COMMUNICATION))

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        self.algorithm(settings)

    def algorithm(self, settings: Settings) -> str:
        return _agreed(settings, "communication", self.communication, COMMUNICATION)


@dataclass(frozen=True)
class CentralStorage(Strategy):
    """The ranks of one node have one copy of the parameters, in memory that all of them map.

    A reduce-scatter adds up the gradients, and each rank updates its shard of the parameters.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> strategy = rr.train.strategies.CentralStorage()
        >>> def program(comm):
        ...     split = rr.train.load(settings)
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "parameters once for a node; optimizer in shards"
    how: ClassVar[str] = "reduce-scatter"

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        if len(nodes) > 1:
            raise ValueError(
                f"central_storage is for the ranks of one node; there are {len(nodes)} nodes: "
                "choose multi_worker_mirrored or zero"
            )
        _check_halves(self, settings)

    def part(self, run: Run) -> Part:
        return sharded_part.Central(run)


@dataclass(frozen=True)
class Zero(Strategy):
    """Each rank has a shard of the optimizer's arrays, of gradients and of parameters.

    Source: Rajbhandari, Rasley, Ruwase & He, "ZeRO: memory optimizations toward training trillion
    parameter models", SC 2020.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> def program(comm):
        ...     split, strategy = rr.train.load(settings), rr.train.strategies.Zero(stage=3)
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "optimizer, gradients, parameters in shards (stages 1, 2, 3)"
    how: ClassVar[str] = "reduce-scatter, all-gather"

    stage: int = _field(1, "zero")
    """1: the optimizer's arrays are in shards.  2: gradients too.  3: parameters too."""

    def __post_init__(self) -> None:
        if type(self.stage) is not int or not 1 <= self.stage <= 3:
            raise ValueError(f"zero is {shown(self.stage)}; wanted stage 1, 2 or 3")

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        _check_halves(self, settings)

    def part(self, run: Run) -> Part:
        return sharded_part.zero(run, self.stage)


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Each rank has a run of layers, and the batch goes through them in microbatches.

    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
    parallelism", NeurIPS 2019.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> def program(comm):
        ...     split, strategy = rr.train.load(settings), rr.train.strategies.Pipeline(splits=4)
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "runs of layers, one or more for each rank"
    how: ClassVar[str] = "neighbours send outputs and their gradients"
    when: ClassVar[str] = "every step, after its microbatches"

    splits: int | None = _field(None, "splits")
    """Number of microbatches.  None: as many as stages, or as `split_size` makes."""
    split_size: int | None = _field(None, "split_size")
    """Samples of a microbatch, in the place of `splits`."""
    schedule: str = _field("1f1b", "schedule")
    """Name of the schedule, as for `ringreduce.pipeline.schedule`."""
    virtual: int = _field(1, "virtual")
    """Number of stages of each rank."""
    cut: str | tuple[int, ...] = _field("balanced", "cut")
    """Number of layers of each stage; ``"balanced"``: the cut whose largest stage is smallest."""
    stages: int | None = _field(None, "stages")
    """Number of stages of all ranks, to be checked.  None: the ranks times `virtual`."""

    def __post_init__(self) -> None:
        _check_pipeline(self)
        if self.splits is not None and self.split_size is not None:
            raise ValueError(
                f"splits is {self.splits} and split_size is {self.split_size}; pass one of them"
            )
        if isinstance(self.cut, list):
            object.__setattr__(self, "cut", tuple(self.cut))
        if self.cut != "balanced" and (isinstance(self.cut, str) or min(self.cut, default=0) < 1):
            raise ValueError(f"cut is {shown(self.cut)}; wanted balanced, or layers of each stage")

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        ranks = sum(map(len, nodes))
        stages, layers = ranks * self.virtual, len(settings.hidden) + 1
        if self.stages not in (None, stages):
            raise ValueError(
                f"stages is {self.stages}; {ranks} ranks with {self.virtual} each (virtual) have "
                f"{stages}"
            )
        splits = self.splits or stages
        if self.split_size is not None:
            splits = splits_of_size(settings.batch, self.split_size, self.schedule, ranks)
        rr.pipeline.schedule(self.schedule, ranks, splits, self.virtual)
        _check_stages(self, stages, splits, settings, replicas=1)
        if isinstance(self.cut, tuple) and (len(self.cut), sum(self.cut)) != (stages, layers):
            raise ValueError(
                f"cut is {' '.join(map(str, self.cut))}; pass {stages} numbers of at least 1 that "
                f"add up to the {layers} layers"
            )

    def sizes(self, ranks: int) -> Coordinates:
        return Coordinates(1, ranks, 1)

    def part(self, run: Run) -> Part:
        return Divided(
            run,
            self.sizes(run.comm.size),
            schedule=self.schedule,
            splits=self.splits,
            split_size=self.split_size,
            virtual=self.virtual,
            cut=self.cut,
        )


@dataclass(frozen=True)
class Tensor(Strategy):
    """Each rank has columns, or rows, of every layer's weight.

    Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using
    model parallelism", 2019.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> def program(comm):
        ...     split, strategy = rr.train.load(settings), rr.train.strategies.Tensor()
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "columns or rows of every layer"
    how: ClassVar[str] = "all-reduce of outputs, and of their gradients"
    when: ClassVar[str] = "every two layers"

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        _check_stages(self, 1, 1, settings, replicas=1)

    def sizes(self, ranks: int) -> Coordinates:
        return Coordinates(1, 1, ranks)

    def part(self, run: Run) -> Part:
        return Divided(run, self.sizes(run.comm.size))


@dataclass(frozen=True)
class Hybrid(Strategy):
    """Replicas of pipelines of divided layers.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> strategy = rr.train.strategies.Hybrid(data=2, pipeline=2, tensor=1)
        >>> def program(comm):
        ...     split = rr.train.load(settings)
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 4)
        [True, True, True, True]
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "columns or rows of a run of layers, on several replicas"
    how: ClassVar[str] = "as pipeline, as tensor, and an all-reduce of replicas"
    when: ClassVar[str] = "every step, after its microbatches"

    data: int | None = _field(None, "data_parallel")
    """Number of replicas.  None: the ranks divided by the other two sizes."""
    pipeline: int = _field(1, "stages")
    """Number of stages of a replica, each of one rank, or of `tensor` ranks."""
    tensor: int = _field(1, "tensor")
    """Number of ranks that share each layer."""
    splits: int | None = _field(None, "splits")
    """Number of microbatches.  None: as many as stages."""
    schedule: str = _field("1f1b", "schedule")
    """Name of the schedule, as for `ringreduce.pipeline.schedule`."""

    def __post_init__(self) -> None:
        for what, value in (
            ("data_parallel", 1 if self.data is None else self.data),
            ("stages", self.pipeline),
            ("tensor", self.tensor),
        ):
            _check_count(what, value)
        _check_pipeline(self)

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        replicas = self.sizes(sum(map(len, nodes))).data
        splits = self.splits or self.pipeline
        rr.pipeline.schedule(self.schedule, self.pipeline, splits)
        _check_stages(self, self.pipeline, splits, settings, replicas)

    def sizes(self, ranks: int) -> Coordinates:
        group = self.pipeline * self.tensor
        if self.data is None and ranks % group:
            raise ValueError(
                f"stages is {self.pipeline} and tensor is {self.tensor}; {ranks} "
                f"rank{'s' * (ranks > 1)} cannot be divided into groups of {group}"
            )
        data = ranks // group if self.data is None else self.data
        sizes = Coordinates(data, self.pipeline, self.tensor)
        check_fits(sizes, ranks)
        return sizes

    def part(self, run: Run) -> Part:
        sizes = self.sizes(run.comm.size)
        return Divided(run, sizes, schedule=self.schedule, splits=self.splits)


@dataclass(frozen=True)
class TPU(Strategy):
    """As `MultiWorkerMirrored`, with parameters and gradients on a device of JAX.

    Gradients are computed by JAX in float32, and are summed by the all-reduce of the settings.  It
    needs JAX: ``pip install 'ringreduce[jax]'``.  It is tested on JAX's CPU backend, and has not
    run on a TPU.

    Example:
        >>> rr.train.strategies.TPU().name
        'tpu'
    """

    __module__ = "ringreduce.train.strategies"

    where: ClassVar[str] = "all on every rank, on JAX's device"
    how: ClassVar[str] = "all-reduce"

    def check_device(self, device: str) -> None:
        if device != "cpu":
            raise ValueError(
                f"device {device} cannot be combined with strategy tpu: JAX has its own device"
            )

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        if settings.batch_norm:
            raise ValueError("batch_norm cannot be combined with strategy tpu")
        if settings.dtype != "float32":
            raise ValueError(
                f"dtype {settings.dtype} cannot be combined with strategy tpu, which computes in "
                "float32"
            )

    def part(self, run: Run) -> Part:
        check_jax()
        from ringreduce.train.jax_part import JaxReplica

        return JaxReplica(run)


# --- names and defaults ---------------------------------------------------------------------------


def name_of(kind: type[Strategy]) -> str:
    return "".join(
        "_" + letter.lower() if letter.isupper() and at else letter.lower()
        for at, letter in enumerate("Tpu" if kind is TPU else kind.__name__)
    )


def check_algorithm(strategy: Strategy, algorithm: str) -> None:
    """Raise ValueError if the strategy names another algorithm than the setting `algorithm`."""
    for name, named in (("cross_device", CROSS_DEVICE), ("communication", COMMUNICATION)):
        value = getattr(strategy, name, "auto")
        if value != "auto" and named[value] != algorithm:
            raise _disagreement(name, value, algorithm)


def default(nodes: Sequence[Sequence[int]]) -> Strategy:
    """Return the strategy of a run that names none: replicas."""
    return Mirrored() if len(nodes) == 1 else MultiWorkerMirrored()


def check_elastic(strategy: Strategy, device: str) -> None:
    """Raise ValueError unless each rank has the whole model in NumPy's arrays."""
    _check_replicas(strategy, device, "--elastic goes on")


def check_shards(strategy: Strategy, shards: int, ranks: int, device: str) -> None:
    """Raise ValueError unless `ranks` ranks can compute `shards` shards of a batch."""
    _check_replicas(strategy, device, "batch_shards works")
    if shards < ranks:
        raise ValueError(f"batch_shards is {shards}; wanted at least as many as ranks, {ranks}")


def _check_replicas(strategy: Strategy, device: str, what: str) -> None:
    if not isinstance(strategy, (OneDevice, Mirrored, MultiWorkerMirrored)):
        raise ValueError(
            f"strategy {strategy.name} divides the model or keeps it elsewhere; {what} with "
            "strategies one_device, mirrored and multi_worker_mirrored"
        )
    if device != "cpu":
        raise ValueError(f"device is {device}; {what} with arrays on the cpu")


def check_jax() -> None:
    """Raise ImportError if JAX, which strategy tpu needs, is not installed."""
    if find_spec("jax") is None:
        raise ImportError("strategy tpu needs JAX: pip install 'ringreduce[jax]'")


# --- checks ---------------------------------------------------------------------------------------


def _check_choice(strategy: Strategy, name: str, choices: Sequence[str]) -> None:
    value = getattr(strategy, name)
    if value not in choices:
        meant = did_you_mean(str(value), choices)
        raise ValueError(f"{name} is {shown(value)}; wanted one of {', '.join(choices)}{meant}")


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {shown(value)}; wanted a whole number of at least 1")


def _check_pipeline(strategy: Any) -> None:
    for name in ("splits", "split_size", "virtual", "stages"):
        value = getattr(strategy, name, None)
        if value is not None:
            _check_count(name, value)
    if not isinstance(strategy.schedule, str):
        raise ValueError(f"schedule is {shown(strategy.schedule)}; wanted the name of a schedule")
    rr.pipeline.schedule(strategy.schedule, ranks=1, splits=1)  # raises if it is unknown


def _check_stages(
    strategy: Strategy, stages: int, splits: int, settings: Settings, replicas: int
) -> None:
    """Raise ValueError unless the settings fit this number of stages, splits and replicas."""
    if settings.wire != "none" and replicas == 1:
        raise ValueError(
            f"wire is for gradients that replicas send; strategy {strategy.name} has one replica"
        )
    layers = len(settings.hidden) + 1
    if stages > layers:
        raise ValueError(
            f"{strategy.name} has {stages} stages; the network has {layers} "
            f"layer{'s' * (layers > 1)}: add hidden layers, or use fewer ranks"
        )
    rows = -(-settings.batch // replicas)
    if splits > max(rows, stages):  # by default there are as many as stages, some without samples
        raise ValueError(
            f"splits is {splits}; a batch has {rows} samples for each replica (batch is "
            f"{settings.batch})"
        )
    if settings.batch_norm and splits > 1:
        raise ValueError(
            f"batch_norm cannot be combined with the microbatches of strategy {strategy.name}: "
            "the means are those of the whole batch"
        )


def _check_halves(strategy: Strategy, settings: Settings) -> None:
    """Check that the all-reduce is a reduce-scatter and an all-gather."""
    if settings.wire != "none":
        raise ValueError(f"wire cannot be combined with strategy {strategy.name}")
    if settings.algorithm not in ("ring", "two_shot", "auto"):
        raise ValueError(
            f"algorithm is {settings.algorithm}; strategy {strategy.name} takes ring, two_shot or "
            "auto"
        )


def _agreed(settings: Settings, name: str, value: str, named: dict[str, str | None]) -> str:
    """Return the algorithm that a field of a strategy and the settings agree on."""
    if value == "auto":
        return settings.algorithm
    algorithm = named[value]
    if settings.algorithm not in (algorithm, Settings.algorithm):
        raise _disagreement(name, value, settings.algorithm)
    return algorithm or settings.algorithm


def _disagreement(name: str, value: str, algorithm: str) -> ValueError:
    return ValueError(f"{name} is {value}, and algorithm is {algorithm}; name one of them")
