"""Strategies of training, by name.

A strategy answers three questions: where parameters and the optimizer's arrays are, how gradients
meet, and when.  Each is a frozen value, for `ringreduce.train.train`::

    result = rr.train.train(comm, split, settings, strategy=strategies.Zero(stage=2))

All strategies compute what one process computes with the same batches, up to rounding, but
`LocalSGD` and a parameter server whose workers do not wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, make_dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import ringreduce as rr
from ringreduce.errors import counted, did_you_mean, shown
from ringreduce.parallel.mesh import Coordinates, check_fits
from ringreduce.parallel.parameter_store import check_numbers
from ringreduce.parallel.stages import right_cut, splits_of_size
from ringreduce.train.divided_part import Divided
from ringreduce.train.nccl import NcclCommunicator
from ringreduce.train.parts import Part, Run
from ringreduce.train.replicas import ExactReplica, LocalReplica, Replica
from ringreduce.train.served_part import Served
from ringreduce.train.settings import Settings, setting
from ringreduce.train.sharded_part import Sharded

__all__ = [
    "TPU",
    "CentralStorage",
    "Hybrid",
    "LocalSGD",
    "Mirrored",
    "MultiWorkerMirrored",
    "OneDevice",
    "ParameterServer",
    "Pipeline",
    "Strategy",
    "Tensor",
    "Zero",
]

PIPELINES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "sequential")
_ALGORITHMS = {
    "ring": "ring",
    "reduce_to_one": "star",
    "hierarchical": "hierarchical",
    "two_shot": "two_shot",
    "nccl": "",
}
"""Name of an all-reduce in the option of a strategy -> algorithm of the settings; "": not ours."""
_IN_HALVES = ("ring", "two_shot", "auto")

# --- options --------------------------------------------------------------------------------------


def _option(
    default: Any, explained: str, choices: Sequence[str] = (), *, name: str = "", **more: Any
) -> Any:
    """Return a field of a strategy with the help and the choices of its option.

    `name` is the option's, if it is not the field's.  In `more`, `unset` is the option's value for
    a default that it cannot have itself; `holds` tells whether a value of the field can work, and
    `wanted` what would.
    """
    unset = 0 if default is None else default
    return setting(default, explained, choices, option=name, **{"unset": unset, **more})


def options(kind: type[Strategy]) -> dict[str, Field[Any]]:
    """Return the fields of a strategy by the names of their options."""
    return {each.metadata["option"] or each.name: each for each in fields(kind)}


_all_reduce = partial(_option, "auto", is_all_reduce=True)
_count = partial(
    _option,
    holds=lambda value: type(value) is int and value >= 1,
    wanted="a whole number of at least 1",
)
_stages = partial(
    _count, explained="runs of layers; pipeline: 0, one for each rank", name="stages", unset=0
)
_splits = partial(_count, None, "microbatches of a batch; 0: as many as stages")
_schedule = partial(
    _option,
    "1f1b",
    "order of microbatches",
    PIPELINES,
    holds=lambda value: isinstance(value, str) and rr.pipeline.schedule(value, 1, 1),
    wanted="the name of a schedule",
)
_bound = partial(
    _option,
    0,
    holds=lambda value: value is None or (type(value) is int and value >= 0),
    wanted="a whole number of at least 0",
)

# --- the strategies -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strategy:
    """Where parameters are, how gradients meet, and when.  Subclasses are the strategies.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> strategy = rr.train.strategies.Pipeline(splits=4)
        >>> def program(comm):
        ...     split = rr.train.load(settings)
        ...     return rr.train.train(comm, split, settings, strategy=strategy).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """

    where: ClassVar[str]
    """Where parameters and the optimizer's arrays are."""
    how: ClassVar[str]
    """How gradients meet."""
    when: ClassVar[str] = "every step"
    """When gradients meet."""
    partial_model: ClassVar[str] = "divides the model or keeps it elsewhere"
    """Why a rank lacks the whole model, the same as others', after a step; "": it has it."""
    on_nodes: ClassVar[str] = ""
    """What to choose in its place on several nodes; "": it can be used there."""
    without: ClassVar[tuple[str, ...]] = ()
    """Settings that it cannot be combined with."""
    algorithms: ClassVar[tuple[str, ...]] = ()
    """Algorithms of the settings that it takes; (): all."""
    only_cpu: ClassVar[str] = ""
    """Why it cannot be used on another device than the CPU; "": it can."""
    servers = 0
    """Number of ranks that keep parameters and do not compute, the last ones."""

    def __post_init__(self) -> None:
        for name, each in options(type(self)).items():
            value, about = getattr(self, each.name), each.metadata
            choices, holds = about["choices"], about.get("holds")
            if value is None and each.default is None:
                continue
            if not (holds(value) if holds else value in choices):
                one_of = f"one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
                wanted = about.get("wanted", one_of)
                raise ValueError(f"{name} is {shown(value)}; wanted {wanted}")

    @property
    def name(self) -> str:
        """Name of the strategy on the command line: the class in snake case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

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
        if len(nodes) > 1 and self.on_nodes:
            raise ValueError(
                f"{self.name} is for the ranks of one node; there are {len(nodes)} nodes: choose "
                f"{self.on_nodes}"
            )
        for name in self.without:
            if getattr(settings, name) != getattr(Settings, name):
                raise ValueError(f"{name} cannot be combined with strategy {self.name}")
        if self.algorithms and settings.algorithm not in self.algorithms:
            raise ValueError(
                f"algorithm is {settings.algorithm}; strategy {self.name} takes "
                f"{', '.join(self.algorithms[:-1])} or {self.algorithms[-1]}"
            )
        self.algorithm(settings)

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
        if self.only_cpu and device != "cpu":
            raise ValueError(
                f"device {device} cannot be combined with strategy {self.name}: {self.only_cpu}"
            )

    def check_installed(self) -> None:
        """Raise ImportError if a package is missing that the strategy needs.

        :meta private:
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
        given = settings.algorithm
        return named_algorithm(self, "" if given == Settings.algorithm else given) or given

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

    where: ClassVar[str] = "all on the one rank"
    how: ClassVar[str] = "one rank has all gradients"
    when: ClassVar[str] = "never"
    partial_model: ClassVar[str] = ""

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        ranks = sum(map(len, nodes))
        if ranks > 1:
            raise ValueError(f"one_device is for one rank; there are {ranks}: choose mirrored")


