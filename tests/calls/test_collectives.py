"""The collectives on ranks-as-threads: results, memory, misuse."""

from __future__ import annotations

import gc
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS
from ringreduce.calls import compound
from tests.support import rails
from tests.support.case_strategies import cases
from tests.support.cases import CONFIG, Case, nodes_of, run_case
from tests.support.rails import LAYOUTS, size_of

QUICK = settings(max_examples=150)


def spawn_case(case: Case) -> None:
    nodes = nodes_of(case.layout, case.ranks)
    rr.spawn(run_case, case.ranks, case, nodes=nodes, timeout_s=120, config=CONFIG)


@QUICK
@given(case=cases(range(1, 10)))
def test_any_case_gives_what_numpy_gives(case):
    spawn_case(case)


@pytest.mark.few(15)
@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("offset", ["0", "1", "n-1", "n", "n+1", "prime"])
def test_counts_around_the_number_of_ranks(ranks, offset):
    count = {"0": 0, "1": 1, "n-1": ranks - 1, "n": ranks, "n+1": ranks + 1, "prime": 10007}[offset]

    def program(comm):
        x = np.arange(count, dtype=np.int64) * (comm.rank + 1)
        wanted = np.arange(count) * (ranks * (ranks + 1) // 2)
        assert np.array_equal(comm.all_reduce(x), wanted)
        shard = comm.reduce_scatter(x)
        assert np.array_equal(shard, np.array_split(wanted, ranks)[comm.rank])
        assert np.array_equal(comm.all_gather(shard), wanted)

    rr.spawn(program, ranks, timeout_s=120)


@pytest.mark.few(10)
@pytest.mark.parametrize("layout", [*LAYOUTS, ((4, 1), (0, 3, 2))])
@pytest.mark.parametrize("count", [0, 3, 1000, 100_003])
def test_hierarchical_on_any_layout(layout, count):
    ranks = size_of(layout)

    def program(comm):
        x = np.arange(count, dtype=np.float64) * (comm.rank + 1)
        total = comm.all_reduce(x, algorithm="hierarchical")
        assert np.array_equal(total, np.arange(count) * (ranks * (ranks + 1) / 2))

    rr.spawn(program, ranks, nodes=layout, timeout_s=120, config=CONFIG)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hierarchical_crosses_nodes_along_rails_only(layout):
    outcomes = rr.spawn(
        rails.log_of_all_reduce, size_of(layout), nodes=layout, timeout_s=20, config=rails.CONFIG
    )
    rails.assert_only_rails_cross(outcomes)


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_propagate_nan(op):
    def program(comm):
        return comm.all_reduce(np.array([1.0, np.nan if comm.rank == 1 else 2.0]), op)

    for result in rr.spawn(program, 3):
        assert result[0] == 1.0
        assert np.isnan(result[1])


def test_mean_divides_the_sum_once():
    def program(comm):
        return comm.all_reduce(np.float32([1, 2, 4]) * (comm.rank + 1), "mean")

    # 1+2+3 = 6 and its multiples are exact; one division by 3 rounds once, here to whole numbers.
    for result in rr.spawn(program, 3):
        assert result.tolist() == [2.0, 4.0, 8.0]


def test_numbers_give_zero_dimensional_results():
    for result in rr.spawn(lambda comm: comm.all_reduce(comm.rank + 1), 3):
        assert result.shape == ()
        assert result == 6


def test_what_shows_its_memory_is_an_array():
    result = rr.spawn(lambda comm: comm.all_reduce(memoryview(np.arange(3.0))), 2)[0]
    assert result.tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex128", "longdouble", "float8_e5m2"])
def test_collectives_that_only_move_take_any_plain_dtype(dtype):
    def program(comm):
        x = np.array([0, 1, comm.rank], dtype)
        assert np.array_equal(comm.broadcast(x, 1), np.array([0, 1, 1], dtype))
        gathered = comm.all_gather(x)
        assert gathered.dtype == x.dtype
        assert np.array_equal(gathered, np.array([0, 1, 0, 0, 1, 1], dtype))

    rr.spawn(program, 2)


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 0, 3), (3, *[1] * 63)])
@pytest.mark.parametrize("dtype", ["bool", "longdouble", "float8_e4m3b11fnuz", "complex64"])
def test_a_scatter_announces_any_shape_and_dtype(dtype, shape, shared_memory):
    def program(comm):
        x = (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)
        part = comm.scatter(x if comm.rank == 1 else None, root=1)
        wanted = np.array_split(x, comm.size)[comm.rank]
        assert (part.dtype, part.shape) == (wanted.dtype, wanted.shape)
        assert np.array_equal(part, wanted)

    rr.spawn(program, 3, config=rr.Config(shared_memory=shared_memory))


