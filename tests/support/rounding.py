"""How far rounding may go, so that two ways to compute the network's gradient can be compared.

Running error analysis: Higham, "Accuracy and stability of numerical algorithms", chapter 3.  A
sum of k products, in any order and with or without FMA, is off by at most gamma(k) times the sum
of the magnitudes.  Whatever the BLAS and however a batch is cut into parts, each value stays
within these bounds of the exact value, so two ways of computing differ by twice as much.  `exp`
and `log` are taken to be good to 4 units in the last place, 8 U.
"""

from __future__ import annotations

import numpy as np

from ringreduce.parallel.batch_norm import EPS
from ringreduce.train import Normalised, data, mlp

U = np.finfo(np.float64).eps / 2
SIZES = (64, 20, 15, 10)


class Alone:
    """The communicator of one rank, as far as batch normalisation uses it."""

    def all_reduce(self, x, *, out=None):
        return x


def problem(seed, samples=23, sizes=SIZES, batch_norm=False):
    """Parameters with biases that are not zero, images and labels, all float64."""
    rng = np.random.default_rng(seed)
    flat = mlp.init_params(sizes, seed, np.float64, batch_norm=batch_norm)
    flat += 0.01 * rng.normal(size=flat.shape)
    x = rng.integers(0, 17, (samples, sizes[0])) / 16
    return flat, x, rng.integers(0, sizes[-1], samples)


def gamma(k):
    return k * U / (1 - k * U)


def product_bound(a, ea, b, eb, terms):
    """Error of a @ b, a sum of `terms` products, where a is off by ea and b by eb."""
    a, b = np.abs(a), np.abs(b)
    return ea @ (b + eb) + a @ eb + gamma(terms) * ((a + ea) @ (b + eb))


def _times(a, ea, b, eb):
    """Error of the elementwise a * b, where a is off by ea and b by eb."""
    a, b = np.abs(a), np.abs(b)
    return ea * (b + eb) + a * eb + U * (a + ea) * (b + eb)


def _sums(a, ea, ranks):
    """Error of the sums of columns, which are added up from the parts of `ranks` ranks."""
    return ea.sum(axis=0) + gamma(len(a) + ranks) * (np.abs(a) + ea).sum(axis=0)


def batch_norm_bounds(x, ex, scale, shift, ranks):
    """What `batch_norm` gives for all samples together, and how far each value may be off."""
    n = len(x)
    mean = x.mean(axis=0)
    emean = _sums(x, ex, ranks) / n
    emean += U * (np.abs(mean) + emean)
    centred = x - mean
    ecentred = ex + emean
    ecentred += U * (np.abs(centred) + ecentred)
    esquares = _times(centred, ecentred, centred, ecentred)
    variance = (centred**2).mean(axis=0)
    evariance = _sums(centred**2, esquares, ranks) / n
    evariance += U * (variance + evariance)
    within = variance + EPS
    ewithin = evariance + U * (within + evariance)
    assert (ewithin < within).all()
    inverse = within**-0.5
    einverse = (within - ewithin) ** -0.5 - inverse
    einverse += 4 * U * (inverse + einverse)  # the root and the division, for both
    unit = centred * inverse
    eunit = _times(centred, ecentred, inverse, einverse)
    y = unit * scale + shift
    ey = _times(unit, eunit, scale, 0)
    ey += U * (np.abs(y) + ey)
    values = Normalised(y, unit, inverse, mean, variance, n)
    return values, Normalised(ey, eunit, einverse, emean, evariance, 0)


def batch_norm_backward_bounds(values, bounds, scale, delta, edelta, ranks):
    """What `batch_norm_backward` gives for all samples, and how far each value may be off.

    Of `batch_norm_bounds` are `values` and `bounds`.
    """
    unit, eunit, n = values.unit, bounds.unit, values.samples
    products = delta * unit
    by_scale, by_shift = products.sum(axis=0), delta.sum(axis=0)
    eby_scale = _sums(products, _times(delta, edelta, unit, eunit), ranks)
    eby_shift = _sums(delta, edelta, ranks)
    of_scale, of_shift = by_scale / n, by_shift / n
    eof_scale = (1 + U) * eby_scale / n + U * np.abs(of_scale)
    eof_shift = (1 + U) * eby_shift / n + U * np.abs(of_shift)
    by_x = delta - of_shift
    eby_x = edelta + eof_shift
    eby_x += U * (np.abs(by_x) + eby_x)
    less = unit * of_scale
    eless = _times(unit, eunit, of_scale, eof_scale)
    eby_x += eless + U * (np.abs(by_x - less) + eby_x + eless)
    by_x = by_x - less
    factor = scale * values.inverse
    efactor = _times(scale, 0, values.inverse, bounds.inverse)
    eby_x = _times(by_x, eby_x, factor, efactor)
    return (by_x * factor, by_scale, by_shift), (eby_x, eby_scale, eby_shift)


def forward_bounds(parameters, x, ranks=1):
    """What enters each layer and the logits, and how far each of these may be off.

    Also the results of `batch_norm_bounds` of each normalised layer, by its number.
    """
    values, bounds, normalised = [x], [np.zeros_like(x)], {}
    for i, (weight, bias, *norm) in enumerate(parameters):
        z = values[-1] @ weight + bias
        ez = product_bound(values[-1], bounds[-1], weight, 0 * weight, len(weight) + 1)
        ez += gamma(len(weight) + 1) * np.abs(bias)
        if norm:
            normalised[i] = batch_norm_bounds(z, ez, *norm, ranks)
            z, ez = (result.y for result in normalised[i])
        hidden = i < len(parameters) - 1
        # A unit that might be on either side of its kink would have no bound.  An exact zero, the
        # sum of zeros, is on one side in every order of additions.
        assert not hidden or ((np.abs(z) > ez) | (ez == 0)).all()
        values.append(np.maximum(z, 0) if hidden else z)
        bounds.append(np.where(z > 0, ez, 0) if hidden else ez)
    return values, bounds, normalised


def rounding_bounds(parameters, x, labels, count, ranks=1):
    """How far the loss, and each parameter's gradient, may be off; `ranks` parts are added up."""
    values, bounds, normalised = forward_bounds(parameters, x, ranks)
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
    for i in reversed(range(len(parameters))):
        layer, a, ea = parameters[i], values[i], bounds[i]
        norm = ()
        if i in normalised:
            (d, *_), (ed, *norm) = batch_norm_backward_bounds(
                *normalised[i], layer.scale, d, ed, ranks
            )
        ones = np.ones((1, len(a)))
        bias = product_bound(ones, 0 * ones, d, ed, terms)[0]
        weight = product_bound(a.T, ea.T, d, ed, terms)
        layers.append(type(layer)(weight, bias, *norm))
        ed = product_bound(d, ed, layer.weight.T, 0 * layer.weight.T, d.shape[1])
        d, ed = (d @ layer.weight.T) * (a > 0), ed * (a > 0)
    return loss, flatten(reversed(layers))


def layers_of(gradients):
    """Layers, of the arrays by name."""
    return [*mlp.by_layer(gradients).values()]


def split_of(x, labels):
    """A split whose samples, all of them, are these, on both sides."""
    return data.Split("problem", x, labels, x, labels)


def loss_and_layers(parameters, x, labels, count, comm=None):
    """The loss, and the gradients as layers from the first to the last."""
    loss, _, pairs = mlp.step(mlp.layers(parameters, comm=comm), x, labels, count, {})
    return loss, layers_of(dict(pairs))


def flatten(layers):
    return np.concatenate([part.reshape(-1) for layer in layers for part in layer])
