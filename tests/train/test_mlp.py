"""The network's loss and gradient, and the optimizers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from ringreduce.train import Settings, mlp, optimizers
from tests.support.rounding import (
    SIZES,
    Alone,
    flatten,
    forward_bounds,
    layers_of,
    loss_and_layers,
    problem,
    rounding_bounds,
)

# --- the network -------------------------------------------------------------------------------


def projection_error(flat, x, labels, gradient, direction, norm=False):
    """How far gradient · direction is from the slope of the loss, and how far it may be."""

    def slope(h):
        ends = [flat + h * direction, flat - h * direction]
        layers = [mlp.views(end, SIZES, norm) for end in ends]
        signs = [[a > 0 for a in forward_bounds(each, x)[0][:-1]] for each in layers]
        # No unit passes its kink on the way, so that the loss is smooth there.
        assert all(np.array_equal(a, b) for a, b in zip(*signs, strict=True))
        up, down = (loss_and_layers(each, x, labels, len(x), Alone())[0] for each in layers)
        off = sum(rounding_bounds(each, x, labels, len(x))[0] for each in layers)
        return (up - down) / (2 * h), off / (2 * h)

    # slope(h) is off by h² f'''/6 + O(h⁴), and slope(2h) - slope(h) is h² f'''/2 + O(h⁴): three
    # times as much, which leaves room for the fourth order.
    h = 1e-4
    (near, off), (far, _) = slope(h), slope(2 * h)
    _, gradient_off = rounding_bounds(mlp.views(flat, SIZES, norm), x, labels, len(x))
    tolerance = abs(far - near) + 2 * off + (gradient_off * np.abs(direction)).sum()
    return abs(gradient @ direction - near), tolerance


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_gradient_is_the_slope_along_a_random_direction(seed, norm):
    flat, x, labels = problem(seed, batch_norm=norm)
    _, layers = loss_and_layers(mlp.views(flat, SIZES, norm), x, labels, len(x), Alone())
    direction = np.random.default_rng(seed + 100).normal(size=flat.shape)
    direction /= np.linalg.norm(direction)
    error, tolerance = projection_error(flat, x, labels, flatten(layers), direction, norm)
    assert error <= tolerance < (1e-5 if norm else 1e-6)


def test_projection_notices_a_gradient_that_is_a_little_wrong():
    flat, x, labels = problem(1)
    _, layers = loss_and_layers(mlp.views(flat, SIZES), x, labels, len(x))
    layers[1].bias[3] += 1e-3
    direction = np.random.default_rng(101).normal(size=flat.shape)
    direction /= np.linalg.norm(direction)
    error, tolerance = projection_error(flat, x, labels, flatten(layers), direction)
    assert error > tolerance


def test_layers_that_are_normalised_need_the_ranks():
    flat, x, labels = problem(5, batch_norm=True)
    with pytest.raises(ValueError, match="layer 0 is normalised over the batch of all ranks"):
        loss_and_layers(mlp.views(flat, SIZES, True), x, labels, len(x))


def test_the_last_layer_is_not_normalised():
    flat, _, _ = problem(5, batch_norm=True)
    kinds = [type(layer) for layer in mlp.views(flat, SIZES, True)]
    assert kinds == [mlp.NormalisedArrays, mlp.NormalisedArrays, mlp.AffineArrays]


def test_statistics_of_the_batch_evaluate_as_the_batch_itself():
    flat, x, labels = problem(5, batch_norm=True)
    network = mlp.layers(mlp.views(flat, SIZES, True), comm=Alone())
    loss, *_ = mlp.step(network, x, labels, len(x), {})
    statistics = mlp.statistics_in(network)
    assert statistics.keys() == mlp.init_statistics(SIZES).keys()
    logits = mlp.predict(network, x, statistics)
    likely = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert -np.log(likely[np.arange(len(x)), labels]).mean() == pytest.approx(loss, rel=1e-12)


def test_an_empty_part_has_no_loss_and_no_gradient():
    flat, x, labels = problem(5)
    loss, layers = loss_and_layers(mlp.views(flat, SIZES), x[:0], labels[:0], 32)
    assert loss == 0
    assert not flatten(layers).any()


def test_the_network_takes_every_array_function_from_xp(monkeypatch):
    flat, x, labels = problem(6)
    parameters = mlp.views(flat, SIZES)
    expected = loss_and_layers(parameters, x, labels, len(x))
    monkeypatch.setattr(mlp, "np", None)
    loss, _, pairs = mlp.step(mlp.layers(parameters, np), x, labels, len(x), {}, np)
    assert loss == expected[0]
    assert np.array_equal(flatten(layers_of(dict(pairs))), flatten(expected[1]))


@pytest.mark.parametrize("norm", [False, True])
def test_views_write_through_and_cover_the_flat_buffer(norm):
    flat = np.zeros(mlp.parameter_count(SIZES, norm))
    layers = mlp.views(flat, SIZES, norm)
    assert [layer.weight.shape for layer in layers] == list(pairwise(SIZES))
    for array in mlp.named(layers).values():
        array += 1
    assert (flat == 1).all()


def test_views_refuse_a_buffer_of_another_length():
    with pytest.raises(ValueError, match=r"shape \(5,\); layers \(64, 20, 15, 10\) need \(1775,\)"):
        mlp.views(np.zeros(5), SIZES)


# --- the optimizer -----------------------------------------------------------------------------


def test_sgd_follows_the_recurrence_written_by_hand():
    rng = np.random.default_rng(0)
    parameters, velocity = rng.normal(size=5), np.zeros(5)
    by_hand = [(p, 0.0) for p in parameters.tolist()]
    for _ in range(10):
        gradient = rng.normal(size=5)
        optimizers.sgd((parameters, velocity), gradient, lr=0.1, momentum=0.9)
        for i, (p, v) in enumerate(by_hand):
            v = 0.9 * v + float(gradient[i])
            by_hand[i] = (p - 0.1 * v, v)
    assert parameters.tolist() == [p for p, _ in by_hand]
    assert velocity.tolist() == [v for _, v in by_hand]


def test_weight_decay_of_sgd_is_that_of_a_penalty():
    """Of decay / 2 times the square of the parameters, whose gradient is decay * parameters."""
    plain, decayed = np.array([2.0, -4.0]), np.array([2.0, -4.0])
    velocities = np.zeros(2), np.zeros(2)
    for gradient in (np.array([1.0, 0.5]), np.array([-2.0, 1.0])):
        optimizers.sgd((plain, velocities[0]), gradient + 0.25 * plain, lr=0.5, momentum=0.5)
        optimizers.sgd((decayed, velocities[1]), gradient, lr=0.5, momentum=0.5, decay=0.25)
    assert np.array_equal(plain, decayed)


def test_adam_follows_the_recurrence_written_by_hand():
    parameters, mean, square = np.array([1.0, -1.0]), np.zeros(2), np.zeros(2)
    wanted, m, v = [1.0, -1.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate(([2.0, 0.5], [-1.0, 0.25], [0.0, 4.0])):
        arrays = parameters, mean, square
        optimizers.adam(arrays, np.array(gradient), lr=0.1, step=step, decay=0.2)
        for i, g in enumerate(gradient):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            unbiased, scale = m[i] / (1 - 0.9 ** (step + 1)), v[i] / (1 - 0.999 ** (step + 1))
            wanted[i] = wanted[i] * (1 - 0.1 * 0.2) - 0.1 * unbiased / (math.sqrt(scale) + 1e-8)
    assert np.allclose(parameters, wanted, rtol=1e-12)


def test_blocks_and_other_arrays_for_the_results_change_nothing():
    rng = np.random.default_rng(0)
    shape = 123, 457
    steps = (
        (2, lambda old, g, lr, n, new: optimizers.sgd(old, g, lr, 0.9, 0.1, new)),
        (3, lambda old, g, lr, n, new: optimizers.adam(old, g, lr, n, decay=0.1, out=new)),
    )
    for count, step in steps:
        *start, gradient = (rng.normal(size=shape) ** 2 for _ in range(count + 1))
        whole, blocks = (tuple(array.copy() for array in start) for _ in range(2))
        apart = tuple(np.full(shape, np.nan) for _ in start)
        step(whole, gradient, 0.1, 5, whole)
        optimizers.in_blocks(step, tuple(start), gradient, 0.1, 5, apart)
        optimizers.in_blocks(step, blocks, gradient, 0.1, 5)
        for found in (blocks, apart):
            assert all(map(np.array_equal, whole, found))
        assert not np.array_equal(whole[0], start[0])


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({}, [1.0, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "constant"}, [1.0] * 4),
        ({"lr_schedule": "constant", "warm_up": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"warm_up": 2}, [0.5, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "constant", "batch": 64, "lr_batch": 32}, [2.0] * 4),
    ],
)
def test_the_learning_rate_of_each_step(given, rates):
    settings = Settings(lr=1.0, **given)
    assert [optimizers.learning_rate(settings, step, 4) for step in range(4)] == rates
