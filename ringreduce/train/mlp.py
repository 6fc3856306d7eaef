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
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ringreduce.parallel.arrays import wide
from ringreduce.parallel.batch_norm import (
    Normalised,
    Sums,
    batch_norm,
    batch_norm_backward,
    normalise_by,
)
from ringreduce.parallel.layers import backward_all, cross_entropy, forward_all
from ringreduce.train.pace import ComputePace

# Rows of a block of `blocks_of`.  A larger product wakes the threads of OpenBLAS.  These
# spin on afterwards and take the cores of the other ranks on this host: training took several times
# as long on 2 cores.
_ROWS = 32

Array = Any


class AffineArrays(NamedTuple):
    """One affine map, ``x @ weight + bias``."""

    weight: Array
    """(inputs, outputs)"""
    bias: Array
    """(outputs,)"""


class NormalisedArrays(NamedTuple):
    """An affine map whose results are normalised over the batch, then scaled and shifted."""

    weight: Array
    bias: Array
    scale: Array
    shift: Array


Parameters = tuple[AffineArrays | NormalisedArrays, ...]


def _shapes(sizes: Sequence[int], batch_norm: bool) -> Iterator[list[tuple[int, ...]]]:
    for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        normalises = batch_norm and number < len(sizes) - 1
        yield [(inputs, outputs), *[(outputs,)] * (3 if normalises else 1)]


def parameter_count(sizes: Sequence[int], batch_norm: bool = False) -> int:
    return sum(math.prod(shape) for layer in _shapes(sizes, batch_norm) for shape in layer)


def views(flat: Array, sizes: Sequence[int], batch_norm: bool = False) -> Parameters:
    """Return the layers as views of `flat`, a contiguous 1-d array; they share its memory.

    Raises ValueError if the length of `flat` is not ``parameter_count(sizes, batch_norm)``.
    """
    wanted = parameter_count(sizes, batch_norm)
    if flat.shape != (wanted,):
        raise ValueError(f"views: flat has shape {flat.shape}; layers {sizes} need ({wanted},)")
    layers: list[AffineArrays | NormalisedArrays] = []
    end = 0
    for shapes in _shapes(sizes, batch_norm):
        arrays = []
        for shape in shapes:
            start, end = end, end + math.prod(shape)
            arrays.append(flat[start:end].reshape(shape))
        layers.append((AffineArrays if len(arrays) == 2 else NormalisedArrays)(*arrays))
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
        if isinstance(layer, NormalisedArrays):
            layer.scale[...] = 1
    return xp.asarray(flat)


def init_statistics(sizes: Sequence[int], xp: ModuleType = np) -> dict[str, Array]:
    """Return the running means of every normalised layer's statistics before the first step.

    "0.mean" (outputs,) is zero, "0.variance" (outputs,) is one; both are float64.
    """
    statistics: dict[str, Array] = {}
    for number, outputs in enumerate(sizes[1:-1]):
        mean, variance = statistics_of(number)
        statistics |= {mean: xp.zeros(outputs), variance: xp.ones(outputs)}
    return statistics


def statistics_of(number: int) -> tuple[str, str]:
    return f"{number}.mean", f"{number}.variance"


class Kept(NamedTuple):
    """The arrays of a layer's forward that its backward needs."""

    x: Array
    """The input, (samples, inputs)."""
    y: Array
    """The output, (samples, outputs)."""
    normalised: Normalised | None


