"""The part of a rank of strategy tpu: the network of `mlp`, computed by JAX in float32.

Parameters, their gradients and the optimizer's arrays are on JAX's default device.  NumPy's arrays
and JAX's are exchanged by DLPack.  On JAX's CPU backend a gradient is reduced from the memory that
JAX wrote it to, and a reduced gradient that is aligned to 64 bytes is read where it is.  Other
devices have memory of their own: JAX copies gradients to the host, and back.

A batch is one program of JAX, so all gradients are final at the same time: their all-reduces
overlap each other, and no computation.  JAX compiles the program once for each length of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce.parallel.data_parallel import DataParallel
from ringreduce.train import mlp, optimizers
from ringreduce.train.parts import Part, Run

Layers = tuple[mlp.AffineArrays, ...]
"""An array for each parameter: the parameters, their gradients, or one kind of an optimizer's."""


class JaxReplica(Part):
    """All parameters on every rank, on a device of JAX; an all-reduce adds up the gradients."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        settings = run.settings
        self.replica, self.replicas = run.comm.rank, run.comm.size
        self._device = jnp.zeros(()).device
        flat = mlp.init_params(run.sizes, settings.seed, settings.dtype)
        named = mlp.named(mlp.views(flat, run.sizes))
        self.reducer: DataParallel = run.data_parallel(named)
        self._parameters: Layers
        self._slots: tuple[Layers, ...]
        self._place(run.with_slots(named))
        self._parameter_bytes = int(flat.nbytes)
        self._sample_bytes = sum(run.sizes) * flat.itemsize
        """Bytes of what enters each layer, and of the logits, for one sample."""

    def gradients(self, x: Any, labels: Any, count: int) -> float:
        begin = time.thread_time()
        loss, layers = _loss_and_gradients(self._parameters, x, labels, count)
        if self.run.pace is not None:
            weights = sum(layer.weight.size for layer in self._parameters)
            self.run.pace.stretch(3 * len(x) * weights, begin)
        self.activation_bytes = max(self.activation_bytes, len(x) * self._sample_bytes)
        gradients = mlp.named(layers)
        for name in reversed(gradients):
            self.reducer.ready(name, to_host(gradients[name]))
        self._reduced = self.reducer.finish()
        return float(loss)

    def update(self, lr: float, step: int) -> None:
        settings = self.run.settings
        gradients = _layers({n: self._to_device(array) for n, array in self._reduced.items()})
        state = self._parameters, self._slots
        if settings.optimizer == "adam":
            # JAX would compute these differences in float32, which loses half of their digits.
            weights = tuple(1 - beta ** (step + 1) for beta in optimizers.BETAS)
            state = _adam(*state, gradients, lr, settings.weight_decay, weights)
        else:
            state = _sgd(*state, gradients, lr, settings.weight_decay, settings.momentum)
        # The next step overwrites the reduced gradients, which JAX may read where they are.
        self._parameters, self._slots = jax.block_until_ready(state)

    @property
    def state_bytes(self) -> int:
        # Gradients are on the device and in buckets.  `own` would copy from some devices.
        return self._parameter_bytes * (3 + len(self._slots))

    def classes(self, x: Any) -> Any:
        return np.asarray(_classes(self._parameters, x))

    @property
    def own(self) -> dict[str, Any]:
        """This rank's arrays, as NumPy's arrays that cannot be written to."""
        found = mlp.named(self._parameters)
        for slot, layers in zip(self.run.slots, self._slots, strict=True):
            found |= {f"{slot}/{name}": array for name, array in mlp.named(layers).items()}
        return {name: to_host(array) for name, array in found.items()}

    def parameters(self) -> Iterable[Any]:
        return map(to_host, mlp.named(self._parameters).values())

    def load(self, arrays: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        self._place(super().load(arrays))
        return {}

    # --- implementation ---

    def _place(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy the content of a checkpoint to the device."""
        placed = {
            name: jax.device_put(array, self._device, may_alias=False)
            for name, array in arrays.items()
        }
        self._parameters = _layers(placed)
        self._slots = tuple(_layers(placed, f"{slot}/") for slot in self.run.slots)

    def _to_device(self, array: np.ndarray) -> Any:
        return jax.dlpack.from_dlpack(array, device=self._device)


def to_host(array: Any) -> np.ndarray:
    """Return an array of JAX as a NumPy array that cannot be written to.

    It is the same memory if `array` is on JAX's CPU backend.  Other devices' memory is copied.
    """
    if array.device.platform == "cpu":
        return np.from_dlpack(array)
    return np.asarray(array)


def _layers(arrays: Mapping[str, Any], prefix: str = "") -> Layers:
    """Return the arrays with the names of `mlp.named`, after `prefix`, as layers."""
    found: list[mlp.AffineArrays] = []
    while f"{prefix}{len(found)}.weight" in arrays:
        start = f"{prefix}{len(found)}"
        found.append(mlp.AffineArrays(arrays[f"{start}.weight"], arrays[f"{start}.bias"]))
    return tuple(found)


# --- the network ----------------------------------------------------------------------------------


def _logits(layers: Layers, x: Any) -> Any:
    for number, (weight, bias) in enumerate(layers):
        # By default a TPU multiplies in bfloat16.
        x = jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST) + bias
        if number < len(layers) - 1:
            x = jax.nn.relu(x)
    return x


def _loss(layers: Layers, x: Any, labels: Any, count: int) -> Any:
    """Return the softmax cross-entropy, as `layers.cross_entropy` does."""
    log_p = jax.nn.log_softmax(_logits(layers, x))
    return -log_p[jnp.arange(len(labels)), labels].sum() / count


def _classes_of(layers: Layers, x: Any) -> Any:
    return _logits(layers, x).argmax(axis=1)


_loss_and_gradients = jax.jit(jax.value_and_grad(_loss))
_classes = jax.jit(_classes_of)

# --- the optimizers -------------------------------------------------------------------------------


def _sgd_step(
    parameters: Layers,
    slots: tuple[Layers, ...],
    gradients: Layers,
    lr: float,
    decay: float,
    momentum: float,
) -> tuple[Layers, tuple[Layers, ...]]:
    """Return what `optimizers.sgd` makes of the parameters and the velocity."""

    def faster(v: Any, g: Any, p: Any) -> Any:
        return momentum * v + g + decay * p

    velocity = jax.tree.map(faster, slots[0], gradients, parameters)
    return jax.tree.map(lambda p, v: p - lr * v, parameters, velocity), (velocity,)


def _adam_step(
    parameters: Layers,
    slots: tuple[Layers, ...],
    gradients: Layers,
    lr: float,
    decay: float,
    weights: tuple[float, float],
) -> tuple[Layers, tuple[Layers, ...]]:
    """Return what `optimizers.adam` makes of the parameters and both means.

    `weights` are the sums of the weights of all gradients in each mean.
    """
    first, second = optimizers.BETAS

    def stepped(p: Any, m: Any, s: Any) -> Any:
        scale = (s / weights[1]) ** 0.5 + optimizers.EPS
        return p * (1 - lr * decay) - lr * (m / weights[0] / scale)

    mean = jax.tree.map(lambda m, g: first * m + (1 - first) * g, slots[0], gradients)
    square = jax.tree.map(lambda s, g: second * s + (1 - second) * (g * g), slots[1], gradients)
    return jax.tree.map(stepped, parameters, mean, square), (mean, square)


# The old arrays are given to JAX for the new ones, unless a NumPy array still shows them.
_sgd = jax.jit(_sgd_step, donate_argnums=(0, 1))
_adam = jax.jit(_adam_step, donate_argnums=(0, 1))
