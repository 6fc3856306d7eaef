"""State and its slots: updates that count whole or not at all."""

from __future__ import annotations

import doctest
import gc
import os
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.calls.refusals import refusals_here
from ringreduce.recovery import slots, state
from ringreduce.recovery.slots import Slots
from ringreduce.recovery.state import State


def three() -> State:
    return State(
        {"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(3, np.float32), "n": np.int64(7)}
    )


def values(of: State | Slots) -> dict[str, list]:
    if isinstance(of, Slots):
        return {name: of.committed(name).tolist() for name in of.entries}
    return {name: of[name].tolist() for name in of}


# --- updates --------------------------------------------------------------------------------------


def test_an_update_counts_when_its_block_ends():
    kept = three()
    before = values(kept)
    with kept.update():
        kept["w"] += 1
        kept["n"] = 9
        assert kept.step == 0
    assert kept.step == 1
    assert values(kept) == {**before, "w": [[1, 2, 3], [4, 5, 6]], "n": 9}


def test_an_exception_discards_the_update():
    kept = three()
    before = values(kept)

    def fails() -> None:
        with kept.update():
            kept["w"] += 1
            kept["b"] = np.ones(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (kept.step, values(kept)) == (0, before)
    with kept.update():
        kept["b"] += 2  # begins with the committed values, not with those of the discarded update
    assert (kept.step, kept["b"].tolist()) == (1, [2, 2, 2])


def test_what_was_read_before_an_update_stays_until_the_update_after_it():
    kept = three()
    before = kept["b"]
    with kept.update():
        kept["b"] = np.ones(3)
        assert before.tolist() == [0, 0, 0]
    assert (before.tolist(), kept["b"].tolist()) == ([0, 0, 0], [1, 1, 1])


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("wbn"), st.booleans(), st.integers(-9, 9)), max_size=4),
        max_size=6,
    ),
    st.data(),
)
def test_any_updates_do_what_plain_arrays_would(updates, draws):
    kept = three()
    plain = {name: np.array(kept[name]) for name in kept}
    for changes in updates:
        fails = draws.draw(st.booleans())
        new = {name: array.copy() for name, array in plain.items()}
        try:
            with kept.update():
                for name, replaces, number in changes:
                    if replaces:
                        kept[name] = np.full(plain[name].shape, number, plain[name].dtype)
                        new[name][...] = number
                    else:
                        kept[name] += number
                        new[name] += number
                if fails:
                    raise RuntimeError
            plain = new
        except RuntimeError:
            pass
        assert values(kept) == {name: array.tolist() for name, array in plain.items()}


# --- kills ----------------------------------------------------------------------------------------


def test_a_kill_at_every_line_of_an_update_leaves_a_whole_step():
    """The file outlives the process as it is: it is read at every line."""
    kept = three()
    with kept.update():
        kept["n"] = 1  # so that the arrays have different slots
    before = 1, values(kept)
    found = []

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(os.path.dirname(state.__file__)):
            return None
        left = Slots.from_file(os.dup(kept._slots.file))
        found.append((left.step, values(left)))
        left.close()
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        with kept.update():
            kept["w"] += 1
            kept["n"] = 2
    finally:
        sys.settrace(outer)
    after = 2, {**before[1], "w": [[1, 2, 3], [4, 5, 6]], "n": 2}
    commits = found.index(after)
    assert found == [before] * commits + [after] * (len(found) - commits)
    assert 30 < commits < len(found)


# --- files ----------------------------------------------------------------------------------------


def test_another_process_reads_and_continues_by_the_descriptor():
    kept = three()
    child = os.fork()
    if child == 0:
        found = Slots.from_file(kept._slots.file)
        found.writable("b")[...] = 5
        found.commit(["b"])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (kept.step, kept["b"].tolist()) == (1, [5, 5, 5])


def test_a_file_keeps_steps_generations_and_every_dtype():
    arrays = {
        name: np.ones(3, np.dtype(name))
        for name in ("bool", "int8", "uint64", "float16", "bfloat16", "float64", "complex128")
    }
    made = Slots.new({**arrays, "empty": np.zeros((0, 4))}, step=41, generation=3)
    found = Slots.from_file(os.dup(made.file))
    assert (found.step, found.generation) == (41, 3)
    for name, array in arrays.items():
        read = found.committed(name)
        assert (read.dtype, read.tolist()) == (array.dtype, array.tolist())
        entry = found.entries[name]
        assert (entry.offset, entry.whole) == ((0,), (3,))
    assert found.committed("empty").shape == (0, 4)
    made.close()
    found.close()


@pytest.mark.parametrize("torn", ["short", "magic", "format", "length"])
def test_a_torn_or_foreign_file_is_refused(torn):
    made = Slots.new({"x": np.ones(100)})
    if torn == "short":
        os.ftruncate(made.file, 10)
    elif torn == "magic":
        os.pwrite(made.file, b"something else..", 0)
    elif torn == "format":
        os.pwrite(made.file, b"\x09", 16)
    else:
        os.ftruncate(made.file, os.fstat(made.file).st_size + 4096)
    with pytest.raises(ValueError, match="a file "):
        Slots.from_file(made.file)
    made.close()


