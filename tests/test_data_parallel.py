"""DataParallel: means of gradients, in buckets, of any model, on any rank; and what it refuses."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr

SHAPES = {"w1": (7, 5), "b1": (5,), "w2": (5, 3), "b2": (3,), "scale": ()}


def params(seed: int, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Whole numbers, others for every seed."""
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.integers(-9, 9, shape), dtype) for n, shape in SHAPES.items()}


def backward(dp, gradients) -> None:
    for name in reversed(gradients):
        dp.ready(name, gradients[name])


def mean(values, weights) -> np.ndarray:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


@given(
    ranks=st.integers(1, 4),
    first=st.sampled_from([1, 30, 1 << 20]),
    others=st.sampled_from([1, 200, 1 << 20]),
    weights=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    weighed=st.booleans(),
    order=st.permutations(list(SHAPES)),
)
@settings(max_examples=40, deadline=None)
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

    for results in rr.spawn(program, ranks, timeout_s=20):
        for step, result in enumerate(results):
            parts = [params(10 * step + rank) for rank in range(ranks)]
            for name in SHAPES:
                wanted = mean([part[name] for part in parts], weights)
                assert np.allclose(result[name], wanted, rtol=1e-15)


def test_the_parameters_become_those_of_rank_0():
    def program(comm):
        mine = params(comm.rank)
        rr.train.DataParallel(comm, mine)
        return mine

    for mine in rr.spawn(program, 3):
        assert all(np.array_equal(mine[name], array) for name, array in params(0).items())


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
        events = []
        reduce = comm.all_reduce

        def all_reduce(*arguments, **named):
            events.append("all_reduce")
            return reduce(*arguments, **named)

        comm.all_reduce = all_reduce
        dp = rr.train.DataParallel(comm, params(comm.rank), first_bucket_bytes=32)
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


# --- what is refused ------------------------------------------------------------------------------


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

    results = rr.spawn(program, 3, timeout_s=20)
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
        (lambda dp: dp.weigh(-1), "weigh: -1 samples"),
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


@pytest.mark.parametrize("name", ["first_bucket_bytes", "bucket_bytes"])
def test_buckets_hold_at_least_a_byte(name):
    with pytest.raises(ValueError, match=f"DataParallel: {name} is 0; wanted at least 1"):
        rr.spawn(lambda comm: rr.train.DataParallel(comm, params(0), **{name: 0}), 1)


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
