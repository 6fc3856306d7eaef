"""Optimizers: they turn a gradient into a step of the parameters."""

from __future__ import annotations

from typing import Any


def sgd(parameters: Any, velocity: Any, gradient: Any, lr: float, momentum: float) -> None:
    """One step of stochastic gradient descent with momentum; two arrays change in place.

        velocity   <- momentum * velocity + gradient
        parameters <- parameters - lr * velocity

    The arrays have one shape and dtype; `velocity` starts at zero; `gradient` is only read.  Equal
    inputs give bitwise equal results, so ranks that start alike and see one gradient stay alike.

    Source: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964, with
    the learning rate outside the velocity.
    """
    velocity *= momentum
    velocity += gradient
    parameters -= lr * velocity


def linear_decay(lr: float, step: int, steps: int) -> float:
    """The learning rate of a step, from 0 to steps - 1: from `lr` it falls evenly towards 0.

    >>> [linear_decay(0.5, step, 4) for step in range(4)]
    [0.5, 0.375, 0.25, 0.125]
    """
    return lr * (steps - step) / steps
