"""`ringreduce bench`: what it refuses, its inputs, its columns, its fit, and a run over MPI."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.bench.collectives import IN_PLACE, OURS, OUT_OF_PLACE
from ringreduce.bench.fit import fit, profile_text
from ringreduce.bench.inputs import OPS, Inputs, refusal
from ringreduce.bench.measure import Timing
from ringreduce.bench.options import nbytes, parser, read
from ringreduce.bench.plot import finding, plot
from ringreduce.bench.table import SizeRow, Table, digits
from ringreduce.picture.style import in_dark, in_light
from ringreduce.schedules.cost import Link, Profile, price
from tests.bench.runs import RUNS
from tests.support.mpi import DEADLINE_S, ROOT, MpiJobs, environment, mpiexec
from tests.support.pictures import contrasts, parse, shapes, whole


def options(*flags: str):
    return read(flags, "bench")


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["-b", "2"], "-b 2 is less than an element of float32"),
        (["-b", "0"], "'0' is no size"),
        (["-f", "1"], "-f is 1; wanted at least 2"),
        (["--iters", "0"], "--iters is 0; wanted at least 1"),
        (["-w", "-1"], "-w is -1; wanted at least 0"),
        (["-d", "str"], "-d str cannot be sent"),
        (["-o", "avg", "-d", "int"], "-o mean does not go with int32"),
        (["-d", "bool"], "-o sum does not go with bool"),
        (["-o", "average"], "did you mean 'avg'?"),
        (
            ["--collectiv", "reduce"],
            "unrecognized arguments: --collectiv reduce; did you mean '--c",
        ),
        (["--algorithm", "rign"], "unknown algorithm 'rign'"),
        (["--algorithm", "pairwise"], "all_reduce: unknown algorithm 'pairwise'"),
        (["--plot", "run.xyz"], "--plot run.xyz: wanted a name that ends in .svg or .png"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, complaint, capsys):
    with pytest.raises(SystemExit) as error:
        options(*flags)
    assert error.value.code == 2
    assert complaint in capsys.readouterr().err


def test_options_are_read_without_mpi():
    code = (
        "import sys; from ringreduce.bench.options import read; read([], 'bench'); "
        "print('mpi4py' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_the_names_of_nccl_tests_are_understood():
    assert options("-d", "half", "-o", "avg").dtype == "float16"
    assert options("-d", "half", "-o", "avg").op == "mean"
    assert options("-d", "bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("8", 8), ("64K", 1 << 16), ("64k", 1 << 16), ("2M", 2 << 20), ("1G", 1 << 30)],
)
def test_sizes(text, wanted):
    assert nbytes(text) == wanted


def test_sizes_go_from_b_to_e_by_f():
    assert options("-b", "8", "-e", "1K", "-f", "4").counts(3) == [2, 8, 32, 128]


def test_shares_are_whole():
    assert options("--collective", "all_gather", "-b", "8", "-e", "64").counts(3) == [3, 6, 15]


# --- inputs ---------------------------------------------------------------------------------------

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint64", "bool", "complex64"]


assert np.dtype("bfloat16") == ml_dtypes.bfloat16, "ml_dtypes has not named its dtypes"
PAIRS = [(op, dtype) for op in OPS for dtype in DTYPES if not refusal(op, np.dtype(dtype))]


def test_many_pairs_go_together():
    assert len(PAIRS) == 42


@pytest.mark.few(12)
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
@given(ranks=st.integers(1, 64), iteration=st.integers(0, 30), order=st.randoms())
@settings(max_examples=6)
def test_results_are_exact_whatever_the_order(op, dtype, ranks, iteration, order):
    inputs = Inputs(ranks, 23, op, dtype)
    arrays = []
    for rank in range(ranks):
        arrays.append(np.empty(23, dtype))
        inputs.fill(arrays[-1], rank, iteration)
    order.shuffle(arrays)
    total = arrays[0]
    for array in arrays[1:]:
        total = OPS[op](total, array).astype(dtype)
    if op == "mean":
        total = (total / ranks).astype(dtype)
    assert np.array_equal(total, inputs.result(iteration))


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_a_contribution_too_few_or_in_another_place_is_seen(ranks):
    inputs = Inputs(ranks, 40, "sum", "float32")
    arrays = [np.empty(40, np.float32) for _ in range(ranks)]
    for rank, array in enumerate(arrays):
        inputs.fill(array, rank, 3)
    right = inputs.result(3)
    assert not np.array_equal(sum(arrays[1:]), right)
    assert not np.array_equal(np.roll(sum(arrays), 8), right)
    assert not np.array_equal(inputs.result(4), right)


def test_long_arrays_are_written_whole():
    inputs = Inputs(2, 100_003, "sum", "float32")
    array = np.full(100_003, np.nan, np.float32)
    inputs.fill(array, 1, 0)
    assert np.array_equal(array[:-5], array[5:])


# --- the fit --------------------------------------------------------------------------------------


def price_of(algorithm, nodes):
    schedule = build("all_reduce", algorithm, nodes)
    return lambda size, profile: price(schedule, nodes, size, profile)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "doubling", "two_shot"])
def test_a_fit_finds_what_the_times_were_made_of(algorithm):
    truth = Profile(Link(3e-6, 2e-10), gamma_s_per_byte=5e-11)
    cost = price_of(algorithm, [[0, 1, 2, 3]])
    points = [(1 << k, cost(1 << k, truth)) for k in range(3, 28)]
    folds = [(size, size * truth.gamma_s_per_byte) for size in (1 << 10, 1 << 20)]
    found = fit(points, folds, cost, across=False)
    assert math.isclose(found.profile.in_node.alpha_s, 3e-6, rel_tol=1e-3)
    assert math.isclose(found.profile.in_node.beta_s_per_byte, 2e-10, rel_tol=1e-3)
    assert math.isclose(found.profile.gamma_s_per_byte, 5e-11, rel_tol=1e-3)
    assert found.error < 1e-3
    assert found.error_checked < 1e-3
    assert len(found.fitted) == 13
    assert len(found.checked) == 12


@pytest.mark.slow
def test_across_nodes_both_links_are_fitted():
    nodes = [[0, 1], [2, 3]]
    truth = Profile(Link(1e-6, 1e-10), Link(3e-5, 1e-9), 5e-11)
    cost = price_of("hierarchical", nodes)
    points = [(1 << k, cost(1 << k, truth)) for k in range(3, 28)]
    folds = [(1 << 20, (1 << 20) * truth.gamma_s_per_byte)]
    found = fit(points, folds, cost, across=True)
    assert found.error_checked < 0.02


def test_noise_does_not_make_a_cost_negative():
    rng = np.random.default_rng(5)
    cost = price_of("ring", [[0, 1]])
    points = [(1 << k, float(rng.uniform(1e-6, 1e-3))) for k in range(3, 20)]
    found = fit(points, [(1 << 20, 1e-4)], cost, across=False)
    link = found.profile.in_node
    assert min(link.alpha_s, link.beta_s_per_byte, found.profile.gamma_s_per_byte) > 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("op", [op for op in OPS if op not in ("and", "or", "xor")])
def test_a_call_that_did_nothing_would_be_noticed(op, ranks):
    inputs = Inputs(ranks, 1000, op, "float64")
    mine = np.empty(1000)
    noticed = []
    for rank in range(ranks):
        inputs.fill(mine, rank, 3)
        noticed.append(not np.array_equal(mine, inputs.result(3)))
    assert sum(noticed) >= ranks - 1  # with an odd number of ranks one may have the mean


# --- the table ------------------------------------------------------------------------------------


def timing(contender: str, place: str, *seconds: float, nbytes: int = 1 << 20, wrong: int = 0):
    return Timing(contender, place, nbytes // 4, nbytes, seconds, wrong)


def row(
    algorithm: str = "ring", nbytes: int = 1 << 20, factor: float = 1.0, wrong: int = 0
) -> SizeRow:
    """Ours takes 1, 2 and 3 us, MPI twice and Gloo half as long, times `factor`."""
    seconds = [factor * us * 1e-6 for us in (3, 1, 2)]
    named = [(OURS, 1.0), ("MPI", 2.0), ("Gloo", 0.5)]
    return SizeRow(
        algorithm,
        [
            timing(name, place, *(slower * s for s in seconds), nbytes=nbytes, wrong=wrong)
            for name, slower in named
            for place in (OUT_OF_PLACE, IN_PLACE)
            if (name, place) != ("Gloo", OUT_OF_PLACE)
        ],
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.5, "0.500"),
        (1.2345, "1.23"),
        (9.996, "10.0"),
        (99.96, "100"),
        (12.345, "12.3"),
        (164_705, "165000"),
        (999_600, "1.00e6"),
        (1_234_567, "1.23e6"),
        (0.004_839, "0.00484"),
        (0.000_484, "4.84e-4"),
        (None, "N/A"),
    ],
)
def test_figures_have_three_significant_digits(value, text):
    assert digits(value) == text


@given(st.floats(1e-9, 1e9))
def test_three_digits_are_right_and_never_longer_than_a_column(value):
    assert len(digits(value)) <= 7
    assert math.isclose(float(digits(value)), value, rel_tol=0.005001)


def test_a_line_has_time_busbw_and_the_speedup_in_each_place():
    table = Table(options(), 4, row())
    # 1 MiB in 2 us is 524 GB/s, of which all-reduce among 4 has a busbw of 1.5 times.
    assert table.line(row()).split() == [
        *("1048576", "ring"),
        *("2.00", "786", "2.00"),
        *("2.00", "786", "0.500"),
        "0",
    ]
    assert table.head()[1].split() == [
        *("#", "size", "algorithm"),
        *("time", "busbw", "speedup"),
        *("time", "busbw", "speedup"),
        "#wrong",
    ]


def test_a_wide_line_adds_count_dtype_op_shortest_time_99th_percentile_and_algbw():
    line = Table(options("--wide"), 4, row()).line(row())
    assert line.split() == [
        *("1048576", "262144", "float", "sum", "ring"),
        *("1.00", "2.00", "3.00", "524", "786", "0", "2.00"),
        *("1.00", "2.00", "3.00", "524", "786", "0", "0.500"),
        *("4.00", "393", "4.00", "393", "1.00", "1570"),
    ]


def test_what_is_only_moved_has_no_redop():
    table = Table(options("--collective", "broadcast", "--wide"), 4, row())
    assert table.line(row()).split()[3] == "none"


@pytest.mark.parametrize("flags", [(), ("--no-peers",), ("--collective", "broadcast")])
@pytest.mark.parametrize(
    ("algorithm", "nbytes", "factor", "wrong"),
    [
        ("halving_doubling", 1 << 30, 1e6, 1 << 30),
        ("hierarchical(halving_doubling, halving_doubling)", 1 << 33, 1e9, 12_345),
        ("ring", 4, 0.05, 0),
    ],
)
def test_no_line_is_longer_than_80_columns(flags, algorithm, nbytes, factor, wrong):
    widest = row(algorithm, nbytes, factor, wrong)
    table = Table(options(*flags), 8, widest)
    lines = [*table.head(), table.line(widest)]
    assert max(map(len, lines)) <= 80
    assert len(lines[-1].split()) == len(table.head()[1].replace("#", " ", 1).split())


def test_columns_are_those_of_what_is_measured():
    ours = SizeRow("ring", [timing(OURS, IN_PLACE, 1e-6)])
    head = "".join(Table(options("--no-peers"), 2, ours).head())
    assert "out of place" not in head
    assert "speedup" not in head


@pytest.mark.parametrize(("wrong", "text"), [(None, "N/A"), (0, "0"), (7, "14")])
def test_wrong_elements_of_both_places_are_counted(wrong, text):
    counted = row(wrong=wrong)
    assert Table(options(), 2, counted).line(counted).split()[-1] == text


# --- over MPI -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def runs(folder):
    """Name of a run -> what came of it, for all ranks together; one job makes all `RUNS`."""
    jobs = MpiJobs(folder)
    ranks = jobs.run_ok("call", 3, "tests.bench.runs:over_mpi", str(folder))
    jobs.sweep()
    found = {}
    for name in RUNS:
        each = [rank[name] for rank in ranks]
        assert len({one["code"] for one in each}) == 1, each
        texts = {text: "".join(one[text] for one in each) for text in ("out", "err")}
        found[name] = SimpleNamespace(**each[0] | texts)
    return found


def rows_of(table: str) -> list[list[str]]:
    """The words of each line of a table that is no comment."""
    return [line.split() for line in table.splitlines() if line and not line.startswith("#")]


TORCH = importlib.util.find_spec("torch") is not None
"""Gloo is a baseline where there is torch."""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("collective", "places"),
    [
        ("all_reduce", {"out of place", "in place"}),
        ("reduce", {"out of place", "in place"}),
        ("reduce_scatter", {"out of place"}),
        ("all_gather", {"out of place"}),
        ("gather", {"out of place"}),
        ("scatter", {"out of place"}),
        ("broadcast", {"in place"}),
        ("all_to_all", {"out of place"}),
        ("barrier", {"out of place"}),
    ],
)
def test_every_collective_is_measured_beside_its_baseline(runs, folder, collective, places):
    run = runs[collective]
    assert run.code == 0, run.out + run.err
    rows = [json.loads(line) for line in (folder / f"{collective}.jsonl").read_text().splitlines()]
    assert {row["bytes"] for row in rows} <= {4, 24, 32, 4092, 4096, 524_280, 524_288}
    gloo = {("Gloo", "in place")} if TORCH and collective == "all_reduce" else set()
    assert {(row["contender"], row["place"]) for row in rows} == gloo | {
        (name, place) for name in ("ringreduce", "MPI") for place in places
    }
    assert [row["wrong"] for row in rows] == [0] * len(rows)
    for row in rows:
        assert 0 < row["min_us"] <= row["median_us"] <= row["p99_us"]
    assert "# wrong elements: 0 of ringreduce, 0 of baselines" in run.out


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["bfloat16", "half avg", "bool xor", "prod"])
def test_dtypes_and_ops(runs, name):
    assert runs[name].code == 0, runs[name].out + runs[name].err


@pytest.mark.mpi
def test_a_wide_table_has_the_columns_of_nccl_tests(runs):
    names = next(line.split() for line in runs["wide"].out.splitlines() if "redop" in line)
    assert names[:4] == ["#", "size", "count", "type"]
    assert [names.count(name) for name in ("algbw", "#wrong", "busbw")] == [2, 2, 4 + TORCH]
    rows = rows_of(runs["wide"].out)
    assert [row[:4] for row in rows] == [
        ["32", "8", "float", "sum"],
        ["4096", "1024", "float", "sum"],
        ["524288", "131072", "float", "sum"],
    ]
    assert all("N/A" in row for row in rows)  # nothing was verified
    # At the end the rate is what time and size make it: all-reduce of three has a factor of 4/3.
    time_us, algbw, busbw = (float(rows[2][column]) for column in (6, 8, 9))
    assert math.isclose(algbw, 524_288 / time_us / 1e3, rel_tol=0.02)
    assert math.isclose(busbw, algbw * 4 / 3, rel_tol=0.02)


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_a_line_names_the_algorithm_that_its_size_used(runs, collective):
    rows, used = rows_of(runs[collective].out), runs[collective].used
    assert len(rows) == 3
    assert [row[1] for row in rows] == [used[f"{collective} {row[0]}"] for row in rows]


@pytest.mark.mpi
def test_a_wrong_option_is_reported_once(runs):
    run = runs["wrong option"]
    assert run.code == 2
    assert run.err.count("ringing") == 1
    assert run.out == ""


@pytest.mark.mpi
def test_help_is_printed_once(runs):
    assert runs["help"].code == 0
    assert runs["help"].out.count("--no-peers") == 2  # in the usage, and explained


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "told"), [("auto", []), ("ring", ["algorithm"])])
def test_calls_name_an_algorithm_only_if_the_options_do(runs, name, told):
    """The benchmark names an algorithm only on request, as a user would."""
    assert runs[name].code == 0, runs[name].err
    assert runs[name].named == [*told, "out"]


@pytest.mark.mpi
def test_a_wrong_result_is_counted_and_fails_the_run(runs):
    assert runs["wrong result"].code == 1
    # Of two sizes three results each are looked at, in two places.
    assert "# wrong elements: 12 of ringreduce, 0 of baselines" in runs["wrong result"].out


@pytest.mark.mpi
def test_a_picture_that_needs_a_library_is_refused_before_it_is_measured(runs):
    run = runs["no library"]
    assert run.code == 2
    assert "--plot run.png: a PNG needs resvg_py: pip install 'ringreduce[plot]'" in run.err
    assert "redop" not in run.out


@pytest.mark.mpi
def test_what_cannot_be_written_is_refused_before_it_is_measured(runs):
    run = runs["no folder"]
    assert run.code == 2
    assert "no/such/folder.jsonl" in run.err
    assert "redop" not in run.out


@pytest.mark.mpi
def test_a_picture(tmp_path):
    """Run the program of the documents, under mpiexec."""
    flags = ("-b", "8", "-e", "64K", "-f", "4", "--iters", "3", "--algorithm", "halving_doubling")
    flags += ("--plot", "run.svg", "--json", "rows.jsonl")
    ended = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, ROOT / "benchmarks/all_reduce.py", *flags],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    shown = [text.text for text in parse((tmp_path / "run.svg").read_text()).iter("text")]
    assert {"median time of a call, µs", "ringreduce, in place", "MPI, in place"} < set(shown)
    assert shown.count("cost model, fitted") == 2
    words = " ".join(ended.stdout.replace("#", " ").split())
    assert "the cost model, fitted to every other size: alpha" in words
    assert "2 ranks on 1 node" in words
    profile = ended.stdout[ended.stdout.index("# Profile(\n") :].replace("\n#", "\n")
    assert isinstance(eval(profile[2:], {"Profile": Profile, "Link": Link}), Profile)
    assert max(map(len, ended.stdout.splitlines())) <= 80
    command = f"mpirun -n 2 python benchmarks/all_reduce.py {' '.join(flags)}"
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert {json.loads(row)["command"] for row in rows} == {command}


@pytest.mark.parametrize("across", [False, True])
def test_the_fitted_profile_can_be_pasted(across):
    rounded = Profile(Link(1.23e-6, 4.56e-10), Link(7.89e-5, 1e-9), 1.5e-10)
    made = eval("\n".join(profile_text(rounded, across, shared=False)))  # as a user would
    assert made == (rounded if across else replace(rounded, between_nodes=Profile().between_nodes))
    in_memory = eval("\n".join(profile_text(rounded, across, shared=True)))
    assert in_memory.of_memory(crowded=True) == replace(
        rounded.also_in_memory().of_memory(crowded=True),
        in_memory=in_memory.in_memory,
        between_nodes=made.between_nodes,
    )


def timed(contender, microseconds, nbytes=8):
    return Timing(contender, IN_PLACE, nbytes // 4, nbytes, (1e-6 * microseconds,), 0)


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        (
            [[timed("ringreduce", 1), timed("MPI", 2), timed("Gloo", 9)]],
            "ringreduce has 2.00 times the speed of the fastest baseline (geometric mean) and is "
            "faster at 1 of 1 size",
        ),
        (
            [[timed("ringreduce", 4), timed("MPI", 2)], [timed("ringreduce", 1), timed("MPI", 8)]],
            "ringreduce has 2.00 times the speed of the fastest baseline (geometric mean) and is "
            "faster at 1 of 2 sizes",
        ),
        (
            [[timed("ringreduce", 1)], [timed("ringreduce", 2, 8000)]],
            "ringreduce handles 4 GB/s at most, at 7.8125 KiB",
        ),
    ],
    ids=["one size", "two sizes", "no baseline"],
)
def test_the_title_of_the_picture_says_what_was_found(rows, title):
    assert finding(rows) == title


def test_a_picture_as_png(tmp_path):
    pytest.importorskip("resvg_py")
    plot(tmp_path / "run.png", "all_reduce", "2 cores", [[timed("ringreduce", 1)]], None, 1.0)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", [in_light, in_dark])
def test_texts_of_the_picture_can_be_read(tmp_path, page):
    rows = [[timed(name, us, 8 << i) for name, us in CONTENDERS] for i in range(9)]
    plot(tmp_path / "run.svg", "all_reduce", "2 cores", rows, None, 1.0)
    picture = parse(page((tmp_path / "run.svg").read_text()))
    assert min(value for _, value in contrasts(picture)) >= 4.5
    assert all(whole(picture).holds(shape) for shape in shapes(picture))


CONTENDERS = (("ringreduce", 1), ("MPI", 1.1), ("Gloo", 200))


def test_the_page_lists_every_flag():
    page = (ROOT / "docs" / "performance.md").read_text()
    flags = {flag for action in parser("bench")._actions for flag in action.option_strings}
    assert {flag for flag in flags if f"`{flag}`" not in page} == {"-h", "--help"}
