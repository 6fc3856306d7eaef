"""Strategy tpu: the network computed by JAX, on its CPU backend, beside NumPy and by N ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.parallel import sampler
from ringreduce.train import Settings, Trainer, load_split, mlp, train
from ringreduce.train.strategies import TPU, Mirrored
from tests.support import rounding

U = np.finfo(np.float32).eps / 2
SETTINGS = Settings(epochs=2, batch=100, hidden=(20,), lr=0.1)
SIZES = (64, 20, 10)
ON_JAX = partial(train, strategy=TPU())


# --- what is refused, with JAX and without --------------------------------------------------------


def test_without_jax_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "ringreduce.train.jax_part", raising=False)
    with pytest.raises(ImportError, match=r"^strategy tpu needs JAX: pip install 'ringreduce\[jax"):
        rr.spawn(ON_JAX, 1, load_split(), SETTINGS)


@pytest.mark.parametrize("setting", [{"dtype": "float64"}, {"batch_norm": True}])
def test_settings_that_it_does_not_compute_are_refused(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} .*cannot be combined with strategy tpu"):
        TPU().check([[0, 1]], replace(SETTINGS, **setting))


def test_arrays_of_cupy_are_refused():
    class Cupy:
        __name__ = "cupy"
        asarray = staticmethod(np.asarray)

    with pytest.raises(ValueError, match="device cuda cannot be combined with strategy tpu"):
        rr.spawn(partial(ON_JAX, xp=Cupy()), 1, load_split(), SETTINGS)


# --- one gradient ---------------------------------------------------------------------------------


def gradient_of_parts(comm, flat, x, labels, count):
    """Return the mean loss and gradient as every rank gets them."""
    settings = replace(SETTINGS, hidden=(20, 15))
    trainer = Trainer(comm, rounding.split_of(x, labels), settings, strategy=TPU())
    trainer.restore(moved(trainer.arrays(), flat, by=0), trainer.state)
    mine = sampler.part(len(x), comm.rank, comm.size)
    loss, gradients = trainer.gradients(x[mine].astype(np.float32), labels[mine], count)
    return comm.all_reduce(loss), rounding.flatten(rounding.layers_of(gradients))


def moved(arrays, by_flat, by=1):
    """Return a checkpoint's arrays with `by` times the parameters, plus `by_flat`."""
    copies = {name: array.copy() for name, array in arrays.items()}
    parameters = [array for name, array in copies.items() if "/" not in name]
    ends = np.cumsum([array.size for array in parameters])
    for array, more in zip(parameters, np.split(by_flat, ends[:-1]), strict=True):
        array *= by
        array += more.reshape(array.shape)
    return copies


@pytest.mark.jax
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 5, 32])
def test_ranks_compute_the_gradient_of_numpy(monkeypatch, ranks, count):
    """NumPy computes it in float64.  With more ranks than samples, some ranks have an empty part.

    The bound is that of any order of additions in float32.
    """
    monkeypatch.setattr(rounding, "U", U)
    flat, x, labels = rounding.problem(7, samples=count)
    flat = flat.astype(np.float32).astype(np.float64)
    parameters = mlp.views(flat, rounding.SIZES)
    loss, layers = rounding.loss_and_layers(parameters, x, labels, count)
    bounds = rounding.rounding_bounds(parameters, x, labels, count, ranks)
    for total, gradient in rr.spawn(gradient_of_parts, ranks, flat, x, labels, count):
        assert abs(total - loss) <= bounds[0] < 0.01 * loss
        assert (np.abs(gradient - rounding.flatten(layers)) <= bounds[1]).all()
        assert bounds[1].max() < 0.01


# --- one step -------------------------------------------------------------------------------------


def arrays_after_a_step(comm, settings, strategy, gradient, number):
    """Return all arrays after step `number` with this gradient; they were drawn before it."""
    trainer = Trainer(comm, load_split(), settings, strategy=strategy)
    rng = np.random.default_rng(3)
    drawn = {n: rng.uniform(0.5, 1, a.shape).astype(a.dtype) for n, a in trainer.arrays().items()}
    trainer.restore(drawn, trainer.state)
    trainer._part._reduced = mlp.named(mlp.views(gradient.copy(), SIZES))
    with trainer.store.update():
        trainer._part.update(1.0, number)
    return {name: array.copy() for name, array in trainer.arrays().items()}


