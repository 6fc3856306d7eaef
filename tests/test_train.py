"""Training: the network's gradient, the data, the ranks together, and the command line."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import math
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import (
    DriftError,
    Epoch,
    Replica,
    Settings,
    check_equal,
    data,
    load_digits,
    load_split,
    mlp,
    optimizers,
    train,
)
from ringreduce.train.__main__ import ProgressLine, main

RANKS = range(1, 10)
U = np.finfo(np.float64).eps / 2


# --- how far rounding may go -------------------------------------------------------------------
#
# Running error analysis: Higham, "Accuracy and stability of numerical algorithms", chapter 3.  A
# sum of k products, in any order and with or without FMA, is off by at most gamma(k) times the sum
# of the magnitudes.  Whatever the BLAS and however a batch is cut into parts, each value stays
# within these bounds of the exact value, so two ways of computing differ by twice as much.  `exp`
# and `log` are taken to be good to 4 units in the last place, 8 U.


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


def flatten(layers):
    return np.concatenate([part.reshape(-1) for layer in layers for part in layer])


# --- the network -------------------------------------------------------------------------------

SIZES = (64, 20, 15, 10)


def problem(seed, samples=23, sizes=SIZES):
    """Parameters with biases that are not zero, images and labels, all float64."""
    rng = np.random.default_rng(seed)
    flat = mlp.init_params(sizes, seed, np.float64)
    flat += 0.01 * rng.normal(size=flat.shape)
    x = rng.integers(0, 17, (samples, sizes[0])) / 16
    return flat, x, rng.integers(0, sizes[-1], samples)


def projection_error(flat, x, labels, gradient, direction):
    """How far gradient · direction is from the slope of the loss, and how far it may be."""

    def slope(h):
        ends = [flat + h * direction, flat - h * direction]
        layers = [mlp.views(end, SIZES) for end in ends]
        signs = [[a > 0 for a in forward_bounds(each, x)[0][:-1]] for each in layers]
        # No unit passes its kink on the way, so that the loss is smooth there.
        assert all(np.array_equal(a, b) for a, b in zip(*signs, strict=True))
        up, down = (mlp.loss(each, x, labels, len(x)) for each in layers)
        off = sum(rounding_bounds(each, x, labels, len(x))[0] for each in layers)
        return (up - down) / (2 * h), off / (2 * h)

    # slope(h) is off by h² f'''/6 + O(h⁴), and slope(2h) - slope(h) is h² f'''/2 + O(h⁴): three
    # times as much, which leaves room for the fourth order.
    h = 1e-4
    (near, off), (far, _) = slope(h), slope(2 * h)
    _, gradient_off = rounding_bounds(mlp.views(flat, SIZES), x, labels, len(x))
    tolerance = abs(far - near) + 2 * off + (gradient_off * np.abs(direction)).sum()
    return abs(gradient @ direction - near), tolerance


@pytest.mark.parametrize("seed", range(8))
def test_gradient_is_the_slope_along_a_random_direction(seed):
    flat, x, labels = problem(seed)
    _, layers = mlp.gradients(mlp.views(flat, SIZES), x, labels, len(x))
    direction = np.random.default_rng(seed + 100).normal(size=flat.shape)
    direction /= np.linalg.norm(direction)
    error, tolerance = projection_error(flat, x, labels, flatten(layers), direction)
    assert error <= tolerance < 1e-6


def test_projection_notices_a_gradient_that_is_a_little_wrong():
    flat, x, labels = problem(1)
    _, layers = mlp.gradients(mlp.views(flat, SIZES), x, labels, len(x))
    layers[1].bias[3] += 1e-3
    direction = np.random.default_rng(101).normal(size=flat.shape)
    direction /= np.linalg.norm(direction)
    error, tolerance = projection_error(flat, x, labels, flatten(layers), direction)
    assert error > tolerance


def test_loss_and_gradients_agree_on_the_loss():
    flat, x, labels = problem(2)
    parameters = mlp.views(flat, SIZES)
    assert mlp.gradients(parameters, x, labels, 7)[0] == mlp.loss(parameters, x, labels, 7)


def test_uniform_logits_lose_the_logarithm_of_the_classes():
    parameters = mlp.views(np.zeros(mlp.parameter_count(SIZES)), SIZES)
    _, x, labels = problem(3)
    assert mlp.loss(parameters, x, labels, len(x)) == pytest.approx(np.log(10), rel=1e-15)


def test_huge_logits_do_not_overflow():
    flat, x, labels = problem(4)
    loss, layers = mlp.gradients(mlp.views(1e4 * flat, SIZES), x, labels, len(x))
    assert np.isfinite(loss)
    assert np.isfinite(flatten(layers)).all()


def test_an_empty_part_has_no_loss_and_no_gradient():
    flat, x, labels = problem(5)
    loss, layers = mlp.gradients(mlp.views(flat, SIZES), x[:0], labels[:0], 32)
    assert loss == 0
    assert not flatten(layers).any()


def test_the_network_takes_every_array_function_from_xp(monkeypatch):
    flat, x, labels = problem(6)
    parameters = mlp.views(flat, SIZES)
    expected = mlp.gradients(parameters, x, labels, len(x))
    monkeypatch.setattr(mlp, "np", None)
    loss, layers = mlp.gradients(parameters, x, labels, len(x), np)
    assert loss == expected[0]
    assert np.array_equal(flatten(layers), flatten(expected[1]))


def test_views_write_through_and_cover_the_flat_buffer():
    flat = np.zeros(mlp.parameter_count(SIZES))
    layers = mlp.views(flat, SIZES)
    assert [layer.weight.shape for layer in layers] == list(pairwise(SIZES))
    for layer in layers:
        layer.weight[...] += 1
        layer.bias[...] += 1
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
        optimizers.sgd(parameters, velocity, gradient, lr=0.1, momentum=0.9)
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
        optimizers.sgd(plain, velocities[0], gradient + 0.25 * plain, lr=0.5, momentum=0.5)
        optimizers.sgd(decayed, velocities[1], gradient, lr=0.5, momentum=0.5, decay=0.25)
    assert np.array_equal(plain, decayed)


def test_adam_follows_the_recurrence_written_by_hand():
    parameters, mean, square = np.array([1.0, -1.0]), np.zeros(2), np.zeros(2)
    wanted, m, v = [1.0, -1.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate(([2.0, 0.5], [-1.0, 0.25], [0.0, 4.0])):
        optimizers.adam(parameters, mean, square, np.array(gradient), lr=0.1, step=step, decay=0.2)
        for i, g in enumerate(gradient):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            unbiased, scale = m[i] / (1 - 0.9 ** (step + 1)), v[i] / (1 - 0.999 ** (step + 1))
            wanted[i] = wanted[i] * (1 - 0.1 * 0.2) - 0.1 * unbiased / (math.sqrt(scale) + 1e-8)
    assert np.allclose(parameters, wanted, rtol=1e-12)


def test_the_first_step_of_adam_is_the_learning_rate_whatever_the_gradient():
    parameters, zeros = np.zeros(3), (np.zeros(3), np.zeros(3))
    optimizers.adam(parameters, *zeros, np.array([1e-3, -5.0, 1e4]), lr=0.1, step=0)
    assert np.allclose(parameters, [-0.1, 0.1, -0.1], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adam_keeps_the_dtype(dtype):
    arrays = [np.ones(3, dtype), np.zeros(3, dtype), np.zeros(3, dtype)]
    optimizers.adam(*arrays, np.ones(3, dtype), lr=0.1, step=0, decay=0.1)
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}


def test_warming_up_and_scaling():
    assert [optimizers.warm_up(1.0, step, 2) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert optimizers.warm_up(0.3, 0, 0) == 0.3
    assert optimizers.linear_scaling(0.1, batch=64, base=32) == 0.2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sgd_keeps_the_dtype(dtype):
    parameters, velocity = np.ones(3, dtype), np.zeros(3, dtype)
    optimizers.sgd(parameters, velocity, np.ones(3, dtype), lr=0.1, momentum=0.9)
    assert parameters.dtype == velocity.dtype == dtype


def test_learning_rate_falls_evenly_to_nothing():
    assert [optimizers.linear_decay(2.0, step, 4) for step in range(5)] == [2, 1.5, 1, 0.5, 0]


# --- the data ----------------------------------------------------------------------------------


def test_digits_are_complete():
    images, labels = load_digits()
    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0, 16)
    # As the source states them.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_hold_out_is_a_fifth_of_each_class():
    _, labels = load_digits()
    held = data.held_out(labels)
    for digit in range(10):
        assert abs(held[labels == digit].sum() - (labels == digit).sum() / 5) <= 0.5


def test_hold_out_is_always_the_same():
    _, labels = load_digits()
    digest = hashlib.sha256(np.packbits(data.held_out(labels)).tobytes()).hexdigest()
    assert digest == "ebf45f67cd7569e7eea115982fa51b27f451da4ccbf9e624def3e2d81e5e337e"


def test_split_puts_every_digit_on_one_side():
    images, labels = load_digits()
    split = load_split(np.float64)
    held = data.held_out(labels)
    assert np.array_equal(split.train_x * 16, images[~held])
    assert np.array_equal(split.held_out_x * 16, images[held])
    assert np.array_equal(split.train_labels, labels[~held])
    assert np.array_equal(split.held_out_labels, labels[held])


def truncated(packed):
    return packed[: len(packed) // 2]


def with_a_flipped_bit(packed):
    middle = len(packed) // 2
    return packed[:middle] + bytes([packed[middle] ^ 1]) + packed[middle + 1 :]


def with_another_label(packed):
    return gzip.compress(gzip.decompress(packed)[:-2] + b"9\n")


@pytest.mark.parametrize("damage", [truncated, with_a_flipped_bit, with_another_label])
def test_damaged_file_is_refused(damage, tmp_path):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(damage(data.DIGITS.read_bytes()))
    with pytest.raises(ValueError, match=r"digits\.csv\.gz is damaged.*install it again"):
        load_digits(path)


@pytest.mark.parametrize("batch", [1, 7, 32, 100])
def test_batches_of_an_epoch_hold_every_sample_once(batch):
    batches = list(data.global_batches(100, batch, seed=3, epoch=1))
    assert np.bincount(np.concatenate(batches), minlength=100).tolist() == [1] * 100
    assert [len(each) for each in batches[:-1]] == [batch] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= batch


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_parts_partition_a_batch_evenly(size, count):
    (batch,) = data.global_batches(count, count, seed=0, epoch=1)
    parts = [data.part(batch, rank, size) for rank in range(size)]
    assert np.array_equal(np.concatenate(parts), batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("seed", "epoch", "same"), [(5, 2, True), (5, 3, False), (6, 2, False), (2, 5, False)]
)
def test_order_and_noise_depend_on_seed_and_epoch_alone(seed, epoch, same):
    def drawn(seed, epoch):
        (order,) = data.global_batches(50, 50, seed, epoch)
        return order, data.noise(50, 0.2, seed, epoch)

    for ours, theirs in zip(drawn(5, 2), drawn(seed, epoch), strict=True):
        assert np.array_equal(ours, theirs) == same


def test_noise_scales():
    assert np.array_equal(data.noise(5, 0.5, 1, 1), data.noise(5, 1.0, 1, 1) / 2)
    assert not data.noise(5, 0.0, 1, 1).any()


# --- ranks together ----------------------------------------------------------------------------

FLOAT64 = Settings(hidden=(20, 15), dtype="float64")


def gradient_of_parts(comm, flat, x, labels, count):
    """Mean loss and gradient as every rank ends up with them."""
    replica = Replica(comm, SIZES, FLOAT64)
    replica.flat[...] = flat
    mine = data.part(np.arange(len(x)), comm.rank, comm.size)
    replica.mean_gradient(x[mine], labels[mine], count)
    return replica.reduced


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", [1, 5, 32])
def test_ranks_compute_the_gradient_of_one_rank(ranks, count):
    flat, x, labels = problem(7, samples=count)
    loss, layers = mlp.gradients(mlp.views(flat, SIZES), x, labels, count)
    bounds = rounding_bounds(mlp.views(flat, SIZES), x, labels, count, ranks)
    for reduced in rr.spawn(gradient_of_parts, ranks, flat, x, labels, count):
        assert abs(reduced[-1] - loss) <= 2 * bounds[0] < 1e-10
        assert (np.abs(reduced[:-1] - flatten(layers)) <= 2 * bounds[1]).all()
        assert bounds[1].max() < 1e-10


def mean_of_means(comm, flat, x, labels):
    """What many a program computes: right only where all parts are equally long."""
    mine = data.part(np.arange(len(x)), comm.rank, comm.size)
    _, layers = mlp.gradients(mlp.views(flat, SIZES), x[mine], labels[mine], len(mine))
    return comm.all_reduce(flatten(layers), op="mean")


def test_the_bound_notices_a_mean_of_means_over_uneven_parts():
    flat, x, labels = problem(7, samples=5)
    _, layers = mlp.gradients(mlp.views(flat, SIZES), x, labels, 5)
    _, bounds = rounding_bounds(mlp.views(flat, SIZES), x, labels, 5, 2)
    wrong = rr.spawn(mean_of_means, 2, flat, x, labels)[0]
    assert (np.abs(wrong - flatten(layers)) > 2 * bounds).mean() > 0.5


def parameters_after(comm, split, settings, nudge):
    """The parameters at the end, if those at the start are moved by `nudge`."""
    sizes = (64, *settings.hidden, 10)
    replica = Replica(comm, sizes, settings)
    replica.flat += nudge
    for number in range(1, settings.epochs + 1):
        replica.epoch(split.train_x, split.train_labels, number)
    return replica.flat


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_train_as_one_rank_does(ranks):
    # Each of T steps differs by at most 2 E in the gradient, thus by lr/(1 - momentum) 2 E in the
    # parameters, the later effect of the velocity included.  What becomes of such a difference by
    # the end is measured: a nudge of known length grows by kappa, or less if it comes later.  A
    # random direction may miss the worst one, and E changes as training goes: 10 stands for both.
    split = load_split(np.float64)
    settings = Settings(epochs=2, batch=100, hidden=(20,), dtype="float64")
    sizes = (64, 20, 10)
    count = mlp.parameter_count(sizes)
    nudge = 1e-9 * np.random.default_rng(0).normal(size=count)
    alone, nudged = (
        rr.spawn(parameters_after, 1, split, settings, by)[0] for by in (np.zeros(count), nudge)
    )
    kappa = max(1, np.linalg.norm(nudged - alone) / np.linalg.norm(nudge))
    start = mlp.views(mlp.init_params(sizes, settings.seed, np.float64), sizes)
    x, labels = split.train_x[: settings.batch], split.train_labels[: settings.batch]
    _, bounds = rounding_bounds(start, x, labels, settings.batch, ranks)
    steps = settings.epochs * np.ceil(len(split.train_x) / settings.batch)
    per_step = settings.lr / (1 - settings.momentum) * 2 * np.linalg.norm(bounds)
    limit = 10 * kappa * steps * per_step
    together = rr.spawn(parameters_after, ranks, split, settings, np.zeros(count))
    assert np.linalg.norm(together[0] - alone) <= limit < 1e-8 * np.linalg.norm(alone)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parameters_are_the_same_on_every_rank(ranks):
    settings = Settings(epochs=1, batch=200)
    results = rr.spawn(train, ranks, load_split(), settings)
    assert {result.digest for result in results} == {
        hashlib.sha256(result.parameters.tobytes()).hexdigest() for result in results
    }
    assert len({result.digest for result in results}) == 1
    assert len({result.accuracy for result in results}) == 1


def drift(comm, culprits):
    parameters = np.arange(100, dtype=np.float32)
    if comm.rank in culprits:
        parameters[17] = np.nextafter(parameters[17], np.float32(np.inf))
    try:
        return check_equal(comm, parameters)
    except DriftError as error:
        return str(error)


@pytest.mark.parametrize(
    ("ranks", "culprits", "named"),
    [(4, (2,), "rank 2"), (4, (0,), "rank 0"), (5, (1, 4), "rank 1, 4"), (2, (1,), "rank 1")],
)
def test_rank_that_drifts_by_one_bit_is_named_everywhere(ranks, culprits, named):
    messages = rr.spawn(drift, ranks, culprits)
    assert len(set(messages)) == 1
    without_digests = re.sub(r" \(\w+…\)", "", messages[0])
    assert without_digests.startswith(f"check_equal: the parameters of {named} differ from")


def test_parameters_start_as_those_of_rank_0():
    def start(comm):
        return Replica(comm, SIZES, Settings(hidden=(20, 15), seed=comm.rank)).flat

    expected = mlp.init_params(SIZES, 0)
    assert all(np.array_equal(flat, expected) for flat in rr.spawn(start, 3))


def test_training_that_diverges_says_so():
    def diverge(comm):
        with pytest.raises(FloatingPointError, match=r"loss is nan after epoch 1 .*smaller lr"):
            train(comm, load_split(), Settings(lr=1e30, batch=200))

    rr.spawn(diverge, 2)


def test_accuracy_over_five_seeds_is_at_least_97_percent():
    split = load_split()

    def five(comm):
        return [train(comm, split, Settings(seed=seed)).accuracy for seed in range(5)]

    assert np.mean(rr.spawn(five, 2)[0]) >= 0.97


def test_training_that_drifts_names_the_rank():
    def run(comm):
        lr = 0.1 if comm.rank == 1 else 0.2
        with pytest.raises(DriftError, match=r"parameters of rank 1 \(\w+…\) differ"):
            train(comm, load_split(), Settings(epochs=1, batch=500, lr=lr))

    rr.spawn(run, 3)


def test_report_changes_nothing():
    def run(comm, report):
        return train(comm, load_split(), Settings(epochs=2, batch=200), report=report).digest

    assert rr.spawn(run, 1, None) == rr.spawn(run, 1, lambda epoch, accuracy: None)


# --- the command line --------------------------------------------------------------------------


def command(monkeypatch, *arguments):
    """Run the command on one rank that is a thread, so that no MPI is needed."""

    def run(comm):
        monkeypatch.setattr(rr, "init", lambda: contextlib.nullcontext(comm))
        return main(arguments)

    return rr.spawn(run, 1)[0]


def test_command_ends_with_the_mean_accuracy(monkeypatch, capsys):
    assert command(monkeypatch, "--epochs", "3", "--seeds", "2", "--batch", "200") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("digits: 1,438 to train, 359 held out; 64-128-10, 9,610 parameters")
    assert re.fullmatch(
        r"epoch 1/3  loss \d\.\d{4}  held-out \d+\.\d %  [\d,]+ samples/s  communication \d+ %",
        lines[1],
    )
    assert [line.split(":")[0] for line in lines if line.startswith("seed")] == ["seed 0", "seed 1"]
    assert re.fullmatch(r"accuracy \d\d\.\d %", lines[-1])


def test_command_fails_with_a_message_when_training_diverges(monkeypatch, capsys):
    assert command(monkeypatch, "--lr", "1e30", "--batch", "200") == 1
    assert "take a smaller lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--epochs 0", "epochs is 0; wanted at least 1"),
        ("--epochs 2.5", "invalid int value: '2.5'"),
        ("--batch 0", "batch is 0; wanted at least 1"),
        ("--batch 1439", "batch is 1439; wanted at most the 1438 training samples"),
        ("--lr 0", "lr is 0.0; wanted a finite number above 0"),
        ("--lr nan", "lr is nan; wanted a finite number above 0"),
        ("--lr inf", "lr is inf; wanted a finite number above 0"),
        ("--momentum 1", "momentum is 1.0; wanted from 0 up to, but not, 1"),
        ("--noise -1", "noise is -1.0; wanted a finite number of at least 0"),
        ("--hidden 64 0", "hidden is (64, 0); wanted widths of at least 1"),
        ("--seed -1", "seed is -1; wanted at least 0"),
        ("--seeds 0", "seeds is 0; wanted at least 1"),
        ("--dtype int8", "invalid choice: 'int8'"),
    ],
)
def test_command_refuses_bad_values_before_it_starts(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(rr, "init", lambda: pytest.fail("started"))
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_command_refuses_an_unknown_algorithm(monkeypatch, capsys):
    assert command(monkeypatch, "--algorithm", "quick") == 2
    assert "unknown algorithm 'quick'; choose one of 'auto', 'ring'" in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "ranks"), [((), 1), (("-m", "ringreduce.cli", "run", "-n", "2"), 2)]
)
def test_command_runs_alone_and_under_mpi(launcher, ranks):
    command = [sys.executable, *launcher, "-m", "ringreduce.train", "--epochs", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"; {ranks} rank" in ended.stdout
    assert re.fullmatch(r"accuracy \d\d\.\d %", ended.stdout.splitlines()[-1])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress(out, epochs):
    line = ProgressLine(epochs, out)
    for number in range(1, epochs + 1):
        line(Epoch(number, loss=0.5, samples_per_s=1234.5, communication=0.25), 0.875)
    return out.getvalue()


def test_progress_stays_on_one_line_of_a_terminal():
    text = progress(Terminal(), 30)
    assert text.count("\r") == 30
    assert text.index("\n") == len(text) - 1


@pytest.mark.parametrize(("epochs", "lines"), [(1, 1), (7, 7), (30, 10), (95, 10)])
def test_progress_elsewhere_is_a_few_lines(epochs, lines):
    written = progress(io.StringIO(), epochs).splitlines()
    assert len(written) == lines
    assert written[-1] == (
        f"epoch {epochs}/{epochs}  loss 0.5000  held-out 87.5 %  1,234 samples/s"
        "  communication 25 %"
    )
