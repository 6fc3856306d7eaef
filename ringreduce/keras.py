"""Keras 3 on several ranks, on its torch, JAX and TensorFlow backends."""

# ruff: noqa: N802 - the names of the functions are those of Horovod's classes

from __future__ import annotations

import os
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
    if not isinstance(comm, (rr.Communicator, type(None))):
        raise TypeError(f"comm is {shown(comm)}; pass a Communicator of ringreduce, or None")
    return comm or _default()


def _mean_of_torch(comm: rr.Communicator) -> _Mean:
    import torch

    def mean(gradients: list[Any]) -> Any:
        dense = [g.detach().to_dense() if g.is_sparse else g.detach() for g in gradients]
        return comm.all_reduce(dense, "mean", out=dense)

    found: _Mean = torch.compiler.disable(mean)
    return found


def _give_jax_two_threads() -> None:
    """Let a rank that is pinned to one core copy a callback's arrays while the callback runs.

    JAX makes as many threads as there are cores, or as NPROC says, when it makes its backend.
    """
    if keras.backend.backend() == "jax" and len(os.sched_getaffinity(0)) == 1:
        from jax._src.xla_bridge import backends_are_initialized

        if not backends_are_initialized():
            os.environ.setdefault("NPROC", "2")


_give_jax_two_threads()


def _mean_of_jax(comm: rr.Communicator) -> _Mean:
    import jax
    from jax.experimental import io_callback

    if len(os.sched_getaffinity(0)) == 1 and os.environ.get("NPROC", "1") == "1":
        raise RuntimeError(
            "this rank has one core, on which JAX waits for itself; import ringreduce.keras before "
            "the first array of JAX, or set NPROC=2"
        )

    def on_host(gradients: list[Any]) -> Any:
        return comm.all_reduce([np.asarray(g) for g in gradients], "mean")

    def mean(gradients: list[Any]) -> Any:
        kinds = [jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients]
        return io_callback(on_host, kinds, gradients, ordered=True)

    return mean


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

    def mean_of_given(gradients: list[Any]) -> list[Any]:
        """Average the gradients that are not None."""
        means = iter(mean([g for g in gradients if g is not None]))
        return [None if g is None else next(means) for g in gradients]

    return mean_of_given


def _settle() -> None:
    """Wait until JAX has made the calls of its programs, so that the next call is behind them."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def _become(instance: Any, **methods: Callable[..., Any]) -> None:
    """Give the instance a subclass of its class, of the same name, with these methods."""
    kind = type(instance)
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    instance.__class__ = type(kind.__name__, (kind,), methods | names)


def DistributedOptimizer(optimizer: Any, comm: rr.Communicator | None = None) -> Any:
    """Make an optimizer average its gradients over the ranks.

    All gradients of a step are one call, before they are clipped.  Sparse gradients are made dense.
    Every rank makes the same steps.

    Args:
        optimizer: an optimizer of Keras, or a name, such as ``"adam"``.
        comm: a communicator; None: one over all ranks, which this module makes once.

    Returns:
        The same object.  Its class is now a subclass of the same name, so a saved model loads
        without ringreduce, and with an optimizer that does not average.  Under the dtype policy
        mixed_float16 it is a ``LossScaleOptimizer`` over it, as `compile` would make.

    Raises:
        TypeError: `comm` is no Communicator.
        ValueError: Keras runs on another backend than torch, JAX and TensorFlow; in a step:
            TensorFlow compiles it by XLA.
        RuntimeError: the rank has one core, and JAX one thread, which would wait for itself.
    """
    optimizer, mean = keras.optimizers.get(optimizer), _mean_of(comm)
    scaling = keras.optimizers.LossScaleOptimizer
    is_half = keras.config.dtype_policy().name == "mixed_float16"
    if is_half and not isinstance(optimizer, scaling):
        # compile() would do it around ours, and leave out a step whose gradients are infinite here.
        optimizer = scaling(optimizer)
    kind = type(optimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        kind.apply(self, mean(list(grads)), trainable_variables)

    def stateless_apply(self: Any, variables: Any, grads: Any, trainable_variables: Any) -> Any:
        return kind.stateless_apply(self, variables, mean(list(grads)), trainable_variables)

    methods: dict[str, Callable[..., Any]] = {"apply": apply}
    if isinstance(optimizer, scaling):
        methods["stateless_apply"] = stateless_apply  # the others' calls apply
    _become(optimizer, **methods)
    return optimizer


def DistributedGradientTape(tape: Any, comm: rr.Communicator | None = None) -> Any:
    """Make a ``tf.GradientTape`` average what `gradient` returns over the ranks; return the tape.

    Arguments and errors are those of `DistributedOptimizer`.
    """
    import tensorflow as tf

    kind, mean = type(tape), _mean_of(comm)

    def gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = kind.gradient(self, *args, **kwargs)
        return tf.nest.pack_sequence_as(gradients, mean(tf.nest.flatten(gradients)))

    _become(tape, gradient=gradient)
    return tape


class Broadcast(keras.callbacks.Callback):  # type: ignore[misc]
    """Send rank 0's weights and the state of its optimizer to all ranks when `fit` begins.

    A model that its first step builds is sent after that step.
    """

    def __init__(self, comm: rr.Communicator | None = None) -> None:
        super().__init__()
        self._comm, self._is_done = _communicator(comm), False

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_done = False
        if self.model.built:
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._send()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._is_done:  # TensorFlow builds a model in its first step
            self._send()

    def _send(self) -> None:
        _settle()
        for variable in [*self.model.weights, *self.model.optimizer.variables]:
            x = np.array(keras.ops.convert_to_numpy(variable))
            variable.assign(self._comm.broadcast(x, out=x))
        self._is_done = True


class MetricAverage(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the metrics of an epoch over the ranks, for the history and for later callbacks."""

    def __init__(self, comm: rr.Communicator | None = None) -> None:
        super().__init__()
        self._comm = _communicator(comm)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        _settle()
        numbers = {name: x for name, x in sorted((logs or {}).items()) if np.isscalar(x)}
        means = self._comm.all_reduce(np.array([*numbers.values()], float), "mean")
        (logs or {}).update(zip(numbers, means.tolist(), strict=True))