@pytest.mark.jax
@pytest.mark.parametrize("number", [0, 1, 1000])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_is_that_of_the_optimizer(optimizer, decay, number):
    """Each way rounds at most ten times, and all numbers are of the size of one."""
    settings = replace(SETTINGS, optimizer=optimizer, weight_decay=decay)
    gradient = np.random.default_rng(4).normal(size=mlp.parameter_count(SIZES)).astype(np.float32)
    ours, theirs = (
        rr.spawn(arrays_after_a_step, 1, settings, strategy, gradient, number)[0]
        for strategy in (TPU(), Mirrored())
    )
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == np.float32
        assert np.abs(array - theirs[name]).max() <= 10 * 2 * U * max(1, np.abs(array).max())


# --- training -------------------------------------------------------------------------------------


def parameters_after(comm, split, settings, strategy, nudge):
    """Return the parameters after training, if `nudge` is added to them before."""
    trainer = Trainer(comm, split, settings, strategy=strategy)
    trainer.restore(moved(trainer.arrays(), nudge), trainer.state)
    return trainer.run().parameters


def gradient_at_the_start(comm, split, settings, strategy):
    trainer = Trainer(comm, split, settings, strategy=strategy)
    batch = slice(0, settings.batch)
    _, gradients = trainer.gradients(
        split.train_x[batch], split.train_labels[batch], settings.batch
    )
    return rounding.flatten(rounding.layers_of(gradients))


def limit_of_rounding(settings):
    """How far two ways of training in float32 may be apart in the end; also the parameters' norm.

    Each of T steps differs by at most 2 E in the gradient, thus by lr/(1 - momentum) 2 E in the
    parameters, and by the rounding of the step, 4 U of the parameters in each way.  E is measured:
    what float32 is off from NumPy's float64 in the first gradient.  How a difference grows until
    the end is measured too, in float64: a nudge grows by a factor kappa.  Both change during
    training; the factor 10 allows for that.
    """
    exact, exactly = load_split(np.float64), replace(settings, dtype="float64")
    zero = np.zeros(mlp.parameter_count(SIZES))
    nudge = 1e-6 * np.random.default_rng(0).normal(size=zero.size)
    alone, nudged = (
        rr.spawn(parameters_after, 1, exact, exactly, Mirrored(), by)[0] for by in (zero, nudge)
    )
    kappa = max(1, np.linalg.norm(nudged - alone) / np.linalg.norm(nudge))
    (rounded,) = rr.spawn(gradient_at_the_start, 1, load_split(), settings, TPU())
    (gradient,) = rr.spawn(gradient_at_the_start, 1, exact, exactly, Mirrored())
    off, norm = np.linalg.norm(rounded - gradient), np.linalg.norm(alone)
    per_step = settings.lr / (1 - settings.momentum) * 2 * off + 2 * 4 * U * norm
    steps = settings.epochs * np.ceil(len(exact.train_x) / settings.batch)
    return 10 * kappa * steps * per_step, norm


@pytest.mark.jax
@pytest.mark.parametrize("longest", [0.0, 0.3])
def test_ranks_train_as_one_rank_does(longest):
    settings, split = replace(SETTINGS, clip=longest), load_split()
    limit, norm = limit_of_rounding(settings)
    nudge = np.zeros(mlp.parameter_count(SIZES), np.float32)
    one, two, three = (
        rr.spawn(parameters_after, ranks, split, settings, TPU(), nudge)[0] for ranks in (1, 2, 3)
    )
    assert limit < 1e-3 * norm
    assert np.linalg.norm(two - one) <= limit
    assert np.linalg.norm(three - one) <= limit


@pytest.mark.jax
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_reaches_the_accuracy(optimizer):
    lr = {"sgd": 0.2, "adam": 0.01}[optimizer]
    settings = Settings(epochs=15, optimizer=optimizer, lr=lr)
    first, second = rr.spawn(ON_JAX, 2, load_split(), settings)
    assert first.accuracy > 0.95
    assert first.digest == second.digest


def from_strategy_to_strategy(comm, split, settings, ways):
    """Train an epoch in each way, from a checkpoint of the way before."""
    checkpoint = None
    for number, strategy in enumerate(ways, 1):
        trainer = Trainer(comm, split, settings, strategy=strategy)
        if checkpoint is not None:
            trainer.restore(*checkpoint)
            assert all(np.array_equal(a, checkpoint[0][n]) for n, a in trainer.arrays().items())
        saved = {}

        def save(trainer, saved=saved):
            arrays = {name: array.copy() for name, array in trainer.arrays().items()}
            saved[trainer.state.step] = arrays, trainer.state

        result = trainer.run(save=save)
        checkpoint = saved[number * trainer.epoch_steps]
    return result.parameters


