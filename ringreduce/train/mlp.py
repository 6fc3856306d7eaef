"""A multilayer perceptron as pure functions: parameters in, values out, nothing kept.

``xp`` is the array module, by default NumPy.  Any module with NumPy's names works, so the same
functions run on another device.  Shapes: ``samples`` rows; a layer maps ``inputs`` columns to
``outputs`` columns; ``sizes`` are the widths from the input to the classes, such as (64, 128, 10).

A rank with a part of a batch passes the count of the *whole* batch.  Its loss and gradients are
then its share of the mean, and the shares of all ranks add up to the mean, for parts of any size.
The share of an empty part is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

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


Parameters = tuple[Layer, ...]


def parameter_count(sizes: Sequence[int]) -> int:
    """Return the number of parameters in layers of these sizes.

    >>> parameter_count((64, 128, 10))
    9610
    """
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))


def views(flat: Array, sizes: Sequence[int]) -> Parameters:
    """Return the layers as views of `flat`, a contiguous 1-d array; they share its memory.

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
    """Return the arrays of the layers by name: "0.weight", "0.bias", "1.weight" and so on."""
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
    """Return new parameters, flat: weights from N(0, 2 / inputs), biases zero.

    They are drawn with NumPy for any `xp`, so that every device starts from the same numbers.
    Source of the variance: He et al., "Delving deep into rectifiers", ICCV 2015.
    """
    rng = np.random.default_rng(seed)
    flat = np.zeros(parameter_count(sizes), dtype)
    for layer in views(flat, sizes):
        inputs = layer.weight.shape[0]
        layer.weight[...] = rng.normal(scale=np.sqrt(2 / inputs), size=layer.weight.shape)
    return xp.asarray(flat)


def forward(parameters: Parameters, x: Array, xp: ModuleType = np) -> Array:
    """Return the logits (samples, classes) of the rows of `x` (samples, inputs)."""
    return _activations(parameters, x, xp)[-1]


def loss(parameters: Parameters, x: Array, labels: Array, count: int, xp: ModuleType = np) -> Array:
    """Return the softmax cross-entropy, summed over these samples and divided by `count`; 0-d.

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
    """Return the result of `loss`, and an iterator over the gradients as (name, array).

    Names are those of `named`.  The gradients come from the last layer to the first, and each is
    computed when the iterator reaches it: so one gradient can be sent to other ranks while the next
    is computed.  A gradient is written into the array of its name in `into`, if there is one.
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
    """Yield the gradients; `delta` is the derivative of the loss by the logits."""
    for number in reversed(range(len(parameters))):
        weight, bias = _names(number)
        yield bias, xp.sum(delta, axis=0, out=into.get(bias))
        yield weight, xp.matmul(inputs[number].T, delta, out=into.get(weight))
        if number:
            delta = delta @ parameters[number].weight.T
            delta *= inputs[number] > 0


def right(parameters: Parameters, x: Array, labels: Array, xp: ModuleType = np) -> int:
    """Return the number of samples whose largest logit is at their label."""
    count = 0
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        count += int((forward(parameters, x[rows], xp).argmax(axis=1) == labels[rows]).sum())
    return count


def _activations(parameters: Parameters, x: Array, xp: ModuleType) -> list[Array]:
    """Return the input of each layer, and last the logits."""
    values = [x]
    for layer in parameters[:-1]:
        value = values[-1] @ layer.weight
        value += layer.bias
        values.append(xp.maximum(value, 0, out=value))
    values.append(values[-1] @ parameters[-1].weight + parameters[-1].bias)
    return values


def _log_softmax(logits: Array, xp: ModuleType) -> Array:
    """Normalise row by row; the largest logit is subtracted first, so `exp` cannot overflow."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))


def _cross_entropy(log_p: Array, labels: Array, xp: ModuleType) -> Array:
    return -log_p[xp.arange(len(labels)), labels].sum()
