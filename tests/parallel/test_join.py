"""DataParallel.join: ranks with different numbers of batches, and ranks that leave the loop."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.train import DataParallel

SHAPES = {"w1": (7, 5), "b1": (5,), "w2": (5, 3), "b2": (3,)}


def made(comm, **how) -> DataParallel:
    how = {"first_bucket_bytes": 100, "bucket_bytes": 100} | how
    return DataParallel(comm, {name: np.zeros(shape) for name, shape in SHAPES.items()}, **how)


def report(dp, value: float) -> None:
    """Report gradients whose numbers are all `value`."""
    for name, shape in reversed(SHAPES.items()):
        dp.ready(name, np.full(shape, float(value)))


def only(gradients) -> float:
    """The one number that all gradients have."""
    (number,) = {value for array in gradients.values() for value in array.reshape(-1).tolist()}
    return number


def means(dp, batches, samples=len) -> list[float]:
    """The gradient of each turn; that of a batch is the mean of its numbers."""
    found = []
    for batch in dp.join(batches, samples):
        if batch is not None:
            report(dp, float(np.mean(batch)) if batch else np.nan)
        found.append(only(dp.finish()))
    return found


BATCH = st.lists(st.integers(-99, 99), max_size=4)


@pytest.mark.slow
@given(batches=st.lists(st.lists(BATCH, max_size=4), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_a_turn_is_the_mean_over_the_samples_of_all_ranks(batches):
    """A batch may be empty, and its gradient no number."""
    together = rr.spawn(
        lambda comm: means(made(comm), batches[comm.rank]), len(batches), timeout_s=20
    )
    turns = max(map(len, batches))
    for found in together:
        assert len(found) == turns
        for turn, mean in enumerate(found):
            values = [v for own in batches if turn < len(own) for v in own[turn]]
            assert mean == pytest.approx(np.mean(values) if values else 0.0, rel=1e-14, abs=1e-14)


def test_without_samples_all_batches_count_alike():
    batches = [[[1], [2]], [[4, 8]], [[3], [10], [7]]]

    def program(comm):
        return means(made(comm), batches[comm.rank], samples=None)

    wanted = [(1 + 6 + 3) / 3, (2 + 10) / 2, 7.0]
    assert rr.spawn(program, 3) == [pytest.approx(wanted, rel=1e-15)] * 3


def test_sums_get_zeros_from_a_rank_without_a_batch():
    def program(comm):
        return means(made(comm, op="sum"), [[1], [2], [4]][comm.rank :], samples=None)

    assert rr.spawn(program, 3) == [[1 + 2 + 4, 2 + 4, 4]] * 3


def test_gradients_of_a_rank_without_a_batch_do_not_count():
    def program(comm):
        dp, found = made(comm), []
        for batch in dp.join([1.0, 2.0][comm.rank :]):
            report(dp, np.nan if batch is None else batch)
            found.append(only(dp.finish()))
        return found

    assert rr.spawn(program, 2) == [[1.5, 2.0]] * 2


def test_a_batch_in_parts():
    """The parts of a batch are added up within no_sync, each times its share of the batch."""
    batches = [[[1, 2, 6], [5]], [[4, 8]]]

    def program(comm):
        dp, found = made(comm), []
        for batch in dp.join(batches[comm.rank], samples=len):
            *first, last = batch or [0]
            with dp.no_sync():
                for part in first:
                    report(dp, part / len(batch))
            if batch is not None:
                report(dp, last / len(batch))
            found.append(only(dp.finish()))
        return found

    assert rr.spawn(program, 2) == [pytest.approx([21 / 5, 5.0], rel=1e-15)] * 2


def test_turns_are_added_up():
    """A rank without a batch in the last turn of a sum keeps what it has added up before."""
    batches = [[[1], [3], [5]], [[4, 8]]]

    def program(comm):
        dp, found = made(comm), []
        for turn, batch in enumerate(dp.join(batches[comm.rank], samples=len)):
            if turn < 2:
                with dp.no_sync():
                    if batch is not None:
                        report(dp, np.mean(batch))
            else:
                if batch is not None:
                    report(dp, np.mean(batch))
                found.append(only(dp.finish()))
        return found

    assert rr.spawn(program, 2) == [[pytest.approx(13 / 3 + 3 + 5, rel=1e-15)]] * 2


def test_two_steps_in_a_turn_have_the_same_shares():
    def program(comm):
        dp, found = made(comm), []
        for batch in dp.join([[1], [2]][comm.rank :], samples=len):
            for factor in (1, 10):
                if batch is not None:
                    report(dp, factor * batch[0])
                found.append(only(dp.finish()))
        return found

    assert rr.spawn(program, 2) == [[1.5, 15, 2, 20]] * 2


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_turn_costs_an_all_reduce_of_two_numbers(batches):
    def program(comm):
        dp = made(comm)
        sizes, reduce = [], comm.all_reduce

        def all_reduce(x, *arguments, **named):
            sizes.append(x.size)
            return reduce(x, *arguments, **named)

        comm.all_reduce = all_reduce
        means(dp, [[1]] * (batches if comm.rank else 0))
        return sizes

    of_turn = [2, *[sum(np.zeros(SHAPES[n]).size for n in names) for names in buckets()]]
    assert rr.spawn(program, 2) == [of_turn * batches + [2]] * 2


def buckets():
    return rr.spawn(lambda comm: made(comm).buckets, 1)[0]


def test_a_rank_with_a_batch_has_it_before_the_others_have_begun_the_turn():
    has_its_batch = threading.Event()

    def program(comm):
        dp = made(comm)
        if comm.rank == 1:
            assert has_its_batch.wait(timeout=120)
        for batch in dp.join([1.0] if comm.rank == 0 else []):
            if batch is not None:
                has_its_batch.set()
                report(dp, batch)
            dp.finish()

    rr.spawn(program, 2, timeout_s=120)


# --- ranks that leave -----------------------------------------------------------------------------


class LeavesError(Exception):
    """The error of a rank that leaves the loop."""


def nothing(dp) -> None:
    pass


def some_gradients(dp) -> None:
    dp.ready("b2", np.zeros(3))
    dp.ready("w2", np.zeros((5, 3)))


def all_gradients(dp) -> None:
    report(dp, 1.0)


def whole_turn(dp) -> None:
    report(dp, 1.0)
    dp.finish()


def mismatch(do) -> str:
    """The text of the error of a function."""
    with pytest.raises(rr.MismatchError) as seen:
        do()
    return str(seen.value)


def goes_on(dp) -> list[float]:
    """Two steps after the loop."""
    found = []
    for value in (1.0, 2.0):
        report(dp, value)
        found.append(only(dp.finish()))
    return found


@pytest.mark.parametrize("how", ["break", "raise"])
@pytest.mark.parametrize("done", [nothing, some_gradients, all_gradients, whole_turn])
@pytest.mark.parametrize(("leaver", "batches"), [(0, (4, 4, 4)), (1, (2, 5, 0)), (2, (0, 1, 4))])
def test_a_rank_that_leaves_is_named_on_all_ranks_and_the_next_step_is_well(
    leaver, batches, done, how
):
    def loop(comm, dp):
        for turn, batch in enumerate(dp.join([1.0] * batches[comm.rank]), 1):
            if comm.rank == leaver and turn == 2:
                if batch is not None:
                    done(dp)
                if how == "raise":
                    raise LeavesError
                break
            if batch is not None:
                report(dp, batch)
            dp.finish()

    def program(comm):
        dp = made(comm)
        if comm.rank != leaver:
            return mismatch(lambda: loop(comm, dp)), goes_on(dp)
        with pytest.raises(LeavesError) if how == "raise" else contextlib.nullcontext():
            loop(comm, dp)
        return mismatch(lambda: dp.join([])), goes_on(dp)

    results = rr.spawn(program, 3, timeout_s=120)
    assert len({text for text, _ in results}) == 1
    text = results[0][0]
    assert f"join: rank {leaver} left the loop in turn 2; every rank must stay" in text
    assert [found for _, found in results] == [[1.0, 2.0]] * 3


@pytest.mark.parametrize("done", [nothing, all_gradients, whole_turn])
def test_ranks_that_all_leave_in_the_same_turn_may(done):
    def program(comm):
        dp = made(comm)
        for turn, _ in enumerate(dp.join([1.0] * 5)):
            if turn == 2:
                done(dp)
                break
            whole_turn(dp)
        return goes_on(dp), means(dp, [[3]])

    assert rr.spawn(program, 3, timeout_s=120) == [([1.0, 2.0], [3.0])] * 3


def test_ranks_that_leave_in_different_turns_are_all_named():
    def program(comm):
        dp = made(comm)
        for turn, _ in enumerate(dp.join([1.0] * 5), 1):
            if turn == 3:  # rank 1
                break
            whole_turn(dp)
            if turn == 2 and comm.rank == 0:
                break
        return mismatch(lambda: whole_turn(dp))

    texts = set(rr.spawn(program, 2, timeout_s=120))
    assert len(texts) == 1
    assert "rank 1 left the loop in turn 3, rank 0 left the loop in turn 2" in texts.pop()


def broken_iterator():
    yield 1.0
    raise LeavesError


@pytest.mark.parametrize(
    ("batches", "samples", "error"),
    [
        (broken_iterator, None, LeavesError),
        (lambda: [1.0] * 3, lambda batch: -1, ValueError),
        (lambda: [1.0] * 3, len, TypeError),
    ],
)
def test_batches_that_fail_are_a_rank_that_leaves(batches, samples, error):
    def loop(dp, batches, samples=None):
        for batch in dp.join(batches, samples):
            report(dp, batch)
            dp.finish()

    def program(comm):
        dp = made(comm)
        if comm.rank == 0:
            return mismatch(lambda: loop(dp, [1.0] * 3))
        with pytest.raises(error):
            loop(dp, batches(), samples)
        return ""

    assert "rank 1 left the loop in turn" in rr.spawn(program, 2, timeout_s=120)[0]


@pytest.mark.parametrize("batches", [(3, 1), (3, 3)])
def test_a_rank_that_does_not_finish_a_turn_is_named(batches):
    def loop(comm, dp):
        for turn, batch in enumerate(dp.join([1.0] * batches[comm.rank]), 1):
            if comm.rank == 1 and turn == 2:
                continue
            if batch is not None:
                report(dp, batch)
            dp.finish()

    def program(comm):
        dp = made(comm)
        return mismatch(lambda: loop(comm, dp)), goes_on(dp)

    results = rr.spawn(program, 2, timeout_s=120)
    assert len({text for text, _ in results}) == 1
    assert (
        "join: rank 1 is in turn 3, rank 0 is in turn 2; every rank must call finish"
        in (results[0][0])
    )
    assert [found for _, found in results] == [[1.0, 2.0]] * 2


def test_a_rank_in_no_loop_is_named():
    def program(comm):
        dp = made(comm)
        return mismatch(lambda: means(dp, [[1], [2]]) if comm.rank == 0 else goes_on(dp))

    for text in rr.spawn(program, 2, timeout_s=120):
        assert "join: rank 0 is in turn 1, rank 1 is in no loop" in text


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_loop_goes_on_after_a_step_that_lacks_a_gradient(lacking):
    def program(comm):
        dp, found = made(comm), []
        for turn, batch in enumerate(dp.join([1.0, 2.0, 3.0])):
            if turn == 1:
                (some_gradients if comm.rank == lacking else all_gradients)(dp)
                assert f"rank {lacking} has not reported 'b1', 'w1'" in mismatch(dp.finish)
            else:
                report(dp, batch)
                found.append(only(dp.finish()))
        return found

    assert rr.spawn(program, 2, timeout_s=120) == [[1.0, 3.0]] * 2


def test_a_loop_that_was_ended_ends_with_the_same_error_if_a_rank_catches_it():
    def loop(comm, dp, texts):
        for turn, _ in enumerate(dp.join([1.0] * 4)):
            if comm.rank == 1 and turn == 1:
                break
            report(dp, 1.0)
            try:
                dp.finish()
            except rr.MismatchError as error:
                texts.append(str(error))
        dp.finish()

    def program(comm):
        texts: list[str] = []
        return texts, mismatch(lambda: loop(comm, made(comm), texts))

    (texts, ended), (_, of_leaver) = rr.spawn(program, 2, timeout_s=120)
    assert texts == [ended]
    assert ended == of_leaver


def test_a_broken_communicator_is_left_without_a_word():
    def program(comm):
        dp = made(comm)
        if comm.rank == 1:
            comm.leave("the disk is full")
            return None
        with pytest.raises(rr.PeerLostError):
            means(dp, [[1], [2]])
        return comm.broken

    assert rr.spawn(program, 2, timeout_s=120) == [True, None]


def over_mpi(comm) -> None:
    """Check that a rank that leaves the loop is named on all ranks."""
    dp = made(comm)

    def loop() -> None:
        for turn, batch in enumerate(dp.join([1.0] * (1 + comm.rank)), 1):
            if comm.rank == 1 and turn == 2:
                break
            if batch is not None:
                report(dp, batch)
            dp.finish()
        dp.finish()

    assert "join: rank 1 left the loop in turn 2" in mismatch(loop)
    assert goes_on(dp) == [1.0, 2.0]


# --- misuse ---------------------------------------------------------------------------------------


def twice(dp) -> None:
    for _ in dp.join([1.0]):
        dp.join([1.0])


def weighed(dp) -> None:
    for _ in dp.join([1.0]):
        dp.weigh(3)


@pytest.mark.parametrize(
    ("op", "use", "words"),
    [
        ("mean", twice, "join: another loop of join has not ended"),
        ("mean", weighed, "weigh: join weights the gradients; pass samples= to join"),
        ("sum", lambda dp: dp.join([], len), "pass no samples"),
    ],
)
def test_misuse_is_refused_at_once(op, use, words):
    def program(comm):
        with pytest.raises(ValueError, match=words):
            use(made(comm, op=op))

    rr.spawn(program, 2, timeout_s=120)
