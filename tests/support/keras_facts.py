"""What holds of `ringreduce.keras` on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
import ringreduce.keras as rk
from tests.support.mpi_checks import outcomes

BACKEND = keras.backend.backend()
BATCH, BATCHES = 32, 4
X = np.random.default_rng(0).standard_normal((BATCH * BATCHES, 16)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, len(X))
OPTIMIZERS: list[Callable[[], Any]] = [
    lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    lambda: keras.optimizers.Adam(0.01),
    lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
]


def _model(optimizer: Any, *, seed: int = 0, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **({"jit_compile": False} | compiled))
    return model


def _fit(model: keras.Model, rows: Any = slice(None), **given: Any) -> dict[str, list[float]]:
    """Train on these rows of each batch; return the history."""
    x, y = (a.reshape(BATCHES, BATCH, *a.shape[1:])[:, rows] for a in (X, Y))
    size = x.shape[1]
    x, y = x.reshape(-1, 16), y.reshape(-1)
    given = {"epochs": 2, "verbose": 0, "shuffle": False, **given}
    return model.fit(x, y, batch_size=size, **given).history


def _mine(world: MPI.Intracomm) -> slice:
    """A rank's rows of each batch: alike many, so that the mean of means is the mean."""
    return slice(world.rank, BATCH // world.size * world.size, world.size)


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(w)) for w in model.weights]


def _assert_equal_on_all_ranks(world: MPI.Intracomm, model: keras.Model) -> None:
    for theirs in world.allgather(_weights(model)):
        for a, b in zip(theirs, _weights(model), strict=True):
            np.testing.assert_array_equal(a, b)


