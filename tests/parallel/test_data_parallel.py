"""DataParallel: means of gradients in buckets, for any model; and misuse."""

from __future__ import annotations

import contextlib
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr

SHAPES = {"w1": (7, 5), "b1": (5,), "w2": (5, 3), "b2": (3,), "scale": ()}


def params(seed: int, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Return integers that differ by seed."""
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.integers(-9, 9, shape), dtype) for n, shape in SHAPES.items()}


def backward(dp, gradients) -> None:
    for name in reversed(gradients):
        dp.ready(name, gradients[name])


def mean(values, weights) -> np.ndarray:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


@pytest.mark.slow
@given(
    ranks=st.integers(1, 4),
    first=st.sampled_from([1, 30, 1 << 20]),
    others=st.sampled_from([1, 200, 1 << 20]),
    weights=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    weighed=st.booleans(),
    order=st.permutations(list(SHAPES)),
)
@settings(max_examples=40)
def test_any_gradients_in_any_order_and_buckets(ranks, first, others, weights, weighed, order):
    weighed &= any(weights[:ranks])
    weights = weights[:ranks] if weighed else [1] * ranks

    def program(comm):
        dp = rr.train.DataParallel(
            comm, params(comm.rank), first_bucket_bytes=first, bucket_bytes=others
        )
        results = []
        for step in range(2):
            if weighed:
                dp.weigh(weights[comm.rank])
            gradients = params(10 * step + comm.rank)
            for name in order:
                dp.ready(name, gradients[name])
            results.append({name: g.copy() for name, g in dp.finish().items()})
        return results

    for results in rr.spawn(program, ranks, timeout_s=120):
        for step, result in enumerate(results):
            parts = [params(10 * step + rank) for rank in range(ranks)]
            for name in SHAPES:
                wanted = mean([part[name] for part in parts], weights)
                assert np.allclose(result[name], wanted, rtol=1e-15)


@pytest.mark.parametrize(
    ("first", "others", "dtypes", "buckets"),
    [
        (32, 1 << 20, "ddddd", (("scale", "b2"), ("w2", "b1", "w1"))),
        (1, 1, "ddddd", (("scale",), ("b2",), ("w2",), ("b1",), ("w1",))),
        (1 << 20, 1 << 20, "ddddd", (("scale", "b2", "w2", "b1", "w1"),)),
        (1 << 20, 1 << 20, "ffddd", (("scale", "b2", "w2"), ("b1", "w1"))),
    ],
)
def test_buckets_are_cut_from_the_last_parameter_to_the_first(first, others, dtypes, buckets):
    arrays = {n: a.astype(t) for (n, a), t in zip(params(0).items(), dtypes, strict=True)}

    def program(comm):
        return rr.train.DataParallel(
            comm, arrays, first_bucket_bytes=first, bucket_bytes=others
        ).buckets

    assert rr.spawn(program, 1) == [buckets]


def test_the_first_bucket_is_on_its_way_before_backward_ends():
    def program(comm):
        dp = rr.train.DataParallel(comm, params(comm.rank), first_bucket_bytes=32)
        events = []
        reduce = comm.all_reduce

        def all_reduce(*arguments, **named):
            events.append("all_reduce")
            return reduce(*arguments, **named)

        comm.all_reduce = all_reduce
        for name, gradient in reversed(params(comm.rank).items()):
            events.append(name)
            dp.ready(name, gradient)
        events.append("finish")
        dp.finish()
        return events

    wanted = ["scale", "b2", "all_reduce", "w2", "b1", "w1", "all_reduce", "finish"]
    assert rr.spawn(program, 2) == [wanted] * 2


def test_gradients_are_accumulated_and_sent_once():
    def program(comm):
        dp = rr.train.DataParallel(comm, params(comm.rank))
        with dp.no_sync():
            backward(dp, params(comm.rank + 10))
            backward(dp, params(comm.rank + 20))
        backward(dp, params(comm.rank + 30))
        first = {name: g.copy() for name, g in dp.finish().items()}
        backward(dp, params(comm.rank + 40))
        return first, dp.finish()

    for first, second in rr.spawn(program, 2):
        for name in SHAPES:
            parts = [params(r + k)[name] for r in (0, 1) for k in (10, 20, 30)]
            assert np.array_equal(first[name], sum(parts) / 2)
            assert np.array_equal(second[name], (params(40)[name] + params(41)[name]) / 2)


def test_16_bits_on_the_wire():
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0, "float32"), wire="bfloat16")
        backward(dp, params(comm.rank, "float32"))
        return dp.finish()

    for result in rr.spawn(program, 2):
        for name, gradient in result.items():
            wanted = (params(0)[name] + params(1)[name]) / 2  # so small that bfloat16 holds them
            assert gradient.dtype == np.float32
            assert np.array_equal(gradient, wanted)


@pytest.mark.parametrize("wire", [None, "float16"])
def test_weights_do_not_overflow_16_bits(wire):
    dtype = "float32" if wire else "float16"

    def program(comm):
        dp = rr.train.DataParallel(comm, {"w": np.zeros(2, dtype)}, wire=wire)
        dp.weigh(50_000)
        dp.ready("w", np.array([20, -20], dtype))
        return dp.finish()["w"].tolist()

    assert rr.spawn(program, 2) == [[20, -20]] * 2


def test_what_is_written_into_the_buffer_need_not_be_copied():
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0))
        for name in reversed(SHAPES):
            dp.buffer(name)[...] = params(comm.rank)[name]
            dp.ready(name)
        return dp.finish()

    for result in rr.spawn(program, 2):
        for name in SHAPES:
            assert np.array_equal(result[name], (params(0)[name] + params(1)[name]) / 2)


def test_a_buffer_that_was_not_asked_for_in_this_step_has_no_gradient():
    def program(comm):
        dp = rr.train.DataParallel(comm, {"w": np.zeros(2)})
        kept = dp.buffer("w")
        kept[...] = 1
        dp.ready("w")
        dp.finish()
        with pytest.raises(ValueError, match=r"ready: 'w' has no gradient: buffer\('w'\) was not"):
            dp.ready("w")
        kept[...] = 3
        dp.ready("w", kept)
        return dp.finish()["w"].tolist()

    assert rr.spawn(program, 2) == [[3, 3]] * 2


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_none_is_no_gradient(stage):
    def program(comm):
        params = {"w": np.zeros((2, 3))}
        made = rr.train.ShardedParallel(comm, params, stage=stage) if stage else None
        made = made or rr.train.DataParallel(comm, params)
        for _ in range(2):
            with pytest.raises(TypeError, match=r"'w' is None; pass zeros of float64\[2, 3\] for"):
                made.ready("w", None)
            made.ready("w", np.ones((2, 3)))
            made.finish()

    rr.spawn(program, 2)


class Tensor:
    """Stands in for a tensor of torch in host memory."""

    def __init__(self, array):
        self.array, self.dtype, self.device, self.shape = array, "torch.float64", "cpu", array.shape

    def detach(self):
        return self

    def numpy(self):
        return self.array


def test_tensors_are_taken_as_the_arrays_in_their_memory():
    def program(comm):
        w = Tensor(np.full(2, comm.rank + 1.0))
        dp = rr.train.DataParallel(comm, {"w": w})
        dp.ready("w", Tensor(np.array([0.0, comm.rank])))
        return w.array.tolist(), dp.finish()["w"].tolist()

    assert rr.spawn(program, 2) == [([1, 1], [0, 0.5])] * 2


def test_where_the_time_went():
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0), first_bucket_bytes=1, bucket_bytes=1)
        backward(dp, params(0))
        dp.finish()
        return dp.times

    for times in rr.spawn(program, 2):
        assert times.exposed_s > 0
        assert times.communication_s > 0


def test_a_part_that_fails_is_not_added_to_the_next_step():
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0))
        with contextlib.suppress(KeyError), dp.no_sync():
            backward(dp, params(5))
            raise KeyError
        backward(dp, params(1))
        return dp.finish()["w1"]

    assert np.array_equal(rr.spawn(program, 1)[0], params(1)["w1"])


def test_blocks_without_synchronisation_may_be_nested():
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0))
        with dp.no_sync():
            with dp.no_sync():
                backward(dp, params(5))
            backward(dp, params(6))
        backward(dp, params(7))
        return dp.finish()["w1"]

    wanted = sum(params(seed)["w1"] for seed in (5, 6, 7))
    assert np.array_equal(rr.spawn(program, 1)[0], wanted)


# --- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [1, 1 << 20])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    "lacking",
    [
        {1: ["w1"]},
        {0: ["b2"]},
        {0: ["w1"], 2: ["b2", "w2"]},
        {0: list(SHAPES)},
        {rank: ["b1"] for rank in range(3)},
    ],
)
def test_who_lacks_a_gradient_is_named_on_all_ranks_and_the_next_step_is_well(
    lacking, weighed, small
):
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0), first_bucket_bytes=small, bucket_bytes=small)
        if weighed:
            dp.weigh(comm.rank + 1)
        for name, gradient in reversed(params(comm.rank).items()):
            if name not in lacking.get(comm.rank, ()):
                dp.ready(name, gradient)
        with pytest.raises(rr.MismatchError) as error:
            dp.finish()
        backward(dp, params(comm.rank))
        return str(error.value), dp.finish()["w1"]

    results = rr.spawn(program, 3, timeout_s=120)
    assert len({text for text, _ in results}) == 1
    text = results[0][0]
    for rank in range(3):
        assert (f"rank {rank} has not reported" in text) == (rank in lacking)
    assert all(repr(name) in text for names in lacking.values() for name in names)
    wanted = sum(params(rank)["w1"] for rank in range(3)) / 3
    assert all(np.allclose(mean, wanted, rtol=1e-15) for _, mean in results)


@pytest.mark.parametrize(
    ("odd", "change", "words"),
    [
        (1, {"w2": np.zeros((5, 2))}, "rank 1 has w2: float64[5, 2] where rank 0 has w2: float64["),
        (1, {"b1": np.zeros(5, "f4")}, "rank 1 has b1: float32[5] where rank 0 has b1: float64[5]"),
        (2, {"extra": np.zeros(2)}, "rank 2 has extra: float64[2] where rank 0 has nothing"),
        (0, {"extra": np.zeros(2)}, "rank 1 has nothing where rank 0 has extra: float64[2]"),
    ],
)
def test_parameters_that_differ_are_named(odd, change, words):
    def program(comm):
        mine = params(0) | (change if comm.rank == odd else {})
        with pytest.raises(rr.MismatchError) as error:
            rr.train.DataParallel(comm, mine)
        return str(error.value)

    assert all(words in text for text in rr.spawn(program, 3))


@pytest.mark.parametrize("small", [1, 1 << 20])
@pytest.mark.parametrize("forgets", [0, 1])
def test_a_rank_that_forgets_to_weigh_is_named_and_the_next_step_is_well(forgets, small):
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0), first_bucket_bytes=small, bucket_bytes=small)
        if comm.rank != forgets:
            dp.weigh(3)
        backward(dp, params(0))
        with pytest.raises(rr.MismatchError) as error:
            dp.finish()
        backward(dp, params(1))
        return str(error.value), dp.finish()["w1"]

    results = rr.spawn(program, 2, timeout_s=120)
    for text, mean in results:
        assert f"rank {1 - forgets} called weigh in this step, rank {forgets} did not" in text
        assert np.array_equal(mean, params(1)["w1"])


def finished_within(dp) -> None:
    with dp.no_sync():
        dp.finish()


def buffered_sum(dp) -> None:
    with dp.no_sync():
        dp.ready("b2", np.zeros(3))
    dp.ready("b2")


def twice(dp) -> None:
    for _ in range(2):
        dp.ready("b2", np.zeros(3))


def weighed_late(dp) -> None:
    dp.ready("b2", np.zeros(3))
    dp.weigh(3)


def weighed_twice(dp) -> None:
    dp.weigh(3)
    dp.weigh(3)


def accumulated_late(dp) -> None:
    dp.ready("b2", np.zeros(3))
    with dp.no_sync():
        pass


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda dp: dp.ready("w3", np.zeros(3)), "there is no parameter 'w3'"),
        (lambda dp: dp.ready("b2", np.zeros(4)), "of 'b2' is float64[4]; wanted float64[3]"),
        (lambda dp: dp.ready("b2", np.zeros(3, "f4")), "is float32[3]; wanted float64[3]"),
        (lambda dp: dp.buffer("w3"), "buffer: there is no parameter 'w3'"),
        (finished_within, "call it after the no_sync block"),
        (buffered_sum, "the sum of 'b2' is in its buffer"),
        (twice, "'b2' was ready before in this step"),
        (weighed_late, "before the first ready"),
        (weighed_twice, "once a step"),
        (accumulated_late, "on their way already"),
    ],
)
def test_misuse_is_refused_at_once(use, words):
    def program(comm):
        dp = rr.train.DataParallel(comm, params(0))
        with pytest.raises(ValueError, match=r".") as error:
            use(dp)
        return str(error.value)

    assert words in rr.spawn(program, 1)[0]


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 3, 100])
def test_shards_are_parts_of_one_order_that_changes_with_the_epoch(n, ranks):
    def program(comm):
        return [rr.train.shard(n, comm, epoch, seed=7).tolist() for epoch in range(2)]

    results = rr.spawn(program, ranks)
    for epoch in range(2):
        parts = [result[epoch] for result in results]
        assert sorted(chain.from_iterable(parts)) == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if n == 100:
        assert results[0][0] != results[0][1]


@pytest.mark.filterwarnings("ignore:.*the matrix subclass")
def test_matrices_are_parameters_and_gradients():
    def program(comm):
        w = np.matrix([[1.0, 2.0], [3.0, 4.0]]) * (comm.rank + 1)
        dp = rr.train.DataParallel(comm, {"w": w})
        dp.ready("w", np.matrix([[5.0, 6.0], [7.0, 8.0]]) * comm.rank)
        return w.tolist(), dp.finish()["w"].tolist(), rr.train.global_norm([w[:, 1]])

    means = [[2.5, 3.0], [3.5, 4.0]]
    assert rr.spawn(program, 2) == [([[1.0, 2.0], [3.0, 4.0]], means, 20**0.5)] * 2
