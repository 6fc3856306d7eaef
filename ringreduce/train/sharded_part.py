"""Parts whose gradients meet by a reduce-scatter: `Zero` and `CentralStorage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ringreduce.parallel.layers import cross_entropy
from ringreduce.parallel.over_ranks import clip, global_norm, on_host
from ringreduce.parallel.sharded_parallel import CentralParallel, ShardedParallel
from ringreduce.train import mlp, optimizers
from ringreduce.train.parts import SHARD, Metered, Part, Run


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
        self.stored = run.init_statistics()
        self.places |= {name: SHARD for name in self.places if name not in self.stored}
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
        return self._most_bytes

    def classes(self, x: Any) -> Any:
        blocks = list(mlp.blocks_of(x))
        for arrays in self.reducer.forward():
            layer = self._layer(arrays)
            blocks = [layer.predict(block, self.running) for block in blocks]
        return self.run.xp.concatenate(blocks).argmax(axis=1)
