"""`ringreduce explain` says what the library would do, proves it, and refuses nonsense."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.algorithms.definition import REGISTERED
from ringreduce.config import Config, Memory
from ringreduce.launch import cli, example_call, explain
from ringreduce.launch.example_call import memory_of_job
from ringreduce.launch.probe import ProbeResult, ask
from ringreduce.picture import to_svg
from ringreduce.planning.plan import Plan, plan_parts, plan_whole, shard_counts
from ringreduce.planning.select import Choice, choose, resolve, slice_count
from ringreduce.schedules.cost import Profile
from ringreduce.schedules.draw import draw
from ringreduce.schedules.schedule import Schedule
from ringreduce.system.topology import parse_nodes
from tests.launch.conftest import Said
from tests.support.mpi import MpiJobs
from tests.support.strategies import EVERY_ALGORITHM, block_layout, steps_of, with_steps, written

NODES = ((0, 1), (2,))
IN_MEMORY = Memory(single_copy=True, crowded=False)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job here sends messages, unless `--transport shm` is given; then each rank has a core."""

    def of_job(ranks: int, transport: str | None = None) -> Memory | None:
        return IN_MEMORY if transport == "shm" else None

    monkeypatch.setattr(example_call, "memory_of_job", of_job)
    monkeypatch.setenv("COLUMNS", "200")  # no line is wrapped


# --- what it says ---------------------------------------------------------------------------------


def test_it_begins_with_what_is_explained(said: Said) -> None:
    explained = said("--ranks 8 --nodes 3,1,4 --algorithm hierarchical --bytes 64M")
    assert explained[0] == [
        "all_reduce · hierarchical · 8 ranks on nodes of 3, 1 and 4 · 64 MiB of float32 "
        "· by messages"
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-n 3", "computing schedule and times of all_reduce on 3 ranks"),
        ("--nodes 2,1 --check", "computing and proving schedule and times of all_reduce on nodes"),
        ("--pipeline 1f1b --stages 4", "computing schedule and times of 1f1b on 4 ranks"),
    ],
)
def test_it_says_what_it_computes_once_that_takes_long_and_ctrl_c_ends_it(
    line: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announced, said = threading.Event(), cli.print_error

    def main(request: object) -> int:
        assert announced.wait(300)
        raise KeyboardInterrupt

    def note(text: str) -> None:
        said(text)
        announced.set()

    monkeypatch.setattr(cli, "_SILENT_S", 0.0)
    monkeypatch.setattr(cli, "print_error", note)
    monkeypatch.setattr(explain, "main", main)
    assert cli.main(["explain", *line.split()]) == 130
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"ringreduce explain: {text}")
    assert last == "ringreduce explain: interrupted"


def test_it_says_nothing_of_computing_that_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_SILENT_S", 300.0)
    assert cli.main(["explain", "-n", "2"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("4", "4 bytes"),
        ("1000", "1000 bytes"),
        ("8K", "8 KiB"),
        ("1536K", "1536 KiB"),
        ("64M", "64 MiB"),
        ("2G", "2 GiB"),
        ("0", "0 bytes"),
    ],
)
def test_sizes_are_binary(said: Said, option: str, text: str) -> None:
    assert f" · {text} of float32 · " in said(f"-n 2 --bytes {option}")[0][0]


def test_without_ranks_they_are_those_of_the_nodes(said: Said) -> None:
    assert "3 ranks on nodes of 2 and 1" in said("--nodes 2,1")[0][0]


def test_the_drawing_is_that_of_every_error(said: Said) -> None:
    drawing = said("--nodes 2,1 --algorithm hierarchical")[1]
    assert drawing == draw(build("all_reduce", "hierarchical", NODES)).splitlines()


def test_the_root_is_heeded(said: Said) -> None:
    drawing = said("--nodes 2,1 --collective broadcast --algorithm ring --root 2")[1]
    assert drawing == draw(build("broadcast", "ring", NODES, root=2)).splitlines()


