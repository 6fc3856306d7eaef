"""A training step of Keras with `ringreduce.keras`, without it, and in Keras's own way.

    KERAS_BACKEND=jax ringreduce run -n 2 -m benchmarks.keras_step [own]

A step is a batch of `Model.fit`; the contenders take turns in one job.  Each rank has one core.
``alone`` averages nothing; ``all_reduce`` is the call by itself, on NumPy arrays of the gradients'
shapes.  With ``own``, Keras's own way takes turns with them; its threads slow the others down.  It
is ``MultiWorkerMirroredStrategy`` on TensorFlow and ``DataParallel`` over Gloo on JAX; on torch,
Keras has none.  A figure is the median over the turns of the slowest rank.  Writes
``bench_results/keras.jsonl``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks import rows

WORLD = MPI.COMM_WORLD
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[WORLD.rank % len(cores)]})

import keras  # noqa: E402

from ringreduce.keras import Broadcast, DistributedOptimizer  # noqa: E402

NAME = "keras"
NETWORKS = [((64, 128, 10), 64), ((784, 1024, 1024, 10), 64), ((784, 1024, 1024, 10), 512)]
"""Units of the layers, and samples of a batch on each rank."""
TURNS, STEPS = 21, 20
BACKEND = keras.backend.backend()


def main() -> None:
    makers: dict[str, Callable[[], Any]] = {"tensorflow": _tensorflows, "jax": _jaxs}
    own = makers[BACKEND]() if "own" in sys.argv else None
    with rr.init() as comm:
        found = [_measure(comm, *network, own) for network in NETWORKS]
    if WORLD.rank == 0:
        versions = {"backend": BACKEND, "own": own is not None, "keras": keras.__version__}
        where = rows.environment(f"KERAS_BACKEND={BACKEND} {rows.command_line('keras_step')}")
        same = ("backend", "own", "units", "batch", "mpi", "ranks", "cpu")
        rows.replace(NAME, [row | versions | where for row in found], same=same)
        for row in found:
            print({key: row[key] for key in ("units", "batch", "median_ms", "ratio", "wrong")})


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _tensorflows() -> Callable[[], Any]:
    import tensorflow as tf

    workers = [f"127.0.0.1:{port}" for port in WORLD.allgather(_port())]
    task = {"type": "worker", "index": WORLD.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy().scope


def _jaxs() -> Callable[[], Any]:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{WORLD.bcast(_port())}", WORLD.size, WORLD.rank)
    return keras.distribution.DataParallel(auto_shard_dataset=False).scope


def _network(units: tuple[int, ...], average: Any = lambda optimizer: optimizer) -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(n, activation="relu") for n in units[1:-1]]
    model = keras.Sequential([keras.Input(units[:1]), *hidden, keras.layers.Dense(units[-1])])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    how = {} if BACKEND == "jax" else {"jit_compile": False}
    model.compile(average(keras.optimizers.SGD(0.01)), loss, **how)
    return model


def _measure(
    comm: rr.Communicator, units: tuple[int, ...], batch: int, own: Callable[[], Any] | None
) -> dict[str, Any]:
    rng = np.random.default_rng(WORLD.rank)
    x = rng.standard_normal((STEPS * batch, units[0])).astype("float32")
    y = rng.integers(0, units[-1], len(x))

    def fit(model: keras.Model, **given: Any) -> None:
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, **given)

    def keras_own_fit(model: keras.Model) -> None:
        with own():
            if BACKEND == "jax":
                fit(model)
                return
            import tensorflow as tf

            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
            options = tf.data.Options()
            policies = tf.data.experimental.AutoShardPolicy
            options.experimental_distribute.auto_shard_policy = policies.OFF
            model.fit(data.with_options(options), verbose=0)

    alone = _network(units)
    ours = _network(units, lambda optimizer: DistributedOptimizer(optimizer, comm))
    fit(ours, callbacks=[Broadcast(comm)])
    weights = [keras.ops.convert_to_numpy(w) for w in ours.weights]
    of_root = WORLD.bcast(weights)
    wrong = sum(not np.array_equal(a, b) for a, b in zip(weights, of_root, strict=True))
    gradients = [np.ones(w.shape, w.dtype) for w in weights]

    def call() -> None:
        for _ in range(STEPS):
            comm.all_reduce(gradients, "mean")

    contenders = {"alone": lambda: fit(alone), "ringreduce": lambda: fit(ours), "all_reduce": call}
    why_not = None
    if own is not None:
        with own():
            theirs = _network(units)
        try:
            keras_own_fit(theirs)
            contenders["own"] = lambda: keras_own_fit(theirs)
        except ValueError as error:  # MultiWorkerMirroredStrategy with Keras 3.15
            why_not = str(error).splitlines()[0]
    seconds = np.zeros((len(contenders), TURNS + 1))
    turns = np.random.default_rng(0)
    for turn in range(TURNS + 1):
        for index in turns.permutation(len(contenders)):
            WORLD.Barrier()
            begin = time.perf_counter()
            [*contenders.values()][index]()
            seconds[index, turn] = (time.perf_counter() - begin) / STEPS
    WORLD.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    ms = dict(zip(contenders, np.median(seconds[:, 1:], axis=1) * 1e3, strict=True))
    return {
        "benchmark": NAME,
        "units": "-".join(map(str, units)),
        "ranks": WORLD.size,
        "batch": batch,
        "median_ms": {key: round(float(value), 3) for key, value in ms.items()},
        "ratio": round(float(ms["ringreduce"] / (ms["alone"] + ms["all_reduce"])), 3),
        "why not own": why_not,
        "wrong": WORLD.allreduce(wrong),
    }


if __name__ == "__main__":
    main()
