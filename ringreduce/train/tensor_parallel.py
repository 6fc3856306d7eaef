"""Tensor parallelism: the ranks of a communicator hold the columns or the rows of every layer.

Layers 0, 2, 4 and so on are cut by columns, layers 1, 3, 5 and so on by rows::

    layer 0:  x, whole          @  columns of weight  ->  these columns of the output
    layer 1:  these columns     @  rows of weight     ->  a summand of the output; all-reduce

So a pair of layers makes one all-reduce forward, of the second layer's products, and one backward,
of the gradient of the first layer's input.  Layer 0 needs no gradient of its input.  A network of n
layers makes ``n // 2`` all-reduces forward and ``(n - 1) // 2`` backward.

If n is even, all ranks have the whole logits.  If n is odd, a rank has some columns of the logits:
the loss then makes two all-reduces, of the largest logit of each sample, and of two sums.  The
logits are not gathered.

Every rank holds the whole bias of a layer by rows, and its scale and shift.  The ranks compute
bitwise the same gradients of them.  If replicas add up these gradients, in buckets that differ
between the ranks of `comm`, the sums may differ by rounding: `gather` takes those of rank 0.

All ranks of the communicator must have the same samples.  They need not divide the widths: the
lengths of their parts differ by at most one.  With fewer columns than ranks, some ranks have none.

Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism", arXiv:1909.08053, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

import ringreduce as rr
from ringreduce.parallel.arrays import wide
from ringreduce.parallel.batch_norm import Sums
from ringreduce.parallel.layers import cross_entropy
from ringreduce.parallel.sampler import part
from ringreduce.train import mlp

Array = Any
"""An array of NumPy or CuPy."""


# --- the parts of arrays --------------------------------------------------------------------------
#
# Arrays have the names of `mlp.named` and `mlp.init_statistics`.  A prefix that ends in "/" changes
# nothing: "velocity/0.weight", of an optimizer, is cut as "0.weight" is.


def axis_of(name: str) -> int | None:
    """Return the axis that an array is cut along; None: every rank holds the whole array.

    >>> [axis_of(name) for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    [1, 0, 0, None]
    """
    number, _, kind = name.rpartition("/")[2].partition(".")
    by_columns = int(number) % 2 == 0
    if kind == "weight":
        return 1 if by_columns else 0
    return 0 if by_columns else None


def slices(name: str, shape: Sequence[int], rank: int, ranks: int) -> tuple[slice, ...]:
    """Return which part of an array of this `shape` one of `ranks` ranks holds.

    >>> slices("0.weight", (64, 10), rank=1, ranks=4)
    (slice(None, None, None), slice(3, 6, None))
    """
    found = [slice(None)] * len(shape)
    axis = axis_of(name)
    if axis is not None:
        found[axis] = part(shape[axis], rank, ranks)
    return tuple(found)


def cut(arrays: Mapping[str, Array], rank: int, ranks: int) -> dict[str, Array]:
    """Return copies of the parts of whole arrays that one of `ranks` ranks holds."""
    return {
        name: array[slices(name, array.shape, rank, ranks)].copy() for name, array in arrays.items()
    }


def gather(
    comm: rr.Communicator, arrays: Mapping[str, Array], xp: ModuleType = np
) -> dict[str, Array]:
    """Return the whole arrays from this rank's parts; of an uncut one, rank 0's.  Collective.

    The arrays must have the same names in the same order on all ranks.
    """
    found = {}
    for name, array in arrays.items():
        axis = axis_of(name)
        if axis is None:
            found[name] = comm.broadcast(array)
            continue
        along = xp.ascontiguousarray(xp.moveaxis(array, axis, 0))
        found[name] = xp.ascontiguousarray(xp.moveaxis(comm.all_gather(along), 0, axis))
    return found


def counted(gradients: Mapping[str, Array], rank: int) -> list[Array]:
    """Return the gradients that a rank counts in a norm: its parts, and on rank 0 uncut ones."""
    return [array for name, array in gradients.items() if axis_of(name) is not None or rank == 0]


class TensorGroup(Protocol):
    """The ranks that hold a network together: a communicator, or an object that stands in."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, x: Array, op: str = "sum", *, out: Array = None) -> Array:
        """Return the sum, or another result, of the arrays of all ranks."""


# --- the network ----------------------------------------------------------------------------------


class TensorParallel:
    """A network whose layers the ranks of `comm` hold together.

    `sizes` are the widths of the whole network.  With one rank every function computes what `mlp`
    does, bit by bit.
    """

    def __init__(self, comm: TensorGroup, sizes: Sequence[int], xp: ModuleType = np) -> None:
        self._comm, self._xp = comm, xp
        self._layers = len(sizes) - 1
        self._classes = sizes[-1]
        self._columns = part(sizes[-1], comm.rank, comm.size)
        """The classes whose logits this rank has if the last layer is cut by columns."""

    @property
    def has_columns(self) -> bool:
        """Whether a rank has some columns of the logits, and not all."""
        return self._comm.size > 1 and self._layers % 2 == 1

    def layers(self, arrays: Mapping[str, Array], samples: Sums | None = None) -> list[mlp.Affine]:
        """Return the layers of parts from `cut`; the ranks of `samples` share the batch."""
        comm = self._comm if self._comm.size > 1 else None
        return [
            mlp.Affine(
                number,
                of_layer,
                last=number == self._layers - 1,
                xp=self._xp,
                samples=samples,
                columns=None if number % 2 else comm,
                rows=comm if number % 2 else None,
            )
            for number, of_layer in mlp.by_layer(arrays).items()
        ]

    def cross_entropy(self, logits: Array, labels: Array, count: int) -> tuple[Array, Array]:
        """Return the loss and its gradient, as `layers.cross_entropy`.  Collective."""
        xp = self._xp
        if not self.has_columns:
            return cross_entropy(logits, labels, count, xp)
        largest = self._largest(logits)
        self._comm.all_reduce(largest, op="max", out=largest)
        shifted = logits.astype(wide(logits.dtype), copy=False) - largest[:, None]
        gradient = xp.exp(shifted)
        rows, columns = self._own(labels)
        sums = xp.zeros((2, len(labels)), shifted.dtype)
        sums[0] = gradient.sum(axis=1)
        sums[1, rows] = shifted[rows, columns]
        exponentials, at_label = self._comm.all_reduce(sums, out=sums)
        gradient /= exponentials[:, None]
        gradient[rows, columns] -= 1
        gradient /= count
        loss = (xp.log(exponentials) - at_label).sum() / count
        return loss, gradient.astype(logits.dtype, copy=False)

    def classes(self, logits: Array) -> Array:
        """Return the lowest class with the largest logit of each sample.  Collective."""
        xp = self._xp
        if not self.has_columns:
            return logits.argmax(axis=1)
        own = self._largest(logits)
        largest = self._comm.all_reduce(own, op="max")
        found = xp.full(len(logits), self._classes)
        if logits.shape[1]:
            # `argmax` finds the first NaN, which is equal to nothing.
            has_largest = (own == largest) | xp.isnan(own)
            found[has_largest] = logits.argmax(axis=1)[has_largest] + self._columns.start
        return self._comm.all_reduce(found, op="min", out=found)

    # --- implementation ---

    def _largest(self, logits: Array) -> Array:
        """Return the largest logit of each sample; without columns -inf, which is never larger."""
        if logits.shape[1]:
            return logits.max(axis=1)
        return self._xp.full(len(logits), -self._xp.inf, logits.dtype)

    def _own(self, labels: Array) -> tuple[Array, Array]:
        """Return the samples whose label is among this rank's columns, and the columns."""
        start, stop = self._columns.start, self._columns.stop
        (rows,) = self._xp.nonzero((labels >= start) & (labels < stop))
        return rows, labels[rows] - start