@dataclass(frozen=True)
class Mirrored(Strategy):
    """Every rank of one node has all parameters; an all-reduce adds up the gradients.

    Example:
        >>> strategy = rr.train.strategies.Mirrored(cross_device="reduce_to_one")
        >>> strategy.algorithm(rr.train.Settings())
        'star'
    """

    where: ClassVar[str] = "all on every rank of one node"
    how: ClassVar[str] = "all-reduce"
    partial_model: ClassVar[str] = ""
    on_nodes: ClassVar[str] = "multi_worker_mirrored (MultiWorkerMirrored)"

    cross_device: str = _all_reduce(
        "all-reduce among ranks of one node",
        ("auto", "reduce_to_one", "hierarchical", "two_shot", "nccl"),
    )
    """``"reduce_to_one"``, ``"hierarchical"``, ``"two_shot"`` or ``"nccl"``; ``"auto"``: the
    algorithm of the settings."""

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        super().check(nodes, settings)
        if self.cross_device == "nccl" and settings.wire != "none":
            raise ValueError(f"wire {settings.wire} cannot be combined with cross_device nccl")

    def check_device(self, device: str) -> None:
        if self.cross_device == "nccl" and device != "cuda":
            raise ValueError("cross_device is nccl, which reduces on GPUs; add device cuda")

    def part(self, run: Run) -> Part:
        if self.cross_device == "nccl":
            return Replica(run, NcclCommunicator(run.comm, run.xp.cuda))
        return super().part(run)