def ranks_train_as_one_process_with_the_whole_batch(world: MPI.Intracomm) -> None:
    whole = slice(BATCH // world.size * world.size)
    for make in OPTIMIZERS:
        one = _model(make())
        wanted = _fit(one, whole)
        many = _model(rk.DistributedOptimizer(make()), seed=world.rank)
        found = _fit(many, _mine(world), callbacks=[rk.Broadcast(), rk.MetricAverage()])
        for a, b in zip(_weights(many), _weights(one), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        _assert_equal_on_all_ranks(world, many)
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)


def a_step_is_one_call_of_its_gradients(world: MPI.Intracomm) -> None:
    with rr.init(world) as comm:
        model = _model(rk.DistributedOptimizer("sgd", comm))
        with mock.patch.object(comm, "all_reduce", wraps=comm.all_reduce) as calls:
            _fit(model, _mine(world), epochs=1)
        lengths = [len(call.args[0]) for call in calls.call_args_list]
    assert lengths == [len(model.trainable_weights)] * BATCHES


def a_saved_optimizer_is_keras_own(world: MPI.Intracomm) -> None:
    plain = keras.optimizers.Adam(0.125)
    saved = keras.saving.serialize_keras_object(rk.DistributedOptimizer(plain))
    assert "ringreduce" not in repr(saved)
    loaded = keras.saving.deserialize_keras_object(saved)
    assert type(loaded) is type(keras.optimizers.Adam())
    assert float(loaded.learning_rate) == 0.125


@keras.saving.register_keras_serializable("facts")
class Own(keras.optimizers.SGD):
    """An optimizer of a program's own."""


def an_optimizer_of_the_programs_own_loads(world: MPI.Intracomm) -> None:
    saved = keras.saving.serialize_keras_object(rk.DistributedOptimizer(Own(0.5, name="own")))
    assert saved == keras.saving.serialize_keras_object(Own(0.5, name="own"))
    assert type(keras.saving.deserialize_keras_object(saved)) is Own


def a_loaded_model_goes_on_with_its_state(world: MPI.Intracomm) -> None:
    path = f"{os.environ['RESULTS']}.{world.rank}.keras"
    model = _model(rk.DistributedOptimizer(keras.optimizers.Adam()))
    _fit(model, _mine(world))
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert rk.DistributedOptimizer(loaded.optimizer) is loaded.optimizer
    for each in (model, loaded):
        _fit(each, _mine(world))
    for a, b in zip(_weights(model), _weights(loaded), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    _assert_equal_on_all_ranks(world, loaded)


def an_infinite_gradient_of_one_rank_is_left_out_by_all(world: MPI.Intracomm) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = rk.DistributedOptimizer(keras.optimizers.SGD(0.1))
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        model = _model(optimizer)
        assert model.optimizer is optimizer
        before = _weights(model)
        rows = np.full((BATCH, 16), np.inf if world.rank == 0 else 1.0, "float32")
        model.fit(rows, Y[:BATCH], batch_size=BATCH, verbose=0)
        for a, b in zip(_weights(model), before, strict=True):
            np.testing.assert_array_equal(a, b)
        _fit(model, _mine(world))
        _assert_equal_on_all_ranks(world, model)
        assert any((a != b).any() for a, b in zip(_weights(model), before, strict=True))
    finally:
        keras.config.set_dtype_policy("float32")


def what_each_rank_embeds_is_averaged(world: MPI.Intracomm) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Embedding(8, 3), keras.layers.Flatten()]
    )
    model.compile(rk.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse", jit_compile=False)
    before = _weights(model)[0]
    model.fit(np.full((2, 1), world.rank), np.zeros((2, 3)), batch_size=2, verbose=0)
    wanted = before.copy()
    for rank in range(world.size):
        wanted[rank] -= 2 / 3 * before[rank] / world.size
    np.testing.assert_allclose(_weights(model)[0], wanted, rtol=1e-5)


def a_model_that_its_first_step_builds_is_sent(world: MPI.Intracomm) -> None:
    keras.utils.set_random_seed(world.rank)
    model = keras.Sequential([keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(rk.DistributedOptimizer("adam"), loss, jit_compile=False)
    _fit(model, _mine(world), callbacks=[rk.Broadcast()])
    _assert_equal_on_all_ranks(world, model)


def models_that_rank_0_sends_begin_alike(world: MPI.Intracomm) -> None:
    """One with optimizers of its own, as a GAN's, is sent too, though Keras does not build it."""
    inner = _model("sgd", seed=world.rank)

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def call(self, x: Any) -> Any:
            return self.inner(x)

    outer, callback = Outer(), rk.Broadcast()
    outer.compile("sgd", "mse", jit_compile=False)
    callback.set_model(outer)
    callback.on_train_begin()
    _assert_equal_on_all_ranks(world, inner)


def a_gradient_that_is_none_stays_none(world: MPI.Intracomm) -> None:
    optimizer = rk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]
    gradient = keras.ops.convert_to_tensor(np.full(3, world.rank, "float32"))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([None, gradient], variables)
    mean = (world.size - 1) / 2
    for variable, wanted in zip(variables, (0, -mean), strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), wanted)


def one_array_may_be_two_gradients(world: MPI.Intracomm) -> None:
    optimizer = rk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]
    one = keras.ops.convert_to_tensor(np.array([world.rank], "float32"))
    gradient = keras.ops.broadcast_to(one, (3,))
    optimizer.apply([gradient, gradient], variables)
    for variable in variables:
        found = keras.ops.convert_to_numpy(variable)
        np.testing.assert_allclose(found, -(world.size - 1) / 2)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(gradient), world.rank)