def test_a_planned_scatter_takes_the_counts_of_all_ranks():
    def program(comm):
        x, out = np.zeros(3, np.int64), np.empty(1 + comm.rank, np.int64)
        planned = comm.plan("scatter", None if comm.rank else x, out=out, counts=[1, 2])
        results = []
        for turn in range(3):
            x[...] = np.arange(3) + 10 * turn
            results.append(planned().tolist())
        return results

    for shared_memory in (False, True):
        found = rr.spawn(program, 2, config=rr.Config(shared_memory=shared_memory))
        assert found == [[[0], [10], [20]], [[1, 2], [11, 12], [21, 22]]]


def routed(turn: int, size: int) -> np.ndarray:
    """The counts of one step of a mixture of experts: other ones at each step."""
    return np.random.default_rng(turn).multinomial(20, np.ones(size) / size, size)


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("counts_of", ["a row", "all ranks"])
def test_counts_that_are_new_in_each_call_are_not_all_kept(counts_of, shared_memory):
    def program(comm):
        kept = []
        for turn in range(40):
            counts = routed(turn, comm.size)
            x = np.repeat(np.arange(comm.size) + 10 * comm.rank, counts[comm.rank])
            given = counts if counts_of == "all ranks" else counts[comm.rank]
            wanted = np.repeat(10 * np.arange(comm.size) + comm.rank, counts[:, comm.rank])
            assert np.array_equal(comm.all_to_all(x, counts=given), wanted)
            kept.append((len(comm._runner.calls), len(comm._engine.executables._flows._flows)))
        return kept

    config = rr.Config(kept_plans=5, shared_memory=shared_memory)
    for kept in rr.spawn(program, 3, config=config):
        assert max(kept) <= (5, 7)
        if counts_of == "a row":
            assert kept[3:] == [kept[3]] * 37


def test_a_program_in_shared_memory_is_rewritten_for_other_counts():
    """Through every way: in the slot, in the ring, single-copy, and back."""

    def program(comm):
        executables, made = set(), []
        for turn, rows in enumerate([1, 4, 1, 4000, 1, 300_000, 400_000, 0, 4000]):
            counts = np.roll(rows * np.arange(comm.size**2), turn).reshape(comm.size, -1)
            x = np.repeat(np.arange(comm.size) + 10.0 * comm.rank, counts[comm.rank])
            wanted = np.repeat(10.0 * np.arange(comm.size) + comm.rank, counts[:, comm.rank])
            result = comm.all_to_all(x, counts=counts[comm.rank], algorithm="direct")
            assert np.array_equal(result, wanted)
            (told,) = [
                c
                for key, c in comm._runner.calls._kept.items()
                if key[0] == "all_to_all of a matrix"
            ]
            executables.add(told.executable)
            made.append(len(executables))
        return made

    config = rr.Config(shared_memory=True, slice_bytes=1 << 30)
    assert rr.spawn(program, 2, config=config, timeout_s=120) == [[1, 1, 1, 1, 1, 2, 2, 3, 3]] * 2


def test_counts_that_another_rank_does_not_expect_are_an_error_on_all():
    def program(comm):
        sent, expected = [[1, 2], [2, 1]], [[1, 2], [3, 0]]
        x, out = np.ones(3), np.empty(3)
        how = {"algorithm": "auto", "out": out, "timeout_s": None, "async_op": False}
        mine, make = tuple(sent[comm.rank]), partial(compound.all_to_all, comm._runner)
        make(x, mine, expected=mine, **how)
        with pytest.raises(rr.MismatchError, match="rank 0 sends 2 elements to rank 1, which exp"):
            make(x, mine, expected=expected[comm.rank], **how)
        assert comm.all_reduce(1) == 2

    rr.spawn(program, 2)