class Affine:
    """A layer of the network: ``x @ weight + bias``, then batch normalisation, then ReLU.

    The last layer ends after the affine map.  The first layer computes no gradient of its input.

    With tensor parallelism the ranks of `columns` have different columns of the weight, and the
    same input: they add up the gradients of the input.  The ranks of `rows` have different rows of
    the weight, and the same columns of the input: they add up ``x @ weight``.
    """

    def __init__(
        self,
        number: int,
        arrays: AffineArrays | NormalisedArrays,
        *,
        last: bool,
        xp: ModuleType = np,
        samples: Sums | None = None,
        columns: Sums | None = None,
        rows: Sums | None = None,
    ) -> None:
        self.number, self.arrays = number, arrays
        self._names = [f"{number}.{kind}" for kind in arrays._fields]
        self._last, self._xp = last, xp
        self._samples, self._columns, self._rows = samples, columns, rows
        self.pace: ComputePace | None = None
        """How long forward and backward take at least; None: as long as they take."""
        self.statistics: dict[str, Array] = {}
        """Mean and variance of the last forward's batch, under the names of `init_statistics`."""

    @property
    def parameters(self) -> dict[str, Array]:
        """Return the arrays by name, as `named` does."""
        return dict(zip(self._names, self.arrays, strict=True))

    def take(self, arrays: Mapping[str, Array]) -> None:
        """Compute with these arrays from now on; `arrays` may have those of other layers too."""
        self.arrays = type(self.arrays)(*[arrays[name] for name in self._names])

    def forward(self, x: Array) -> tuple[Array, Kept]:
        begin = time.thread_time()
        value, normalised = self._affine(x), None
        if isinstance(self.arrays, NormalisedArrays):
            if self._samples is None:
                raise ValueError(
                    f"layer {self.number} is normalised over the batch of all ranks; pass comm"
                )
            scale, shift = self.arrays.scale, self.arrays.shift
            normalised = batch_norm(self._samples, value, scale, shift, xp=self._xp)
            mean, variance = statistics_of(self.number)
            self.statistics = {mean: normalised.mean, variance: normalised.variance}
            value = normalised.y
        y = self._activation(value)
        if self.pace is not None:
            self.pace.stretch(len(x) * self.arrays.weight.size, begin)
        return y, Kept(x, y, normalised)

    def predict(self, x: Array, running: Mapping[str, Array]) -> Array:
        """Return the output, normalised by the statistics in `running`."""
        value = self._affine(x)
        if isinstance(self.arrays, NormalisedArrays):
            mean, variance = (running[name] for name in statistics_of(self.number))
            scale, shift = self.arrays.scale, self.arrays.shift
            value = normalise_by(mean, variance, value, scale, shift, self._xp)
        return self._activation(value)

    def backward(
        self, kept: Kept, gradient: Array, into: Mapping[str, Array]
    ) -> tuple[Array | None, Iterator[tuple[str, Array]]]:
        of_norm: list[tuple[str, Array]] = []
        begin = time.thread_time()
        if not self._last:
            gradient *= kept.y > 0
        if isinstance(self.arrays, NormalisedArrays):
            assert self._samples is not None
            assert kept.normalised is not None
            gradient, of_scale, of_shift = batch_norm_backward(
                self._samples, kept.normalised, self.arrays.scale, gradient, xp=self._xp
            )
            of_norm = [("shift", of_shift), ("scale", of_scale)]
        of_input = None
        if self.number:
            of_input = gradient @ self.arrays.weight.T
            if self._columns is not None:
                self._columns.all_reduce(of_input, out=of_input)
        if self.pace is not None:
            self.pace.stretch(2 * len(gradient) * self.arrays.weight.size, begin)
        return of_input, self._of_parameters(kept.x, gradient, of_norm, into)

    # --- implementation ---

    def _affine(self, x: Array) -> Array:
        value = x @ self.arrays.weight
        if self._rows is not None:
            self._rows.all_reduce(value, out=value)
        value += self.arrays.bias
        return value

    def _activation(self, value: Array) -> Array:
        return value if self._last else self._xp.maximum(value, 0, out=value)

    def _of_parameters(
        self,
        x: Array,
        gradient: Array,
        of_norm: list[tuple[str, Array]],
        into: Mapping[str, Array],
    ) -> Iterator[tuple[str, Array]]:
        for kind, of_kind in of_norm:
            yield _placed(f"{self.number}.{kind}", of_kind, into)
        weight, bias = f"{self.number}.weight", f"{self.number}.bias"
        of_bias = self._xp.sum(gradient, axis=0, dtype=wide(gradient.dtype))
        yield _placed(bias, of_bias.astype(gradient.dtype, copy=False), into)
        yield weight, self._xp.matmul(x.T, gradient, out=into.get(weight))


def layers(parameters: Parameters, xp: ModuleType = np, comm: Sums | None = None) -> list[Affine]:
    """Return the layers of a whole network; the ranks of `comm` share the batch."""
    last = len(parameters) - 1
    return [
        Affine(number, arrays, last=number == last, xp=xp, samples=comm)
        for number, arrays in enumerate(parameters)
    ]


def by_layer(arrays: Mapping[str, Array]) -> dict[int, AffineArrays | NormalisedArrays]:
    """Return the arrays of each layer by its number, from the first to the last.

    `arrays` have the names of `named`: those of all layers, or of some.
    """
    found: dict[int, dict[str, Array]] = {}
    for name, array in arrays.items():
        number, _, kind = name.partition(".")
        found.setdefault(int(number), {})[kind] = array
    return {
        number: (NormalisedArrays if "scale" in kinds else AffineArrays)(**kinds)
        for number, kinds in sorted(found.items())
    }


def step(
    network: Sequence[Affine],
    x: Array,
    labels: Array,
    count: float,
    into: Mapping[str, Array],
    xp: ModuleType = np,
) -> tuple[Array, list[Kept], Iterator[tuple[str, Array]]]:
    """Return the result of `cross_entropy`, what forward has kept, and the gradients by name.

    Gradients come from the last layer to the first, and each is computed when the iterator reaches
    it: so one can be sent to other ranks while the next is computed.  A gradient is written into
    the array of its name in `into`, if there is one.
    """
    logits, kept = forward_all(network, x)
    loss, gradient = cross_entropy(logits, labels, count, xp)
    return loss, kept, _in_turn(network, kept, gradient, into)


def _in_turn(
    network: Sequence[Affine], kept: Sequence[Kept], gradient: Array, into: Mapping[str, Array]
) -> Iterator[tuple[str, Array]]:
    for _, of_layer in backward_all(network, kept, gradient, into):
        yield from of_layer


def statistics_in(network: Iterable[Affine]) -> dict[str, Array]:
    """Return the mean and variance of each normalised layer in its last forward."""
    return {name: value for layer in network for name, value in layer.statistics.items()}


def _placed(name: str, gradient: Array, into: Mapping[str, Array]) -> tuple[str, Array]:
    """Return the name and its array in `into` with the gradient; without one, the gradient."""
    place = into.get(name)
    if place is None:
        return name, gradient
    place[...] = gradient
    return name, place


def blocks_of(x: Array) -> Iterator[Array]:
    """Yield blocks of `_ROWS` rows of `x`, the last one shorter; of no rows, one empty block."""
    return (x[start : start + _ROWS] for start in range(0, max(1, len(x)), _ROWS))


def predict(network: Iterable[Affine], x: Array, running: Mapping[str, Array]) -> Array:
    """Return the logits (samples, classes) of the rows of `x` (samples, inputs).

    Layers are normalised by the statistics in `running`, with the names of `init_statistics`.
    """
    for layer in network:
        x = layer.predict(x, running)
    return x
