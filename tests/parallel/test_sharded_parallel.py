"""ShardedParallel: the bits, messages and bytes of ZeRO's three stages; and misuse."""

from __future__ import annotations

import re
import tracemalloc
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.train import DataParallel, Settings, ShardedParallel, clip, global_norm, optimizers
from tests.support.mpi import ROOT

STAGES = (1, 2, 3)
SHAPES = {
    "0.weight": (7, 5),
    "0.bias": (5,),
    "1.weight": (5, 3),
    "1.bias": (3,),
    "2.weight": (3, 11),
    "3.scale": (),
}
LAYERS = [["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight"], ["3.scale"]]
SMALL = {"first_bucket_bytes": 100, "bucket_bytes": 200}


def params(seed: int, shapes=SHAPES, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Numbers whose sums are rounded."""
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.normal(size=shape), dtype) for n, shape in shapes.items()}


def made(comm, stage, **how) -> ShardedParallel:
    return ShardedParallel(comm, params(comm.rank), stage=stage, **(SMALL | how))


def backward(sharded, gradients) -> None:
    """Make the loops of a step, and report gradients."""
    for _ in sharded.forward():
        pass
    for layer in sharded.backward():
        for name in reversed(layer):
            sharded.ready(name, gradients[name])


def descend(parameters, slots, gradient) -> None:
    parameters -= 0.1 * gradient


# --- bits -----------------------------------------------------------------------------------------


class Run:
    """A run of some steps, whose gradients depend on the parameters."""

    def __init__(self, shapes, optimizer: str, dtype: str, steps: int = 3) -> None:
        self.shapes, self.dtype, self.steps = shapes, dtype, steps
        self.settings = Settings(optimizer=optimizer, momentum=0.9, weight_decay=0.01)
        self.slots = optimizers.SLOTS[optimizer]
        self.update = optimizers.update(self.settings)

    def gradient(self, comm, step: int, name: str, parameter):
        seed = [step, comm.rank, *name.encode()]
        noise = np.random.default_rng(seed).normal(size=parameter.shape)
        return np.asarray(parameter * noise + noise, self.dtype)

    def replicated(self, comm, how):
        """Return the parameters after a run with DataParallel."""
        mine = params(comm.rank, self.shapes, self.dtype)
        slots = {name: tuple(np.zeros_like(mine[name]) for _ in self.slots) for name in mine}
        dp = DataParallel(comm, mine, **how)
        for step in range(self.steps):
            for name in reversed(mine):
                dp.ready(name, self.gradient(comm, step, name, mine[name]))
            for name, gradient in dp.finish().items():
                arrays = (mine[name], *slots[name], gradient)
                one, *own, slope = (array.reshape(-1) for array in arrays)
                arrays = (one, *own)
                self.update(arrays, slope, 0.1, step, arrays)
        return mine

    def sharded(self, comm, stage, how):
        """Return the parameters after a run with ShardedParallel."""
        mine = params(comm.rank, self.shapes, self.dtype)
        sharded = ShardedParallel(comm, mine, stage=stage, slots=self.slots, **how)
        for step in range(self.steps):
            for _ in sharded.forward():
                pass
            for layer in sharded.backward():
                for name in reversed(layer):
                    sharded.ready(name, self.gradient(comm, step, name, layer[name]))
            sharded.finish()
            sharded.step(
                lambda p, own, g, step=step: self.update((p, *own), g, 0.1, step, (p, *own))
            )
        whole = sharded.arrays()
        if stage < 3:
            assert all(same_bits(whole[name], mine[name]) for name in mine)
        return {name: whole[name] for name in mine}


def same_bits(a, b) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def equal(results, references) -> bool:
    return all(
        same_bits(result[name], reference[name])
        for result, reference in zip(results, references, strict=True)
        for name in reference
    )


SHAPE = st.lists(st.integers(0, 9), max_size=2).map(tuple)


@pytest.mark.slow
@given(
    ranks=st.integers(1, 5),
    stage=st.sampled_from(STAGES),
    shapes=st.lists(SHAPE, min_size=1, max_size=6),
    optimizer=st.sampled_from(["sgd", "adam"]),
    algorithm=st.sampled_from(["ring", "two_shot"]),
    dtype=st.sampled_from(["float32", "float64"]),
    bucket_bytes=st.sampled_from([1, 100, 1 << 20]),
    slice_bytes=st.sampled_from([None, 64]),
    interleaved=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_parameters_are_bitwise_those_of_data_parallel(
    ranks, stage, shapes, optimizer, algorithm, dtype, bucket_bytes, slice_bytes, interleaved
):
    """In stage 3 the buckets are the layers, which have one parameter each."""
    run = Run({f"{k}.weight": shape for k, shape in enumerate(shapes)}, optimizer, dtype)
    how = {"first_bucket_bytes": 50, "bucket_bytes": bucket_bytes, "algorithm": algorithm}
    if stage == 3:
        how |= {"first_bucket_bytes": 1, "bucket_bytes": 1}
    placed = {
        "nodes": (tuple(range(0, ranks, 2)), tuple(range(1, ranks, 2)))
        if interleaved and ranks > 1
        else None,
        "config": rr.Config(slice_bytes=slice_bytes),
        "timeout_s": 20,
    }
    references = rr.spawn(run.replicated, ranks, how, **placed)
    assert equal(rr.spawn(run.sharded, ranks, stage, how, **placed), references)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_stage_3_equals_data_parallel_within_rounding_if_layers_have_many_parameters(optimizer):
    run = Run(SHAPES, optimizer, "float64")
    references = rr.spawn(run.replicated, 3, {})
    results = rr.spawn(run.sharded, 3, 3, {})
    for name, wanted in references[0].items():
        # A mean of 3 is rounded 3 times; Adam divides by roots of what may be as small as 1e-3.
        assert np.allclose(results[0][name], wanted, rtol=0, atol=1e-12)
    assert equal(results, results[:1] * 3)


def over_mpi(comm) -> None:
    """Check that each stage gives the bits of DataParallel, with each algorithm."""
    many = Run(SHAPES, "adam", "float32"), SMALL
    one = (
        Run({f"{k}.weight": (k, 5) for k in range(5)}, "adam", "float32"),
        {"first_bucket_bytes": 1, "bucket_bytes": 1},
    )
    for algorithm in ("ring", "two_shot"):
        for stage, (run, sizes) in zip(STAGES, (many, many, one), strict=True):
            how = sizes | {"algorithm": algorithm}
            assert equal([run.sharded(comm, stage, how)], [run.replicated(comm, how)])


# --- bytes held -----------------------------------------------------------------------------------

EVEN = {f"{k}.{name}": shape for k in range(4) for name, shape in (("w", (64, 16)), ("b", (16,)))}
"""Four layers of 1040 numbers, which 1, 2, 4 and 8 ranks divide."""


def formula(stage: int, ranks: int, slots: int, sizes: list[int]) -> int:
    """Numbers that a rank holds according to the docstring, for buckets of these sizes."""
    rounded = [-(-size // ranks) * ranks for size in sizes]
    p, s, w, n, k = sum(sizes), sum(rounded) // ranks, max(rounded), ranks, slots
    held = {1: p + n * s + (1 + k) * s, 2: p + (1 + k) * s + 2 * w, 3: (2 + k) * s + 4 * w}
    fewer = {1: 0, 2: max(0, 2 - len(sizes)), 3: max(0, 3 - len(sizes))}
    return held[stage] - fewer[stage] * w


def held_after_steps(comm, stage, shapes, slots, steps=2, **how) -> list[int]:
    """The bytes that a rank holds after each step."""
    sharded = ShardedParallel(comm, params(0, shapes), stage=stage, slots=slots, **how)
    found = []
    for step in range(steps):
        backward(sharded, params(step, shapes))
        sharded.finish()
        sharded.step(descend)
        found.append(sharded.held_bytes)
    return found


@pytest.mark.parametrize("slots", [(), ("mean", "square")])
@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_holds_the_bytes_of_the_formula(stage, ranks, slots):
    how = {"first_bucket_bytes": 1040 * 8, "bucket_bytes": 1040 * 8}
    found = rr.spawn(lambda comm: held_after_steps(comm, stage, EVEN, slots, **how), ranks)
    assert found == [[8 * formula(stage, ranks, len(slots), [1040] * 4)] * 2] * ranks


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_few_buckets_of_odd_sizes_are_rounded_up(stage, layers):
    shapes = {f"{k}.w": (31 - 2 * k,) for k in range(layers)}
    how = {"first_bucket_bytes": 1, "bucket_bytes": 1}
    found = rr.spawn(lambda comm: held_after_steps(comm, stage, shapes, ["v"], **how), 3)
    sizes = [31 - 2 * k for k in range(layers)]
    assert found == [[8 * formula(stage, 3, 1, sizes)] * 2] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_the_bytes_held_are_those_that_numpy_has_allocated(stage):
    shapes = {f"{k}.w": (250, 400) for k in range(4)}
    how = {"first_bucket_bytes": 1, "bucket_bytes": 1}
    allocated = []

    def program(comm):
        own = params(0, shapes)
        sharded = ShardedParallel(comm, own, stage=stage, slots=["v"], **how)
        if stage == 3:
            own.clear()
        for _ in range(2):
            backward(sharded, dict.fromkeys(shapes, np.ones((250, 400))))
            sharded.finish()
            sharded.step(descend)
        comm.barrier()
        if comm.rank == 0:
            allocated.append(tracemalloc.take_snapshot())
        comm.barrier()
        return sharded.held_bytes

    tracemalloc.start()
    try:
        held = rr.spawn(program, 2)
    finally:
        tracemalloc.stop()
    # Of all arrays, those made here and by `Communicator.empty`; others are scratch of the calls.
    numpy_data = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    found = allocated[0].filter_traces([numpy_data]).statistics("filename")
    ours = (__file__, rr.Communicator.empty.__code__.co_filename)
    assert sum(held) == sum(each.size for each in found if each.traceback[0].filename in ours)


def table(text: str) -> list[list[str]]:
    """The rows of the table of held bytes in a page."""
    rows = re.findall(r"^\| (`DataParallel`|stage \d) \|(.+)\|$", text, re.M)
    return [[name, *(cell.strip() for cell in cells.split("|"))] for name, cells in rows]


@pytest.mark.slow
def test_the_table_in_the_documents_is_what_ranks_hold():
    """Of 8 layers of 256 x 256 and biases, in float32, with Adam; a bucket is a layer."""
    sides = {"weight": (256, 256), "bias": (256,)}
    shapes = {f"{k}.{name}": shape for k in range(8) for name, shape in sides.items()}
    layer = 4 * sum(map(prod, sides.values()))
    how = {"first_bucket_bytes": layer, "bucket_bytes": layer}

    def program(comm, stage):
        zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        sharded = ShardedParallel(comm, zeros, stage=stage, slots=("mean", "square"), **how)
        backward(sharded, zeros)
        sharded.finish()
        sharded.step(descend)
        return sharded.held_bytes

    def row(name, held):
        return [name, *(f"{each / (1 << 20):.1f}" for each in held)]

    wanted = [row("`DataParallel`", [4 * 8 * layer] * 4)]
    for stage in STAGES:
        held = [rr.spawn(program, ranks, stage)[0] for ranks in (1, 2, 4, 8)]
        wanted.append(row(f"stage {stage}", held))
    assert table((ROOT / "docs/reference/train.md").read_text()) == wanted


# --- messages -------------------------------------------------------------------------------------


def sent_in_a_step(comm, stage, algorithm) -> int:
    """Bytes that this rank sends in a step; stage 0: with DataParallel."""
    how = {"first_bucket_bytes": 1040 * 8, "bucket_bytes": 1040 * 8, "algorithm": algorithm}
    start = params(0, EVEN)
    if stage:
        sharded = ShardedParallel(comm, start, stage=stage, **how)
    else:
        dp = DataParallel(comm, start, **how)
    before = len(comm.message_log)
    if stage:
        backward(sharded, params(1, EVEN))
        sharded.finish()
        sharded.step(descend)
    else:
        for name, gradient in reversed(params(1, EVEN).items()):
            dp.ready(name, gradient)
        dp.finish()
    messages = comm.message_log[before:]
    return sum(message.nbytes for message in messages if message.direction == "send")


@pytest.mark.parametrize("algorithm", ["ring", "two_shot"])
@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize(("stage", "factor"), [(1, 1), (2, 1), (3, 1.5)])
def test_messages_have_as_many_bytes_as_those_of_all_reduces(stage, factor, ranks, algorithm):
    config = rr.Config(log_messages=True)
    ours = rr.spawn(sent_in_a_step, ranks, stage, algorithm, config=config)
    theirs = rr.spawn(sent_in_a_step, ranks, 0, algorithm, config=config)
    assert min(theirs) > 0
    assert ours == [factor * sent for sent in theirs]


# --- gathers of stage 3 ---------------------------------------------------------------------------


def watched(comm, events) -> None:
    """Record the gathers that start, by their length."""
    gather = comm.all_gather

    def all_gather(x, **how):
        events.append(("gather", x.size))
        return gather(x, **how)

    comm.all_gather = all_gather


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_next_layer_is_on_its_way_while_one_is_used(direction):
    shapes = {f"{k}.w": (2 * k + 2,) for k in range(3)}

    def program(comm):
        sharded = ShardedParallel(comm, params(0, shapes), stage=3)
        events = []
        watched(comm, events)
        for layer in getattr(sharded, direction)():
            events.append(("use", *layer))
        return events

    order = [0, 1, 2] if direction == "forward" else [2, 1, 0]
    first, second, third = order
    assert rr.spawn(program, 2)[0] == [
        ("gather", first + 1),
        ("gather", second + 1),
        ("use", f"{first}.w"),
        ("gather", third + 1),
        ("use", f"{second}.w"),
        ("use", f"{third}.w"),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_layers_have_the_parameters_of_rank_0_in_order(stage, ranks):
    def program(comm):
        sharded = made(comm, stage)
        loops = (sharded.forward(), sharded.backward())
        return [[{n: a.copy() for n, a in layer.items()} for layer in loop] for loop in loops]

    for forward, backward in rr.spawn(program, ranks):
        assert [list(layer) for layer in forward] == LAYERS
        assert [list(layer) for layer in backward] == LAYERS[::-1]
        for layer in (*forward, *backward):
            assert all(same_bits(array, params(0)[name]) for name, array in layer.items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_without_parameters_is_computed_in_the_turn_of_a_layer_beside_it(stage):
    """The loss is the sum of tanh(x @ a) @ c; layer 1 is the tanh."""
    given, x = params(3, {"0.a": (4, 3), "2.c": (3, 2)}), params(4, {"x": (5, 4)})["x"]

    def program(comm):
        sharded = ShardedParallel(comm, params(3, {"0.a": (4, 3), "2.c": (3, 2)}), stage=stage)
        y = x
        for layer in sharded.forward():
            if "0.a" in layer:
                y = hidden = np.tanh(y @ layer["0.a"])
            else:
                y = y @ layer["2.c"]
        slope = np.ones_like(y)
        for layer in sharded.backward():
            if "2.c" in layer:
                sharded.ready("2.c", hidden.T @ slope)
                slope = slope @ layer["2.c"].T
            else:
                sharded.ready("0.a", x.T @ (slope * (1 - hidden**2)))
        sharded.finish()
        return sharded.gradients()

    hidden, ones = np.tanh(x @ given["0.a"]), np.ones((5, 2))
    slope = (ones @ given["2.c"].T) * (1 - hidden**2)
    wanted = {"0.a": x.T @ slope, "2.c": hidden.T @ ones}
    assert equal(rr.spawn(program, 2), [wanted] * 2)  # the mean of two equal numbers is exact


def test_a_loop_that_all_ranks_leave_early_drops_its_layers():
    def program(comm):
        sharded = made(comm, 3)
        before = sharded.held_bytes
        for _ in sharded.forward():
            break
        held = sharded.held_bytes - before
        backward(sharded, params(1))
        sharded.finish()
        return held, [layer.keys() for layer in sharded.forward()]

    rounded = 8 * 2 * 20  # the longest layer, of 40 numbers
    for held, layers in rr.spawn(program, 2):
        assert held == 2 * rounded
        assert list(map(list, layers)) == LAYERS


def test_parameters_of_several_dtypes_may_be_in_a_layer():
    def program(comm):
        start = {"0.a": np.ones(3, "f4"), "0.b": np.full(5, 2.0), "1.a": np.full(2, 3.0, "f4")}
        sharded = ShardedParallel(comm, start, stage=3)
        backward(sharded, start)
        sharded.finish()
        sharded.step(descend)
        return sharded.arrays()

    for arrays in rr.spawn(program, 3):
        wanted = {"0.a": ("f4", [0.9] * 3), "0.b": ("f8", [1.8] * 5), "1.a": ("f4", [2.7] * 2)}
        for name, (dtype, numbers) in wanted.items():
            assert arrays[name].dtype == dtype
            assert arrays[name].tolist() == pytest.approx(numbers, rel=1e-6)


# --- weigh, no_sync, join, clip -------------------------------------------------------------------


def filled(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, float(value)) for name, shape in SHAPES.items()}


def only(sharded) -> float:
    """The one number that all gradients have; this rank's shard must not be empty."""
    (number,) = {value for part in sharded.shard for value in part.tolist()}
    return number


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_weighed(stage):
    def program(comm):
        sharded = made(comm, stage)
        sharded.weigh([0, 1, 3][comm.rank])
        backward(sharded, filled(comm.rank or np.nan))
        sharded.finish()
        return only(sharded)

    assert rr.spawn(program, 3) == [(1 * 1 + 3 * 2) / 4] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_accumulated_and_sent_once(stage):
    def program(comm):
        sharded, found = made(comm, stage), []
        for step in range(2):
            with sharded.no_sync():
                backward(sharded, filled(comm.rank + 1 + step))
                backward(sharded, filled(10))
            backward(sharded, filled(100))
            sharded.finish()
            found.append(only(sharded))
            sharded.step(descend)
        return found

    assert rr.spawn(program, 2) == [[111.5, 112.5]] * 2


@pytest.mark.slow
@given(
    stage=st.sampled_from(STAGES),
    batches=st.lists(st.lists(st.lists(st.integers(-9, 9)), max_size=3), min_size=1, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_ranks_may_have_different_numbers_of_batches(stage, batches):
    def program(comm):
        sharded, found = made(comm, stage), []
        for batch in sharded.join(batches[comm.rank], samples=len):
            if batch is not None:
                backward(sharded, filled(np.mean(batch) if batch else np.nan))
            sharded.finish()
            found.append(only(sharded))
            sharded.step(descend)
        return found

    results = rr.spawn(program, len(batches), timeout_s=20)
    for turn in range(max(map(len, batches))):
        samples = [x for mine in batches for batch in mine[turn : turn + 1] for x in batch]
        wanted = np.mean(samples) if samples else 0.0
        assert all(found[turn] == pytest.approx(wanted, abs=1e-13) for found in results)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_different_numbers_of_batches_may_accumulate(stage):
    batches = [[2.0, 4.0, 6.0], [10.0]]

    def program(comm):
        sharded = made(comm, stage)
        for turn, batch in enumerate(sharded.join(batches[comm.rank])):
            if turn < 2:
                with sharded.no_sync():
                    if batch is not None:
                        backward(sharded, filled(batch))
                    else:
                        for _ in (*sharded.forward(), *sharded.backward()):
                            pass
            else:
                if batch is not None:
                    backward(sharded, filled(batch))
                sharded.finish()
        return only(sharded)

    assert rr.spawn(program, 2, timeout_s=120) == [(2 + 10) / 2 + 4 + 6] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_clipped_by_the_norm_over_all_ranks(stage, ranks):
    numbers = sum(map(prod, SHAPES.values()))

    def program(comm):
        sharded = made(comm, stage)
        backward(sharded, filled(2))
        sharded.finish()
        norm = global_norm(sharded.shard, comm)
        clip(sharded.shard, norm, norm / 4)
        return norm, only(sharded)

    norm = pytest.approx(2 * numbers**0.5, rel=1e-14)
    assert rr.spawn(program, ranks) == [(norm, 0.5)] * ranks


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize(("ranks", "others"), [(1, 3), (3, 2)])
def test_arrays_go_over_to_another_stage_and_number_of_ranks(before, after, ranks, others):
    wanted = params(1) | {f"v/{name}": array for name, array in params(2).items()}

    def loaded(comm, stage, arrays):
        sharded = made(comm, stage, slots=["v"])
        sharded.load(arrays if comm.rank == 0 else None)
        return sharded

    def first(comm):
        return loaded(comm, before, wanted).arrays()

    def second(comm):
        sharded = loaded(comm, after, given)
        return sharded.arrays(), [
            a for layer in sharded.forward() for a in map(np.copy, layer.values())
        ]

    given = rr.spawn(first, ranks)[-1]
    assert list(given) == list(wanted)
    for arrays, layers in rr.spawn(second, others):
        assert equal([arrays], [wanted])
        assert equal([dict(enumerate(layers))], [dict(enumerate(params(1).values()))])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"v/0.bias": None}, "load: there is no array 'v/0.bias'"),
        ({"0.bias": np.zeros(4)}, r"load: '0.bias' has the shape \(4,\); wanted \(5,\)"),
    ],
)
def test_wrong_arrays_are_refused(wrong, words):
    arrays = params(1) | {f"v/{name}": array for name, array in params(2).items()} | wrong
    arrays = {name: array for name, array in arrays.items() if array is not None}

    def program(comm):
        sharded = made(comm, 1, slots=["v"])
        with pytest.raises(ValueError, match=words):
            sharded.load(arrays if comm.rank == 0 else None)

    rr.spawn(program, 2, timeout_s=120)


