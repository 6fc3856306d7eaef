"""The part of a model that one rank has, and how it computes, reduces and updates it.

`Trainer` is the same for all strategies.  A strategy decides which `Part` each rank has.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr
from ringreduce.parallel import sampler
from ringreduce.parallel.data_parallel import DataParallel, average
from ringreduce.parallel.mesh import Mesh
from ringreduce.parallel.over_ranks import check_replicas, clip, global_norm, on_host
from ringreduce.parallel.reducer import StepTimes
from ringreduce.parallel.sharded_parallel import ShardedParallel
from ringreduce.parallel.stages import activation_bytes
from ringreduce.train import mlp, optimizers, tensor_parallel
from ringreduce.train.pace import ComputePace
from ringreduce.train.settings import Settings
from ringreduce.train.steps import Store

Arrays = Mapping[str, Any]
_FORGOTTEN = 0.1
"""Share of a running mean that a step's statistics replace, once ten steps are made."""


@dataclass(frozen=True)
class Run:
    """What all parts of a run are made from."""

    comm: rr.Communicator
    sizes: tuple[int, ...]
    settings: Settings
    algorithm: str
    xp: ModuleType
    pace: ComputePace | None = None

    def init_params(self) -> dict[str, Any]:
        settings = self.settings
        dtype, norm = settings.dtype, settings.batch_norm
        flat = mlp.init_params(self.sizes, settings.seed, dtype, self.xp, norm)
        return mlp.named(mlp.views(flat, self.sizes, norm))

    def init_statistics(self) -> dict[str, Any]:
        """Return the running means before the first step, by their names in a checkpoint."""
        found = mlp.init_statistics(self.sizes, self.xp) if self.settings.batch_norm else {}
        return {f"running/{name}": array for name, array in found.items()}

    def with_slots(self, parameters: Arrays) -> dict[str, Any]:
        """Return parameters and new arrays of the optimizer, by their names in a checkpoint."""
        zeros = {
            f"{slot}/{name}": self.xp.zeros_like(array)
            for slot in self.slots
            for name, array in parameters.items()
        }
        return {**parameters, **zeros}

    def data_parallel(self, parameters: Arrays, comm: Any = None) -> DataParallel:
        """Return what adds up the gradients of all ranks, or of those of `comm`.  Collective."""
        settings = self.settings
        return DataParallel(
            self.comm if comm is None else comm,
            parameters,
            first_bucket_bytes=settings.first_bucket_bytes,
            bucket_bytes=settings.bucket_bytes,
            op="sum",
            wire=None if settings.wire == "none" else settings.wire,
            algorithm=self.algorithm,
        )

    @property
    def slots(self) -> tuple[str, ...]:
        return optimizers.SLOTS[self.settings.optimizer]


class Metered:
    """Stands in for a communicator; adds up the time and the bytes of its all-reduces."""

    def __init__(self, comm: rr.Communicator, algorithm: str) -> None:
        self._comm, self._algorithm = comm, algorithm
        self.seconds = 0.0
        self.sent_bytes = 0
        self._sizes: dict[tuple[Any, ...], int] = {}

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None) -> Any:
        begin = time.perf_counter()
        try:
            return self._comm.all_reduce(x, op, out=out, algorithm=self._algorithm)
        finally:
            self.seconds += time.perf_counter() - begin
            self.sent_bytes += self._sent(x)

    def _sent(self, x: Any) -> int:
        kind = x.shape, x.dtype
        if kind not in self._sizes:
            count = self._comm.sent_bytes("all_reduce", x, algorithm=self._algorithm)
            self._sizes[kind] = count
        return self._sizes[kind]

    def begin(self) -> None:
        self.seconds, self.sent_bytes = 0.0, 0


class StageOwner(NamedTuple):
    """The ranks of one stage of a pipeline have an array, in the parts of `tensor_parallel`."""

    stage_rank: int
    """Rank of the pipeline that has the stage."""


EVERYWHERE = "everywhere"
"""All ranks have the same array."""
EACH = "each"
"""Each rank has an array of its own, whose mean is in checkpoints."""
SHARD = "shard"
"""The reducer of a rank has a shard of the array."""
Place = StageOwner | str


