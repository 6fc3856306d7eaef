"""Keras 3 on several ranks, on its torch, JAX and TensorFlow backends."""

# ruff: noqa: N802 - the names of the functions are those of Horovod's classes

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import numpy as np

import ringreduce as rr
from ringreduce.errors import shown

_Mean = Callable[[list[Any]], Any]
"""The means over the ranks of a list of arrays of Keras's backend."""


@cache
def _default() -> rr.Communicator:
    return rr.init()


def _communicator(comm: rr.Communicator | None) -> rr.Communicator:
    if comm is None:
        return _default()
    if not isinstance(comm, rr.Communicator):
        raise TypeError(f"comm is {shown(comm)}; pass a Communicator of ringreduce, or None")
    return comm


def _mean_of_torch(comm: rr.Communicator) -> Any:
    import torch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mean(gradients: list[Any]) -> Any:
        dense = [(g.to_dense() if g.is_sparse else g).detach().contiguous() for g in gradients]
        if len({g.data_ptr() for g in dense}) < len(dense):  # autograd may name one array twice
            dense = [g.clone() for g in dense]
        return comm.all_reduce(dense, "mean", out=dense)

    return mean


def _mean_of_jax(comm: rr.Communicator) -> _Mean:
    import jax
    from jax.experimental import io_callback
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    # io_callback copies all arrays, on another thread: with one thread it would wait for itself.
    (ordered,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
    mean = Primitive("mean_over_ranks")
    mean.multiple_results = True
    mean.def_effectful_abstract_eval(lambda *arrays: (arrays, {ordered}))

    def on_host(*gradients: Any) -> tuple[Any, ...]:
        return tuple(comm.all_reduce([*gradients], "mean"))

    def lower(context: Any, *gradients: Any) -> Any:
        token, kinds = context.tokens_in.get(ordered), (context.avals_in, context.avals_out)
        means, token, _ = mlir.emit_python_callback(
            context, on_host, token, gradients, *kinds, has_side_effect=True
        )
        context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({ordered: token})))
        return means

    mlir.register_lowering(mean, lower)
    return lambda gradients: jax.jit(mean.bind)(*gradients)


def _mean_of_tensorflow(comm: rr.Communicator) -> _Mean:
    import tensorflow as tf
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

    def on_host(*gradients: Any) -> Any:
        return comm.all_reduce([*gradients], "mean")

    def mean(gradients: list[Any]) -> Any:
        if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError("XLA cannot compile a call of ringreduce; pass jit_compile=False")
        dense = [tf.convert_to_tensor(g) for g in gradients]
        means = tf.nest.flatten(tf.numpy_function(on_host, dense, [g.dtype for g in dense]))
        return [tf.ensure_shape(m, g.shape) for m, g in zip(means, dense, strict=True)]

    return mean


_MEANS = {"torch": _mean_of_torch, "jax": _mean_of_jax, "tensorflow": _mean_of_tensorflow}
"""Keras's backend -> what makes its `_Mean`."""


def _mean_of(comm: rr.Communicator | None) -> _Mean:
    backend = keras.backend.backend()
    if backend not in _MEANS:
        raise ValueError(f"Keras runs on {backend}; ringreduce.keras needs one of {[*_MEANS]}")
    mean = _MEANS[backend](_communicator(comm))

    def mean_of_given(gradients: Any) -> list[Any]:
        """Average the gradients that are not None."""
        gradients = [*gradients]
        means = iter(mean([g for g in gradients if g is not None]))
        return [None if g is None else next(means) for g in gradients]

    return mean_of_given


def _settle() -> None:
    """Wait until JAX has made the calls of its programs, so that the next call is behind them."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def DistributedOptimizer(optimizer: Any, comm: rr.Communicator | None = None) -> Any:
    """Make an optimizer average its gradients over the ranks.

    All gradients of a step are one call, before they are clipped.  Sparse gradients are made dense.
    Every rank makes the same steps.  A saved model names Keras's own optimizer, so it loads without
    ringreduce, and does not average.

    Args:
        optimizer: an optimizer of Keras, or a name, such as ``"adam"``.
        comm: a communicator; None: one over all ranks, which this module makes once.

    Returns:
        The same object; under the dtype policy mixed_float16 a ``LossScaleOptimizer`` that holds
        it, as `compile` would make, unless it is one.

    Raises:
        TypeError: `optimizer` is no optimizer, or `comm` no Communicator.
        ValueError: Keras runs on another backend than torch, JAX and TensorFlow; in a step:
            TensorFlow compiles it by XLA.
    """
    optimizer, scaling = keras.optimizers.get(optimizer), keras.optimizers.LossScaleOptimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer is {shown(optimizer)}; pass an optimizer of Keras, or its name")
    mean, is_half = _mean_of(comm), keras.config.dtype_policy().name == "mixed_float16"
    if is_half and not isinstance(optimizer, scaling):
        # compile() would do it around ours, and leave out a step whose gradients are infinite here.
        optimizer = scaling(optimizer)
    apply, stateless_apply = optimizer.apply, optimizer.stateless_apply

    def apply_means(grads: Any, trainable_variables: Any = None) -> Any:
        return apply(mean(grads), trainable_variables)

    def stateless_apply_means(
        optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        return stateless_apply(optimizer_variables, mean(grads), trainable_variables)

    optimizer.apply = apply_means
    if isinstance(optimizer, scaling):
        optimizer.stateless_apply = stateless_apply_means  # the others' calls apply
    return optimizer


def DistributedGradientTape(tape: Any, comm: rr.Communicator | None = None) -> Any:
    """Make a ``tf.GradientTape`` average what `gradient` returns over the ranks; return the tape.

    Arguments and errors are those of `DistributedOptimizer`.
    """
    import tensorflow as tf

    gradient, mean = tape.gradient, _mean_of(comm)

    def mean_gradient(*args: Any, **kwargs: Any) -> Any:
        gradients = gradient(*args, **kwargs)
        return tf.nest.pack_sequence_as(gradients, mean(tf.nest.flatten(gradients)))

    tape.gradient = mean_gradient
    return tape


class Broadcast(keras.callbacks.Callback):  # type: ignore[misc]
    """Send rank 0's weights and the state of its optimizer to all ranks when `fit` begins.

    A model that its first step builds is sent after that step.
    """

    def __init__(self, comm: rr.Communicator | None = None) -> None:
        super().__init__()
        self._comm, self._is_done = _communicator(comm), False

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_done = self.model.built
        if self.model.weights:
            self._send()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._is_done:  # TensorFlow builds a model in its first step
            self._is_done = True
            self._send()

    def _send(self) -> None:
        _settle()
        model, optimizer = self.model, self.model.optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        for variable in [*model.weights, *optimizer.variables]:
            x = np.array(keras.ops.convert_to_numpy(variable))
            variable.assign(self._comm.broadcast(x, out=x))


class MetricAverage(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the metrics of an epoch over the ranks, for the history and for later callbacks."""

    def __init__(self, comm: rr.Communicator | None = None) -> None:
        super().__init__()
        self._comm = _communicator(comm)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        _settle()
        logs = {} if logs is None else logs
        numbers = {name: x for name, x in sorted(logs.items()) if np.isscalar(x)}
        means = self._comm.all_reduce(np.array([*numbers.values()], float), "mean")
        logs.update(zip(numbers, means.tolist(), strict=True))