def test_of_a_large_schedule_the_first_part_is_drawn_and_how_to_see_the_rest(said: Said) -> None:
    drawing = said("-n 20 --algorithm ring")[1]
    assert drawing[0].split()[-1] == "7"
    assert "… 12 of 20 ranks are not drawn" in drawing
    assert drawing[-1] == "--svg FILE draws all of it"


def test_a_drawing_fits_into_the_terminal(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    drawing = said("-n 6 --algorithm ring")[1]
    assert drawing[0] == "step  rank 0       rank 1       rank 2       rank 3"
    assert "… 2 of 6 ranks are not drawn" in drawing


@pytest.mark.parametrize(
    "line",
    [
        "-n 64 --algorithm tree",
        "--nodes 3,1,4 --algorithm hierarchical --check",
        "-n 8 --algorithm two_shot --transport shm",
        "-n 9 --collective all_to_all --algorithm direct",
        "--pipeline zero_bubble --stages 8 --splits 16 --check",
    ],
)
def test_without_a_terminal_every_line_fits_80_columns(
    said: Said, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.delenv("COLUMNS")
    assert max(len(each) for section in said(line) for each in section) <= 80


def test_rows_of_a_table_are_not_wrapped(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    _, _, traffic, prices = said("--nodes 7,5,4 --bytes 3G")
    assert all(row.split()[0][0].isdigit() for row in traffic[1:])
    assert all(row.endswith(" µs") for row in prices[3:9])


def test_ranks_that_do_alike_share_a_row(said: Said) -> None:
    assert said("-n 4 --algorithm ring --bytes 1M")[2] == [
        "ranks  steps  sends bytes           receives bytes",
        "0-3        6    1,572,864  (1.50x)       1,572,864  (1.50x)",
    ]


def test_rows_of_ranks_that_differ_are_bounded(said: Said) -> None:
    lines = said("-n 40 --collective broadcast --algorithm ring --bytes 4")[2]
    assert len(lines) <= 1 + 16 + 1


def bytes_moved(text: Sequence[str], size: int) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends and receives by the table."""
    moved = [(-1, -1)] * size
    for line in text[1:]:
        ranks, _, sent, *_, received = [w for w in line.split() if not w.startswith("(")]
        for run in ranks.split(","):
            low, _, high = run.partition("-")
            for rank in range(int(low), int(high or low) + 1):
                moved[rank] = int(sent.replace(",", "")), int(received.replace(",", ""))
    return moved


def planned(plan: Plan) -> tuple[int, int]:
    """The bytes that a rank's plan sends and receives, message by message."""
    steps = [step for index in range(plan.slices) for step in plan.slice(index).steps]
    both = ([m.span for s in steps for m in s.sends], [m.span for s in steps for m in s.recvs])
    sent, received = (sum(s.stop - s.start for s in spans) * plan.itemsize for spans in both)
    return sent, received


@pytest.mark.parametrize("nbytes", [0, 4, 4 * 1009, 4 << 20])
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [pair for pair in EVERY_ALGORITHM if pair[0] in ("all_reduce", "reduce_scatter", "all_gather")],
)
def test_bytes_are_those_that_would_be_sent(
    said: Said, collective: str, algorithm: str, nbytes: int
) -> None:
    nodes = tuple(map(tuple, block_layout(2, 3)))
    what = f"--collective {collective} --algorithm '{algorithm}' --bytes {nbytes}"
    table = said(f"--nodes 2,3 {what}")[2]
    schedule = build(collective, algorithm, nodes)
    slices = slice_count(schedule, nbytes, nodes, Config())
    count, wanted = nbytes // 4, []
    for rank in range(5):
        if collective == "all_reduce":
            plan = plan_whole(schedule, rank, count, 4, slices)
        else:
            plan = plan_parts(schedule, rank, shard_counts(count, 5), 4, slices)
        wanted.append(planned(plan))
    assert bytes_moved(table, 5) == wanted


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_candidate_is_priced_the_cheapest_first(said: Said, collective: str) -> None:
    choice = choose(collective, NODES, 1 << 20, Config())
    rows = priced(said(f"--nodes 2,1 --collective {collective}"))
    assert {name: seconds for name, seconds, _ in rows} == {
        name: f"{1e6 * seconds:,.1f}" for name, seconds in choice.predicted_s.items()
    }
    assert [row[0] for row in rows] == sorted(choice.predicted_s, key=choice.predicted_s.get)


@pytest.mark.parametrize("nodes", ["4", "2,2", "1,1,1,1"])
def test_it_is_said_what_auto_takes_and_what_is_shown(said: Said, nodes: str) -> None:
    layout = block_layout(*map(int, nodes.split(",")))
    auto = resolve("all_reduce", "auto", tuple(map(tuple, layout)), 1 << 20, Config())
    prices = said(f"--nodes {nodes} --algorithm hierarchical")[3]
    assert [line.split()[0] for line in prices if "auto takes it" in line] == [auto]
    assert [line.split()[0] for line in prices if "shown here" in line] == ["hierarchical"]


def notes(said: Said, line: str) -> dict[str, str]:
    """Return the words behind the time of each algorithm in the table of prices."""
    return {name: words for name, _, words in priced(said(line))}


def priced(sections: list[list[str]]) -> list[tuple[str, str, str]]:
    """Return the name of each candidate of the table of prices, its µs, and the words behind."""
    row = r"(\S+(?: \w+\))?) +([\d,.]+) µs *(.*)"
    whole = "\n".join(sections[3][1:-1]).replace("\n    ", " ")
    return [found.groups() for found in map(re.compile(row).fullmatch, whole.splitlines()) if found]


TIE = "auto takes it: the first in the list within 2 % of the cheapest; shown here"


def test_auto_shows_what_auto_takes(said: Said) -> None:
    marks = notes(said, "--nodes 2,1")
    assert marks["hierarchical"] == f"cheapest; {TIE}"
    assert not any(mark for name, mark in marks.items() if name != "hierarchical")


def test_of_almost_equal_algorithms_the_first_is_taken(said: Said) -> None:
    marks = notes(said, "-n 3 --collective broadcast --bytes 32K")
    assert {name: mark for name, mark in marks.items() if mark} == {
        "double_tree": "cheapest",
        "tree": TIE,
    }


def test_of_equal_algorithms_the_first_is_taken(said: Said) -> None:
    marks = notes(said, "-n 2 --collective broadcast")
    assert {name: mark for name, mark in marks.items() if mark} == {"ring": f"cheapest; {TIE}"}


def test_the_only_candidate_is_taken_for_that_reason(said: Said) -> None:
    marks = notes(said, "-n 3 --collective barrier --bytes 0")
    assert marks == {"dissemination": "auto takes it: the only candidate; shown here"}


def test_an_algorithm_that_auto_does_not_price_says_so(said: Said) -> None:
    marks = notes(said, "-n 3 --algorithm hierarchical")
    assert marks["hierarchical"] == "auto does not price it; shown here"


@pytest.mark.parametrize(
    ("nbytes", "end"), [("1M", "profile"), ("1000", "; the times are those of 1 KiB")]
)
def test_the_size_that_is_priced_is_said(said: Said, nbytes: str, end: str) -> None:
    assert said(f"-n 2 --bytes {nbytes} --algorithm ring")[3][-1].endswith(end)


# --- any cluster ----------------------------------------------------------------------------------


def test_candidates_that_need_no_price_are_the_last(said: Said) -> None:
    config = Config(node_memory=Memory(single_copy=False, crowded=False))
    choice = choose("all_reduce", parse_nodes((8,) * 16, 128), 64, config)
    assert choice.algorithm == "hierarchical(leader, doubling)"
    assert len(choice.more_than_s) == 5
    sections = said("--nodes 16x8 --bytes 64")
    assert next(name for name, *_ in priced(sections)) == choice.algorithm
    others = sections[3][-1 - len(choice.more_than_s) : -1]
    bounds = sorted(choice.more_than_s.items(), key=lambda item: item[1])
    assert [" ".join(line.split()) for line in others] == [
        f"{name} more than {1e6 * seconds:,.1f} µs" for name, seconds in bounds
    ]


def test_an_algorithm_that_is_shown_has_a_price(said: Said) -> None:
    rows = said("--nodes 16x8 --bytes 64 --algorithm ring")[3][1:-1]
    ring = next(line for line in rows if line.startswith("ring"))
    assert "more than" not in ring
    assert ring.endswith("shown here")


def test_json_has_the_bounds_of_what_is_not_priced(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--nodes", "16x8", "--bytes", "64", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    config = Config(node_memory=Memory(single_copy=False, crowded=False))
    choice = choose("all_reduce", parse_nodes((8,) * 16, 128), 64, config)
    assert printed["predicted_s"].keys() == choice.predicted_s.keys()
    assert printed["more_than_s"] == choice.more_than_s


@pytest.mark.parametrize("nodes", ["2x3,1,4", "3,3,1,4", "2x3,1x1,1x4"])
def test_equal_nodes_can_be_counted(said: Said, nodes: str) -> None:
    assert " · 11 ranks on nodes of 3, 3, 1 and 4 · " in said(f"--nodes {nodes}")[0][0]


@pytest.mark.parametrize(
    ("link", "alpha_s", "beta_s_per_byte", "words"),
    [
        ("400gbit,2us", 2e-6, 8 / 400e9, "400 Gbit/s and 2 µs"),
        ("2.5gbit,0.05ms", 50e-6, 8 / 2.5e9, "2.5 Gbit/s and 50 µs"),
        ("1tbit,500ns", 0.5e-6, 8e-12, "1000 Gbit/s and 0.5 µs"),
        ("100mbit,0s", 0.0, 8e-8, "0.1 Gbit/s and 0 µs"),
    ],
)
def test_the_link_between_nodes_can_be_stated(
    said: Said, link: str, alpha_s: float, beta_s_per_byte: float, words: str
) -> None:
    stated = replace(
        Profile().between_nodes,
        alpha_s=pytest.approx(alpha_s),
        beta_s_per_byte=pytest.approx(beta_s_per_byte),
    )
    assert cli._link(link) == stated
    config = Config(profile=Profile(between_nodes=cli._link(link)))
    choice = choose("all_reduce", NODES, 1 << 20, config)
    prices = said(f"--nodes 2,1 --link {link}")[3]
    assert f"{1e6 * choice.predicted_s['ring']:,.1f} µs" in "".join(prices)
    assert prices[-1].endswith(f"{words} between nodes, other links as in the default profile")


@pytest.mark.parametrize(
    ("collective", "rows"),
    [
        ("all_reduce", [("0-159", "318", "2,605,056", "2,605,056")]),
        (
            "broadcast",
            [
                ("0", "159", "1,310,720", "0"),
                ("1-158", "159", "1,310,720", "1,310,720"),
                ("159", "159", "0", "1,310,720"),
            ],
        ),
    ],
)
def test_ranks_of_a_large_job_share_a_row_if_their_claims_are_the_same(
    said: Said, collective: str, rows: list[tuple[str, ...]]
) -> None:
    line = f"--nodes 20x8 --collective {collective} --algorithm ring --bytes 1310720"
    words = [row.split() for row in said(line)[2][1:]]
    assert [(ranks, steps, sent, into) for ranks, steps, sent, _, into, _ in words] == rows


@pytest.mark.slow
def test_ten_thousand_ranks_are_explained(said: Said) -> None:
    parts = said("--nodes 1250x8 --link 400gbit,2us --bytes 1M")
    assert "10000 ranks on 1250 nodes of 8" in parts[0][0]
    assert sum("auto takes it" in line for line in parts[3]) == 1
    assert sum("more than" in line for line in parts[3]) >= 1


# --- shared memory or messages --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("-n 2", "by messages"),
        ("-n 2 --transport mpi", "by messages"),
        ("--nodes 2,1", "by messages"),
        ("-n 2 --transport shm", "through shared memory"),
    ],
)
def test_the_first_line_says_how_ranks_exchange_data(said: Said, line: str, how: str) -> None:
    assert said(line)[0][0].endswith(f" · {how}")


def test_more_ranks_than_cores_are_named(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = replace(IN_MEMORY, crowded=True)
    monkeypatch.setattr(example_call, "memory_of_job", lambda *_: crowded)
    assert said("-n 2")[0][0].endswith(" · through shared memory, more ranks than cores")


def test_a_quick_kernel_is_named(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_call, "memory_of_job", lambda *_: replace(IN_MEMORY, quick=True))
    assert said("-n 2")[0][0].endswith(" · through shared memory, quick copies by the kernel")


def test_shared_memory_has_prices_of_its_own(said: Said) -> None:
    choice = choose("all_reduce", ((0, 1, 2),), 1 << 20, Config(memory=IN_MEMORY))
    rows = [line.split() for line in said("-n 3 --transport shm")[3][1:-1]]
    assert {name: seconds for name, seconds, *_ in rows} == {
        name: f"{1e6 * seconds:,.1f}" for name, seconds in choice.predicted_s.items()
    }


FOUND = {"shared": True, "single_copy": True}


@pytest.mark.parametrize(
    ("found", "transport", "variable", "memory"),
    [
        (FOUND, None, None, (True, False)),
        (FOUND | {"single_copy": False}, None, None, (False, False)),
        (FOUND | {"writes": True, "quick": True}, None, None, (True, False, True, True)),
        ({"shared": False, "single_copy": False}, None, None, None),
        ({"shared": False, "single_copy": False}, "shm", None, (False, False)),
        (None, None, None, None),
        (FOUND, "mpi", None, None),
        (FOUND, None, "mpi", None),
        (FOUND, "shm", "mpi", (True, False)),
    ],
)
def test_a_job_here_shares_memory_if_it_can(monkeypatch, found, transport, variable, memory):
    answer = ProbeResult([] if found is None else [found])
    monkeypatch.setattr(example_call, "ask", lambda probe: answer)
    monkeypatch.setattr(example_call, "usable", lambda: 4)
    monkeypatch.delenv("RINGREDUCE_TRANSPORT", raising=False)
    if variable:
        monkeypatch.setenv("RINGREDUCE_TRANSPORT", variable)
    assert memory_of_job(4, transport) == (memory and Memory(*memory))


@pytest.mark.parametrize(("ranks", "crowded"), [(4, False), (5, True)])
def test_a_job_is_crowded_if_it_has_more_ranks_than_cores(monkeypatch, ranks, crowded):
    monkeypatch.setattr(example_call, "ask", lambda probe: ProbeResult([FOUND]))
    monkeypatch.setattr(example_call, "usable", lambda: 4)
    monkeypatch.delenv("RINGREDUCE_TRANSPORT", raising=False)
    assert memory_of_job(ranks) == Memory(single_copy=True, crowded=crowded)


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("RINGREDUCE_TRANSPORT", "tcp", "is 'tcp'; wanted auto, mpi, sockets or shm"),
        ("RINGREDUCE_TIMEOUT_S", "soon", "is 'soon'"),
    ],
)
def test_a_variable_that_no_job_would_take_is_refused(
    monkeypatch, capsys, variable, value, complaint
):
    monkeypatch.setattr(example_call, "memory_of_job", memory_of_job)
    monkeypatch.setenv(variable, value)
    assert cli.main(["explain", "-n", "2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    named = f"ringreduce explain: environment variable {variable}"
    assert printed.err.startswith(f"{named} {complaint}")


@pytest.mark.slow
def test_without_compiled_functions_a_job_sends_messages(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    facts = "shared", "single_copy", "writes", "quick"
    assert ask("memory").lines == [dict.fromkeys(facts, False)]


COLLECTIVES = [name for name in ALGORITHMS if name != "barrier"]
EVERY_SIZE = [8 << power for power in range(24)]
SOME_SIZES = EVERY_SIZE[::5] + EVERY_SIZE[-1:]
CASES = [
    (collective, nbytes)
    for collective in COLLECTIVES
    for nbytes in (EVERY_SIZE if collective == "all_reduce" else SOME_SIZES)
]
"""Collectives, and bytes from 8 to 64 Mi."""


NOT_WHERE_MPI_IS_SET = pytest.mark.skipif(
    os.environ.get("RINGREDUCE_TRANSPORT") == "mpi",
    reason="(4, None) sends messages too where the environment sets mpi",
)


def choices() -> list[dict[str, Any]]:
    """Run by each rank of a job: what the communicator takes in each of the cases."""
    with rr.init() as comm:
        found = [comm.explain(nbytes, collective=collective) for collective, nbytes in CASES]
    return [as_json(choice) for choice in found]


def as_json(choice: Choice) -> dict[str, Any]:
    return {
        "algorithm": choice.algorithm,
        "cheapest": choice.cheapest,
        "transport": choice.transport,
        "predicted_s": dict(choice.predicted_s),
    }


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "transport"),
    [(2, None), (5, None), pytest.param(4, "mpi", marks=NOT_WHERE_MPI_IS_SET)],
    ids=str,
)
def test_a_job_takes_what_explain_shows(
    mpi: MpiJobs,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    transport: str | None,
) -> None:
    variables = {"RINGREDUCE_TRANSPORT": transport} if transport else {}
    in_job = mpi.run_ok("call", ranks, f"{__name__}:choices", **variables)
    of_host = cache(memory_of_job)  # which asks the host once for all cases
    monkeypatch.setattr(example_call, "memory_of_job", of_host)
    shown = []
    for collective, nbytes in CASES:
        line = f"-n {ranks} --collective {collective} --bytes {nbytes} --json"
        more = ["--transport", transport] if transport else []
        assert cli.main(["explain", *line.split(), *more]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert all(found == shown for found in in_job)


# --- JSON -----------------------------------------------------------------------------------------


def test_json_is_the_choice_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "-n", "3", "--json", "--transport", "shm", "--bytes", "4K"]) == 0
    choice = choose("all_reduce", ((0, 1, 2),), 4096, Config(memory=IN_MEMORY))
    printed = json.loads(capsys.readouterr().out)
    assert printed == as_json(choice)
    assert next(iter(printed["predicted_s"])) == choice.cheapest