@pytest.mark.parametrize("shared_memory", [False, True])
def test_equal_counts_in_each_call_are_planned_once(shared_memory):
    def program(comm):
        x = np.arange(comm.size * 2) + 10 * comm.rank
        row = [0] * (comm.size - 1) + [x.size]
        executables = set()
        for _ in range(4):
            comm.all_to_all(x, counts=row)
            (told,) = [
                c
                for key, c in comm._runner.calls._kept.items()
                if key[0] == "all_to_all of a matrix"
            ]
            executables.add(told.executable)
        return len(executables)

    assert rr.spawn(program, 3, config=rr.Config(shared_memory=shared_memory)) == [1] * 3


def test_a_planned_all_to_all_takes_the_counts_of_all_ranks():
    def program(comm):
        x = np.zeros(3, np.int64)
        planned = comm.plan("all_to_all", x, counts=[[0, 3], [2, 1]])
        results = []
        for turn in range(3):
            x[...] = 10 * turn + comm.rank
            results.append(planned().tolist())
        return results

    assert rr.spawn(program, 2) == [
        [[1, 1], [11, 11], [21, 21]],
        [[0, 0, 0, 1], [10, 10, 10, 11], [20, 20, 20, 21]],
    ]


def test_counts_that_no_memory_has_room_for_are_refused():
    def program(comm):
        counts = [[4, 0], [1 << 62, 1 << 62]]
        with pytest.raises(ValueError, match=r"no memory|add up to"):
            comm.all_to_all(np.ones(4), counts=counts)
        with pytest.raises(ValueError, match="no memory has room"):
            comm.all_gather(np.ones(4), counts=[4, 1 << 60])
        assert comm.all_reduce(1) == 2

    rr.spawn(program, 2)


def test_an_out_of_the_wrong_length_on_one_rank_is_an_error_on_all():
    def program(comm):
        out = np.empty(5 if comm.rank == 1 else 4)
        with pytest.raises(
            ValueError, match="out on rank 1 has first dimension 5, the result has 4"
        ):
            comm.all_gather(np.ones(2), out=out)
        assert comm.all_reduce(1) == 2

    rr.spawn(program, 2)


def test_the_barrier_holds_everybody_back():
    arrived = []

    def program(comm):
        arrived.append(comm.rank)
        comm.barrier()
        return len(arrived)

    assert rr.spawn(program, 7) == [7] * 7


def test_places_in_and_across_nodes():
    def program(comm):
        return comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size

    assert rr.spawn(program, 6, nodes=(3, 1, 2)) == [
        (0, 3, 0, 3),
        (1, 3, 0, 2),
        (2, 3, 0, 1),
        (0, 1, 1, 3),
        (0, 2, 2, 3),
        (1, 2, 1, 2),
    ]


def test_explain_prices_every_candidate():
    def program(comm):
        return comm.explain(1 << 26)

    choice = rr.spawn(program, 4, nodes=(2, 2))[0]
    direct = {"one_shot", "two_shot"}
    assert set(choice.predicted_s) >= set(ALGORITHMS["all_reduce"]) - direct
    assert "hierarchical(leader, doubling)" in choice.predicted_s
    assert not direct & set(choice.predicted_s)
    assert choice.predicted_s[choice.algorithm] <= 1.02 * min(choice.predicted_s.values())
    assert "hierarchical" in str(choice)


def test_spawn_raises_what_a_rank_raised_and_wakes_the_others():
    seen = []

    def program(comm):
        if comm.rank == 2:
            raise KeyError("mine")
        with pytest.raises(rr.PeerLostError, match=r"rank 2 has left.*KeyError: 'mine'"):
            comm.all_reduce(1)
        seen.append(comm.rank)

    with pytest.raises(KeyError, match="mine"):
        rr.spawn(program, 4, timeout_s=120)
    assert sorted(seen) == [0, 1, 3]


