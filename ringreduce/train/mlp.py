"""A multilayer perceptron as pure functions: parameters in, values out, nothing kept.

``xp`` is the array module, NumPy unless said otherwise: any module with NumPy's names does, so
that the same functions run on another device.  Shapes: ``samples`` rows; a layer maps ``inputs``
columns to ``outputs`` columns; ``sizes`` are the widths from the input to the classes, such as
(64, 128, 10).

A rank that holds a part of a batch passes the count of the *whole* batch: loss and gradients are
then its share of the mean, and the shares of all ranks add up to the mean, however uneven the parts
are.  A part may be empty; its share is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

# Rows that `right` takes at a time.  A larger product wakes the threads of OpenBLAS, and those
# spin on afterwards, in the way of the other ranks on this host: training took several times as
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


Parameters = tuple[Layer, ...]


def parameter_count(sizes: Sequence[int]) -> int:
    """How many numbers the layers of these sizes hold.

    >>> parameter_count((64, 128, 10))
    9610
    """
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))


def views(flat: Array, sizes: Sequence[int]) -> Parameters:
    """The layers as views into `flat`, a contiguous 1-d array; writing to one writes to the other.

    Raises ValueError if the length of `flat` is not ``parameter_count(sizes)``.
    """
    wanted = parameter_count(sizes)
    if flat.shape != (wanted,):
        raise ValueError(f"views: flat has shape {flat.shape}; layers {sizes} need ({wanted},)")
    layers = []
    end = 0
    for inputs, outputs in pairwise(sizes):
        start, middle, end = end, end + inputs * outputs, end + (inputs + 1) * outputs
        layers.append(Layer(flat[start:middle].reshape(inputs, outputs), flat[middle:end]))
    return tuple(layers)


def named(parameters: Parameters) -> dict[str, Array]:
    """The arrays of the layers by name, "0.weight" and "0.bias" first."""
    arrays: dict[str, Array] = {}
    for number, layer in enumerate(parameters):
        weight, bias = _names(number)
        arrays |= {weight: layer.weight, bias: layer.bias}
    return arrays


def _names(number: int) -> tuple[str, str]:
    return f"{number}.weight", f"{number}.bias"


def init_params(
    sizes: Sequence[int], seed: int, dtype: Any = np.float32, xp: ModuleType = np
) -> Array:
    """Fresh parameters, flat: weights from N(0, 2 / inputs), biases zero.

    They are drawn with NumPy whatever `xp` is, so that every device starts from the same numbers.
    Source of the variance: He et al., "Delving deep into rectifiers", ICCV 2015.
    """
    rng = np.random.default_rng(seed)
    flat = np.zeros(parameter_count(sizes), dtype)
    for layer in views(flat, sizes):
        inputs = layer.weight.shape[0]
        layer.weight[...] = rng.normal(scale=np.sqrt(2 / inputs), size=layer.weight.shape)
    return xp.asarray(flat)


def forward(parameters: Parameters, x: Array, xp: ModuleType = np) -> Array:
    """The logits (samples, classes) of the rows of `x` (samples, inputs)."""
    return _activations(parameters, x, xp)[-1]


def loss(parameters: Parameters, x: Array, labels: Array, count: int, xp: ModuleType = np) -> Array:
    """Softmax cross-entropy, summed over these samples and divided by `count`; 0-d.

    `labels` (samples,) are integers from 0 to classes - 1.
    """
    return _cross_entropy(_log_softmax(forward(parameters, x, xp), xp), labels, xp) / count


def gradients(
    parameters: Parameters,
    x: Array,
    labels: Array,
    count: int,
    xp: ModuleType = np,
    into: Mapping[str, Array] | None = None,
) -> tuple[Array, Iterator[tuple[str, Array]]]:
    """The loss, as `loss` gives it, and the gradient as pairs of a name, as in `named`, and array.

    They come from the last layer to the first, each computed when it is asked for: so that one can
    be on its way to other ranks while the next is computed.  They are written into the arrays of
    those names in `into`, if given.
    """
    *inputs, logits = _activations(parameters, x, xp)
    log_p = _log_softmax(logits, xp)
    delta = xp.exp(log_p)
    delta[xp.arange(len(labels)), labels] -= 1
    delta /= count
    loss = _cross_entropy(log_p, labels, xp) / count
    return loss, _backward(parameters, inputs, delta, xp, into or {})


def _backward(
    parameters: Parameters,
    inputs: list[Array],
    delta: Array,
    xp: ModuleType,
    into: Mapping[str, Array],
) -> Iterator[tuple[str, Array]]:
    """`delta` is the slope of the loss by what leaves the last layer."""
    for number in reversed(range(len(parameters))):
        weight, bias = _names(number)
        yield bias, xp.sum(delta, axis=0, out=into.get(bias))
        yield weight, xp.matmul(inputs[number].T, delta, out=into.get(weight))
        if number:
            delta = delta @ parameters[number].weight.T
            delta *= inputs[number] > 0


def right(parameters: Parameters, x: Array, labels: Array, xp: ModuleType = np) -> int:
    """How many samples have their largest logit at their label."""
    count = 0
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        count += int((forward(parameters, x[rows], xp).argmax(axis=1) == labels[rows]).sum())
    return count


def _activations(parameters: Parameters, x: Array, xp: ModuleType) -> list[Array]:
    """What enters each layer, and last the logits."""
    values = [x]
    for layer in parameters[:-1]:
        value = values[-1] @ layer.weight
        value += layer.bias
        values.append(xp.maximum(value, 0, out=value))
    values.append(values[-1] @ parameters[-1].weight + parameters[-1].bias)
    return values


def _log_softmax(logits: Array, xp: ModuleType) -> Array:
    """Row by row; the largest logit is taken off first, so that `exp` cannot overflow."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))


def _cross_entropy(log_p: Array, labels: Array, xp: ModuleType) -> Array:
    return -log_p[xp.arange(len(labels)), labels].sum()
