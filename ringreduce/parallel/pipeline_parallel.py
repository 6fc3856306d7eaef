"""Train a model whose layers are on several ranks, by a schedule of `ringreduce.pipeline`.

The layers are cut into stages, and the batch into microbatches.  Each rank executes the actions of
its stages in the order of the schedule.  The gradients are bitwise those of one process that
computes the microbatches one after another and adds up their gradients.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.errors import counted, shown
from ringreduce.parallel.consensus import gather_words
from ringreduce.parallel.layers import Array, Layer, cross_entropy
from ringreduce.parallel.sampler import part
from ringreduce.parallel.stage_messages import BetweenRanks, Key, Kinds, OnOneRank
from ringreduce.parallel.stages import (
    GradientSums,
    Loss,
    MakesLayer,
    SplitBatch,
    StepOfStages,
    cut_of,
    splits_of_size,
    stages_of,
)

Into = Mapping[str, Array] | Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Name -> array for the sum of gradients; or a function that returns it for these parameters."""


@dataclass(frozen=True)
class _StagePlan:
    """What a rank does in a pass through its actions."""

    schedule: rr.pipeline.PipelineSchedule
    acts: Sequence[rr.pipeline.Action]
    steps: Sequence[Any]
    """A step before each action, and one after the last."""
    ahead: int
    """The number of steps by which receives are posted ahead."""

    @classmethod
    def of(cls, schedule: rr.pipeline.PipelineSchedule, rank: int, ahead: int) -> _StagePlan:
        return cls(schedule, schedule.acts(rank), rr.pipeline.lower(schedule, rank), ahead)


