"""PipelineParallel: gradients bitwise those of one process, activations as proven, and misuse."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.parallel.layers import backward_all, cross_entropy, forward_all
from ringreduce.parallel.sampler import part
from ringreduce.train import PipelineParallel, mlp

CLASSES = 3
SIZES = (5, 4, 7, 6, 3, 8, 5, 4, CLASSES)
"""Eight layers: a stage each for 4 ranks with 2 stages."""


def weights_last(ranks, rank, splits, virtual):
    """All forwards, the gradients of all inputs in descending order, then those of all weights."""
    yield from (f"{rank}F{number}" for number in range(splits))
    yield from (f"{rank}I{number}" for number in reversed(range(splits)))
    yield from (f"{rank}W{number}" for number in range(splits))


rr.pipeline.register("weights_last", weights_last)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "sequential", "weights_last")


class Eager:
    """A layer that computes the gradient of its weights at once, in the array that it gets."""

    def __init__(self, layer):
        self.layer = layer
        self.parameters, self.forward = layer.parameters, layer.forward

    def backward(self, kept, gradient, into):
        of_input, pairs = self.layer.backward(kept, gradient, into)
        return of_input, list(pairs)


def network(dtype="float64", sizes=SIZES, eager=False) -> list:
    layers = mlp.layers(mlp.views(mlp.init_params(sizes, 1, dtype), sizes))
    return [Eager(layer) for layer in layers] if eager else layers


def batch_of(rows: int, dtype="float64", seed=0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((seed, rows))
    return rng.standard_normal((rows, SIZES[0])).astype(dtype), rng.integers(0, CLASSES, rows)


def of_one_process(layers, x, labels, count, splits):
    """Loss and gradients of the microbatches, one after another."""
    loss, sums = 0.0, {}
    for number in range(splits):
        rows = part(len(x), number, splits)
        y, kept = forward_all(layers, x[rows])
        more, gradient = cross_entropy(y, labels[rows], count)
        loss += float(more)
        for _, pairs in backward_all(layers, kept, gradient, {}):
            for name, array in pairs:
                if name in sums:
                    sums[name] += array
                else:
                    sums[name] = array.copy()
    return loss, sums


def bits(gradients) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in gradients.items()}


def bits_of_all(found) -> dict[str, bytes]:
    """The gradients of all ranks together; no two ranks have the same parameter."""
    together = {name: array for gradients in found for name, array in gradients.items()}
    assert len(together) == sum(map(len, found))
    return bits(together)


def copied(gradients) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in gradients.items()}


@st.composite
def pipelines(draw) -> dict:
    ranks, name = draw(st.integers(1, 4)), draw(st.sampled_from(SCHEDULES))
    splits = draw(st.integers(1, 8))
    interleaved = name == "interleaved"
    virtual = draw(st.integers(1, 2)) if interleaved else 1
    stages = ranks * virtual
    borders = sorted(draw(st.permutations(range(1, len(SIZES) - 1)))[: stages - 1])
    cut = [b - a for a, b in zip([0, *borders], [*borders, len(SIZES) - 1], strict=True)]
    return {
        "ranks": ranks,
        "splits": -(-splits // ranks) * ranks if interleaved else splits,
        "schedule": name,
        "virtual": virtual,
        "cut": draw(st.sampled_from(["balanced", cut])),
    }


@pytest.mark.slow
@given(
    how=pipelines(),
    batches=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "float64"]),
    eager=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_gradients_are_bitwise_those_of_one_process(how, batches, dtype, eager):
    ranks, splits = how.pop("ranks"), how["splits"]

    def program(comm):
        pipe = PipelineParallel(comm, network(dtype, eager=eager), **how)
        found = []
        for rows in batches:
            loss = pipe.step(*batch_of(rows, dtype), count=31)
            found.append((loss, copied(pipe.gradients), pipe.held, pipe.proof.held[comm.rank]))
        return found

    for rows, *found in zip(batches, *rr.spawn(program, ranks, timeout_s=120), strict=True):
        wanted = of_one_process(network(dtype), *batch_of(rows, dtype), 31, splits)
        losses, gradients, held, proven = zip(*found, strict=True)
        assert set(losses) == {wanted[0]}
        assert bits_of_all(gradients) == bits(wanted[1])
        assert held == proven


def piped(comm, layers=None, **how) -> PipelineParallel:
    return PipelineParallel(comm, network() if layers is None else layers, **how)


def stepped(program, ranks: int, **how) -> list:
    """What ``program(pipe)`` returns on each rank, after a step of ten samples."""

    def on_rank(comm):
        pipe = piped(comm, **how)
        pipe.step(*batch_of(10), count=10)
        return program(pipe)

    return rr.spawn(on_rank, ranks, timeout_s=120)


# --- the cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "cut"),
    [
        ({}, (2, 3, 3)),  # layers of 24, 35, 48, 21, 32, 45, 24 and 15 parameters
        ({"costs": [9, 1, 1, 1, 1, 1, 1, 1]}, (1, 6, 1)),
        ({"cut": [1, 2, 5]}, (1, 2, 5)),
    ],
)
def test_layers_are_cut_into_stages(how, cut):
    assert stepped(lambda pipe: pipe.cut, 3, **how) == [cut] * 3


def test_a_rank_has_every_fourth_stage():
    found = stepped(lambda pipe: pipe.stages, 4, schedule="interleaved", virtual=2)
    assert found == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_rank_has_the_layers_of_its_stages():
    found = stepped(lambda pipe: [each.number for each in pipe.layers], 2, cut=[3, 5])
    assert found == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_a_rank_makes_its_own_layers_alone():
    def program(comm):
        made = []

        def maker(number):
            return lambda: made.append(number) or network()[number]

        layers = [maker(number) for number in range(8)]
        pipe = piped(comm, layers, cut=[3, 5])
        pipe.step(*batch_of(10), count=10)
        return made, pipe.gradients

    (first, of_first), (second, of_second) = rr.spawn(program, 2, timeout_s=120)
    assert (first, second) == ([0, 1, 2], [3, 4, 5, 6, 7])
    wanted = of_one_process(network(), *batch_of(10), 10, splits=2)[1]
    assert bits_of_all([of_first, of_second]) == bits(wanted)


# --- microbatches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "how", "splits"),
    [
        (10, {}, 2),
        (10, {"splits": 3}, 3),
        (10, {"split_size": 4}, 3),
        (12, {"split_size": 4}, 3),
        (1, {"split_size": 4}, 1),
        (0, {"split_size": 4}, 1),
        (10, {"split_size": 4, "schedule": "interleaved", "virtual": 2}, 4),
    ],
)
def test_a_batch_has_this_many_microbatches(rows, how, splits):
    def program(comm):
        pipe = piped(comm, **how)
        pipe.step(*batch_of(rows), count=10)
        return pipe.schedule.splits

    assert rr.spawn(program, 2, timeout_s=120) == [splits] * 2


def test_each_batch_has_as_many_microbatches_as_its_length_needs():
    def program(comm):
        pipe = piped(comm, split_size=4)
        found = []
        for rows in (10, 3, 20):
            pipe.step(*batch_of(rows), count=10)
            found.append(copied(pipe.gradients))
        return found

    for rows, splits, *gradients in zip(
        (10, 3, 20), (3, 1, 5), *rr.spawn(program, 3, timeout_s=120), strict=True
    ):
        wanted = of_one_process(network(), *batch_of(rows), 10, splits)[1]
        assert bits_of_all(gradients) == bits(wanted)


class Flat:
    """A layer that takes samples of any shape, and keeps the shape."""

    parameters: ClassVar = {}

    def forward(self, x):
        return 2 * x, None

    def backward(self, kept, gradient, into):
        return 2 * gradient, []


def test_samples_of_another_shape_and_as_many_rows_may_follow():
    def squares(y, labels, count):
        return (y**2).sum() / count, 2 * y / count

    def program(comm):
        pipe = piped(comm, [Flat(), Flat(), Flat()], loss=squares)
        return [
            pipe.step(np.ones(shape, dtype), np.zeros(4), count=4)
            for shape, dtype in [((4, 2), "f8"), ((4, 3), "f8"), ((4, 3, 2), "f4"), ((4,), "f2")]
        ]

    assert rr.spawn(program, 3, timeout_s=120) == [[128.0, 192.0, 384.0, 64.0]] * 3


def test_a_rank_needs_the_samples_or_the_labels_alone():
    def program(comm):
        x, labels = batch_of(10)
        pipe = piped(comm)
        return pipe.step(x if comm.rank < 2 else None, labels if comm.rank > 0 else None, 10)

    loss = of_one_process(network(), *batch_of(10), 10, splits=3)[0]
    assert rr.spawn(program, 3, timeout_s=120) == [loss] * 3


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_are_added_up_in_the_arrays_that_are_given():
    def program(comm):
        mine = {"0.weight": np.full((5, 4), np.nan), "7.bias": np.full(CLASSES, np.nan)}
        pipe = piped(comm, into=mine)
        pipe.step(*batch_of(10), count=10)
        return [name for name in mine if pipe.gradients.get(name) is mine[name]], pipe.gradients

    (first, *_), (last, *_) = found = rr.spawn(program, 2, timeout_s=120)
    assert (first, last) == (["0.weight"], ["7.bias"])
    wanted = of_one_process(network(), *batch_of(10), 10, splits=2)[1]
    assert bits_of_all([gradients for _, gradients in found]) == bits(wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gradient_is_reported_once_when_it_is_final(schedule):
    def program(comm):
        reported = []
        pipe = piped(
            comm,
            splits=4,
            schedule=schedule,
            on_gradient=lambda name, array: reported.append((name, array.copy())),
        )
        pipe.step(*batch_of(10), count=10)
        assert len(reported) == len(pipe.gradients)
        return bits(dict(reported)) == bits(pipe.gradients)

    assert rr.spawn(program, 2, timeout_s=120) == [True, True]


def test_replicas_add_up_their_gradients_while_they_are_computed():
    """Two pipelines of two stages; each has half of the batch."""

    def program(comm):
        pipeline, replicas = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        layers = piped(pipeline).layers
        parameters = {n: array for layer in layers for n, array in layer.parameters.items()}
        dp = rr.train.DataParallel(replicas, parameters, op="sum")
        pipe = piped(
            pipeline,
            into={name: dp.buffer(name) for name in parameters},
            on_gradient=lambda name, gradient: dp.ready(name),
        )
        x, labels = batch_of(10)
        mine = part(10, comm.rank // 2, 2)
        pipe.step(x[mine], labels[mine], count=10)
        return copied(dp.finish())

    found = rr.spawn(program, 4, timeout_s=120)
    x, labels = batch_of(10)
    halves = [
        of_one_process(network(), x[p], labels[p], 10, 2)[1] for p in (slice(5), slice(5, 10))
    ]
    wanted = {name: halves[0][name] + halves[1][name] for name in halves[0]}
    assert bits_of_all(found[:2]) == bits_of_all(found[2:]) == bits(wanted)


# --- counts ---------------------------------------------------------------------------------------


def test_bytes_of_activations_and_messages_are_counted():
    def program(pipe):
        return pipe.held_bytes, pipe.sent_bytes

    # Layers of 5-4-7-6-3-8-5-4-3, cut after the third; two microbatches of five samples, float64.
    first, last = stepped(program, 2, cut=[3, 5])
    assert first == (2 * 5 * 8 * (5 + 4 + 7 + 6), 10 * 8 * 6)
    assert last == (5 * 8 * (6 + 3 + 8 + 5 + 4 + 3), 10 * 8 * 6)


def test_times_are_those_of_the_actions():
    def program(pipe):
        return [(end - begin > 0) for begin, end in pipe.times], len(pipe.schedule.acts(0))

    for found, actions in stepped(program, 2):
        assert found == [True] * actions


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved", 2), ("zero_bubble", 1)])
def test_receives_are_posted_a_step_ahead(schedule, virtual):
    """The receive of each input is posted before the action before it, once shapes are known."""

    def program(comm):
        pipe = piped(comm, schedule=schedule, virtual=virtual, splits=8)
        pipe.step(*batch_of(16), count=16)
        assert pipe.proof.posted_ahead == 1
        posted, recv, execute = [0], comm.recv, pipe._run
        seen = []

        def count(*arguments, **named):
            posted[0] += 1
            return recv(*arguments, **named)

        def watched(plan, parts, kind, act):
            def acted(action, given):
                seen.append(posted[0])
                return act(action, given)

            return execute(plan, parts, kind, acted)

        comm.recv, pipe._run = count, watched
        pipe.step(*batch_of(16), count=16)
        steps = rr.pipeline.lower(pipe.schedule, comm.rank)
        needed = [sum(len(step.recvs) for step in steps[: i + 2]) for i in range(len(steps) - 1)]
        return seen == needed

    assert rr.spawn(program, 4, timeout_s=120) == [True] * 4


# --- predict --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(1, {}), (2, {}), (3, {"split_size": 4}), (2, {"schedule": "interleaved", "virtual": 2})],
)
@pytest.mark.parametrize("rows", [0, 1, 3, 23])
@pytest.mark.parametrize("first", [True, False])
def test_predict_returns_the_output_on_the_last_rank(ranks, how, rows, first):
    def program(comm):
        pipe = piped(comm, **how)
        if not first:
            pipe.step(*batch_of(10), count=10)
        return pipe.predict(batch_of(rows)[0])

    *others, last = rr.spawn(program, ranks, timeout_s=120)
    assert others == [None] * (ranks - 1)
    wanted, _ = forward_all(network(), batch_of(rows)[0])
    # Products of matrices of other heights add up in another order.
    assert np.allclose(last, wanted, rtol=1e-12, atol=1e-12)


def test_predict_computes_no_longer_microbatches_than_the_step():
    def program(comm):
        longest = []

        def forward(layer, x):
            longest.append(len(x))
            return layer.forward(x)[0]

        pipe = piped(comm, splits=5)
        pipe.step(*batch_of(10), count=10)
        pipe.predict(batch_of(23)[0], forward)
        return max(longest), sum(longest)

    assert rr.spawn(program, 2, timeout_s=120) == [(2, 23 * 4)] * 2


# --- over MPI -------------------------------------------------------------------------------------


def over_mpi(comm) -> None:
    """Check steps of two lengths by several schedules, on four ranks that are processes."""
    for schedule in ("1f1b", "interleaved", "zero_bubble"):
        virtual = 2 if schedule == "interleaved" else 1
        pipe = piped(comm, schedule=schedule, virtual=virtual, splits=4)
        for rows in (10, 3):
            pipe.step(*batch_of(rows), count=10)
            wanted = bits(of_one_process(network(), *batch_of(rows), 10, splits=4)[1])
            assert bits(pipe.gradients).items() <= wanted.items()
            assert comm.all_reduce(len(pipe.gradients)) == len(wanted)
        assert pipe.held == pipe.proof.held[comm.rank]


# --- misuse ---------------------------------------------------------------------------------------


class Broken:
    """A layer that cannot compute."""

    parameters: ClassVar = {}

    def forward(self, x):
        raise KeyError("no such table")


def test_an_error_of_a_layer_ends_the_step_of_all_ranks():
    seen = {}

    def program(comm):
        layers = network()
        layers[3] = Broken()
        pipe = piped(comm, layers, cut=[2, 2, 2, 2])
        try:
            pipe.step(*batch_of(10), count=10)
        except rr.PeerLostError as error:
            seen[comm.rank] = str(error)
            raise

    with pytest.raises(KeyError, match="no such table"):
        rr.spawn(program, 4, timeout_s=120)
    assert seen.keys() == {0, 2, 3}
    assert all("no such table" in text for text in seen.values())


class Other(Flat):
    """A layer whose gradient has another dtype than its output."""

    def backward(self, kept, gradient, into):
        return gradient.astype("f4"), []


class Longer(Flat):
    def forward(self, x):
        return np.concatenate([x, x]), None


class Nameless(Flat):
    def backward(self, kept, gradient, into):
        return gradient, [("w", gradient)]


class Tied(Flat):
    def __init__(self, times):
        super().__init__()
        self.parameters, self.times = {"tied": np.ones(3)}, times

    def backward(self, kept, gradient, into):
        return gradient, [("tied", np.ones(3))] * self.times


class Endless(Flat):
    def backward(self, kept, gradient, into):
        return None, []


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Other(), "rank 1 sends float32.* rank 0 receives float64"),
        (Longer(), "stage 1 returns 10 samples for 5"),
        (Nameless(), "a gradient of 'w', which is no parameter of the layer"),
        (Tied(0), "no gradient of 'tied'; return one for each parameter of the layer"),
        (Tied(2), "a gradient of 'tied', twice"),
        (Endless(), "the first layer of stage 1 returns no gradient of its input"),
    ],
)
def test_a_layer_that_breaks_the_protocol_is_named(layer, text):
    def program(comm):
        piped(comm, [network()[0], layer], splits=2).step(*batch_of(10), count=10)

    with pytest.raises(ValueError, match=text):
        rr.spawn(program, 2, timeout_s=120)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"splits": 2, "split_size": 4}, "got splits and split_size; pass one of them"),
        ({"split_size": 0}, "split_size is 0; pass an int of at least 1"),
        ({"splits": 0}, "splits is 0; pass an int of at least 1"),
        ({"schedule": "1f1"}, "did you mean '1f1b'"),
        ({"schedule": "1f1b", "virtual": 2}, "virtual is 2, but each rank has one stage"),
        ({"schedule": "interleaved", "virtual": 2, "splits": 3}, "splits is 3, no multiple"),
        (
            {"schedule": "interleaved", "virtual": 5},
            "layers has length 8; each of the 10 stages needs a layer",
        ),
        ({"cut": "equal"}, "cut is 'equal'; pass 'balanced' or a list of numbers"),
        ({"cut": [4, 5]}, r"cut is \[4, 5\]; pass 2 numbers of at least 1 that add up to the 8"),
        ({"cut": [8, 0]}, r"cut is \[8, 0\]"),
        ({"cut": [2, 2, 4]}, r"cut is \[2, 2, 4\]; pass 2 numbers"),
        ({"costs": [1, 2]}, "costs has 2 numbers and cut is 'balanced'; pass the cost of each"),
        ({"costs": [1] * 8, "cut": [4, 4]}, r"costs has 8 numbers and cut is \[4, 4\]"),
        ({"into": {name: np.zeros(1) for name in ["0.bias", "7.bias"]}}, "into has float64.1. "),
        ({"layers": [network] * 8}, "a layer is a function, whose cost is not known; pass costs"),
    ],
)
def test_a_wrong_argument_is_refused_on_every_rank(how, text):
    def program(comm):
        comm.all_gather = comm.send = None  # nothing is sent
        with pytest.raises(ValueError, match=text):
            piped(comm, **how)

    rr.spawn(program, 2, timeout_s=120)


def test_something_that_is_no_layer_is_named():
    def program(comm):
        with pytest.raises(TypeError, match=r"layers\[1\] is 4; pass an object with forward"):
            piped(comm, [network()[0], 4])

    rr.spawn(program, 2, timeout_s=120)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_parameters_of_one_name_are_named_on_every_rank(ranks):
    def program(comm):
        with pytest.raises(ValueError, match=r"2 parameters have the name '0\.weight'"):
            piped(comm, [*network()[:2], *network()[:1]])

    rr.spawn(program, ranks, timeout_s=120)


def test_a_gradient_of_none_is_named():
    class Unused(Eager):
        def backward(self, kept, gradient, into):
            of_input, pairs = super().backward(kept, gradient, into)
            return of_input, [(name, None) for name, _ in pairs]

    def program(comm):
        with pytest.raises(TypeError, match=r"'7\.bias' is None; pass zeros of float64\[3\] for"):
            piped(comm, [Unused(layer) for layer in network()]).step(*batch_of(3), count=3)

    rr.spawn(program, 1)


def test_ranks_that_pass_different_arguments_are_named():
    def program(comm):
        with pytest.raises(
            rr.MismatchError, match=r"rank 1 passes cut \[5, 3\], rank 0 passes cut \[4, 4\]"
        ):
            piped(comm, cut=[4 + comm.rank, 4 - comm.rank])

    rr.spawn(program, 2, timeout_s=120)


@pytest.mark.parametrize("call", ["step", "predict"])
def test_ranks_that_pass_different_numbers_of_samples_are_named(call):
    def program(comm):
        pipe = piped(comm)
        x, labels = batch_of(10 + comm.rank)
        with pytest.raises(rr.MismatchError, match="rank 1 passes 11 samples, rank 0 passes 10"):
            pipe.step(x, labels, count=10) if call == "step" else pipe.predict(x)
        return pipe.step(*batch_of(4), count=10)  # and the next is right

    first, second = rr.spawn(program, 2, timeout_s=120)
    assert first == second


@pytest.mark.parametrize(
    ("x", "labels", "count", "error", "text"),
    [
        ([[1.0] * 5], [0], 1, TypeError, "x is list; pass an array"),
        (*batch_of(3), 0, ValueError, "count is 0; pass the samples of the global batch"),
        (None, np.zeros(3, int), 3, ValueError, "x is None; pass an array"),
        (np.zeros((3, 5)), None, 3, ValueError, "labels is None; pass an array"),
        (np.zeros((3, 5)), np.zeros(4, int), 3, ValueError, "x has 3 samples and labels 4; pass a"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(x, labels, count, error, text):
    def program(comm):
        with pytest.raises(error, match=f"step: {text}"):
            piped(comm).step(x, labels, count=count)

    rr.spawn(program, 1)
