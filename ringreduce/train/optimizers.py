"""Optimizers, which turn a gradient into a step of the parameters, and learning rates.

All arrays of a call have the same shape and dtype; `gradient` is only read.  Equal inputs give
bitwise equal results: ranks with equal parameters that use equal gradients keep equal parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.parallel.arrays import wide
from ringreduce.train.settings import Settings

Arrays = tuple[Any, ...]
"""The parameters, and after them the optimizer's own arrays, in the order of `SLOTS`."""
Update = Callable[[Arrays, Any, float, int, Arrays], None]
"""(arrays, gradient, learning rate, step, new arrays) -> None"""

SLOTS = {"sgd": ("velocity",), "adam": ("mean", "square")}
"""Optimizer -> names of its own arrays, each in the parameters' shape and initially zero."""

BETAS = (0.9, 0.999)
"""Adam's share of each running mean, of the gradient and of its square, that a step keeps."""
EPS = 1e-8
"""What Adam adds to the root of the mean square."""
_BLOCK = 1 << 14
"""Elements that are updated at once, so that all arrays of a block stay in the cache."""


def sgd(
    arrays: Arrays,
    gradient: Any,
    lr: float,
    momentum: float,
    decay: float = 0.0,
    out: Arrays | None = None,
) -> None:
    """Make one step of stochastic gradient descent with momentum.

        velocity   <- momentum * velocity + gradient + decay * parameters
        parameters <- parameters - lr * velocity

    `arrays` are the parameters and the velocity, which starts at zero.  The new values are written
    into `out`: two arrays, by default `arrays` itself.

    Source: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964, with
    the learning rate outside the velocity.
    """
    if gradient.dtype.itemsize < 4:
        _in_wide(sgd, arrays, gradient, out, lr, momentum, decay)
        return
    parameters, velocity = arrays
    new_parameters, new_velocity = arrays if out is None else out
    np.multiply(velocity, momentum, out=new_velocity)
    new_velocity += gradient
    if decay:
        new_velocity += decay * parameters
    np.subtract(parameters, lr * new_velocity, out=new_parameters)


def adam(
    arrays: Arrays,
    gradient: Any,
    lr: float,
    step: int,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    decay: float = 0.0,
    out: Arrays | None = None,
) -> None:
    """Make step number `step`, from 0 on, of Adam.

    `arrays` are the parameters, and the running means of the gradient and of its square, which
    start at zero.  The new values are written into `out`: three arrays, by default `arrays` itself.
    `decay` shrinks the parameters directly, not through the gradient (AdamW).

    Sources: Kingma & Ba, "Adam: a method for stochastic optimization", ICLR 2015; Loshchilov &
    Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    if gradient.dtype.itemsize < 4:
        _in_wide(adam, arrays, gradient, out, lr, step, betas, eps, decay)
        return
    parameters, mean, square = arrays
    new_parameters, new_mean, new_square = arrays if out is None else out
    first, second = betas
    np.multiply(mean, first, out=new_mean)
    new_mean += (1 - first) * gradient
    np.multiply(square, second, out=new_square)
    new_square += (1 - second) * (gradient * gradient)
    unbiased = new_mean / (1 - first ** (step + 1))
    scale = (new_square / (1 - second ** (step + 1))) ** 0.5
    scale += eps
    change = lr * (unbiased / scale)
    if decay:
        np.multiply(parameters, 1 - lr * decay, out=new_parameters)
        new_parameters -= change
    else:
        np.subtract(parameters, change, out=new_parameters)


def _in_wide(
    step: Callable[..., None], arrays: Arrays, gradient: Any, out: Arrays | None, *how: Any
) -> None:
    """Make a step in the wide dtype, for floats of 16 and 8 bits, and round its results once."""
    wider = [each.astype(wide(each.dtype)) for each in (*arrays, gradient)]
    step(tuple(wider[:-1]), wider[-1], *how)
    for place, result in zip(arrays if out is None else out, wider, strict=False):
        place[...] = result


def update(settings: Settings) -> Update:
    momentum, decay = settings.momentum, settings.weight_decay
    if settings.optimizer == "adam":
        return lambda old, g, lr, step, new: adam(old, g, lr, step, decay=decay, out=new)
    return lambda old, g, lr, step, new: sgd(old, g, lr, momentum, decay, new)


def in_blocks(
    step: Update, arrays: Arrays, gradient: Any, lr: float, number: int, out: Arrays | None = None
) -> None:
    """Make one step on contiguous arrays, NumPy's in blocks; write into `out`, or into `arrays`."""
    out = arrays if out is None else out
    size = gradient.size
    if size <= _BLOCK or not isinstance(gradient, np.ndarray):
        step(arrays, gradient, lr, number, out)
        return
    old, new = ([array.reshape(-1) for array in each] for each in (arrays, out))
    slope = gradient.reshape(-1)
    for start in range(0, size, _BLOCK):
        block = slice(start, start + _BLOCK)
        before = after = tuple([array[block] for array in old])
        if out is not arrays:
            after = tuple([array[block] for array in new])
        step(before, slope[block], lr, number, after)


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    lr = settings.lr
    if settings.lr_batch:
        lr = linear_scaling(lr, settings.batch, settings.lr_batch)
    return warm_up(_decayed(settings, lr, step, steps), step, settings.warm_up)


def scheduled(settings: Settings, made: int, whole: int) -> float:
    """Return the learning rate after `made` of `whole` samples, without warming up."""
    return _decayed(settings, settings.lr, made, whole)


def _decayed(settings: Settings, lr: float, made: int, whole: int) -> float:
    return linear_decay(lr, made, whole) if settings.lr_schedule == "linear" else lr


def linear_decay(lr: float, step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0 on: it falls evenly from `lr` to 0 at `steps`."""
    return lr * (steps - step) / steps


def warm_up(lr: float, step: int, steps: int) -> float:
    """Return the learning rate of a step: it rises linearly to `lr` over `steps`, then stays."""
    return lr * min(1.0, (step + 1) / steps) if steps else lr


def linear_scaling(lr: float, batch: int, base: int) -> float:
    """Return the learning rate for a global batch, from `lr` for a batch of `base` samples.

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
    """
    return lr * batch / base