@pytest.mark.jax
def test_checkpoints_of_mirrored_go_on_on_jax_and_back():
    settings, split = replace(SETTINGS, epochs=3), load_split()
    limit, norm = limit_of_rounding(settings)
    ways = Mirrored(), TPU(), Mirrored()
    mixed = rr.spawn(from_strategy_to_strategy, 2, split, settings, ways)[0]
    alone = rr.spawn(train, 2, split, settings)[0].parameters
    assert np.linalg.norm(mixed - alone) <= limit < 1e-3 * norm


@pytest.mark.jax
@pytest.mark.parametrize(("wire", "itemsize"), [("none", 4), ("bfloat16", 2)])
def test_two_ranks_send_each_gradient_once_in_the_type_of_the_wire(wire, itemsize):
    settings = replace(SETTINGS, epochs=1, wire=wire)
    first, second = rr.spawn(ON_JAX, 2, load_split(), settings)
    assert first.sent_bytes == second.sent_bytes == itemsize * mlp.parameter_count(SIZES)
    assert first.digest == second.digest


@pytest.mark.jax
def test_held_bytes_count_the_gradients_on_the_device_and_in_the_buckets():
    settings = replace(SETTINGS, epochs=1, optimizer="adam", lr=0.003)
    result = rr.spawn(ON_JAX, 2, load_split(), settings)[0]
    # 50 samples of a batch of 100.
    assert result.held_bytes == 4 * (5 * mlp.parameter_count(SIZES) + 50 * sum(SIZES))


# --- DLPack ---------------------------------------------------------------------------------------


def aligned(shape, to=64):
    """Return a float32 array whose address is a multiple of `to`."""
    memory = np.zeros(4 * np.prod(shape) + to, np.uint8)
    start = -memory.ctypes.data % to
    return memory[start : start + 4 * np.prod(shape)].view(np.float32).reshape(shape)


@pytest.mark.jax
def test_a_gradient_goes_to_the_device_and_back_without_a_copy():
    def there_and_back(comm):
        from ringreduce.train.jax_part import to_host

        part = Trainer(comm, load_split(), SETTINGS, strategy=TPU())._part
        reduced = aligned((20, 10))
        on_device = part._to_device(reduced)
        back = to_host(on_device)
        return reduced.ctypes.data, on_device.unsafe_buffer_pointer(), back.ctypes.data

    (addresses,) = rr.spawn(there_and_back, 1)
    assert len(set(addresses)) == 1


@pytest.mark.jax
def test_what_jax_computes_is_shown_to_numpy_without_a_copy():
    def addresses(comm):
        part = Trainer(comm, load_split(), SETTINGS, strategy=TPU())._part
        part.gradients(part.run.xp.zeros((5, 64), np.float32), np.zeros(5, int), 5)
        part.update(0.1, 0)
        on_device = [a.unsafe_buffer_pointer() for a in mlp.named(part._parameters).values()]
        return on_device, [array.ctypes.data for array in part.parameters()]

    ((on_device, shown),) = rr.spawn(addresses, 1)
    assert on_device == shown


@pytest.mark.jax
def test_parameters_that_numpy_shows_are_not_changed_by_a_step():
    def kept(comm):
        part = Trainer(comm, load_split(), SETTINGS, strategy=TPU())._part
        shown = part.whole()
        before = {name: array.copy() for name, array in shown.items()}
        part.gradients(np.ones((5, 64), np.float32), np.zeros(5, int), 5)
        part.update(0.1, 0)
        changed = [n for n, array in part.whole().items() if not np.array_equal(array, before[n])]
        return changed, [n for n, array in shown.items() if not np.array_equal(array, before[n])]

    ((changed, of_shown),) = rr.spawn(kept, 1)
    assert "0.weight" in changed
    assert of_shown == []


# --- over MPI -------------------------------------------------------------------------------------


def over_mpi():
    """Return the digest and the accuracy of this rank."""
    with rr.init() as comm:
        result = ON_JAX(comm, load_split(), Settings(epochs=5))
    return result.digest, result.accuracy


@pytest.mark.jax
@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["mpi", "shm"])
def test_ranks_train_over_mpi(mpi, transport):
    how = {"RINGREDUCE_TRANSPORT": transport}
    first, second = mpi.run_ok("call", 2, "tests.train.test_jax:over_mpi", **how)
    assert first == second
    assert first[1] > 0.9
