"""What the benchmarks make of their rows: ratios, targets, and what counts as slower."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import collectives, instructions, old_and_new, one_host, peers, torch_backend
from ringreduce.bench import options
from ringreduce.launch import cli
from tests.support.pictures import parse, placed

# --- benchmarks.collectives -----------------------------------------------------------------------


def row(contender, microseconds, **other):
    """A row of a broadcast of 8 bytes on 2 ranks, each call after a barrier, over MPICH."""
    usual = {"collective": "broadcast", "way": collectives.AFTER_A_BARRIER, "bytes": 8, "ranks": 2}
    usual |= {"mpi_wheel": "mpich", "thread_level": "multiple", "contender": contender}
    return {**usual, "median_us": microseconds, "from_first_us": 10.0, **other}


def line(rows, start):
    (found,) = (x for x in collectives.summary(rows).splitlines() if x.startswith(start))
    return found


def test_a_ratio_is_that_of_the_fastest_mpi_in_its_own_run():
    rows = [row("ringreduce", 2.0), row("MPI", 3.0)]
    rows += [row(name, us, mpi_wheel="impi-rt") for name, us in (("ringreduce", 1.0), ("MPI", 2.5))]
    assert line(rows, "| broadcast") == "| broadcast | 2.50 | 2.50 | 2.50 at 8 B | 1.00 |"


def test_a_contender_counts_in_its_faster_place():
    rows = [row("MPI", 4.0), row("ringreduce", 4.0), row("ringreduce", 2.0, place="in place")]
    assert line(rows, "| broadcast") == "| broadcast | 2.00 | 2.00 | 2.00 at 8 B | 1.00 |"


def test_the_mean_from_the_first_entry_has_a_column_of_its_own():
    rows = [row("ringreduce", 10.0, from_first_us=4.0), row("MPI", 5.0, from_first_us=6.0)]
    assert line(rows, "| broadcast") == "| broadcast | 0.50 | 0.50 | 0.50 at 8 B | 1.50 |"


def test_a_mean_below_the_target_is_named():
    rows = [row("ringreduce", 10.0), row("MPI", 9.9)]
    assert line(rows, "targets").endswith("missed: broadcast: mean 0.99")


def test_a_size_below_the_lowest_is_named():
    rows = [row("ringreduce", 10.0), row("MPI", 6.9)]
    rows += [row("ringreduce", 1.0, bytes=64), row("MPI", 3.0, bytes=64)]
    assert line(rows, "targets").endswith("missed: broadcast: 0.69 at 8 B")


def test_four_ranks_have_a_higher_target():
    rows = [row("ringreduce", 1.0, ranks=4), row("MPI", 1.1, ranks=4)]
    assert line(rows, "targets").endswith("missed: broadcast: mean 1.10")


def test_loops_have_no_target():
    rows = [row(name, 1.0, way=collectives.IN_LOOPS) for name in ("ringreduce", "MPI")]
    assert "targets" not in collectives.summary(rows)


# --- benchmarks.old_and_new -----------------------------------------------------------------------


def compared(old, new):
    """One case, of so many runs."""
    case = ("planned", 8)
    ((_, times),) = old_and_new.compared([{case: x} for x in old], [{case: x} for x in new])
    return {"benchmark": "small_calls", "mpi_wheel": "mpich", "ranks": 2, "unit": "µs", **times} | {
        "case": "planned",
        "bytes": 8,
    }


def test_the_shared_program_is_whole():
    files = old_and_new._SAME_PROGRAM
    for file in files:
        for module in re.findall(r"from ringreduce\.bench\.(\w+) import", Path(file).read_text()):
            assert f"ringreduce/bench/{module}.py" in files, file


def test_the_ratio_is_that_of_the_medians():
    assert compared([1.0, 2.0, 9.0], [1.0, 3.0, 3.1])["ratio"] == 1.5


def test_a_case_that_one_checkout_lacks_is_left_out():
    assert not list(old_and_new.compared([{("a", 8): 1.0}], [{("b", 8): 1.0}]))


@pytest.mark.parametrize(
    ("old", "new", "slower"),
    [
        ([1.0, 1.01, 1.02], [1.1, 1.11, 1.12], True),
        ([1.0, 1.01, 1.02], [1.05, 1.06, 1.07], False),  # within what is allowed
        ([0.8, 1.0, 1.4], [0.9, 1.1, 1.5], False),  # within what the runs differ by
        ([1.1, 1.11, 1.12], [1.0, 1.01, 1.02], False),
        ([1.0], [1.2], True),
    ],
)
def test_a_case_is_slower_outside_the_spread_alone(old, new, slower):
    assert old_and_new.is_slower(compared(old, new)) == slower


def test_the_summary_names_the_mean_and_the_slow_case():
    text = old_and_new.summary([compared([1.0, 1.01, 1.02], [1.1, 1.11, 1.12])])
    line = "| small_calls | mpich | 2 | 1 | 1.099 | 1.100 | 1.10, planned, 8 B | more than 1.03 |"
    assert line in text
    assert text.endswith("1.10  small_calls, mpich, 2 ranks: planned, 8 B, 1.01 to 1.11 µs")


# --- benchmarks.instructions ----------------------------------------------------------------------

DISASSEMBLY = """
0000000000000000 <run>:
   0:\tpush   %rbp
   1:\tdata16 cs nopw 0x0(%rax,%rax,1)
   c:\tret
   d:\tint3
   e:\txchg   %ax,%ax
  10:\txchg   %rax,%rbx