def test_a_read_only_view_of_out_is_in_place():
    def program(comm):
        for count in (3, 5000):
            out = np.arange(count) * (comm.rank + 1.0)
            view = out.view()
            view.flags.writeable = False
            assert comm.all_reduce(view, out=out) is out
            assert np.array_equal(out, np.arange(count) * 6.0)

    rr.spawn(program, 3)


@pytest.mark.parametrize("state", ["raise", "warn"])
def test_the_callers_numpy_error_state_does_not_matter(state):
    """An overflow is part of the result; NumPy's error state on a rank does not change it."""

    def program(comm):
        with np.errstate(all=state), warnings.catch_warnings():
            warnings.simplefilter("error")
            for count in (3, 5000):
                x = np.full(count, np.finfo(np.float32).max, np.float32)
                assert np.all(np.isinf(comm.all_reduce(x)))
                assert np.all(np.isinf(comm.all_reduce(x, async_op=True).wait()))
                assert np.all(np.isnan(comm.all_reduce(np.inf * (1 - 2 * comm.rank) * x)))

    rr.spawn(program, 2)


def test_counts_may_be_any_integers():
    def program(comm):
        given = np.array([2, 2]) if comm.rank else [2, np.int32(2)]
        return comm.all_gather(np.ones(2), counts=given).size

    assert rr.spawn(program, 2) == [4, 4]


@pytest.mark.slow
def test_what_is_dropped_is_let_go_of():
    """Planned calls without references, and arrays that calls were made on."""

    def program(comm):
        arrays = []
        for _ in range(5):
            x = np.ones(5000)
            arrays.append(weakref.ref(x))
            comm.all_reduce(x)
            comm.plan("all_reduce", x, out=x)()
        del x
        comm.plan("all_reduce", np.ones(1))
        gc.collect()
        return [array() is None for array in arrays]

    assert rr.spawn(program, 2) == [[True] * 5] * 2


@pytest.mark.parametrize("name", ["slice_bytes", "segment_bytes", "in_flight", "kept_plans"])
def test_settings_that_make_no_sense_are_refused(name):
    with pytest.raises(ValueError, match=f"Config: {name} is 0; pass an int of at least 1"):
        rr.Config(**{name: 0})


@pytest.mark.slow
def test_plans_are_kept_and_bounded():
    def program(comm):
        for count in range(40):
            for _ in range(2):
                assert comm.all_reduce(np.ones(count))[:1].sum() == comm.size * (count > 0)
        comm._engine.free_discarded()
        return len(comm._runner.calls), len(comm._engine.executables._flows._flows)

    config = rr.Config(kept_plans=8)
    for calls, kept in rr.spawn(program, 3, config=config):
        assert calls == 8
        assert kept <= 8


@pytest.mark.slow
@given(counts=st.lists(st.integers(0, 3000), min_size=1, max_size=12))
@settings(max_examples=20)
def test_calls_of_many_sizes_follow_each_other(counts):
    def program(comm):
        for count in counts:
            x = np.arange(count) + comm.rank
            assert np.array_equal(comm.all_reduce(x), 3 * np.arange(count) + 3)

    rr.spawn(program, 3, config=rr.Config(kept_plans=2, slice_bytes=4096, staged_bytes=512))


def test_a_communicator_and_its_part_add_at_the_same_time():
    def program(comm):
        part = comm.split(comm.rank // 2)
        x, y = np.full(200_000, comm.rank + 1.0), np.full(200_000, comm.rank + 1.0)
        for _ in range(20):
            whole = comm.all_reduce(x, "mean", async_op=True)
            mine = part.all_reduce(y, "mean", async_op=True)
            assert whole.wait()[-1] == 2.5
            assert mine.wait()[-1] == (1.5 if comm.rank < 2 else 3.5)
        part.close()

    rr.spawn(program, 4)


@pytest.mark.parametrize("count", [5, 40_000])
def test_a_flow_of_few_or_many_messages_is_planned(count):
    """Few messages are unrolled into one function; thousands would take seconds to compile."""
    config = rr.Config(segment_bytes=64)

    def program(comm):
        x = np.arange(count) * (comm.rank + 1.0)
        plan = comm.plan("all_reduce", x, out=x, algorithm="ring")
        return plan()[-1]

    assert rr.spawn(program, 3, config=config) == [(count - 1) * 6.0] * 3
