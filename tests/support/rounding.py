"""How far rounding may go, so that two ways to compute the network's gradient can be compared.

Running error analysis: Higham, "Accuracy and stability of numerical algorithms", chapter 3.  A
sum of k products, in any order and with or without FMA, is off by at most gamma(k) times the sum
of the magnitudes.  Whatever the BLAS and however a batch is cut into parts, each value stays
within these bounds of the exact value, so two ways of computing differ by twice as much.  `exp`
and `log` are taken to be good to 4 units in the last place, 8 U.
"""

from __future__ import annotations

import numpy as np

from ringreduce.train import data, mlp

U = np.finfo(np.float64).eps / 2
SIZES = (64, 20, 15, 10)


def problem(seed, samples=23, sizes=SIZES):
    """Parameters with biases that are not zero, images and labels, all float64."""
    rng = np.random.default_rng(seed)
    flat = mlp.init_params(sizes, seed, np.float64)
    flat += 0.01 * rng.normal(size=flat.shape)
    x = rng.integers(0, 17, (samples, sizes[0])) / 16
    return flat, x, rng.integers(0, sizes[-1], samples)


def gamma(k):
    return k * U / (1 - k * U)


def product_bound(a, ea, b, eb, terms):
    """Error of a @ b, a sum of `terms` products, where a is off by ea and b by eb."""
    a, b = np.abs(a), np.abs(b)
    return ea @ (b + eb) + a @ eb + gamma(terms) * ((a + ea) @ (b + eb))


def forward_bounds(parameters, x):
    """What enters each layer and the logits, and how far each of these may be off."""
    values, bounds = [x], [np.zeros_like(x)]
    for i, (weight, bias) in enumerate(parameters):
        z = values[-1] @ weight + bias
        ez = product_bound(values[-1], bounds[-1], weight, 0 * weight, len(weight) + 1)
        ez += gamma(len(weight) + 1) * np.abs(bias)
        hidden = i < len(parameters) - 1
        # A unit that might be on either side of its kink would have no bound.
        assert not hidden or (np.abs(z) > ez).all()
        values.append(np.maximum(z, 0) if hidden else z)
        bounds.append(ez)
    return values, bounds


def rounding_bounds(parameters, x, labels, count, ranks=1):
    """How far the loss, and each parameter's gradient, may be off; `ranks` parts are added up."""
    values, bounds = forward_bounds(parameters, x)
    logits, ez = values.pop(), bounds.pop()
    classes, terms = logits.shape[1], len(x) + ranks
    # Shifting by the largest logit adds its error and one rounding; the sum of the exponentials is
    # at least 1, so its relative error passes to the logarithm as it is, doubled for second order.
    shifted = logits - logits.max(axis=1, keepdims=True)
    es = ez + ez.max(axis=1, keepdims=True) + U * np.abs(shifted)
    relative = np.expm1(es).max(axis=1, keepdims=True) + 8 * U + gamma(classes)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    elog_p = es + 2 * relative + 8 * U * np.log(classes) + U * np.abs(log_p)
    own = np.arange(len(labels)), labels
    loss = (elog_p[own].sum() + gamma(terms + 1) * np.abs(log_p[own]).sum()) / count

    d = np.exp(log_p)
    ed = d * (np.expm1(elog_p) + 8 * U)
    d[own] -= 1
    d, ed = d / count, (ed + 2 * U * (np.abs(d) + ed)) / count
    layers = []
    for (weight, _), a, ea in zip(parameters[::-1], values[::-1], bounds[::-1], strict=True):
        ones = np.ones((1, len(a)))
        bias = product_bound(ones, 0 * ones, d, ed, terms)[0]
        layers.append(mlp.Layer(product_bound(a.T, ea.T, d, ed, terms), bias))
        ed = product_bound(
            d, ed, weight.T, 0 * weight.T, classes if a is values[-1] else d.shape[1]
        )
        d, ed = (d @ weight.T) * (a > 0), ed * (a > 0)
    return loss, flatten(reversed(layers))


def layers_of(gradients):
    """Layers, of the arrays by name."""
    numbers = range(len(gradients) // 2)
    return [mlp.Layer(gradients[f"{n}.weight"], gradients[f"{n}.bias"]) for n in numbers]


def split_of(x, labels):
    """A split whose samples, all of them, are these, on both sides."""
    return data.Split("problem", x, labels, x, labels)


def loss_and_layers(parameters, x, labels, count):
    """What `mlp.gradients` gives, as layers from the first to the last."""
    loss, pairs = mlp.gradients(parameters, x, labels, count)
    return loss, layers_of(dict(pairs))


def flatten(layers):
    return np.concatenate([part.reshape(-1) for layer in layers for part in layer])
