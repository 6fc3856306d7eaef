"""Parts of a model that is divided by layers, and inside layers: pipeline, tensor and hybrid."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.parallel.data_parallel import DataParallel
from ringreduce.parallel.mesh import Coordinates, Mesh
from ringreduce.parallel.pipeline_parallel import PipelineParallel
from ringreduce.train import mlp, tensor_parallel
from ringreduce.train.parts import Metered, Part, Run, StageOwner


class Divided(Part):
    """A stage of the model, of whose layers this rank has columns or rows.

    The ranks are a `Mesh`.  A pipeline of its ranks computes a replica of the model, and each stage
    is computed by a tensor group.  An all-reduce adds up the gradients of the replicas.
    """

    mesh: Mesh

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
        self.mesh = mesh = Mesh(run.comm, *sizes)
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
        ranks_of = [
            self.pipe.schedule.rank_of(stage)
            for stage, layers in enumerate(self.pipe.cut)
            for _ in range(layers)
        ]
        self.places = {name: StageOwner(ranks_of[_layer_of(name)]) for name in self.places}
        running = tensor_parallel.cut(run.init_statistics(), self._tensor.rank, self._tensor.size)
        place = mesh.coordinates
        mine = StageOwner(place.pipeline)
        running = {name: array for name, array in running.items() if self.places[name] == mine}
        self.stored = run.with_slots(self.pipe.parameters) | running
        self.counts = ranks_of[-1] == place.pipeline and self._tensor.rank == 0
        self.group = place.pipeline * run.comm.size + place.tensor

    def gradients(self, x: Any, labels: Any, count: int) -> float:
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
        self.reducer = dp = self.run.data_parallel(parameters, self.mesh.data)
        return {name: dp.buffer(name) for name in parameters}

    def _ready(self, name: str, gradient: Any) -> None:
        if self.reducer is not None:
            self.reducer.ready(name, gradient)

    def _layers(self) -> Iterator[mlp.Affine]:
        for layer in self.pipe.layers:
            assert isinstance(layer, mlp.Affine)
            yield layer

    def reduced(self) -> dict[str, Any]:
        return dict(self.pipe.gradients)

    @property
    def sent_bytes(self) -> int:
        return super().sent_bytes + self.pipe.sent_bytes

    @property
    def gradient_bytes(self) -> int:
        return self.pipe.gradient_bytes

    def classes(self, x: Any) -> Any:
        def predict(layer: Any, rows: Any) -> Any:
            return layer.predict(rows, self.running)

        logits = self.pipe.predict(x, predict)
        return None if logits is None else self._columns.classes(logits)


def _layer_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition(".")[0])