# --- wrong calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrays",
    [None, {}, [np.ones(3)], {1: np.ones(3)}, {"x": None}, {"x": "text"}, {"x": np.ones(1, ">f8")}],
)
def test_a_state_of_nothing_or_of_objects_is_refused(arrays):
    with pytest.raises(TypeError, match="State: "):
        State(arrays)


def test_arrays_change_in_updates_alone():
    kept = three()
    with pytest.raises(ValueError, match="read-only"):
        kept["w"] += 1
    with pytest.raises(ValueError, match="outside an update"):
        kept["w"] = np.zeros((2, 3))
    assert values(kept) == values(three())


def test_an_array_of_an_update_cannot_be_written_after_it():
    kept = three()
    with kept.update():
        kept["w"] += 1
        new = kept["w"]
    with pytest.raises(ValueError, match="read-only"):
        new += 1
    assert kept["w"][0, 0] == 1


def test_whole_numbers_of_python_fit_any_array_of_whole_numbers():
    kept = State({"u": np.zeros(2, np.uint8)})
    with kept.update():
        kept["u"] = [1, 255]
        with pytest.raises(OverflowError):
            kept["u"] = [1, 256]
    assert kept["u"].tolist() == [1, 255]


@pytest.mark.slow
def test_states_that_are_garbage_leave_no_file_open():
    gc.collect()  # what other tests have left
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        three()
    closed = three()
    closed.close()
    del closed  # Python's map of a file has a descriptor of its own
    assert os.listdir("/proc/self/fd") == before


def test_an_update_that_another_thread_ends_refuses_no_calls_of_that_thread():
    """As when a generator that was left in its block is collected."""
    update, of_threads = three().update(), []

    def begin():
        update.__enter__()
        with pytest.raises(ValueError, match="update"):
            refusals_here().check()
        of_threads.append(refusals_here())

    def end():
        update.__exit__(None, None, None)
        of_threads.append(refusals_here())

    for part in (begin, end):
        thread = threading.Thread(target=part)
        thread.start()
        thread.join()
    assert [refusals._refused for refusals in of_threads] == [0, 0]


def test_an_update_inside_an_update_is_refused():
    kept = three()
    with pytest.raises(ValueError, match="inside another update"), kept.update(), kept.update():
        pass
    assert kept.step == 0


def test_other_shapes_dtypes_and_names_are_refused():
    kept = three()
    with kept.update():
        with pytest.raises(ValueError, match=r"has shape \(3,\); the new values have \(2,\)"):
            kept["b"] = np.zeros(2)
        with pytest.raises(TypeError, match="is int64; the new values are float64"):
            kept["n"] = 2.5
        with pytest.raises(KeyError, match="there is no 'v'; the arrays are w, b, n"):
            kept["v"]
    assert values(kept) == values(three())


def test_examples_print_what_they_say():
    assert doctest.testmod(slots) == (0, 1)


def test_a_state_is_restored_after_updates():
    state = State({"x": np.zeros(2), "y": np.zeros(1)})
    for _ in range(3):
        with state.update():
            state["x"] += 1
    state.restore({"x": np.full(2, 7.0), "y": np.ones(1)}, step=10)
    assert (state.step, state["x"].tolist(), state["y"].tolist()) == (10, [7, 7], [1])
    with state.update():
        state["x"] += 1
    assert (state.step, state["x"].tolist(), state["y"].tolist()) == (11, [8, 8], [1])


def test_a_state_is_restored_outside_updates_and_with_its_own_arrays_alone():
    state = State({"x": np.zeros(2)})
    with pytest.raises(ValueError, match="the arrays are others than those of the State: x"):
        state.restore({"x": np.zeros(3)}, 1)
    with state.update(), pytest.raises(ValueError, match="inside an update"):
        state.restore({"x": np.zeros(2)}, 1)


@pytest.mark.parametrize(
    ("facts", "error", "text"),
    [
        ({"step": 3, "format": 1}, ValueError, "the manifest has format, step of its own"),
        ({"words": "x" * 40_000}, ValueError, "more than 32,768"),
        ({"what": object()}, TypeError, "not JSON serializable"),
    ],
)
def test_facts_that_a_manifest_cannot_have_are_refused(facts, error, text):
    state = State({"x": np.zeros(2)})
    with pytest.raises(error, match=text):
        state.save_to("somewhere", facts)
    assert state.saving is None


def test_an_empty_array_is_written_in_place_inside_an_update():
    state = State({"x": np.zeros(2)})
    before = state["x"]
    with pytest.raises(ValueError, match="'x' outside an update"):
        state.empty("x")
    with state.update():
        with pytest.raises(KeyError, match="there is no 'z'"):
            state.empty("z")
        new = np.add(before, 1, out=state.empty("x"))
        assert state.empty("x") is new
        assert state["x"] is new
    assert (before.tolist(), state["x"].tolist()) == ([0, 0], [1, 1])
    with pytest.raises(ValueError, match="read-only"):
        new += 1


def test_what_is_unsaved_goes_to_stderr_without_a_launcher(capsys):
    state = State({"x": np.zeros(1)})
    state.report_unsaved("losses.csv: the disk is full")
    assert capsys.readouterr().err == "losses.csv: the disk is full\n"
    with pytest.raises(TypeError, match="report_unsaved: text is 3; pass a string"):
        state.report_unsaved(3)
