"""Optimizers, which turn a gradient into a step of the parameters, and learning rates.

All arrays of a call have the same shape and dtype; `gradient` is only read.  Equal inputs give
bitwise equal results: ranks with equal parameters that use equal gradients keep equal parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.train.settings import Settings

Update = Callable[[Any, tuple[Any, ...], Any, float, int], None]
"""(parameters, the optimizer's own arrays, gradient, learning rate, step) -> None"""

SLOTS = {"sgd": ("velocity",), "adam": ("mean", "square")}
"""Optimizer -> names of its own arrays, each in the parameters' shape and initially zero."""

BETAS = (0.9, 0.999)
"""Adam's share of each running mean, of the gradient and of its square, that a step keeps."""
EPS = 1e-8
"""What Adam adds to the root of the mean square."""
_BLOCK = 1 << 14
"""Elements that are updated at once, so that all arrays of a block stay in the cache."""


def sgd(
    parameters: Any, velocity: Any, gradient: Any, lr: float, momentum: float, decay: float = 0.0
) -> None:
    """Make one step of stochastic gradient descent with momentum; two arrays change in place.

        velocity   <- momentum * velocity + gradient + decay * parameters
        parameters <- parameters - lr * velocity

    `velocity` starts at zero.

    Source: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964, with
    the learning rate outside the velocity.
    """
    velocity *= momentum
    velocity += gradient
    if decay:
        velocity += decay * parameters
    parameters -= lr * velocity


def adam(
    parameters: Any,
    mean: Any,
    square: Any,
    gradient: Any,
    lr: float,
    step: int,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    decay: float = 0.0,
) -> None:
    """Make step number `step`, from 0 on, of Adam; three arrays change in place.

    `mean` and `square`, the running means of the gradient and of its square, start at zero.
    `decay` shrinks the parameters directly, not through the gradient (AdamW).

    Sources: Kingma & Ba, "Adam: a method for stochastic optimization", ICLR 2015; Loshchilov &
    Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    first, second = betas
    mean *= first
    mean += (1 - first) * gradient
    square *= second
    square += (1 - second) * (gradient * gradient)
    unbiased = mean / (1 - first ** (step + 1))
    scale = (square / (1 - second ** (step + 1))) ** 0.5
    scale += eps
    if decay:
        parameters *= 1 - lr * decay
    parameters -= lr * (unbiased / scale)


def update(settings: Settings) -> Update:
    """Return the update of the settings' optimizer."""
    momentum, decay = settings.momentum, settings.weight_decay
    if settings.optimizer == "adam":
        return lambda p, own, g, lr, step: adam(p, own[0], own[1], g, lr, step, decay=decay)
    return lambda p, own, g, lr, step: sgd(p, own[0], g, lr, momentum, decay)


def in_blocks(
    step: Update, parameters: Any, own: tuple[Any, ...], gradient: Any, lr: float, number: int
) -> None:
    """Make one step on contiguous arrays; NumPy's are updated block by block."""
    flat = [array.reshape(-1) for array in (parameters, *own, gradient)]
    block = _BLOCK if isinstance(parameters, np.ndarray) else max(1, parameters.size)
    for start in range(0, parameters.size, block):
        values, *owned, slope = (array[start : start + block] for array in flat)
        step(values, tuple(owned), slope, lr, number)


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0 to steps - 1."""
    lr = settings.lr
    if settings.lr_batch:
        lr = linear_scaling(lr, settings.batch, settings.lr_batch)
    if settings.lr_schedule == "linear":
        lr = linear_decay(lr, step, steps)
    return warm_up(lr, step, settings.warm_up)


def linear_decay(lr: float, step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0 to steps - 1: falling evenly from `lr` towards 0.

    >>> [linear_decay(0.5, step, 4) for step in range(4)]
    [0.5, 0.375, 0.25, 0.125]
    """
    return lr * (steps - step) / steps


def warm_up(lr: float, step: int, steps: int) -> float:
    """Return the learning rate of a step: it rises linearly to `lr` over `steps`, then stays.

    >>> [warm_up(0.5, step, 4) for step in range(6)]
    [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    """
    return lr * min(1.0, (step + 1) / steps) if steps else lr


def linear_scaling(lr: float, batch: int, base: int) -> float:
    """Return the learning rate for a global batch, from `lr` for a batch of `base` samples.

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.

    >>> linear_scaling(0.1, batch=256, base=64)
    0.4
    """
    return lr * batch / base
