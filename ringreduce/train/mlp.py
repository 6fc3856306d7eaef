"""A multilayer perceptron as pure functions: parameters in, values out, nothing kept.

``xp`` is the array module, by default NumPy.  Any module with NumPy's names works, so the same
functions run on another device.  Shapes: ``samples`` rows; a layer maps ``inputs`` columns to
``outputs`` columns; ``sizes`` are the widths from the input to the classes, such as (64, 128, 10).

A rank with a part of a batch passes the count of the *whole* batch.  Its loss and gradients are
then its share of the mean, and the shares of all ranks add up to the mean, for parts of any size.
The share of an empty part is zero.

With ``batch_norm=True`` the results of every layer but the last are normalised over the batch of
all ranks.  Functions that compute with such layers then need the communicator of the ranks, or, to
evaluate, the running means of the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ringreduce.train.batch_norm import (
    Normalised,
    Sums,
    batch_norm,
    batch_norm_backward,
    normalise_by,
)

# Rows that `right` computes at a time.  A larger product wakes the threads of OpenBLAS.  These spin
# on afterwards and take the cores of the other ranks on this host: training took several times as
# long on 2 cores.
_ROWS = 32

Array = Any
"""An array of the module in use."""


class Layer(NamedTuple):
    """One affine map, ``x @ weight + bias``."""

    weight: Array
    """(inputs, outputs)"""
    bias: Array
    """(outputs,)"""


class NormalisedLayer(NamedTuple):
    """An affine map whose results are normalised over the batch, then scaled and shifted."""

    weight: Array
    """(inputs, outputs)"""
    bias: Array
    """(outputs,)"""
    scale: Array
    """(outputs,)"""
    shift: Array
    """(outputs,)"""


Parameters = tuple[Layer | NormalisedLayer, ...]
Normalise = Callable[[int, NormalisedLayer, Array], Array]
"""(number of a layer, the layer, its affine map's results) -> normalised results"""


def _shapes(sizes: Sequence[int], batch_norm: bool) -> Iterator[list[tuple[int, ...]]]:
    """Yield the shapes of each layer's arrays."""
    for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        normalises = batch_norm and number < len(sizes) - 1
        yield [(inputs, outputs), *[(outputs,)] * (3 if normalises else 1)]


def parameter_count(sizes: Sequence[int], batch_norm: bool = False) -> int:
    """Return the number of parameters in layers of these sizes.

    >>> parameter_count((64, 128, 10))
    9610
    >>> parameter_count((64, 128, 10), batch_norm=True)
    9866
    """
    return sum(math.prod(shape) for layer in _shapes(sizes, batch_norm) for shape in layer)


def views(flat: Array, sizes: Sequence[int], batch_norm: bool = False) -> Parameters:
    """Return the layers as views of `flat`, a contiguous 1-d array; they share its memory.

    Raises ValueError if the length of `flat` is not ``parameter_count(sizes, batch_norm)``.
    """
    wanted = parameter_count(sizes, batch_norm)
    if flat.shape != (wanted,):
        raise ValueError(f"views: flat has shape {flat.shape}; layers {sizes} need ({wanted},)")
    layers: list[Layer | NormalisedLayer] = []
    end = 0
    for shapes in _shapes(sizes, batch_norm):
        arrays = []
        for shape in shapes:
            start, end = end, end + math.prod(shape)
            arrays.append(flat[start:end].reshape(shape))
        layers.append((Layer if len(arrays) == 2 else NormalisedLayer)(*arrays))
    return tuple(layers)


def named(parameters: Parameters) -> dict[str, Array]:
    """Return the arrays of the layers by name: "0.weight", "0.bias", "1.weight" and so on.

    A normalised layer also has "0.scale" and "0.shift".
    """
    return {
        f"{number}.{kind}": array
        for number, layer in enumerate(parameters)
        for kind, array in layer._asdict().items()
    }


def init_params(
    sizes: Sequence[int],
    seed: int,
    dtype: Any = np.float32,
    xp: ModuleType = np,
    batch_norm: bool = False,
) -> Array:
    """Return new parameters, flat: weights from N(0, 2 / inputs), scales one, the others zero.

    They are drawn with NumPy for any `xp`, so that every device starts from the same numbers.
    Source of the variance: He et al., "Delving deep into rectifiers", ICCV 2015.
    """
    rng = np.random.default_rng(seed)
    flat = np.zeros(parameter_count(sizes, batch_norm), dtype)
    for layer in views(flat, sizes, batch_norm):
        inputs = layer.weight.shape[0]
        layer.weight[...] = rng.normal(scale=np.sqrt(2 / inputs), size=layer.weight.shape)
        if isinstance(layer, NormalisedLayer):
            layer.scale[...] = 1
    return xp.asarray(flat)


def init_statistics(sizes: Sequence[int], xp: ModuleType = np) -> dict[str, Array]:
    """Return the running means of every normalised layer's statistics before the first step.

    "0.mean" (outputs,) is zero, "0.variance" (outputs,) is one; both are float64.
    """
    statistics: dict[str, Array] = {}
    for number, outputs in enumerate(sizes[1:-1]):
        mean, variance = _statistics_of(number)
        statistics |= {mean: xp.zeros(outputs), variance: xp.ones(outputs)}
    return statistics


def _statistics_of(number: int) -> tuple[str, str]:
    """Return the names of a layer's statistics."""
    return f"{number}.mean", f"{number}.variance"


def forward(
    parameters: Parameters,
    x: Array,
    xp: ModuleType = np,
    running: Mapping[str, Array] | None = None,
) -> Array:
    """Return the logits (samples, classes) of the rows of `x` (samples, inputs).

    Layers are normalised by the statistics in `running`, with the names of `init_statistics`.
    """
    statistics = running or {}

    def normalise(number: int, layer: NormalisedLayer, value: Array) -> Array:
        mean, variance = (statistics[name] for name in _statistics_of(number))
        return normalise_by(mean, variance, value, layer.scale, layer.shift, xp)

    return _activations(parameters, x, xp, normalise)[-1]


def loss(
    parameters: Parameters,
    x: Array,
    labels: Array,
    count: int,
    xp: ModuleType = np,
    comm: Sums | None = None,
) -> Array:
    """Return the softmax cross-entropy, summed over these samples and divided by `count`; 0-d.

    `labels` (samples,) are integers from 0 to classes - 1.  Layers are normalised over the samples
    of all ranks of `comm`, which all ranks must then pass.
    """
    logits = _activations(parameters, x, xp, _over_all_ranks(comm, {}, xp))[-1]
    return _cross_entropy(_log_softmax(logits, xp), labels, xp) / count


def gradients(
    parameters: Parameters,
    x: Array,
    labels: Array,
    count: int,
    xp: ModuleType = np,
    into: Mapping[str, Array] | None = None,
    comm: Sums | None = None,
    statistics: MutableMapping[str, Array] | None = None,
) -> tuple[Array, Iterator[tuple[str, Array]]]:
    """Return the result of `loss`, and an iterator over the gradients as (name, array).

    Names are those of `named`.  The gradients come from the last layer to the first, and each is
    computed when the iterator reaches it: so one gradient can be sent to other ranks while the next
    is computed.  A gradient is written into the array of its name in `into`, if there is one.

    The mean and variance of each normalised layer are put into `statistics`, under the names of
    `init_statistics`.
    """
    normalised: dict[int, Normalised] = {}
    *inputs, logits = _activations(parameters, x, xp, _over_all_ranks(comm, normalised, xp))
    if statistics is not None:
        for number, layer in normalised.items():
            mean, variance = _statistics_of(number)
            statistics[mean], statistics[variance] = layer.mean, layer.variance
    log_p = _log_softmax(logits, xp)
    delta = xp.exp(log_p)
    delta[xp.arange(len(labels)), labels] -= 1
    delta /= count
    loss = _cross_entropy(log_p, labels, xp) / count
    return loss, _backward(parameters, inputs, normalised, delta, xp, into or {}, comm)


def _backward(
    parameters: Parameters,
    inputs: list[Array],
    normalised: Mapping[int, Normalised],
    delta: Array,
    xp: ModuleType,
    into: Mapping[str, Array],
    comm: Sums | None,
) -> Iterator[tuple[str, Array]]:
    """Yield the gradients; `delta` is the derivative of the loss by the logits."""
    for number in reversed(range(len(parameters))):
        layer = parameters[number]
        if isinstance(layer, NormalisedLayer):
            assert comm is not None
            delta, of_scale, of_shift = batch_norm_backward(
                comm, normalised[number], layer.scale, delta, xp=xp
            )
            yield _placed(f"{number}.shift", of_shift, into)
            yield _placed(f"{number}.scale", of_scale, into)
        weight, bias = f"{number}.weight", f"{number}.bias"
        yield bias, xp.sum(delta, axis=0, out=into.get(bias))
        yield weight, xp.matmul(inputs[number].T, delta, out=into.get(weight))
        if number:
            delta = delta @ layer.weight.T
            delta *= inputs[number] > 0


def _placed(name: str, gradient: Array, into: Mapping[str, Array]) -> tuple[str, Array]:
    """Return the name and its array in `into` with the gradient; without one, the gradient."""
    place = into.get(name)
    if place is None:
        return name, gradient
    place[...] = gradient
    return name, place


def right(
    parameters: Parameters,
    x: Array,
    labels: Array,
    xp: ModuleType = np,
    running: Mapping[str, Array] | None = None,
) -> int:
    """Return the number of samples whose largest logit, of `forward`, is at their label."""
    count = 0
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        logits = forward(parameters, x[rows], xp, running)
        count += int((logits.argmax(axis=1) == labels[rows]).sum())
    return count


def _over_all_ranks(
    comm: Sums | None, normalised: MutableMapping[int, Normalised], xp: ModuleType
) -> Normalise:
    """Return a function that normalises over the samples of all ranks, and keeps the results."""

    def normalise(number: int, layer: NormalisedLayer, value: Array) -> Array:
        if comm is None:
            raise ValueError(f"layer {number} is normalised over the batch of all ranks; pass comm")
        normalised[number] = batch_norm(comm, value, layer.scale, layer.shift, xp=xp)
        return normalised[number].y

    return normalise


def _activations(
    parameters: Parameters, x: Array, xp: ModuleType, normalise: Normalise
) -> list[Array]:
    """Return the input of each layer, and last the logits."""
    values = [x]
    for number, layer in enumerate(parameters[:-1]):
        value = values[-1] @ layer.weight
        value += layer.bias
        if isinstance(layer, NormalisedLayer):
            value = normalise(number, layer, value)
        values.append(xp.maximum(value, 0, out=value))
    values.append(values[-1] @ parameters[-1].weight + parameters[-1].bias)
    return values


def _log_softmax(logits: Array, xp: ModuleType) -> Array:
    """Normalise row by row; the largest logit is subtracted first, so `exp` cannot overflow."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))


def _cross_entropy(log_p: Array, labels: Array, xp: ModuleType) -> Array:
    return -log_p[xp.arange(len(labels)), labels].sum()
