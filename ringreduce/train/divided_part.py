"""Parts of a model that is divided by layers, and inside layers: pipeline, tensor and hybrid."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.parallel.data_parallel import DataParallel
from ringreduce.parallel.equality import on_host
from ringreduce.parallel.mesh import Coordinates, Mesh
from ringreduce.parallel.pipeline_parallel import PipelineParallel
from ringreduce.train import mlp, optimizers, tensor_parallel
from ringreduce.train.parts import Metered, Part, Run


class Divided(Part):
    """A stage of the model, of whose layers this rank has columns or rows.

    The ranks are a `Mesh`.  A pipeline of its ranks computes a replica of the model, and each stage
    is computed by a tensor group.  An all-reduce adds up the gradients of the replicas.
    """

    def __init__(
        self,
        run: Run,
        sizes: Coordinates,
        *,
        schedule: str = "1f1b",
        splits: int | None = None,
        split_size: int | None = None,
        virtual: int = 1,
        cut: str | Sequence[int] = "balanced",
    ) -> None:
        super().__init__(run)
        self._mesh = mesh = Mesh(run.comm, *sizes)
        self.replica, self.replicas = mesh.coordinates.data, sizes.data
        run.comm.all_reduce(np.empty(0), algorithm=run.algorithm)  # refuses an unknown one
        self._tensor = Metered(mesh.tensor, run.algorithm)
        self._samples = Metered(mesh.data, run.algorithm)
        self.metered = self._tensor, self._samples
        self._columns = tensor_parallel.TensorParallel(self._tensor, run.sizes, run.xp)
        whole = run.init_params()
        costs: dict[int, int] = {}
        for name, array in whole.items():
            costs[_layer_of(name)] = costs.get(_layer_of(name), 0) + array.size
        own = tensor_parallel.cut(whole, self._tensor.rank, self._tensor.size)
        self.reducer: DataParallel | None = None
        self.pipe = PipelineParallel(
            mesh.pipeline,
            self._columns.layers(own, self._samples),
            splits=splits,
            split_size=split_size,
            schedule=schedule,
            virtual=virtual,
            cut=cut,
            costs=[*costs.values()] if cut == "balanced" else None,
            loss=self._columns.cross_entropy,
            xp=run.xp,
            into=self._buffers,
            on_gradient=self._ready,
        )
        for layer in self._layers():
            layer.pace = run.pace
        self._slots = {
            slot: {name: run.xp.zeros_like(array) for name, array in self.pipe.parameters.items()}
            for slot in run.slots
        }
        rank, ranks = self._tensor.rank, self._tensor.size
        running = tensor_parallel.cut(run.init_statistics(), rank, ranks)
        self.running = {name: array for name, array in running.items() if self._has(name)}
        self.counts = self._has(f"{len(run.sizes) - 2}.weight") and self._tensor.rank == 0
        place = mesh.coordinates
        self.group = place.pipeline * run.comm.size + place.tensor

    # --- a step ---

    def gradients(self, x: Any, labels: Any, count: int) -> float:
        """Compute and reduce the gradients of a batch.  Return the loss of this replica."""
        self._tensor.begin()
        self._samples.begin()
        begin = time.perf_counter()
        loss = self.pipe.step(x, labels, count)
        computed_s = sum(end - at for at, end in self.pipe.times)
        self.waited_s = time.perf_counter() - begin - computed_s
        self.statistics = mlp.statistics_in(self._layers())
        self.activation_bytes = max(self.activation_bytes, self.pipe.held_bytes)
        if self.reducer is not None:
            self.reducer.finish()
        return loss

    def _buffers(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays in which the gradients of this rank's parameters are added up."""
        if self.replicas == 1:
            return {}
        self.reducer = dp = self.run.data_parallel(parameters, self._mesh.data)
        return {name: dp.buffer(name) for name in parameters}

    def _ready(self, name: str, gradient: Any) -> None:
        """Reduce a gradient that is complete on this replica."""
        if self.reducer is not None:
            self.reducer.ready(name, gradient)

    def _layers(self) -> Iterator[mlp.Affine]:
        for layer in self.pipe.layers:
            assert isinstance(layer, mlp.Affine)
            yield layer

    def reduced(self) -> dict[str, Any]:
        return dict(self.pipe.gradients)

    def counted(self) -> list[Any]:
        """Return the gradients that this rank counts: those of the first replica."""
        if self.replica:
            return []
        return tensor_parallel.counted(self.pipe.gradients, self._tensor.rank)

    def update(self, lr: float, step: int) -> None:
        for name, gradient in self.pipe.gradients.items():
            arrays = self.pipe.parameters[name], *(each[name] for each in self._slots.values())
            optimizers.in_blocks(self._update, arrays, gradient, lr, step)

    @property
    def sent_bytes(self) -> int:
        return super().sent_bytes + self.pipe.sent_bytes

    @property
    def state_bytes(self) -> int:
        parameters = sum(int(array.nbytes) for array in self.own())
        return parameters * (1 + len(self._slots)) + self.pipe.gradient_bytes

    # --- evaluation, and proofs ---

    def right(self, x: Any, labels: Any) -> int:
        """As `Part.right`; only the ranks of the last stage know."""

        def predict(layer: Any, rows: Any) -> Any:
            return layer.predict(rows, self.running)

        logits = self.pipe.predict(x, predict)
        if logits is None:
            return 0
        return int((self._columns.classes(logits) == labels).sum())

    def own(self) -> list[Any]:
        return list(self.pipe.parameters.values())

    # --- the whole model ---

    def whole(self) -> dict[str, Any]:
        return self._gather(self.pipe.parameters, self.run.init_params())

    def arrays(self) -> dict[str, np.ndarray]:
        like = self.run.init_params()
        found = self._gather(self.pipe.parameters, like)
        for slot, arrays in self._slots.items():
            whole = self._gather(arrays, like)
            found |= {f"{slot}/{name}": array for name, array in whole.items()}
        whole = self._gather(self.running, self.run.init_statistics())
        found |= {f"running/{name}": array for name, array in whole.items()}
        return {name: on_host(array) for name, array in found.items()}

    def load(self, arrays: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        rank, ranks = self._tensor.rank, self._tensor.size
        like = self.run.init_params()
        for prefix, own in self._by_prefix():
            whole_like = self.run.init_statistics() if prefix == "running/" else like
            for name, array in whole_like.items():
                whole = array if arrays is None else self.run.xp.asarray(arrays[prefix + name])
                received = self.run.comm.broadcast(whole, root=0)
                if name in own:
                    part = tensor_parallel.slices(name, received.shape, rank, ranks)
                    own[name][...] = received[part]
        return {}

    def close(self) -> None:
        self._mesh.close()

    def _by_prefix(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield "", self.pipe.parameters
        for slot, arrays in self._slots.items():
            yield f"{slot}/", arrays
        yield "running/", self.running

    def _gather(self, own: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole arrays, of which this rank has parts of some; `like` has their shapes."""
        whole = tensor_parallel.gather(self._mesh.tensor, own, self.run.xp)
        return {
            name: self._mesh.pipeline.broadcast(whole.get(name, array), root=self._rank_of(name))
            for name, array in like.items()
        }

    def _rank_of(self, name: str) -> int:
        """Return the rank of the pipeline that has the layer of an array."""
        layer, end = _layer_of(name), 0
        for stage, layers in enumerate(self.pipe.cut):
            end += layers
            if layer < end:
                return self.pipe.schedule.rank_of(stage)
        raise AssertionError(f"no stage has layer {layer}")

    def _has(self, name: str) -> bool:
        return self._rank_of(name) == self._mesh.coordinates.pipeline


def _layer_of(name: str) -> int:
    return int(name.partition(".")[0])