"""


def test_what_fills_space_is_no_instruction():
    assert instructions.count(DISASSEMBLY) == 3


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump: apt install binutils")
@pytest.mark.skipif(shutil.which("as") is None, reason="no assembler: apt install binutils")
def test_an_object_file_is_found_behind_what_stands_before_it(tmp_path):
    made = tmp_path / "made.o"
    subprocess.run(["as", "-o", str(made)], input="f: nop\n ret\n", text=True, check=True)
    text = instructions.disassembled(b"digest" + b'{"name": "f"}\n' + made.read_bytes())
    assert instructions.count(text) == 1


def test_functions_of_one_checkout_alone_have_no_ratio():
    lines = instructions.comparison({"enter": 200, "run": 100}, {"run": 110}).splitlines()
    assert lines[1].split() == ["200", "-", "enter"]
    assert lines[2].split() == ["100", "110", "1.100", "run"]


# --- benchmarks.peers -----------------------------------------------------------------------------


def test_the_flags_of_a_run_are_options_of_the_bench():
    given = ["bench", "--ranks", "2", *peers.FLAGS]
    launched, rest = cli.parsers()[0].parse_known_args(given)
    assert (launched.ranks, options.read(rest, "bench").iterations) == (2, 40)


# --- pictures -------------------------------------------------------------------------------------


def one_host_row(contender, microseconds, ranks=2, nbytes=8):
    row = {"contender": contender, "median_us": microseconds, "ranks": ranks, "bytes": nbytes}
    row |= {"mpi_wheel": "mpich", "thread_level": "multiple", "dtype": "float32"}
    return row | {"cpu": "a CPU", "cores": 2, "date": "2026-11-22"}


def one_host_rows(ranks, times_of_ours):
    """Rows in which the MPI takes 6 µs, Gloo 9, and registered arrays take 1."""
    rows = []
    for i, ours in enumerate(times_of_ours):
        times = {"MPI": 6.0, "Gloo": 9.0, "ringreduce": ours, "registered": 1.0}
        rows += [one_host_row(name, us, ranks, 8 << i) for name, us in times.items()]
    return rows


def texts(svg):
    return [text.text for text in parse(svg).iter("text")]


def test_the_title_has_the_mean_speed_beside_the_fastest_baseline():
    rows = one_host_rows(2, [1.0, 4.0]) + one_host_rows(4, [2.0, 2.0])
    picture = parse(one_host.picture(rows))
    assert picture.findtext("title") == (
        "ringreduce has 3.0 times the speed of the fastest baseline with 2 ranks and 3.0 times "
        "with 4 ranks"
    )


def test_a_size_at_which_ours_is_slower_is_below_the_baseline():
    svg = one_host.picture(one_host_rows(2, [3.0, 12.0]))
    ours, registered, baseline = (
        [point.top for point in boxes]
        for shape, boxes in placed(parse(svg))
        if shape.get("class") == "line"
    )
    assert ours[0] < baseline[0] == baseline[1] < ours[1]
    assert registered[0] == registered[1] < ours[0]


def test_the_baselines_are_those_of_the_rows():
    svg = one_host.picture(one_host_rows(2, [3.0]))
    assert "at each size is the fastest of MPICH and Gloo." in " ".join(texts(svg))


def test_each_line_is_named():
    shown = texts(one_host.picture(one_host_rows(2, [3.0, 3.0])))
    assert {"NumPy arrays", "comm.empty arrays", "fastest baseline"} < set(shown)


def test_the_bus_bandwidth_counts_the_cases_in_which_ours_is_faster():
    run = {"ringreduce": {8: 1.0, 16: 3.0}, "MPI": {8: 2.0, 16: 2.0}, "Gloo": {8: 9.0, 16: 9.0}}
    where = {"cpu": "a CPU", "cores": 2, "date": "2026-11-22"}
    picture = parse(peers.picture({2: {"MPICH": run}, 4: {"MPICH": run}}, where))
    assert picture.findtext("title") == (
        "ringreduce over an MPI is faster than that MPI's own all-reduce in 2 of 4 cases"
    )


def test_the_bus_bandwidth_has_the_sizes_of_the_rows():
    run = {name: {16: 1.0, 2048: 3.0} for name in ("ringreduce", "MPI", "Gloo")}
    svg = peers.picture({2: {"MPICH": run}}, {"cpu": "a CPU", "cores": 2, "date": "2026-11-22"})
    assert "on one host, from 16 B to 2 KiB." in " ".join(texts(svg))


@pytest.mark.parametrize("module", [one_host, peers, torch_backend], ids=lambda module: module.NAME)
def test_a_picture_of_the_docs_is_drawn_from_the_results(module, monkeypatch, tmp_path):
    committed = module.PICTURE.read_text()
    monkeypatch.setattr(module, "PICTURE", tmp_path / "picture.svg")
    monkeypatch.setattr("sys.argv", ["benchmark", "--draw"])
    module.main()
    assert module.PICTURE.read_text() == committed