def test_json_names_the_algorithm_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "-n", "4", "--json", "--algorithm", "torus"]) == 0
    assert json.loads(capsys.readouterr().out)["algorithm"] == "torus"


def test_json_with_a_picture_is_json_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "picture.svg"
    assert cli.main(["explain", "-n", "2", "--json", "--check", "--svg", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)
    assert file.exists()


# --- colours --------------------------------------------------------------------------------------


GREEN, RED, BOLD = "\x1b[32m", "\x1b[31m", "\x1b[1m"


@pytest.fixture
def coloured(said: Said, monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return said


def test_the_line_that_is_taken_is_green_and_the_cheapest_is_bold(coloured: Said) -> None:
    prices = coloured("-n 3 --collective broadcast --bytes 32K")[3]
    painted = [line.split()[0] for line in prices if "\x1b" in line]
    assert painted == [f"{BOLD}double_tree", f"{GREEN}tree"]


def test_what_is_proven_is_green(coloured: Said) -> None:
    assert coloured("-n 2 --check")[4][0] == f"{GREEN}proven:\x1b[0m"


def test_into_a_file_nothing_is_coloured(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert not any("\x1b" in line for section in said("-n 2 --check") for line in section)


# --- the proof ------------------------------------------------------------------------------------


def test_it_says_what_has_been_proven(said: Said) -> None:
    assert said("-n 4 --algorithm ring --check")[4] == [
        "proven:",
        "  every result holds every contribution exactly once",
        "  all ranks form the same expression, hence the same bits",
        "  chunk 0 is (0, ((1, 2), 3))",
        "  every send meets one receive of the same chunks: 24 messages, none left",
        "  no deadlock, even when every send waits for its receive",
        "  no step races with itself",
        "  steps and chunks are as claimed: up to 6 steps, 24 chunks moved",
        "  chunks are held before and after by those whom all_reduce promises them",
    ]


def test_a_barrier_has_no_results_but_hears_from_everybody(said: Said) -> None:
    proven = said("-n 4 --collective barrier --check --bytes 0")[4]
    assert proven[-1] == "  nobody leaves before having heard from everybody"
    assert not any("contribution" in line for line in proven)


@pytest.mark.slow
def test_a_long_expression_is_cut(said: Said) -> None:
    proven = said("-n 64 --algorithm ring --check")[4]
    assert proven[3].endswith(" …")
    assert len(proven[3]) < 80


def test_without_check_nothing_is_said_to_be_proven(said: Said) -> None:
    assert len(said("-n 4")) == 4


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Schedule], None]:
    """Puts a schedule among the all-reduces, under the name of ``mine``."""

    def put(schedule: Schedule) -> None:
        monkeypatch.setitem(REGISTERED, ("all_reduce", "mine"), lambda nodes, root: schedule)

    return put


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """Return the output of `explain` for a schedule that is wrong."""
    assert cli.main(["explain", *line.split()]) == 1
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_a_contribution_counted_twice_is_shown_where_it_happens(
    offer: Callable[[Schedule], None], capsys: pytest.CaptureFixture[str]
) -> None:
    ring = build("all_reduce", "ring", block_layout(3))
    ranks = steps_of(ring)
    arrives = ranks[1][3].recvs[0]
    ranks[1][3] = replace(ranks[1][3], recvs=(replace(arrives, reduce=True),))
    offer(with_steps(ring, ranks))
    text = refused(capsys, "-n 3 --algorithm mine --check")
    assert "!>2:0 <0:2+" in text
    assert "! did not finish: rank 1 in step 3" in text
    assert "NOT proven: all_reduce ring of 3 ranks: step 3: rank 1 folds chunk 2" in text
    assert "predicted" not in text


def test_of_a_deadlock_all_who_wait_are_marked(
    offer: Callable[[Schedule], None], capsys: pytest.CaptureFixture[str]
) -> None:
    offer(written("rank 0\n <1:0+\n >1:0\nrank 1\n <0:0+\n >0:0"))
    text = refused(capsys, "-n 2 --algorithm mine --check")
    assert "! did not finish: rank 0 in step 0, rank 1 in step 0" in text


def test_what_is_wrong_at_the_end_marks_no_step(
    offer: Callable[[Schedule], None], capsys: pytest.CaptureFixture[str]
) -> None:
    offer(written("rank 0\n -\nrank 1\n -"))
    text = refused(capsys, "-n 2 --algorithm mine --check")
    assert "NOT proven: all_reduce written of 2 ranks: at the end chunk 0 on rank 0 lacks" in text
    assert "did not finish" not in text


def test_what_cannot_be_priced_says_so(
    offer: Callable[[Schedule], None], capsys: pytest.CaptureFixture[str]
) -> None:
    offer(written("rank 0\n <1:0+\n >1:0\nrank 1\n <0:0+\n >0:0"))
    text = refused(capsys, "-n 2 --algorithm mine")
    assert "ringreduce explain: the schedule cannot finish" in text


# --- files ----------------------------------------------------------------------------------------


def test_an_svg_is_written(said: Said, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert said(f"--nodes 2,1 --svg {file}")[-1] == [f"wrote {file}"]
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert file.read_text().count('class="node"') == 2


def test_one_node_is_not_framed(said: Said, tmp_path: Path) -> None:
    said(f"-n 3 --svg {tmp_path / 'picture.svg'}")
    assert 'class="node"' not in (tmp_path / "picture.svg").read_text()


def test_a_png_is_written(said: Said, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    file = tmp_path / "picture.png"
    assert said(f"-n 3 --png {file}")[-1] == [f"wrote {file}"]
    assert file.read_bytes().startswith(b"\x89PNG")


def test_two_pictures_are_laid_out_once(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("resvg_py")
    layouts = []
    monkeypatch.setattr(explain, "to_svg", lambda *drawn: layouts.append(drawn) or to_svg(*drawn))
    said(f"-n 3 --svg {tmp_path / 'picture.svg'} --png {tmp_path / 'picture.png'}")
    assert len(layouts) == 1


def test_a_png_without_its_library_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    text = refused(capsys, f"-n 3 --png {tmp_path / 'picture.png'}")
    assert "pip install 'ringreduce[plot]'" in text


@pytest.mark.parametrize("file", ["/nowhere/x.svg", "/proc/x.svg", "/sys/x.svg"])
def test_a_file_that_cannot_be_written_exits_with_2(
    capsys: pytest.CaptureFixture[str], file: str
) -> None:
    assert cli.main(["explain", "-n", "2", "--svg", file]) == 2
    assert file in capsys.readouterr().err


@pytest.mark.parametrize("file", ["/nowhere/x.svg", "folder.svg"])
def test_a_file_is_checked_before_anything_is_computed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.svg").mkdir()
    assert cli.main(["explain", "-n", "2", "--svg", file]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    explain = [sys.executable, "-m", "ringreduce", "explain", "-n", "40"]
    ended = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -n 1', "bash", *explain],
        capture_output=True,
        text=True,
    )
    said = [line for line in ended.stderr.splitlines() if "Ctrl-C ends it" not in line]
    assert (ended.returncode, said) == (0, [])


# --- nonsense -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("-n two", "invalid int value: 'two'"),
        ("--nodes 3,,4", "wanted the ranks of each node"),
        ("--nodes 4x", "'4x'; wanted the ranks of each node, as in 3,1,2, or 16x8 for 16 nodes"),
        ("--nodes 0x4", "wanted the ranks of each node"),
        ("--nodes 4x0", "wanted the ranks of each node"),
        ("--nodes 2,2 --link fast", "'fast' is no link; wanted its rate and its latency, as in"),
        ("--nodes 2,2 --link 10gbit", "as in 10gbit,10us"),
        ("--nodes 2,2 --link 0gbit,1us", "'0gbit,1us' is no link"),
        ("--nodes 2,2 --link 10gbit,-1us", "'10gbit,-1us' is no link"),
        ("--nodes 2,2 --link 10GB,1us", "'10GB,1us' is no link"),
        ("-n 4 --link 10gbit,10us", "--link is the network between nodes; name several with"),
        ("--pipeline 1f1b --stages 4 --link 1gbit,1us", "--link is for a collective"),
        ("-n 4 --transport tcp", "unknown transport 'tcp'; choose shm or mpi"),
        ("--nodes 2,2 --transport shm", "--transport shm needs all ranks on one node"),
        ("-n 4 --root -1", "root -1 is none of the ranks 0 to 3"),
        ("-n 4 --bytes -1", "'-1' is no size"),
        ("-n 4 now", "unrecognized arguments: now"),
        ("-n 4 --svg x", "--svg x: wanted a name that ends in .svg"),
        ("--pipeline 1f1b", "how many ranks has the pipeline? --stages 4"),
        ("--pipeline 1f1b --stages two", "argument --stages: invalid int value: 'two'"),
        ("--pipeline 1f1b --stages 4 --virtual 0", "--virtual is 0; wanted at least 1"),
        ("--pipeline 1f1b --stages 4 --splits -1", "--splits is -1; wanted at least 1"),
        ("--pipeline 1f1b --stages 4 --png x.svg", "--png x.svg: wanted a name that ends in .png"),
        ("--pipeline 1f1b --stages 4 --json", "--json is for a collective, not for --pipeline"),
        ("--pipeline 1f1b --stages 4 --nodes 2,2", "--nodes is for a collective"),
        ("--pipeline 1f1b --stages 4 --root 1", "--root is for a collective"),
        ("-n 4 --stages 4", "--stages is for a pipeline; add --pipeline"),
        ("-n 4 --virtual 2", "--virtual is for a pipeline; add --pipeline"),
    ],
)
def test_a_usage_error_exits_with_2_and_says_why(
    capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", *line.split()])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_example_of_runs_is_true() -> None:
    assert doctest.testmod(importlib.import_module("ringreduce.schedules.ranges")) == (0, 1)