@dataclass(frozen=True)
class MultiWorkerMirrored(Strategy):
    """Every rank of all nodes has all parameters; an all-reduce adds up the gradients.

    Example:
        >>> strategy = rr.train.strategies.MultiWorkerMirrored("hierarchical")
        >>> strategy.algorithm(rr.train.Settings())
        'hierarchical'
    """

    where: ClassVar[str] = "all on every rank of all nodes"
    how: ClassVar[str] = "all-reduce"
    partial_model: ClassVar[str] = ""

    communication: str = _all_reduce(
        "all-reduce among ranks of all nodes", ("auto", "ring", "hierarchical")
    )
    """``"ring"`` or ``"hierarchical"``; ``"auto"``: the algorithm of the settings."""


@dataclass(frozen=True)
class CentralStorage(Strategy):
    """The ranks of one node have one copy of the parameters, in memory that all of them map.

    A reduce-scatter adds up the gradients, and each rank updates its shard of the parameters.

    Example:
        >>> rr.train.strategies.CentralStorage().check([[0, 1]], rr.train.Settings())
    """

    where: ClassVar[str] = "parameters once for a node; optimizer in shards"
    how: ClassVar[str] = "reduce-scatter"
    on_nodes: ClassVar[str] = "multi_worker_mirrored or zero"
    without: ClassVar[tuple[str, ...]] = ("wire",)
    algorithms: ClassVar[tuple[str, ...]] = _IN_HALVES

    def part(self, run: Run) -> Part:
        return Sharded(run, None)