class Part(ABC):
    """What one rank has of the model.  Every rank makes the same calls.

    A subclass computes gradients, and says in `stored` and `places` where each array is.  From
    these this class makes steps, checkpoints, norms and proofs, and counts bytes.
    """

    replica = 0
    """Index of the part of each batch that this rank computes."""
    replicas = 1
    """Number of parts into which each batch is divided."""
    counts = True
    """Whether the loss and the right predictions of this rank count: of the ranks that compute
    the same samples, one does."""
    losses = 1
    """The number of losses that `gradients` returns."""
    every = 0
    """Steps from one call of `meet` to the next.  0: ranks communicate in every step."""
    blame = ""
    """Words that name the rank whose loss is infinite, if it is known."""
    group: int | None = 0
    """Ranks of the same group have the same parameters.  None: no other rank has this rank's."""
    reducer: DataParallel | ShardedParallel | None = None
    """What reduces the gradients of this rank."""
    mesh: Mesh | None = None
    metered: tuple[Metered, ...] = ()
    """The communicators of all other all-reduces of a step."""
    waited_s = 0.0
    """Seconds of the last step in other calls that wait for ranks."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._update = optimizers.update(run.settings)
        self._shapes = shapes(run.sizes, run.settings)
        self._names = {
            name: (name, *(f"{slot}/{name}" for slot in run.slots))
            for name in self._shapes
            if "/" not in name
        }
        """Name of a parameter -> names of it and of the optimizer's arrays."""
        self.places: dict[str, Place] = dict.fromkeys(self._shapes, EVERYWHERE)
        """Name of each array of the whole model in a checkpoint -> where it is."""
        self.stored: dict[str, Any] = {}
        """This rank's arrays by name, which the trainer's store keeps; shards are in `reducer`."""
        self.running: dict[str, Any] = {}
        """Running means of batch normalisation, of the layers on this rank."""
        self.statistics: dict[str, Any] = {}
        """Means and variances of the last global batch."""
        self.activation_bytes = 0
        """The most bytes of activations that a step has held."""
        self._most_rows = 0
        self._reduced: dict[str, Any] = {}
        self.staleness: dict[str, Any] = {}
        """The fields `staleness_…` of an `Epoch`; {} without a parameter server."""

    def _hold(self, rows: int, kept: Any) -> None:
        """Count the bytes of the activations `kept` of a batch, if it is the longest so far."""
        if rows > self._most_rows:
            self._most_rows = rows
            self.activation_bytes = activation_bytes(kept)

    def rows(self, count: int) -> slice:
        """Return the rows of a global batch of `count` that this replica computes."""
        return sampler.part(count, self.replica, self.replicas)

    # --- a step ---

    @abstractmethod
    def gradients(self, x: Any, labels: Any, count: int) -> float | np.ndarray:
        """Compute and reduce a batch's gradients; return this rank's share of each of `losses`."""

    def reduced(self) -> dict[str, Any]:
        """Return the gradients that `gradients` has reduced, of this rank's parameters, by name."""
        return self._reduced

    def counted(self) -> list[Any]:
        """Return the gradients that this rank counts in the norm: each number has one rank."""
        if self.mesh is not None:
            rank = self.mesh.tensor.rank
            return [] if self.replica else tensor_parallel.counted(self.reduced(), rank)
        if self.reducer is not None:
            return self.reducer.shard
        return list(self.reduced().values()) if self.run.comm.rank == 0 else []

    def update(self, lr: float, step: int) -> None:
        """Make the optimizer's step on this rank's parameters, inside an update of the store."""
        old, new = self.stored, {**self.stored}
        for name, gradient in self.reduced().items():
            names = self._names[name]
            out = tuple([self._store.empty(each) for each in names])
            before = tuple([old[each] for each in names])
            optimizers.in_blocks(self._update, before, gradient, lr, step, out)
            new.update(zip(names, out, strict=True))
        for name in self.running:
            new[f"running/{name}"] = self._store[f"running/{name}"]
        self._take(new)

    def meet(self) -> None:  # noqa: B027  # most parts have no weights of their own
        """Average what this rank has changed alone, inside an update of the store.  Collective."""

    def clip(self, longest: float) -> None:
        """Scale the gradients down if their norm over all ranks is larger than `longest`."""
        clip(self.reduced().values(), global_norm(self.counted(), self.run.comm), longest)

    def average_statistics(self, step: int) -> None:
        """Update the running means by the statistics of a step, numbered from 0.

        The first steps count alike, so that the mean does not remember its initial value.
        """
        share = max(_FORGOTTEN, 1 / (step + 1))
        for name, value in self.statistics.items():
            self.running[name] += share * (value - self.running[name])

    @property
    def times(self) -> tuple[float, float]:
        """Seconds of communication and of exposed communication in the last step."""
        times = StepTimes(0.0, 0.0) if self.reducer is None else self.reducer.times
        exposed_s = self.waited_s + sum(each.seconds for each in self.metered)
        return times.communication_s + exposed_s, times.exposed_s + exposed_s

    # --- what it costs ---

    @property
    def sent_bytes(self) -> int:
        """Bytes of data that this rank has sent in the last step."""
        reduced = 0 if self.reducer is None else self.reducer.sent_bytes
        return reduced + sum(each.sent_bytes for each in self.metered)

    @property
    def gradient_bytes(self) -> int:
        return sum(int(array.nbytes) for array in self.parameters())

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer's arrays and buffers on this rank."""
        steps = sum(int(a.nbytes) for n, a in self.own.items() if not n.startswith("running/"))
        copies = 2 if isinstance(self._store, rr.State) else 1  # a State has two slots
        return copies * steps + self.gradient_bytes

    @property
    def held_bytes(self) -> int:
        """The most bytes that this rank has held: `state_bytes` and activations."""
        return self.state_bytes + self.activation_bytes

    # --- evaluation, and proofs ---

    def total(self, array: np.ndarray, op: str = "sum") -> Any:
        """Return the sum, or the mean, of what all ranks have counted.  Collective."""
        return self.run.comm.all_reduce(array, op, algorithm=self.run.settings.algorithm)

    @abstractmethod
    def classes(self, x: Any) -> Any:
        """Return the predicted class of each sample; None on ranks without the last layer."""

    def right(self, x: Any, labels: Any) -> int:
        """Return how many of this replica's held-out samples are predicted right."""
        found = self.classes(x)
        return 0 if found is None else int((found == labels).sum())

    def parameters(self) -> Iterable[Any]:
        """Return this rank's parameters, or its shards of them, one at a time on the device."""
        if isinstance(self.reducer, ShardedParallel):
            return map(self.run.xp.asarray, self.reducer.own)
        return (array for name, array in self.own.items() if "/" not in name)

    def check_equal(self) -> None:
        """Prove that replicas have bitwise the same parameters.  Raises DriftError on all ranks."""
        if self.group is not None:
            flat = self.run.xp.concatenate([array.reshape(-1) for array in self.parameters()])
            check_replicas(self.run.comm, flat, self.group)

    def all_finite(self) -> bool:
        isfinite = self.run.xp.isfinite
        bad = sum(int(not bool(isfinite(array).all())) for array in self.parameters())
        return not self.run.comm.all_reduce(np.array([bad]))[0]

    # --- where the arrays are ---

    @property
    def own(self) -> Mapping[str, Any]:
        """This rank's arrays, by their names in a checkpoint; shards are in `reducer`."""
        return self.stored

    def use(self, store: Store) -> None:
        """Take the arrays of `stored` from the store, which has copies of them."""
        self._store = store
        self._take({name: store[name] for name in self.stored})

    def _take(self, arrays: dict[str, Any]) -> None:
        """Compute with these arrays from now on."""
        self.stored = arrays
        running = (name for name in arrays if name.startswith("running/"))
        self.running = {name.partition("/")[2]: arrays[name] for name in running}

    def whole(self) -> dict[str, Any]:
        """Return the parameters of the whole model, by name, the same on all ranks.  Collective."""
        return {name: self.run.xp.asarray(array) for name, array in self._gather(self._names)}

    def flat(self) -> Any:
        """Return the parameters of the whole model as one array.  Collective."""
        return self.run.xp.concatenate([array.reshape(-1) for array in self.whole().values()])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the content of a checkpoint: all arrays that steps change.  Collective."""
        found = {name: on_host(array) for name, array in self._gather(self._shapes)}
        means = {n: array.copy() for n, array in found.items() if self.places[n] == EACH}
        if means:
            average(self.run.comm, means)
        return found | means

    def _gather(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield the names and the whole arrays; of `EACH`, this rank's.  Collective."""
        reducer, own = self.reducer, self.own
        shards = reducer.arrays() if isinstance(reducer, ShardedParallel) else {}
        for name in names:
            place = self.places[name]
            if isinstance(place, StageOwner):
                assert self.mesh is not None
                array = self._new(name)
                if place.stage_rank == self.mesh.pipeline.rank:
                    parts = {name: own[name]}
                    array = tensor_parallel.gather(self.mesh.tensor, parts, self.run.xp)[name]
                yield name, self.mesh.pipeline.broadcast(array, root=place.stage_rank)
            else:
                yield name, shards[name] if place == SHARD else own[name]

    def _new(self, name: str) -> Any:
        """Return an uninitialised array like a whole one."""
        dtype = np.float64 if name.startswith("running/") else self.run.settings.dtype
        return self.run.xp.empty(self._shapes[name], dtype)

    def load(self, arrays: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        """Set all arrays to rank 0's `arrays`; return those for the store.  Collective."""
        if isinstance(self.reducer, ShardedParallel):
            self.reducer.load(arrays)
        loaded = {}
        for name, place in self.places.items():
            if place == SHARD:
                continue
            whole = self._new(name)
            if arrays is not None:
                whole[...] = self.run.xp.asarray(arrays[name])
            self.run.comm.broadcast(whole, root=0, out=whole)
            if not isinstance(place, StageOwner):
                loaded[name] = whole
            elif self.mesh is not None and place.stage_rank == self.mesh.pipeline.rank:
                tensor = self.mesh.tensor
                part = tensor_parallel.slices(name, whole.shape, tensor.rank, tensor.size)
                loaded[name] = whole[part].copy()
        return loaded

    def close(self) -> None:
        """Close the communicators that this part has made.  Collective."""
        if self.mesh is not None:
            self.mesh.close()


def shapes(sizes: Sequence[int], settings: Settings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays in a checkpoint, by name."""
    norm = settings.batch_norm
    network = mlp.views(np.empty(mlp.parameter_count(sizes, norm)), sizes, norm)
    ours = {name: array.shape for name, array in mlp.named(network).items()}
    slots = {
        f"{slot}/{name}": shape
        for slot in optimizers.SLOTS[settings.optimizer]
        for name, shape in ours.items()
    }
    running = mlp.init_statistics(sizes) if norm else {}
    return ours | slots | {f"running/{name}": array.shape for name, array in running.items()}