def gradients_of_many_megabytes_are_averaged(world: MPI.Intracomm) -> None:
    model = keras.Sequential([keras.Input((2048,)), keras.layers.Dense(2048)])
    model.compile(rk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    x = np.random.default_rng(world.rank).standard_normal((64, 2048)).astype("float32")
    model.fit(x, x, batch_size=16, verbose=0, callbacks=[rk.Broadcast()])
    _assert_equal_on_all_ranks(world, model)


def means_of_metrics_are_those_of_all_ranks(world: MPI.Intracomm) -> None:
    model = _model(rk.DistributedOptimizer("sgd"))
    rows = _mine(world)
    given = {
        "epochs": 1,
        "validation_data": (X[world.rank :: world.size], Y[world.rank :: world.size]),
    }
    alone = _model(rk.DistributedOptimizer("sgd"))
    own = _fit(alone, rows, **given)
    found = _fit(model, rows, **given, callbacks=[rk.MetricAverage()])
    for name, value in found.items():
        np.testing.assert_allclose(value[0], np.mean(world.allgather(own[name][0])), rtol=1e-5)
    assert {"loss", "val_loss", "val_accuracy"} <= set(found)


def different_models_are_a_mismatch(world: MPI.Intracomm) -> None:
    with rr.init(world) as comm:
        optimizer = rk.DistributedOptimizer(keras.optimizers.SGD(1.0), comm)
        variable = keras.Variable(np.zeros(3 + world.rank, "float32"))
        gradient = keras.ops.convert_to_tensor(np.ones(3 + world.rank, "float32"))
        with pytest.raises(Exception, match="rank 1"):
            optimizer.apply([gradient], [variable])


def a_traced_array_is_refused(world: MPI.Intracomm) -> None:
    with rr.init(world) as comm:
        if BACKEND == "jax":
            import jax

            for compiled in (jax.jit, jax.grad):
                with pytest.raises(TypeError, match=r"call it by jax\.experimental\.io_callback"):
                    compiled(comm.all_reduce)(1.0)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with pytest.raises(TypeError, match=r"call it by tf\.numpy_function"):
                tf.function(comm.all_reduce)(tf.ones(3))


def no_optimizer_is_refused(world: MPI.Intracomm) -> None:
    with pytest.raises(TypeError, match="optimizer is None; pass an optimizer of Keras"):
        rk.DistributedOptimizer(None)


def other_communicators_are_refused(world: MPI.Intracomm) -> None:
    makers: list[Any] = [lambda comm: rk.DistributedOptimizer("sgd", comm)]
    for make in [*makers, rk.Broadcast, rk.MetricAverage]:
        with pytest.raises(TypeError, match="pass a Communicator of ringreduce, or None"):
            make(world)


def tensorflow_cannot_compile_a_step(world: MPI.Intracomm) -> None:
    model = _model(rk.DistributedOptimizer("sgd"), jit_compile=True)
    with pytest.raises(ValueError, match="pass jit_compile=False"):
        _fit(model, _mine(world))


def a_tape_of_tensorflow_averages(world: MPI.Intracomm) -> None:
    import tensorflow as tf

    x, unused = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    table = tf.Variable(tf.ones((4, 2)))

    def gradients() -> Any:
        with rk.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(x * float(world.rank))
            loss += tf.reduce_sum(tf.gather(table, [0, world.rank]))
        return tape.gradient(loss, {"x": x, "none": unused, "table": table})

    for found in (gradients(), tf.function(gradients)()):
        np.testing.assert_allclose(found["x"], (world.size - 1) / 2)
        assert found["none"] is None
        wanted = np.zeros((4, 2))
        wanted[0] = 1
        wanted[: world.size] += 1 / world.size
        np.testing.assert_allclose(found["table"], wanted)


FACTS = [
    ranks_train_as_one_process_with_the_whole_batch,
    a_step_is_one_call_of_its_gradients,
    a_saved_optimizer_is_keras_own,
    an_optimizer_of_the_programs_own_loads,
    a_loaded_model_goes_on_with_its_state,
    an_infinite_gradient_of_one_rank_is_left_out_by_all,
    what_each_rank_embeds_is_averaged,
    a_model_that_its_first_step_builds_is_sent,
    models_that_rank_0_sends_begin_alike,
    a_gradient_that_is_none_stays_none,
    one_array_may_be_two_gradients,
    gradients_of_many_megabytes_are_averaged,
    means_of_metrics_are_those_of_all_ranks,
    different_models_are_a_mismatch,
    a_traced_array_is_refused,
    no_optimizer_is_refused,
    other_communicators_are_refused,
]
if BACKEND == "tensorflow":
    FACTS += [tensorflow_cannot_compile_a_step, a_tape_of_tensorflow_averages]


def facts() -> dict[str, str]:
    """Return the outcomes of all facts."""
    return outcomes(FACTS, MPI.COMM_WORLD)
