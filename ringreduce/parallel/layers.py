"""Layers of a model: pairs of a forward and a backward function.

A model is a sequence of layers.  `forward_all` and `backward_all` compute a run of layers: all of a
model, or the stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ringreduce.parallel.arrays import wide

Array = Any
"""An array of NumPy or CuPy."""
Gradients = Iterable[tuple[str, Array]]
"""Pairs of the name of a parameter and its gradient."""


class Layer(Protocol):
    """A layer of a model, for `PipelineParallel`.  A class with these three members is a Layer.

    Example:
        >>> class Scale:
        ...     def __init__(self, name, factor): self.parameters = {name: np.array([factor])}
        ...     def forward(self, x):
        ...         (factor,) = self.parameters.values()
        ...         return factor * x, x
        ...     def backward(self, kept, gradient, into):
        ...         (name, factor), = self.parameters.items()
        ...         return factor * gradient, [(name, (kept * gradient).sum(keepdims=True))]
        >>> y, kept = Scale("a", 2.0).forward(np.array([1.0, 3.0]))
        >>> Scale("a", 2.0).backward(kept, np.ones(2), {})
        (array([2., 2.]), [('a', array([4.]))])
    """

    __module__: str = "ringreduce.train"

    @property
    def parameters(self) -> Mapping[str, Array]:
        """Name -> array.  No other layer of the model has the same name.

        Example:
            >>> class Identity:
            ...     parameters = {}
            ...     def forward(self, x): return x, None
            ...     def backward(self, kept, gradient, into): return gradient, []
            >>> len(Identity().parameters)
            0
        """

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the output, and whatever `backward` needs besides the gradient of the output.

        Args:
            x: the input, whose first axis are samples.  It must not be changed.

        Returns:
            The output, whose first axis are the same samples, and any object.  The output is a new
            array in each call: a pipeline may still send the output of the call before.

        Raises:
            ValueError: the input has another shape than the layer can take.

        Example:
            >>> class Double:
            ...     parameters = {}
            ...     def forward(self, x): return 2 * x, None
            ...     def backward(self, kept, gradient, into): return 2 * gradient, []
            >>> Double().forward(np.ones(2))
            (array([2., 2.]), None)
        """

    def backward(
        self, kept: Any, gradient: Array, into: Mapping[str, Array]
    ) -> tuple[Array | None, Gradients]:
        """Return the gradient of the input, and the gradients of the parameters.

        The gradients of the parameters may be computed as they are iterated over, after the
        gradient of the input: then a pipeline of ``schedule="zero_bubble"`` computes them later,
        while it would be idle.

        Args:
            kept: the object that `forward` returned.
            gradient: gradient of the loss by the output.  The layer owns it, and may change it.
            into: name -> array for the gradient of a parameter.  The layer may compute a gradient
                in it, and return it, or return another array.

        Returns:
            The gradient of the input, or None if no layer before needs it; and a pair of name and
            gradient for each parameter.

        Raises:
            ValueError: the gradient has another shape than the output.

        Example:
            >>> class Double:
            ...     parameters = {}
            ...     def forward(self, x): return 2 * x, None
            ...     def backward(self, kept, gradient, into): return 2 * gradient, []
            >>> Double().backward(None, np.ones(2), {})
            (array([2., 2.]), [])
        """


def forward_all(layers: Iterable[Layer], x: Array) -> tuple[Array, list[Any]]:
    """Return the output of the last layer, and what the layers keep for `backward`."""
    kept = []
    for layer in layers:
        x, of_layer = layer.forward(x)
        kept.append(of_layer)
    return x, kept


def backward_all(
    layers: Sequence[Layer], kept: Sequence[Any], gradient: Array, into: Mapping[str, Array]
) -> Iterator[tuple[Array | None, Gradients]]:
    """Yield the result of each layer's `backward`, from the last layer to the first."""
    of_output: Array | None = gradient
    for layer, of_layer in zip(reversed(layers), reversed(kept), strict=True):
        of_output, gradients = layer.backward(of_layer, of_output, into)
        yield of_output, gradients


def cross_entropy(
    logits: Array, labels: Array, count: float, xp: ModuleType = np
) -> tuple[Array, Array]:
    """Return the softmax cross-entropy, summed over these samples and divided by `count`, 0-d.

    And its gradient by the logits (samples, classes).  `labels` (samples,) are integers from 0 to
    classes - 1.  Both are computed in float64; the gradient has the dtype of the logits.
    """
    log_p = _log_softmax(logits, xp)
    gradient = xp.exp(log_p)
    gradient[xp.arange(len(labels)), labels] -= 1
    gradient /= count
    loss = -log_p[xp.arange(len(labels)), labels].sum() / count
    return loss, gradient.astype(logits.dtype, copy=False)


def _log_softmax(logits: Array, xp: ModuleType) -> Array:
    """Normalise row by row; the largest logit is subtracted first, so `exp` cannot overflow."""
    logits = logits.astype(wide(logits.dtype), copy=False)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
