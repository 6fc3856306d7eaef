"""The requests that `ringreduce explain` explains, and how such a call would run on this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.config import Config, Environment, Memory
from ringreduce.errors import counted, did_you_mean
from ringreduce.launch.probe import ask
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.registry import schedule
from ringreduce.planning.plan import plan_parts, plan_whole, shard_counts
from ringreduce.planning.select import Choice, choose, predict, priced_bytes, slice_count
from ringreduce.schedules.collectives import IN_PARTS
from ringreduce.schedules.cost import Link, Profile
from ringreduce.schedules.schedule import Schedule
from ringreduce.system.cores import usable
from ringreduce.system.topology import Nodes, parse_nodes

_MOST_EXACT = 128
"""The most ranks of which every step is counted.  Of more, those of one with each claim are."""


class VariableError(Exception):
    """A variable of the environment has a value with which no job would start."""


def memory_of_job(ranks: int, transport: str | None = None) -> Memory | None:
    """Return what memory a job of `ranks` ranks on this host shares; None: it exchanges messages.

    `transport` is as for `ringreduce.init`.  Raises VariableError for a variable that `init`
    would refuse.
    """
    transport = transport or _transport_of_environment()
    if transport == "mpi":
        return None
    answer = ask("memory")
    found = answer.lines[0] if answer.lines else {}
    if not found.get("shared") and transport != "shm":
        return None
    can = {fact: found.get(fact, False) for fact in ("single_copy", "writes", "quick")}
    return Memory(crowded=ranks > usable(), **can)


def _transport_of_environment() -> str:
    try:
        return Environment.read().transport or "auto"
    except ValueError as error:
        raise VariableError(str(error)) from None


@dataclass(frozen=True)
class ExplainRequest:
    """A call to explain, and the output that is wanted.  Raises ValueError for a wrong field."""

    ranks: int
    nodes: Sequence[int] = ()
    """The number of ranks of each node.  Empty: all ranks are on one node."""
    link: Link | None = None
    """The link between nodes.  None: that of the default profile."""
    collective: str = "all_reduce"
    algorithm: str = "auto"
    root: int = 0
    nbytes: int = 1 << 20
    dtype: str = "float32"
    transport: str | None = None
    """``"shm"`` or ``"mpi"``.  None: what a job on this host takes."""
    prove: bool = False
    json: bool = False
    svg: Path | None = None
    png: Path | None = None
    trace: Path | None = None
    """Where to write the predicted messages, as a trace."""

    def __post_init__(self) -> None:
        if self.collective not in ALGORITHMS:
            raise ValueError(
                f"unknown collective {self.collective!r}; choose one of {', '.join(ALGORITHMS)}"
                f"{did_you_mean(self.collective, ALGORITHMS)}"
            )
        if self.ranks < 1:
            raise ValueError(f"{self.ranks} ranks; wanted at least 1")
        if self.nodes and sum(self.nodes) != self.ranks:
            raise ValueError(
                f"--nodes has {counted(sum(self.nodes), 'rank')}, --ranks asks for {self.ranks}"
            )
        if self.transport not in (None, "shm", "mpi"):
            meant = did_you_mean(self.transport, ("shm", "mpi"))
            raise ValueError(f"unknown transport {self.transport!r}; choose shm or mpi{meant}")
        if self.transport == "shm" and len(self.layout) > 1:
            raise ValueError("--transport shm needs all ranks on one node")
        if self.link is not None and len(self.layout) == 1:
            raise ValueError("--link is the network between nodes; name several with --nodes")
        if not 0 <= self.root < self.ranks:
            raise ValueError(f"root {self.root} is none of the ranks 0 to {self.ranks - 1}")
        if self.nbytes % self.itemsize:
            raise ValueError(
                f"{counted(self.nbytes, 'byte')} {'is' if self.nbytes == 1 else 'are'} no whole "
                f"number of {self.dtype}, which has {self.itemsize} bytes"
            )
        _check_suffixes(self.svg, self.png)
        if self.trace is not None and self.trace.suffix != ".json":
            raise ValueError(f"--trace is '{self.trace}'; wanted a name that ends in .json")
        if self.trace is not None and self.ranks > _MOST_EXACT:
            raise ValueError(
                f"--trace has every message of at most {_MOST_EXACT} ranks; these are {self.ranks}"
            )
        if self.algorithm != "auto":
            build(self.collective, self.algorithm, self.layout, self.root)

    @cached_property
    def layout(self) -> Nodes:
        return parse_nodes(self.nodes or (self.ranks,), self.ranks)

    @property
    def itemsize(self) -> int:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"unknown dtype {self.dtype!r}; wanted one such as float32") from None
        if dtype.kind not in "biufc":
            raise ValueError(f"dtype {self.dtype!r} cannot be sent; wanted numbers or bools")
        return dtype.itemsize


def _check_suffixes(svg: Path | None, png: Path | None) -> None:
    for option, path in (("--svg", svg), ("--png", png)):
        if path is not None and path.suffix != f".{option[2:]}":
            raise ValueError(f"{option} {path}: wanted a name that ends in .{option[2:]}")


@dataclass(frozen=True)
class PipelineRequest:
    """A pipeline to explain, and what to print.  Raises ValueError for a wrong field."""

    name: str
    ranks: int
    splits: int
    """Microbatches."""
    virtual: int = 1
    """Stages of each rank."""
    prove: bool = False
    svg: Path | None = None
    png: Path | None = None

    def __post_init__(self) -> None:
        options = {"--stages": self.ranks, "--splits": self.splits, "--virtual": self.virtual}
        for option, number in options.items():
            if number < 1:
                raise ValueError(f"{option} is {number}; wanted at least 1")
        _check_suffixes(self.svg, self.png)
        schedule(self.name, self.ranks, self.splits, self.virtual)

    @property
    def schedule(self) -> PipelineSchedule:
        return schedule(self.name, self.ranks, self.splits, self.virtual)


@dataclass(frozen=True)
class Case:
    """A request, and what a call would find and do.

    A schedule that is wrong may have no price, so prices are computed when they are used.
    """

    request: ExplainRequest
    config: Config

    @classmethod
    def of(cls, request: ExplainRequest) -> Case:
        """Return the case on this host, or on several like hosts with a core for each rank."""
        memory = node_memory = None
        if len(request.layout) == 1:
            memory = memory_of_job(request.ranks, request.transport)
        elif (request.transport or _transport_of_environment()) in ("auto", "sockets"):
            node_memory = Memory(single_copy=False, crowded=False)
        profile = Profile() if request.link is None else Profile(between_nodes=request.link)
        return cls(request, Config(memory=memory, node_memory=node_memory, profile=profile))

    @cached_property
    def choice(self) -> Choice:
        """The choice of ``"auto"``."""
        request = self.request
        return choose(request.collective, request.layout, request.nbytes, self.config)

    @cached_property
    def algorithm(self) -> str:
        named = self.request.algorithm
        return self.choice.algorithm if named == "auto" else named

    @cached_property
    def schedule(self) -> Schedule:
        request = self.request
        return build(request.collective, self.algorithm, request.layout, request.root)

    @cached_property
    def slices(self) -> int:
        request = self.request
        return slice_count(self.schedule, request.nbytes, request.layout, self.config)

    @cached_property
    def predicted_s(self) -> Mapping[str, float]:
        """Algorithm -> predicted seconds, cheapest first, of the candidates and the one shown."""
        predicted_s, name, request = dict(self.choice.predicted_s), self.algorithm, self.request
        if name not in predicted_s:
            nbytes = priced_bytes(request.nbytes)
            predicted_s[name] = predict(
                request.collective, name, request.layout, nbytes, self.config
            )
        return dict(sorted(predicted_s.items(), key=lambda item: item[1]))

    @cached_property
    def more_than_s(self) -> Mapping[str, float]:
        """Candidate that has no price -> seconds that it takes at least, the least first."""
        bounds = sorted(self.choice.more_than_s.items(), key=lambda item: item[1])
        return {name: seconds for name, seconds in bounds if name not in self.predicted_s}

    @cached_property
    def is_exact(self) -> bool:
        """Whether the ranks are so few that all their steps, and all cuts of chunks, are made."""
        return self.request.ranks <= _MOST_EXACT

    @cached_property
    def chunk_bytes(self) -> Sequence[float]:
        """The bytes of every chunk in all slices together.

        They are cut exactly as the planner does, or among many ranks in proportion to the weights.
        """
        schedule, itemsize = self.schedule, self.request.itemsize
        if not self.is_exact:
            total = sum(schedule.weights) or 1
            return [self.request.nbytes * weight / total for weight in schedule.weights]
        count, chunks = self.request.nbytes // itemsize, len(schedule.weights)
        if schedule.collective in IN_PARTS:  # as `array_split` does
            plan = plan_parts(schedule, 0, shard_counts(count, chunks), itemsize, self.slices)
        else:
            plan = plan_whole(schedule, 0, count, itemsize, self.slices)
        offsets = [plan.chunk_offsets(index) for index in range(plan.slices)]
        return [sum(each[chunk].count for each in offsets) * itemsize for chunk in range(chunks)]
