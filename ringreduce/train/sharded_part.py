"""Parts whose gradients meet by a reduce-scatter: `Zero` and `CentralStorage`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ringreduce.parallel.clipping import clip, global_norm
from ringreduce.parallel.equality import on_host
from ringreduce.parallel.layers import cross_entropy
from ringreduce.parallel.sharded_parallel import CentralParallel, ShardedParallel
from ringreduce.train import mlp, optimizers
from ringreduce.train.parts import Metered, Part, Run, of_running, spread

_ROWS = 32
"""Rows that a layer predicts at a time; see `mlp.right`."""


class Sharded(Part):
    """A shard of the optimizer's arrays on every rank, and of what else a stage of ZeRO divides."""

    def __init__(self, run: Run, stage: int | None) -> None:
        """Make a part.  Stage None is central storage: the parameters are once in host memory."""
        super().__init__(run)
        self._is_central = stage is None
        make: Callable[..., ShardedParallel] = CentralParallel
        if stage is not None:
            make = partial(ShardedParallel, stage=stage)
        settings = run.settings
        self.replica, self.replicas = run.comm.rank, run.comm.size
        self.group = 0 if stage in (1, 2) else None
        self._depth = len(run.sizes) - 1
        self.reducer: ShardedParallel = make(
            run.comm,
            run.init_params(),
            slots=run.slots,
            first_bucket_bytes=settings.first_bucket_bytes,
            bucket_bytes=settings.bucket_bytes,
            op="sum",
            algorithm=run.algorithm,
        )
        self.running = run.init_statistics()
        self._normalising = Metered(run.comm, run.algorithm)
        self.metered = (self._normalising,)
        self._most_bytes = 0

    def gradients(self, x: Any, labels: Any, count: int) -> float:
        self._normalising.begin()
        network, kept = [], []
        for arrays in self.reducer.forward():
            layer = self._layer(arrays)
            x, of_layer = layer.forward(x)
            network.append(layer)
            kept.append(of_layer)
        self.statistics = mlp.statistics_in(network)
        self._hold(len(labels), kept)
        del network
        loss, gradient = cross_entropy(x, labels, count, self.run.xp)
        for arrays, of_layer in zip(self.reducer.backward(), reversed(kept), strict=True):
            gradient, gradients = self._layer(arrays).backward(of_layer, gradient, {})
            for name, of_parameter in gradients:
                sent = on_host(of_parameter) if self._is_central else of_parameter
                self.reducer.ready(name, sent)
        self._most_bytes = max(self._most_bytes, self.reducer.held_bytes)
        self.reducer.finish()
        return float(loss)

    def _layer(self, arrays: Mapping[str, Any]) -> mlp.Affine:
        xp = self.run.xp
        on_device = {name: xp.asarray(array) for name, array in arrays.items()}
        ((number, of_layer),) = mlp.by_layer(on_device).items()
        last = number == self._depth - 1
        layer = mlp.Affine(number, of_layer, last=last, xp=xp, samples=self._normalising)
        layer.pace = self.run.pace
        return layer

    def reduced(self) -> dict[str, Any]:
        """Return copies of the gradients, gathered from all ranks.  Collective."""
        return self.reducer.gradients()

    def clip(self, longest: float) -> None:
        shard = self.counted()
        clip(shard, global_norm(shard, self.run.comm), longest)

    def update(self, lr: float, step: int) -> None:
        def of_shard(parameters: Any, own: tuple[Any, ...], gradient: Any) -> None:
            optimizers.in_blocks(self._update, (parameters, *own), gradient, lr, step)

        self.reducer.step(of_shard)
        self._most_bytes = max(self._most_bytes, self.reducer.held_bytes)

    @property
    def state_bytes(self) -> int:
        """The most bytes of parameters, gradients, optimizer's arrays and buffers."""
        return self._most_bytes

    def right(self, x: Any, labels: Any) -> int:
        blocks = [x[start : start + _ROWS] for start in range(0, len(x), _ROWS)]
        for arrays in self.reducer.forward():
            layer = self._layer(arrays)
            blocks = [layer.predict(block, self.running) for block in blocks]
        found = [block.argmax(axis=1) for block in blocks]
        return int((self.run.xp.concatenate(found) == labels).sum()) if found else 0

    def own(self) -> Iterable[Any]:
        return map(self.run.xp.asarray, self.reducer.own)

    def whole(self) -> dict[str, Any]:
        whole = self.reducer.arrays().items()
        return {name: self.run.xp.asarray(array) for name, array in whole if "/" not in name}

    def arrays(self) -> dict[str, np.ndarray]:
        whole = self.reducer.arrays() | of_running(self.running)
        return {name: on_host(array) for name, array in whole.items()}

    def load(self, arrays: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        self.reducer.load(arrays)
        spread(self.run, of_running(self.running), arrays)
        return {}