# --- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", list(SHAPES))
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_reported_is_named_on_all_ranks_and_the_next_step_is_well(
    stage, lacking
):
    def program(comm):
        sharded = made(comm, stage)

        def some() -> None:
            for layer in sharded.backward():
                for name, array in layer.items():
                    if comm.rank != 1 or name != lacking:
                        sharded.ready(name, np.ones_like(array))
            sharded.finish()

        with pytest.raises(rr.MismatchError) as error:
            some()
        backward(sharded, filled(comm.rank))
        sharded.finish()
        return str(error.value), only(sharded)

    results = rr.spawn(program, 3, timeout_s=120)
    assert len({text for text, _ in results}) == 1
    assert re.search(rf"rank 1 has not reported [^;]*'{lacking}'", results[0][0])
    assert [number for _, number in results] == [1.0] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_leaves_the_loop_of_join_is_named(stage):
    def program(comm):
        sharded = made(comm, stage)

        def loop() -> None:
            for turn, _ in enumerate(sharded.join([1.0] * 4)):
                if comm.rank == 1 and turn == 2:
                    break
                backward(sharded, filled(1))
                sharded.finish()
            sharded.finish()

        with pytest.raises(rr.MismatchError) as error:
            loop()
        backward(sharded, filled(comm.rank))
        sharded.finish()
        return str(error.value), only(sharded)

    for text, number in rr.spawn(program, 2, timeout_s=120):
        assert "join: rank 1 left the loop in turn 3" in text
        assert number == 0.5


def with_(array) -> dict[str, np.ndarray]:
    return params(0) | {"0.weight": array}


def test_parameters_that_differ_are_named_on_all_ranks():
    def program(comm):
        with pytest.raises(rr.MismatchError) as error:
            ShardedParallel(comm, with_(np.zeros(comm.rank + 1)), stage=3)
        return str(error.value)

    assert len(set(rr.spawn(program, 2))) == 1


@pytest.mark.parametrize("times", [0, 1])
def test_a_step_needs_new_gradients(times):
    def program(comm):
        sharded = made(comm, 1)
        for _ in range(times):
            backward(sharded, filled(1))
            sharded.finish()
            sharded.step(descend)
        sharded.step(descend)

    with pytest.raises(ValueError, match="step: there are no new gradients; call finish"):
        rr.spawn(program, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_where_the_time_went(stage):
    def program(comm):
        sharded = made(comm, stage)
        backward(sharded, filled(1))
        sharded.finish()
        before = sharded.times
        sharded.step(descend)
        gathers = sharded.times.communication_s - before.communication_s
        return before.communication_s > 0, gathers > 0, sharded.times.exposed_s > before.exposed_s

    assert rr.spawn(program, 2) == [(True, stage < 3, True)] * 2