@dataclass(frozen=True)
class Zero(Strategy):
    """Each rank has a shard of the optimizer's arrays, of gradients and of parameters.

    Source: Rajbhandari, Rasley, Ruwase & He, "ZeRO: memory optimizations toward training trillion
    parameter models", SC 2020.

    Example:
        >>> rr.train.strategies.Zero(stage=3).check([[0, 1], [2, 3]], rr.train.Settings())
    """

    where: ClassVar[str] = "optimizer, gradients, parameters in shards (stages 1, 2, 3)"
    how: ClassVar[str] = "reduce-scatter, all-gather"
    without: ClassVar[tuple[str, ...]] = ("wire",)
    algorithms: ClassVar[tuple[str, ...]] = _IN_HALVES

    stage: int = _option(
        1,
        "1 divides the optimizer, 2 gradients too, 3 parameters too",
        name="zero",
        holds=lambda value: type(value) is int and 1 <= value <= 3,
        wanted="stage 1, 2 or 3",
    )

    def part(self, run: Run) -> Part:
        return Sharded(run, self.stage)


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Each rank has a run of layers, and the batch goes through them in microbatches.

    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
    parallelism", NeurIPS 2019.

    Example:
        >>> rr.train.strategies.Pipeline(splits=4).sizes(ranks=2)
        Coordinates(data=1, pipeline=2, tensor=1)
    """

    where: ClassVar[str] = "runs of layers, one or more for each rank"
    how: ClassVar[str] = "neighbours send outputs and their gradients"
    when: ClassVar[str] = "every step, after its microbatches"

    splits: int | None = _splits()
    """Number of microbatches.  None: as many as stages, or as `split_size` makes."""
    split_size: int | None = _count(None, "samples of a microbatch, in the place of splits")
    schedule: str = _schedule()
    """Name of the schedule, as for `ringreduce.pipeline.schedule`."""
    virtual: int = _count(1, "stages of each rank, for the interleaved schedule")
    cut: str | tuple[int, ...] = _option(
        "balanced",
        "layers of each stage; none: as even as possible",
        unset=(),
        holds=lambda cut: (
            cut == "balanced" or (not isinstance(cut, str) and min(cut, default=0) >= 1)
        ),
        wanted="balanced, or layers of each stage",
        metavar="LAYERS",
    )
    """Number of layers of each stage; ``"balanced"``: the cut whose largest stage is smallest."""
    stages: int | None = _stages(None)
    """Number of stages of all ranks, to be checked.  None: the ranks times `virtual`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits is not None and self.split_size is not None:
            raise ValueError(
                f"splits is {self.splits} and split_size is {self.split_size}; pass one of them"
            )
        if isinstance(self.cut, list):
            object.__setattr__(self, "cut", tuple(self.cut))

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        super().check(nodes, settings)
        ranks = sum(map(len, nodes))
        stages, layers = ranks * self.virtual, len(settings.hidden) + 1
        if self.stages not in (None, stages):
            raise ValueError(
                f"stages is {self.stages}; {counted(ranks, 'rank')} with {self.virtual} each "
                f"(virtual) {'has' if ranks == 1 else 'have'} {stages}"
            )
        splits = self.splits
        if self.split_size is not None:
            splits = splits_of_size(settings.batch, self.split_size, self.schedule, ranks)
        _check_divided(self, settings, self.sizes(ranks), splits, self.schedule, self.virtual)
        if isinstance(self.cut, tuple) and (len(self.cut), sum(self.cut)) != (stages, layers):
            raise ValueError(f"cut is {' '.join(map(str, self.cut))}; {right_cut(stages, layers)}")

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
        >>> rr.train.strategies.Tensor().sizes(ranks=2)
        Coordinates(data=1, pipeline=1, tensor=2)
    """

    where: ClassVar[str] = "columns or rows of every layer"
    how: ClassVar[str] = "all-reduce of outputs, and of their gradients"
    when: ClassVar[str] = "every two layers"

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        super().check(nodes, settings)
        _check_divided(self, settings, self.sizes(sum(map(len, nodes))))

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
        >>> rr.train.strategies.Hybrid(pipeline=2, splits=4).sizes(ranks=6)
        Coordinates(data=3, pipeline=2, tensor=1)
    """

    where: ClassVar[str] = "columns or rows of a run of layers, on several replicas"
    how: ClassVar[str] = "as pipeline, as tensor, and an all-reduce of replicas"
    when: ClassVar[str] = "every step, after its microbatches"

    data: int | None = _count(
        None, "replicas of the model; 0: the ranks that are left", name="data_parallel"
    )
    """Number of replicas.  None: the ranks divided by the other two sizes."""
    pipeline: int = _stages(1)
    """Number of stages of a replica, each of one rank, or of `tensor` ranks."""
    tensor: int = _count(1, "ranks that share each layer")
    splits: int | None = _splits()
    """Number of microbatches.  None: as many as stages."""
    schedule: str = _schedule()
    """Name of the schedule, as for `ringreduce.pipeline.schedule`."""

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        super().check(nodes, settings)
        sizes = self.sizes(sum(map(len, nodes)))
        _check_divided(self, settings, sizes, self.splits, self.schedule)

    def sizes(self, ranks: int) -> Coordinates:
        group = self.pipeline * self.tensor
        if self.data is None and ranks % group:
            raise ValueError(
                f"stages is {self.pipeline} and tensor is {self.tensor}; "
                f"{counted(ranks, 'rank')} cannot be divided into groups of {group}"
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

    where: ClassVar[str] = "all on every rank, on JAX's device"
    how: ClassVar[str] = "all-reduce"
    without: ClassVar[tuple[str, ...]] = ("batch_norm",)
    only_cpu: ClassVar[str] = "JAX has its own device"

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        super().check(nodes, settings)
        if settings.dtype != "float32":
            raise ValueError(
                f"dtype {settings.dtype} cannot be combined with strategy tpu, which computes in "
                "float32"
            )

    def check_installed(self) -> None:
        if find_spec("jax") is None:
            raise ImportError("strategy tpu needs JAX: pip install 'ringreduce[jax]'")

    def part(self, run: Run) -> Part:
        self.check_installed()
        from ringreduce.train.jax_part import JaxReplica

        return JaxReplica(run)


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Replicas step alone; every few steps, and after each epoch, they average their weights.

    A replica's gradient is the number of ranks times its share of the batch's mean.  Ranks keep
    their own arrays of the optimizer; a checkpoint, made at an average, has the means.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019.

    Example:
        >>> rr.train.strategies.LocalSGD(every=4).name
        'local_sgd'
    """

    where: ClassVar[str] = "all on every rank; they differ between averages"
    how: ClassVar[str] = "not at all: an all-reduce averages weights"
    when: ClassVar[str] = "every few steps, and at the end of an epoch"
    without: ClassVar[tuple[str, ...]] = ("batch_norm", "clip", "batch_shards")
    only_cpu: ClassVar[str] = "it averages arrays on the cpu"
    partial_model: ClassVar[str] = "lets replicas differ"

    every: int = _count(8, "steps from one average of the weights to the next")

    def part(self, run: Run) -> Part:
        return LocalReplica(run, self.every)


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """The last ranks keep the parameters; the others pull them, compute, and push gradients.

    With a bound, or none, a worker does not wait for all others in each step.  Then the result is
    not that of one process, and the learning rate of a push is divided by 1 + its staleness.

    Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.

    Example:
        >>> rr.train.strategies.ParameterServer().check([[0]], rr.train.Settings())
        Traceback (most recent call last):
          ...
        ValueError: servers is 1; of 1 rank that leaves no worker: pass fewer servers, or start \
more ranks
    """

    where: ClassVar[str] = "on servers, with the optimizer; copies on workers"
    how: ClassVar[str] = "workers push them to servers"
    when: ClassVar[str] = "every step; with a bound, or none, when a worker has them"
    without: ClassVar[tuple[str, ...]] = ("batch_norm", "clip", "batch_shards", "wire")
    only_cpu: ClassVar[str] = "servers and workers have arrays on the cpu"

    servers: int = _count(1, "ranks that keep parameters, the last ones")
    replicas: int = _count(1, "servers that keep each parameter")
    staleness: int | None = _bound(
        "pushes that a worker may be ahead of the slowest; 0: workers push in steps; none: any",
        words=("none",),
        wanted="a whole number of at least 0, or none",
    )
    backup_workers: int = _bound("workers for which a step does not wait")

    def __post_init__(self) -> None:
        if str(self.staleness) == "none":  # as on the command line, and in files
            object.__setattr__(self, "staleness", None)
        super().__post_init__()

    def check(self, nodes: Sequence[Sequence[int]], settings: Settings) -> None:
        super().check(nodes, settings)
        check_numbers(sum(map(len, nodes)), **asdict(self))

    def part(self, run: Run) -> Part:
        return Served(run, **asdict(self))


# --- names and defaults ---------------------------------------------------------------------------


STRATEGIES: dict[str, type[Strategy]] = {kind().name: kind for kind in Strategy.__subclasses__()}
"""Name -> class, in the order of the pages."""


def _owners(option: str) -> list[str]:
    return [name for name, kind in STRATEGIES.items() if option in options(kind)]


def _declared() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, type and field of the option that names a strategy, and of theirs."""
    auto = "mirrored, or on several nodes multi_worker_mirrored"
    text = f"where parameters are, and how gradients meet; help prints all; auto: {auto}"
    yield "strategy", Any, setting("auto", text, words=("auto", *STRATEGIES, "help"))
    for name, kind in STRATEGIES.items():
        for option, each in options(kind).items():
            owners, about = _owners(option), each.metadata
            if owners[0] == name:
                text = f"{', '.join(owners)}: {about['help']}"
                yield option, Any, field(default=about["unset"], metadata={**about, "help": text})


OPTIONS = {each.name: each for each in fields(make_dataclass("_Options", _declared()))}
"""Name -> option of the command line and files, with its default and help there."""


def by_name(name: str, given: Mapping[str, Any]) -> Strategy | None:
    """Return the strategy with these options, None for "auto"; ValueError for a wrong name."""
    if name == "auto" and not given:
        return None
    kind = Strategy if name == "auto" else STRATEGIES.get(name)
    if kind is None:
        meant = did_you_mean(name, STRATEGIES)
        raise ValueError(f"strategy is {name!r}; wanted one of {', '.join(STRATEGIES)}{meant}")
    takes = options(kind)
    for option in given:
        if option not in takes:
            raise ValueError(
                f"{option} is an option of strategy {' and '.join(_owners(option))}; strategy is "
                f"{name}"
            )
    return kind(
        **{takes[o].name: value for o, value in given.items() if value != OPTIONS[o].default}
    )


def to_plain(given: Settings | Strategy) -> dict[str, Any]:
    """Return settings, or a strategy and its options that are set, as values for JSON and TOML."""
    if isinstance(given, Settings):
        values = asdict(given)
    else:
        values = {"strategy": given.name}
        for option, each in options(type(given)).items():
            if getattr(given, each.name) != each.default:
                value = getattr(given, each.name)
                values[option] = "none" if value is None else value
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def table() -> str:
    """Return where, how, when and the options of each strategy, a fact a line."""
    lines = []
    for name, kind in STRATEGIES.items():
        flags = " ".join("--" + option.replace("_", "-") for option in options(kind))
        facts = ("parameters", kind.where), ("gradients", kind.how), ("when", kind.when)
        lines.append(name)
        lines += [f"  {head:<10}  {text}" for head, text in (*facts, ("options", flags)) if text]
    return "\n".join(lines)


def default(nodes: Sequence[Sequence[int]]) -> Strategy:
    """Return the strategy of a run that names none: replicas."""
    return Mirrored() if len(nodes) == 1 else MultiWorkerMirrored()


def check_whole_model(strategy: Strategy, device: str, what: str) -> None:
    """Raise ValueError unless each rank has the whole model in NumPy's arrays, as `what` needs."""
    if strategy.partial_model:
        *names, last = (name for name, kind in STRATEGIES.items() if not kind.partial_model)
        raise ValueError(
            f"strategy {strategy.name} {strategy.partial_model}; {what} with strategies "
            f"{', '.join(names)} and {last}"
        )
    if device != "cpu":
        raise ValueError(f"device is {device}; {what} with arrays on the cpu")


def _check_divided(
    strategy: Strategy,
    settings: Settings,
    sizes: Coordinates,
    splits: int | None = None,
    schedule: str = "1f1b",
    virtual: int = 1,
) -> None:
    stages = sizes.pipeline * virtual
    splits = splits or stages
    rr.pipeline.schedule(schedule, sizes.pipeline, splits, virtual)
    if settings.wire != "none" and sizes.data == 1:
        raise ValueError(
            f"wire is for gradients that replicas send; strategy {strategy.name} has one replica"
        )
    layers = len(settings.hidden) + 1
    if stages > layers:
        raise ValueError(
            f"{strategy.name} has {stages} stages; the network has "
            f"{counted(layers, 'layer')}: add hidden layers, or use fewer ranks"
        )
    rows = -(-settings.batch // sizes.data)
    if splits > max(rows, stages):  # by default there are as many as stages, some without samples
        raise ValueError(
            f"splits is {splits}; a batch has {counted(rows, 'sample')} for each replica "
            f"(batch is {settings.batch})"
        )
    if settings.batch_norm and splits > 1:
        raise ValueError(
            f"batch_norm cannot be combined with the microbatches of strategy {strategy.name}: "
            "the means are those of the whole batch"
        )


def named_algorithm(strategy: Strategy, given: str) -> str:
    """Return the algorithm of a strategy's option, or `given`; ValueError if they differ."""
    for name, each in options(type(strategy)).items():
        value = getattr(strategy, each.name)
        if each.metadata.get("is_all_reduce") and value != "auto":
            named = _ALGORITHMS[value]
            if given not in ("", named):
                raise ValueError(f"{name} is {value}, and algorithm is {given}; name one of them")
            return named
    return given
