"""Tensor parallelism: equal to one process, its messages, its memory, and the parts of arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.parallel.layers import backward_all, forward_all
from ringreduce.parallel.sampler import part
from ringreduce.train import Mesh, global_norm, mlp, tensor_parallel
from ringreduce.train.tensor_parallel import TensorParallel, counted, cut, gather
from tests.support.rounding import (
    SIZES,
    Alone,
    flatten,
    gamma,
    layers_of,
    loss_and_layers,
    problem,
    rounding_bounds,
)

EVEN = (64, 20, 10)
DEEP = (64, 7, 9, 5, 6, 10)
NARROW = (64, 3, 2, 3)
"""Narrower than 4 ranks: some ranks have no columns."""


class Counting:
    """A communicator that records how many numbers each all-reduce adds up."""

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.lengths = []

    def all_reduce(self, x, *, op="sum", out=None):
        self.lengths.append(x.size)
        return self._comm.all_reduce(x, op=op, out=out)


class Replica:
    """Stands for the data group of the only replica."""

    rank, size = 0, 1


def parts_of(flat, sizes, norm, comm):
    return cut(mlp.named(mlp.views(flat, sizes, norm)), comm.rank, comm.size)


def gradients_of(network, arrays, data, x, labels, count):
    """The loss and the gradients of this rank's part of the model for its part of the batch."""
    layers = network.layers(arrays, data)
    mine = part(len(x), data.rank, data.size)
    logits, kept = forward_all(layers, x[mine])
    loss, gradient = network.cross_entropy(logits, labels[mine], count)
    return loss, {
        name: array
        for _, pairs in backward_all(layers, kept, gradient, {})
        for name, array in pairs
    }


def train_step(comm, tensor, flat, sizes, norm, x, labels, count):
    """The loss, the whole gradient, and the parts of it that this rank has."""
    with Mesh(comm, data=comm.size // tensor, tensor=tensor) as mesh:
        network = TensorParallel(mesh.tensor, sizes)
        arrays = parts_of(flat, sizes, norm, mesh.tensor)
        loss, found = gradients_of(network, arrays, mesh.data, x, labels, count)
        found = {name: mesh.data.all_reduce(array) for name, array in found.items()}
        loss = mesh.data.all_reduce(loss).item()
        return loss, flatten(layers_of(gather(mesh.tensor, found))), found


# --- equal to one process -------------------------------------------------------------------------


def off(found, sizes, norm, data, seed, samples):
    """How far the loss and the gradient are beyond the bound of those of one process."""
    flat, x, labels = problem(seed, samples, sizes, norm)
    parameters = mlp.views(flat, sizes, norm)
    wanted, layers = loss_and_layers(parameters, x, labels, len(x), Alone())
    of_loss, bounds = rounding_bounds(parameters, x, labels, len(x), data)
    loss, gradient, _ = found
    assert max(bounds.max(), of_loss) < 1e-5  # the largest is that of four normalised layers
    errors = np.abs(gradient - flatten(layers)) - 2 * bounds
    return max(errors.max(), abs(loss - wanted) - 2 * of_loss)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("sizes", [(64, 10), EVEN, SIZES, DEEP, NARROW], ids=str)
@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_ranks_compute_what_one_process_computes(tensor, sizes, norm):
    """The bound is for sums in any order, so it is the same however many ranks add up a product."""
    flat, x, labels = problem(3, 23, sizes, norm)
    for found in rr.spawn(train_step, tensor, tensor, flat, sizes, norm, x, labels, len(x)):
        assert off(found, sizes, norm, 1, 3, 23) <= 0


@pytest.mark.few(8)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("sizes", [EVEN, SIZES, NARROW], ids=str)
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("samples", [2, 23])
def test_replicas_of_parts_compute_what_one_process_computes(samples, data, tensor, sizes, norm):
    """Of 2 samples the third replica has an empty part."""
    flat, x, labels = problem(3, samples, sizes, norm)
    results = rr.spawn(
        train_step, data * tensor, tensor, flat, sizes, norm, x, labels, len(x), timeout_s=30
    )
    for found in results:
        assert off(found, sizes, norm, data, 3, samples) <= 0


@pytest.mark.parametrize("sizes", [EVEN, SIZES], ids=str)
def test_one_rank_is_bitwise_one_process(sizes):
    flat, x, labels = problem(4, sizes=sizes)
    ((loss, gradient, _),) = rr.spawn(train_step, 1, 1, flat, sizes, False, x, labels, 23)
    wanted, layers = loss_and_layers(mlp.views(flat, sizes), x, labels, 23)
    assert (loss, gradient.tobytes()) == (wanted, flatten(layers).tobytes())


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("sizes", [EVEN, DEEP], ids=str)
def test_gradients_of_whole_arrays_are_bitwise_the_same_on_every_rank(sizes, norm):
    flat, x, labels = problem(5, sizes=sizes, batch_norm=norm)
    results = rr.spawn(train_step, 3, 3, flat, sizes, norm, x, labels, len(x))
    for name in results[0][2]:
        if tensor_parallel.axis_of(name) is None:
            assert len({found[name].tobytes() for _, _, found in results}) == 1


def test_huge_logits_do_not_overflow():
    flat, x, labels = problem(4)
    loss, gradient, _ = rr.spawn(train_step, 3, 3, 1e4 * flat, SIZES, False, x, labels, 23)[0]
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [EVEN, SIZES], ids=str)
def test_the_dtype_is_kept(sizes, dtype):
    flat, x, labels = problem(4, sizes=sizes)

    def program(comm):
        network, arrays = (
            TensorParallel(comm, sizes),
            parts_of(flat.astype(dtype), sizes, False, comm),
        )
        _, found = gradients_of(network, arrays, Replica, x.astype(dtype), labels, 23)
        return {array.dtype for array in found.values()}

    assert rr.spawn(program, 2) == [{np.dtype(dtype)}] * 2


