"""`comm.explain(..., measured=True)`: the candidates of "auto", timed by all ranks."""

from __future__ import annotations

import pytest

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS
from ringreduce.calls import measured
from ringreduce.errors import MismatchError


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measured, "_CANDIDATE_S", 0.0)


@pytest.mark.parametrize("collective", ALGORITHMS)
@pytest.mark.parametrize("nbytes", [0, 40, 4096])
def test_every_candidate_is_timed_on_all_ranks(collective, nbytes):
    def program(comm):
        found = comm.explain(nbytes, collective=collective, measured=True)
        return found, comm.explain(nbytes, collective=collective)

    outcomes = rr.spawn(program, 3, nodes=(2, 1))
    found, predicted = outcomes[0]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert found.measured_s.keys() == predicted.predicted_s.keys() == found.predicted_s.keys()
    assert all(seconds > 0 for seconds in found.measured_s.values())
    assert (found.algorithm, found.reason) == (predicted.algorithm, predicted.reason)


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int8", "complex64"])
def test_any_dtype_is_timed(dtype):
    found = rr.spawn(lambda comm: comm.explain(64, dtype, measured=True), 2)[0]
    assert found.measured_s.keys() == found.predicted_s.keys()


def test_predicted_and_measured_are_one_table():
    choice = rr.spawn(lambda comm: comm.explain(64, measured=True), 2)[0]
    first, heading, *rows = str(choice).splitlines()
    assert first == f"all_reduce of 64 bytes by messages: {choice.algorithm}, {choice.reason}"
    assert heading.split() == ["candidate", "predicted", "measured"]
    assert [row.split() for row in rows] == [
        [name, f"{1e6 * s:,.1f}", "µs", f"{1e6 * choice.measured_s[name]:,.1f}", "µs"]
        for name, s in sorted(choice.predicted_s.items(), key=lambda item: item[1])
    ]


def mismatch(call):
    """Return the errors of three ranks; then all of them make the same call."""

    def program(comm):
        with pytest.raises(MismatchError) as raised:
            call(comm)
        assert comm.all_reduce(1) == 3
        return str(raised.value)

    return rr.spawn(program, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda comm: comm.explain(8, measured=True) if comm.rank == 1 else comm.barrier(),
            "rank 1 calls explain(nbytes=8, dtype=float32, collective=all_reduce, measured=True), "
            "ranks 0 and 2 call barrier()",
        ),
        (
            lambda comm: comm.explain(8 + 8 * (comm.rank == 2), measured=True),
            "explain: rank 2 passes nbytes=16, ranks 0 and 1 pass nbytes=8",
        ),
        (
            lambda comm: comm.explain(8, ["int8", "int64"][comm.rank > 0], measured=True),
            "explain: rank 0 passes dtype=int8, ranks 1 and 2 pass dtype=int64",
        ),
    ],
)
def test_ranks_that_do_not_all_measure_alike_get_one_error(call, words):
    texts = mismatch(call)
    assert len(set(texts)) == 1
    assert words in texts[0]


def test_one_rank_that_measures_alone_is_an_error_of_all_at_the_end():
    raised = []

    def program(comm):
        try:
            with comm:
                comm.explain(8, measured=comm.rank == 0)
        except MismatchError as error:
            raised.append(str(error))
            raise

    with pytest.raises(MismatchError):
        rr.spawn(program, 3)
    assert len(raised) == 3
    assert len(set(raised)) == 1
    assert "explain" in raised[0]


def test_measured_is_true_or_false():
    with pytest.raises(TypeError, match="explain: measured is 1; pass True or False"):
        rr.spawn(lambda comm: comm.explain(8, measured=1), 1)