class PipelineParallel:
    """One rank's stages of a model that several ranks compute together.

    Every rank makes a PipelineParallel with the same arguments, and calls `step` for every batch.
    Stage k is on rank ``k % comm.size``.  The gradients are bitwise those of one process that adds
    up the gradients of the same microbatches, from the first to the last.

    Args:
        comm: the communicator of the pipeline's ranks.
        layers: all layers of the model, on every rank: objects with the members of `Layer`.  In
            the place of a layer may be a function without arguments that returns it.  It is called
            on the rank of the layer alone.
        split_size: the most samples of a microbatch.  A batch is cut into as few microbatches as
            the schedule allows.
        splits: number of microbatches of a batch.  Their lengths differ by at most one sample.
            None, without `split_size`: as many as stages.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero_bubble"``, ``"sequential"``,
            or a registered name; see `rr.pipeline.schedule`.
        virtual: number of stages of each rank.
        cut: ``"balanced"``: the heaviest stage is as light as possible, see `rr.pipeline.balance`.
            Or the number of layers of each stage.
        costs: the cost of each layer, for ``cut="balanced"``, such as its time.  None: its number
            of parameters.
        loss: ``loss(output, labels, count)`` returns the loss, summed over these samples and
            divided by `count`, and its gradient by the output.  None: softmax cross-entropy.
        xp: the array module, NumPy or CuPy.
        into: name -> array in which the gradient of a parameter is added up.  A parameter that is
            not named gets a new array.  Or a function that returns them for `parameters`.
        on_gradient: ``on_gradient(name, gradient)`` is called in `step` when the gradient of a
            parameter is final.

    Attributes:
        layers: this rank's layers.
        parameters: name -> array of this rank's layers.
        gradients: name -> gradient of the loss, of this rank's layers.  `step` overwrites them.
        stages: numbers of this rank's stages.
        cut: number of layers of each stage of all ranks.
        schedule: the `PipelineSchedule` of the last step.  With `split_size` and before the first
            step it has as many microbatches as stages.
        proof: its `PipelineProof`.
        held: the most activations that this rank held at once in the last step, each of one stage
            and one microbatch.  They were counted; ``proof.held[comm.rank]`` is the same number.
        held_bytes: the most bytes of these activations: of the arrays that `forward` has kept.
        sent_bytes: bytes of the outputs and gradients that this rank sent in the last step.
        times: begin and end of each of this rank's actions in the last step, in seconds on the
            clock of ``time.perf_counter``.

    Raises:
        TypeError, ValueError: a wrong argument; nothing has been sent.  Or two parameters have
            the same name; all ranks raise it.
        ScheduleError: the schedule is wrong; nothing has been sent.
        MismatchError: ranks passed different arguments; all ranks raise it.

    Example:
        >>> def program(comm):
        ...     sizes = (4, 8, 8, 3)
        ...     params = rr.train.mlp.views(rr.train.mlp.init_params(sizes, seed=1), sizes)
        ...     pipe = rr.train.PipelineParallel(comm, rr.train.mlp.layers(params), splits=4)
        ...     x, labels = np.ones((10, 4), np.float32), np.zeros(10, int)
        ...     loss = pipe.step(x, labels, count=10)
        ...     return pipe.stages, [*pipe.gradients], pipe.held
        >>> rr.spawn(program, 2)[0]
        ((0,), ['0.weight', '0.bias'], 2)
    """

    __module__ = "ringreduce.train"

    def __init__(
        self,
        comm: rr.Communicator,
        layers: Sequence[Layer | MakesLayer],
        *,
        split_size: int | None = None,
        splits: int | None = None,
        schedule: str = "1f1b",
        virtual: int = 1,
        cut: str | Sequence[int] = "balanced",
        costs: Sequence[float] | None = None,
        loss: Loss | None = None,
        xp: ModuleType = np,
        into: Into | None = None,
        on_gradient: Callable[[str, Array], Any] | None = None,
    ) -> None:
        self._comm, self._xp = comm, xp
        self._name, self._virtual = schedule, virtual
        _check_splits(split_size, splits)
        self._split_size = split_size
        self._plans: dict[int, tuple[_StagePlan, rr.pipeline.PipelineProof]] = {}
        plan, self.proof = self._plan(comm.size * virtual if splits is None else splits)
        self.schedule = plan.schedule
        self.cut = cut_of(layers, self.schedule.stages, cut, costs)
        self.stages = tuple(range(comm.rank, self.schedule.stages, comm.size))
        self._layers = stages_of(layers, self.cut, self.stages)
        self.layers = [layer for each in self._layers.values() for layer in each]
        self.parameters = {
            n: array for layer in self.layers for n, array in layer.parameters.items()
        }
        self._sums = GradientSums(self.parameters, self._places(into), on_gradient, xp)
        self.gradients = self._sums.sums
        self._loss = partial(cross_entropy, xp=xp) if loss is None else loss
        self._kinds: Kinds = {}
        self._most_rows: int | None = split_size
        self.held = self.held_bytes = self.sent_bytes = 0
        self.times: tuple[tuple[float, float], ...] = ()
        self._check_alike()

    def step(self, x: Array, labels: Array, count: int) -> float:
        """Compute the loss and the gradients of a batch.

        Every rank of the pipeline calls `step` for every batch.  If a layer raises an exception,
        let it leave the program's ``with`` block: the other ranks then raise PeerLostError.

        Args:
            x: samples of the batch, along the first axis; the rank of the first stage uses them.
                On another rank None will do, if `labels` are passed.
            labels: labels of these samples; the rank of the last stage uses them.  On another rank
                None will do, if `x` is passed.
            count: samples of the global batch.  The loss and the gradients are divided by it.

        Returns:
            The loss, equal on all ranks.

        Raises:
            TypeError: `x` is no array.
            ValueError: `x` and `labels` have different lengths, this rank lacks what it uses, or
                `count` is below 1.
            MismatchError: ranks passed different numbers of samples, or a gradient has another
                shape than the output of its stage.
            ScheduleError: with `split_size`, the schedule for this batch is wrong.
            PeerLostError: another rank has failed, for example by an exception in a layer.

        Example:
            >>> def program(comm):
            ...     sizes = (4, 8, 3)
            ...     params = rr.train.mlp.views(rr.train.mlp.init_params(sizes, seed=1), sizes)
            ...     pipe = rr.train.PipelineParallel(comm, rr.train.mlp.layers(params))
            ...     return round(pipe.step(np.zeros((5, 4), np.float32), np.zeros(5, int), 5), 4)
            >>> rr.spawn(program, 2)
            [1.0986, 1.0986]
        """
        if count < 1:
            raise ValueError(f"step: count is {shown(count)}; pass the samples of the global batch")
        rows, kind = self._agree("step", x, labels)
        plan, self.proof = self._plan(self._splits_of(rows))
        self.schedule = plan.schedule
        parts = _parts(rows, self.schedule.splits)
        self._most_rows = max(each.stop - each.start for each in parts)
        batch = SplitBatch(x, labels, count, parts)
        last = self.schedule.stages - 1
        work = StepOfStages(self._layers, last, batch, self._loss, self._sums)
        self.sent_bytes, self.times = self._run(plan, parts, kind, work.execute)
        self.held, self.held_bytes = work.held, work.held_bytes
        loss: float = self._comm.broadcast(np.float64(work.loss), root=self._last_rank).item()
        return loss

    def predict(
        self, x: Array, forward: Callable[[Layer, Array], Array] | None = None
    ) -> Array | None:
        """Return the output of the last layer, on the rank of the last stage.

        Every rank of the pipeline makes the call.  No microbatch is longer than those of the last
        step.

        Args:
            x: samples, along the first axis; the rank of the first stage uses them.
            forward: ``forward(layer, x)`` returns the output of a layer.  None: its `forward`.

        Returns:
            The output for all samples; None on the other ranks.

        Raises:
            TypeError, ValueError: `x` is no array.
            MismatchError: ranks passed different numbers of samples.
            PeerLostError: another rank has failed.

        Example:
            >>> def program(comm):
            ...     sizes = (4, 8, 3)
            ...     params = rr.train.mlp.views(rr.train.mlp.init_params(sizes, seed=1), sizes)
            ...     pipe = rr.train.PipelineParallel(comm, rr.train.mlp.layers(params))
            ...     logits = pipe.predict(np.zeros((5, 4), np.float32))
            ...     return None if logits is None else logits.shape
            >>> rr.spawn(program, 2)
            [None, (5, 3)]
        """
        rows, kind = self._agree("predict", x, x)
        most = self._most_rows or -(-rows // self.schedule.splits)
        parts = _parts(rows, max(1, -(-rows // max(1, most))))
        outputs: list[Array] = []

        def execute(action: rr.pipeline.Action, given: Array | None) -> Array | None:
            y = x[parts[action.microbatch]] if action.stage == 0 else given
            for layer in self._layers[action.stage]:
                y = layer.forward(y)[0] if forward is None else forward(layer, y)
            if action.stage < self.schedule.stages - 1:
                return y
            outputs.append(y)
            return None

        schedule = rr.pipeline.PipelineSchedule(
            "predict", self._comm.size, len(parts), self._virtual, _forwards
        )
        self._run(_StagePlan.of(schedule, self._comm.rank, 1), parts, kind, execute)
        return self._xp.concatenate(outputs) if outputs else None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the arrays of gradients: the sums, and those of one more microbatch."""
        return self._sums.nbytes

    # --- implementation ---

    def _places(self, into: Into | None) -> Mapping[str, Array]:
        """Return the arrays in which gradients are added up."""
        return into(self.parameters) if callable(into) else into or {}

    @property
    def _last_rank(self) -> int:
        return self.schedule.rank_of(self.schedule.stages - 1)

    def _splits_of(self, rows: int) -> int:
        """Return the number of microbatches of a batch."""
        if self._split_size is None:
            return self.schedule.splits
        return splits_of_size(rows, self._split_size, self._name, self._comm.size)

    def _plan(self, splits: int) -> tuple[_StagePlan, rr.pipeline.PipelineProof]:
        """Return this rank's plan for a number of microbatches, and the proof of its schedule."""
        if splits not in self._plans:
            schedule = rr.pipeline.schedule(self._name, self._comm.size, splits, self._virtual)
            proof = rr.pipeline.prove(schedule)
            plan = _StagePlan.of(schedule, self._comm.rank, max(1, proof.posted_ahead))
            self._plans[splits] = plan, proof
        return self._plans[splits]

    def _run(
        self,
        plan: _StagePlan,
        parts: Sequence[slice],
        kind: int,
        execute: Callable[[rr.pipeline.Action, Array | None], Array | None],
    ) -> tuple[int, tuple[tuple[float, float], ...]]:
        """Execute the actions of a plan; return the bytes sent, and the times of the actions."""

        def key(payload: rr.pipeline.Payload) -> Key:
            rows = parts[payload.microbatch]
            return payload.stage, rows.stop - rows.start, kind

        messages: OnOneRank | BetweenRanks = OnOneRank(plan.acts)
        if self._comm.size > 1:
            messages = BetweenRanks(self._comm, plan.steps, plan.ahead, key, self._kinds, self._xp)
        times = []
        for number, action in enumerate(plan.acts):
            given = messages.receive(number)
            with rr.span(f"{action.kind} {action.microbatch}"):
                begin = time.perf_counter()
                result = execute(action, given)
                times.append((begin, time.perf_counter()))
            messages.send(number, result)
        messages.finish()
        return messages.sent_bytes, tuple(times)

    def _agree(self, where: str, x: Any, labels: Any) -> tuple[int, int]:
        """Return the number of samples, and a hash of x's dtype and row shape.  Collective."""
        needed = [("x", x, 0)] + ([("labels", labels, self._last_rank)] if where == "step" else [])
        for name, array, rank in needed:
            if array is None and (rank == self._comm.rank or (x is None and labels is None)):
                raise ValueError(f"{where}: {name} is None; pass an array")
        rows = len(labels if x is None else x)
        if labels is not None and len(labels) != rows:
            raise ValueError(
                f"{where}: x has {counted(rows, 'sample')} and labels {len(labels)}; pass a label "
                "for each"
            )
        kind = 0
        if self._comm.rank == 0:
            if not hasattr(x, "dtype"):
                raise TypeError(f"{where}: x is {type(x).__name__}; pass an array")
            kind = zlib.crc32(f"{x.dtype} {x.shape[1:]}".encode())
        every = self._comm.all_gather(np.array([[rows, kind]]), counts=[1] * self._comm.size)
        for rank, (theirs, _) in enumerate(every.tolist()):
            if theirs != every[0, 0]:
                raise rr.MismatchError(
                    f"{where}: rank {rank} passes {counted(theirs, 'sample')}, rank 0 passes "
                    f"{every[0, 0]}; every rank must pass the same number of samples"
                )
        return rows, int(every[0, 1])

    def _check_alike(self) -> None:
        """Raise on all ranks if their arguments differ, or two parameters have one name."""
        mine = [
            f"schedule {self._name!r}",
            f"virtual {self._virtual}",
            f"split_size {self._split_size}",
            f"splits {self.schedule.splits}",
            f"cut {list(self.cut)}",
        ]
        names = [name for layer in self.layers for name in layer.parameters]
        lists = gather_words(self._comm, [*mine, *names])
        for rank, words in enumerate(lists):
            for theirs, wanted in zip(words[: len(mine)], lists[0], strict=False):
                if theirs != wanted:
                    raise rr.MismatchError(
                        f"PipelineParallel: rank {rank} passes {theirs}, rank 0 passes {wanted}; "
                        "every rank must pass the same arguments"
                    )
        every = Counter(name for words in lists for name in words[len(mine) :])
        for name, count in every.items():
            if count > 1:
                raise ValueError(
                    f"PipelineParallel: {count} parameters have the name {name!r}; pass layers "
                    "whose parameters have different names"
                )


def _check_splits(split_size: int | None, splits: int | None) -> None:
    if splits is not None and split_size is not None:
        raise ValueError("PipelineParallel: got splits and split_size; pass one of them")
    if split_size is not None and (not isinstance(split_size, int) or split_size < 1):
        raise ValueError(
            f"PipelineParallel: split_size is {shown(split_size)}; pass an int of at least 1"
        )


def _parts(rows: int, splits: int) -> list[slice]:
    return [part(rows, number, splits) for number in range(splits)]


def _forwards(ranks: int, rank: int, splits: int, virtual: int) -> Any:
    """Yield the forwards of all microbatches, each through all stages of the rank."""
    for microbatch in range(splits):
        for stage in range(rank, ranks * virtual, ranks):
            yield rr.pipeline.Action(stage, "F", microbatch)