def test_stages_of_a_pipeline_compute_what_the_network_computes():
    flat, x, _ = problem(6, sizes=DEEP)

    def program(comm):
        network = TensorParallel(comm, DEEP)
        arrays = parts_of(flat, DEEP, False, comm)
        logits, _ = forward_all(network.layers(arrays), x)
        value = x
        for numbers in ("0", "12", "34"):
            stage = {name: array for name, array in arrays.items() if name[0] in numbers}
            layers = network.layers(stage)
            assert [layer.number for layer in layers] == [int(number) for number in numbers]
            value, _ = forward_all(layers, value)
        return np.array_equal(value, logits)

    assert rr.spawn(program, 2) == [True, True]


def test_every_array_function_comes_from_xp(monkeypatch):
    flat, x, labels = problem(6, sizes=NARROW)

    def program(comm):
        network = TensorParallel(comm, NARROW, np)
        arrays = parts_of(flat, NARROW, False, comm)
        _, found = gradients_of(network, arrays, Replica, x, labels, 23)
        network.classes(mlp.predict(network.layers(arrays), x, {}))
        return gather(comm, found, np)

    monkeypatch.setattr(mlp, "np", None)
    monkeypatch.setattr(tensor_parallel, "np", None)
    rr.spawn(program, 4)


def over_mpi(comm) -> None:
    """Check meshes of 1, 2 and 4 tensor ranks against one process."""
    for tensor in (1, 2, 4):
        for sizes in (EVEN, SIZES):
            flat, x, labels = problem(3, 23, sizes, True)
            found = train_step(comm, tensor, flat, sizes, True, x, labels, len(x))
            assert off(found, sizes, True, comm.size // tensor, 3, 23) <= 0


# --- predictions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [EVEN, SIZES, NARROW], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_right_predictions_are_counted_as_one_process_counts_them(ranks, sizes):
    flat, x, labels = problem(7, 100, sizes, True)
    running = mlp.init_statistics(sizes)
    rng = np.random.default_rng(7)
    running = {name: rng.uniform(0.5, 1, array.shape) for name, array in running.items()}

    def program(comm):
        network = TensorParallel(comm, sizes)
        layers = network.layers(parts_of(flat, sizes, True, comm))
        logits = mlp.predict(layers, x, cut(running, comm.rank, comm.size))
        return sum(network.classes(logits) == labels)

    whole = mlp.layers(mlp.views(flat, sizes, True))
    wanted = sum(mlp.predict(whole, x, running).argmax(axis=1) == labels)
    assert rr.spawn(program, ranks) == [wanted] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("special", [1.0, -np.inf, np.nan])
def test_the_lowest_class_with_the_largest_logit_is_predicted(special, ranks):
    """Most rows have ties; a NaN is the largest, as for `argmax`."""
    logits = np.random.default_rng(0).integers(0, 3, (200, 5)).astype(float)
    logits[logits == 1] = special
    logits[0] = special

    def program(comm):
        network = TensorParallel(comm, (64, 5))
        return network.classes(logits[:, part(5, comm.rank, comm.size)]).tolist()

    assert rr.spawn(program, ranks) == [logits.argmax(axis=1).tolist()] * ranks


def test_no_samples_have_no_classes():
    def program(comm):
        return TensorParallel(comm, (64, 3)).classes(np.empty((0, 3 // comm.size))).shape

    assert rr.spawn(program, 3) == [(0,)] * 3


# --- messages and memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        # The logits' largest, and two sums, for each of 23 samples.
        ((64, 10), [23, 46]),
        # The products of layer 1.
        (EVEN, [23 * 10]),
        # The products of layer 1; the loss; the gradient of layer 2's input.
        (SIZES, [23 * 15, 23, 46, 23 * 15]),
        ((64, 8, 9, 7, 10), [23 * 9, 23 * 10, 23 * 9]),
        (DEEP, [23 * 9, 23 * 6, 23, 46, 23 * 6, 23 * 9]),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_all_reduces_of_a_step(ranks, sizes, lengths):
    flat, x, labels = problem(8, sizes=sizes)

    def program(comm):
        counting = Counting(comm)
        network = TensorParallel(counting, sizes)
        gradients_of(network, parts_of(flat, sizes, False, comm), Replica, x, labels, 23)
        return counting.lengths

    assert rr.spawn(program, ranks) == [lengths if ranks > 1 else []] * ranks


# Layer 0 has 5 columns of 64, layer 1 has 5 rows of 15, layer 2 has 3 or 2 columns of 15; a bias is
# as long as the output.
PLAIN = [(64 * 5 + 5) + (5 * 15 + 15) + (15 * columns + columns) for columns in (3, 3, 2, 2)]
# Also scale and shift: of 5 columns of layer 0, and of all 15 columns of layer 1.
NORMALISED = [plain + 2 * 5 + 2 * 15 for plain in PLAIN]


@pytest.mark.parametrize(("norm", "held"), [(False, PLAIN), (True, NORMALISED)])
def test_the_numbers_that_a_rank_holds(norm, held):
    flat, _, _ = problem(8, batch_norm=norm)

    def program(comm):
        arrays = parts_of(flat, SIZES, norm, comm)
        layers = TensorParallel(comm, SIZES).layers(arrays)
        return sum(array.size for layer in layers for array in layer.parameters.values())

    assert rr.spawn(program, 4) == held


def test_parts_do_not_keep_the_whole_array_in_memory():
    flat, _, _ = problem(8)
    arrays = cut(mlp.named(mlp.views(flat, SIZES)), 1, 3)
    assert all(array.base is None and array.flags.c_contiguous for array in arrays.values())


# --- the parts of arrays --------------------------------------------------------------------------


def everything(sizes, seed=0):
    """Whole arrays with every kind of name: parameters, an optimizer's, running means."""
    flat, _, _ = problem(seed, sizes=sizes, batch_norm=True)
    arrays = mlp.named(mlp.views(flat, sizes, True))
    slots = {f"velocity/{name}": 2 * array for name, array in arrays.items()}
    running = mlp.init_statistics(sizes)
    return arrays | slots | {f"running/{name}": array for name, array in running.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sizes", [(64, 10), EVEN, SIZES, DEEP, NARROW], ids=str)
def test_gathered_parts_are_the_whole_on_every_rank(sizes, ranks):
    whole = everything(sizes)

    def program(comm):
        return gather(comm, cut(whole, comm.rank, comm.size))

    for found in rr.spawn(program, ranks):
        assert list(found) == list(whole)
        assert all(np.array_equal(found[name], array) for name, array in whole.items())
        assert all(array.flags.c_contiguous for array in found.values())


def test_rank_0_has_the_arrays_that_are_not_cut():
    def program(comm):
        return gather(comm, {"1.bias": np.full(3, comm.rank)})["1.bias"].tolist()

    assert rr.spawn(program, 3) == [[0, 0, 0]] * 3


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slices_are_where_the_parts_of_an_array_are(ranks):
    for name, array in everything(SIZES).items():
        for rank in range(ranks):
            where = tensor_parallel.slices(name, array.shape, rank, ranks)
            assert np.array_equal(array[where], cut({name: array}, rank, ranks)[name])


@pytest.mark.parametrize("sizes", [EVEN, SIZES, NARROW], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_number_is_counted_by_one_rank(ranks, sizes):
    """The bound is for squares and their sum in any order; a root halves the error."""
    flat, _, _ = problem(9, sizes=sizes, batch_norm=True)

    def program(comm):
        return global_norm(counted(parts_of(flat, sizes, True, comm), comm.rank), comm)

    exact = math.sqrt(math.fsum(flat**2))
    for norm in rr.spawn(program, ranks):
        assert abs(norm - exact) <= gamma(len(flat) + ranks + 4) * exact
