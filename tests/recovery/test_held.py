"""The memory files that the supervisor holds: which one the next generation begins with."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.recovery.saving import Saving, last_saved
from ringreduce.recovery.slots import Slots
from ringreduce.recovery.wire import ADDRESS, TOKEN
from ringreduce.supervisor.held import HeldFiles
from tests.support.watch import Watch


def written(steps: int) -> Slots:
    """The file of a rank after so many steps, whose array has that value."""
    slots = Slots.new({"x": np.zeros(2)})
    for step in range(1, steps + 1):
        slots.writable("x")[...] = step
        slots.commit(["x"])
    return slots


def file_after(steps: int) -> int:
    """A descriptor of the file of a rank after so many steps; its rank is gone."""
    slots = written(steps)
    return os.dup(slots.file)


def holding(*steps: int, call: int = 1) -> HeldFiles:
    held = HeldFiles()
    for each in steps:
        held.take(call, file_after(each), len(steps))
    return held


def test_the_most_advanced_file_goes_on_after_its_rank():
    held = holding(4, 5, 4)
    assert held.step == 5
    held.next_generation()
    assert held.source(1).committed("x").tolist() == [5, 5]
    held.close()


def test_the_source_is_kept_until_every_rank_has_its_own_copy():
    held = holding(3, 3)
    held.next_generation()
    held.take(1, file_after(3), 2)
    assert held.source(1) is not None
    held.next_generation()  # a rank was lost before it had a copy
    assert held.source(1).step == 3
    for _ in range(2):
        held.take(1, file_after(3), 2)
    assert held.source(1) is None
    assert held.step == 3
    held.close()


def test_each_call_has_its_own_files_and_the_last_one_counts():
    held = holding(7)
    held.take(2, file_after(2), 1)
    assert held.step == 2
    held.next_generation()
    assert (held.source(1).step, held.source(2).step, held.source(3)) == (7, 2, None)
    held.close()


def test_ranks_of_a_generation_that_is_over_may_not_write():
    slots = written(1)
    held = HeldFiles()
    held.take(1, os.dup(slots.file), 1)
    assert slots.generation == 1
    held.revoke()
    assert slots.generation == 0
    held.close()


def test_nothing_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    held = holding(1, 2, 3)
    held.next_generation()
    held.take(1, file_after(3), 2)
    held.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_file_is_refused():
    file = os.memfd_create("test")
    with pytest.raises(ValueError, match="too short"):
        HeldFiles().take(1, file, 1)
    os.close(file)


def test_a_rank_without_a_lease_ends_before_it_commits():
    state = rr.State({"x": np.zeros(1)})
    child = os.fork()
    if child == 0:
        with state.update():
            state["x"] = [1.0]
            Slots.from_file(os.dup(state.file)).revoke()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert (state.step, state["x"].tolist()) == (0, [0.0])


def test_a_rank_that_the_launcher_refuses_trains_nothing():
    watch = Watch()
    watch.start()
    code = (
        "import numpy as np, ringreduce as rr\n"
        "rr.elastic(lambda comm, state: print('trained'), rr.State({'x': np.zeros(1)}))"
    )
    launcher = {ADDRESS: watch.address, TOKEN: "of an earlier generation"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **launcher}, capture_output=True, text=True
    )
    watch.stop()
    assert (done.returncode, done.stdout) == (1, ""), done.stderr


def test_a_state_is_saved_once_and_found_again(tmp_path):
    slots = Slots.new({"x": np.arange(3.0)}, step=5)
    held = HeldFiles(tmp_path, slots)
    assert held.save(2) == f"step 5 is saved in {tmp_path}"
    (manifest,) = tmp_path.glob("*.json")
    written = manifest.stat().st_mtime_ns
    assert held.save(3) == f"step 5 is saved in {tmp_path}"
    assert manifest.stat().st_mtime_ns == written
    found = last_saved(tmp_path, pytest.fail)
    assert (found.step, found.committed("x").tolist()) == (5, [0, 1, 2])
    manifest.write_text("no JSON")
    passed_over = []
    with pytest.raises(ValueError, match="none of the 1 checkpoints"):
        last_saved(tmp_path, passed_over.append)
    assert len(passed_over) == 1
    assert held.save(3) == f"step 5 is saved in {tmp_path}"
    assert last_saved(tmp_path, pytest.fail).step == 5
    held.close()


def test_what_cannot_be_saved_is_said(tmp_path):
    (tmp_path / "file").touch()
    assert HeldFiles().save(1) == "there is nothing to save"
    held = HeldFiles(begin=Slots.new({"x": np.zeros(1)}))
    assert held.save(1) == "step 0 was the last; nothing is saved, for no folder is named"
    held.saving[1] = Saving(str(tmp_path / "file"), {})
    assert "step 0 was the last; it cannot be saved: " in held.save(1)
    held.close()


def of_steps(held: HeldFiles, *steps: int, call: int = 1) -> list[Slots]:
    """Files of ranks that have made so many steps."""
    files = []
    for step in steps:
        slots = Slots.new({"x": np.zeros(1)}, step)
        held.take(call, os.dup(slots.file), len(steps))
        files.append(slots)
    return files


def test_all_ranks_pause_after_the_same_step_that_none_has_passed():
    held = HeldFiles()
    files = of_steps(held, 7, 6)
    held.pause()
    assert held.pauses
    assert [files[0].commit([])] == [True]
    assert [files[1].commit([]), files[1].commit([])] == [False, True]
    assert [held.is_early(1, step) for step in (6, 7, 8)] == [True, True, False]
    held.go_on()
    assert not held.pauses
    assert not files[0].commit([])
    held.close()


def test_ranks_of_a_later_call_pause_too():
    held = HeldFiles()
    of_steps(held, 9)
    held.pause()
    (later,) = of_steps(held, 0, call=2)
    assert later.commit([])
    assert held.is_early(2, 1)
    assert later.commit([])
    assert not held.is_early(2, 2)
    assert held.is_early(1, 10), "the call before is over"
    held.close()


def test_the_state_of_a_later_call_is_saved_but_no_run_goes_on_with_it(tmp_path):
    held = HeldFiles(tmp_path)
    held.take(1, file_after(9), 1)
    held.take(2, file_after(4), 1)
    assert held.save(1) == f"step 4 is saved in {tmp_path}"
    with pytest.raises(ValueError, match=r"step 4 was saved in call 2 of rr\.elastic"):
        last_saved(tmp_path, print)
    held.close()
