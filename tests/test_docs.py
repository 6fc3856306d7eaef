"""Every code block of every page runs, and prints what the page says that it prints."""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks import one_host
from ringreduce.algorithms import ALGORITHMS
from ringreduce.picture.scales import size_text
from tests.support.mnist import mnist
from tests.support.mpi import ROOT, mpiexec, output_of
from tests.test_examples import one_after_another

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.M | re.S)
README_COMMANDS = 2
"""The README's shell blocks, which `.ci/run` runs word for word in a clean environment."""


@dataclass
class Block:
    page: Path
    language: str
    code: str
    prints: str | None

    def __str__(self) -> str:
        return f"{self.page.name}: {self.code.strip().splitlines()[0][:40]}"


def blocks() -> list[Block]:
    return [
        Block(page, *match.groups()) for page in PAGES for match in FENCE.finditer(page.read_text())
    ]


def words(command: list[str]) -> list[str]:
    """Return a command with this environment's interpreter and MPI, and with smaller arrays."""
    ringreduce = [sys.executable, "-m", "ringreduce.launch.cli"]
    stands_for = {"ringreduce": ringreduce, "mpirun": [mpiexec()], "python": [sys.executable]}
    stands_for["16M"] = ["1M"]
    return [part for word in command for part in stands_for.get(word, [word])]


NAMED = re.compile(r"# (\w+\.(?:py|toml))\n")
"""The first line of a file that commands of its page use."""
PYTHON = [b for b in blocks() if b.language == "python" and not NAMED.match(b.code)]
OVER_MPI = [
    block
    for block in PYTHON
    if re.search(r"rr\.(init|wrap)\(", block.code) and "__main__" not in block.code
]
"""Programs that a launcher starts.  Others start their ranks themselves."""


def marks(block: Block) -> list[pytest.MarkDecorator]:
    """Return the marks of a block that runs alone: it needs a GPU or a library.

    A block of the README that starts its ranks itself is a smoke test.
    """
    found = [pytest.mark.gpu] * ("import cupy" in block.code)
    found += [pytest.mark.jax] * ("import jax" in block.code)
    found += [pytest.mark.torch] * ("import torch" in block.code)
    found += [pytest.mark.keras, pytest.mark.torch] * ("import keras" in block.code)
    found += [pytest.mark.tensorflow] * ("import tensorflow" in block.code)
    found += [pytest.mark.slow] * ("__main__" in block.code)
    if block in OVER_MPI:
        return found and [pytest.mark.mpi, *found]
    return found + [pytest.mark.smoke] * (block.page.name == "README.md")


ALONE = [pytest.param(block, marks=marks(block), id=str(block)) for block in PYTHON if marks(block)]


@pytest.mark.parametrize("block", ALONE)
def test_a_block_prints_what_the_page_says(block, tmp_path):
    (tmp_path / "block.py").write_text(block.code)
    start = ["ringreduce", "run", "-n", "4"] if block in OVER_MPI else ["python"]
    printed = output_of(words([*start, "block.py"]), tmp_path, KERAS_BACKEND="torch")
    assert printed == (block.prints or "")


def write(folder: Path, *, over_mpi: bool) -> dict[str, Block]:
    """Write the blocks that need not run alone.  Returns them by the names of their files."""
    chosen = [block for block in PYTHON if (block in OVER_MPI) is over_mpi and not marks(block)]
    named = {f"{number}_{block.page.stem}": block for number, block in enumerate(chosen)}
    for name, block in named.items():
        (folder / f"{name}.py").write_text(block.code)
    return named


@pytest.mark.slow
def test_blocks_print_what_the_pages_say_each_in_a_fork(tmp_path):
    named = write(tmp_path, over_mpi=False)
    output_of([sys.executable, "-m", "tests.support.programs.forks", *named], tmp_path)
    printed = {name: (tmp_path / name / "printed").read_text() for name in named}
    assert printed == {name: block.prints or "" for name, block in named.items()}


@pytest.mark.mpi
@pytest.mark.parametrize("start", ["ringreduce run -n 4", "mpirun -n 4 python"])
def test_blocks_over_mpi_print_what_the_pages_say_one_after_another(start, tmp_path):
    named = write(tmp_path, over_mpi=True)
    (tmp_path / "script.py").write_text(one_after_another(f"{name}.py" for name in named))
    printed = output_of(words([*start.split(), "script.py"]), tmp_path)
    assert printed == "".join(block.prints for block in named.values())


FILE = r"\w+\.(jsonl?|png|svg|toml)"
COMMAND = re.compile(
    r"^    ((?:ringreduce|mpirun|python) [^\n]*)$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S
)
"""A command, and its output if the page shows it."""
NEEDS_JAX = "--strategy tpu"


def commands(page: Path, *, with_jax: bool = False) -> list[tuple[list[str], str]]:
    """Return the words and the output of the commands of a page that need JAX, or need none."""
    found = COMMAND.findall(page.read_text())
    return [(line.split(), output) for line, output in found if (NEEDS_JAX in line) is with_jax]


SLOW = {
    *("compare.md", "performance.md", "search.md", "seeing.md", "strategies.md", "trace.md"),
    "training.md",
}
"""Pages whose commands compute for five seconds or longer."""
WITH_COMMANDS = [page for page in PAGES if commands(page)]
WITH_JAX = [page for page in PAGES if commands(page, with_jax=True)]


@pytest.mark.mpi
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] * (page.name in SLOW), id=page.name)
        for page in WITH_COMMANDS
    ],
)
def test_the_commands_of_a_page_run_one_after_another(page, tmp_path):
    run_commands(page, commands(page), tmp_path)


@pytest.mark.mpi
@pytest.mark.jax
@pytest.mark.parametrize("page", WITH_JAX, ids=lambda page: page.name)
def test_the_commands_of_a_page_that_need_jax_run(page, tmp_path):
    run_commands(page, commands(page, with_jax=True), tmp_path)


def run_commands(page: Path, shown: list[tuple[list[str], str]], tmp_path: Path) -> None:
    """Run commands in a folder with the files that the page shows, and a small one like MNIST's."""
    for block in blocks():
        if block.page == page and (named := NAMED.match(block.code)):
            (tmp_path / named[1]).write_text(block.code)
    (tmp_path / "mnist").mkdir()
    mnist(tmp_path / "mnist")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for command, output in shown:
        printed = output_of(words(command), tmp_path)
        if output:
            assert re.fullmatch(pattern(output), printed), f"wanted:\n{output}\n{printed}"
    written = {word for command, _ in shown for word in command if re.fullmatch(FILE, word)}
    assert all((tmp_path / name).exists() for name in written), written


def pattern(output: str) -> str:
    """A pattern for an output, in which … stands for a number, and a line of … for any lines."""
    lines = re.split(r"^…\n", output, flags=re.M)
    return r"(?:.*\n)*".join(re.escape(part).replace("…", r"[\d.,]+") for part in lines)


@pytest.mark.parametrize(
    ("printed", "fits"),
    [
        ("a\nb 1.5 s\nc\n", True),
        ("a\nx\ny\nb 1,500 s\nc\n", True),
        ("a\nb  s\nc\n", False),
        ("a\nx b 1 s\nc\n", False),
        ("a\nb 1 s\nc\nd\n", False),
    ],
)
def test_a_shown_output_is_compared_with_what_is_printed(printed, fits):
    assert bool(re.fullmatch(pattern("a\n…\nb … s\nc\n"), printed)) is fits


def test_pages_have_commands():
    names = [
        "compare.md",
        "search.md",
        "trace.md",
        "performance.md",
        "seeing.md",
        "strategies.md",
        "training.md",
    ]
    assert [page.name for page in WITH_COMMANDS] == names
    assert [page.name for page in WITH_JAX] == ["strategies.md"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table", "compared"])
def test_the_tables_of_strategies_are_computed(name):
    program = f"import strategies; print(strategies.{name}())"
    printed = output_of([sys.executable, "-c", program], ROOT / "docs")
    page = (ROOT / "docs/strategies.md").read_text()
    assert f"<!-- {name} -->\n\n{printed}\n<!-- end -->" in page


def test_the_pages_have_no_other_blocks():
    others = ("console", "python", "text", "toml")
    commands = [block for block in blocks() if block.language not in others]
    assert [block.page.name for block in commands] == ["README.md"] * README_COMMANDS
    assert len(PYTHON) > 5
    assert OVER_MPI


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_the_generator_on_the_page_is_the_one_that_runs():
    source = (ROOT / "ringreduce/algorithms/ring.py").read_text()
    shown = next(b.code for b in PYTHON if "def ring_reduce_scatter" in b.code)
    body = shown.split('chunks[me]."""\n')[1]
    assert body in source


WITH_LINKS = [*PAGES, ROOT / "examples/README.md"]


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r'\]\(([^)#]+)\)|\b(?:src|srcset)="([^"]+)"', page.read_text())
    for target in (inline or attribute for inline, attribute in links):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_no_row_has_a_path_of_the_machine_that_made_it():
    for path in (ROOT / "bench_results").iterdir():
        assert not re.search(r"[\" =]/(home|root|work|tmp|usr)/", path.read_text()), path.name


def rows(name: str, **facts: object) -> list[dict]:
    lines = (ROOT / f"bench_results/{name}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if facts.items() <= row.items()]


def test_the_figures_in_the_readme_are_those_of_the_rows():
    runs = {n: one_host._runs(rows("one_host", ranks=n, dtype="float32")) for n in (2, 4)}
    ratios = {n: one_host.speedups(runs[n], "ringreduce") for n in runs}
    two, four = (f"{statistics.geometric_mean(each.values()):.1f}" for each in ratios.values())
    least = min(min(each.values()) for each in ratios.values())
    torch = rows("torch", ranks=2, collective="all_reduce")
    ours = [row["gloo_us"] / row["ours_us"] for row in torch]
    ddp = [1 / r["registered_of_gloo"] for r in rows("torch_ddp", ranks=2) if "registered_ms" in r]
    figures = [
        f"is {two} times (2 ranks) and {four} times (4 ranks) as fast as the fastest of Open MPI",
        f"from 8 B to {size_text(max(runs[2]))} ({size_text(max(runs[4]))} with 4 ranks)",
        f"at least {int(10 * least) / 10} times at every size",
        f"the largest comparison with an MPI has {max(r['ranks'] for r in rows('one_host'))} ranks",
        f"is then {int(min(ours))} to {int(max(ours))} times as fast as over Gloo",
        f"The communication of a DDP step is {min(ddp):.1f} to {max(ddp):.1f} times as fast",
        f"{len(ALGORITHMS) - 1} other collective calls".replace("8", "eight"),
    ]
    for kills in rows("recovery", proof="live") + rows("recovery", proof="random"):
        if (kills["proof"] == "live") == ("Open MPI" in kills["mpi"]):
            counts, seconds = f"{kills['survived']} of {kills['kills']}", kills["recovered_s_p50"]
            figures.append(f"| {counts} | {seconds:.2f} s |")
    wrapped = [row["median_us"] for row in rows("wrapped", ranks=2)]
    faster = [int(us["allreduce of MPI"] / us["allreduce wrapped"]) for us in wrapped]
    figures.append(f"{min(faster)} to {max(faster)} times as fast as under three MPIs")
    of_mpi = [row["of_mpi"]["auto"] for row in rows("hosts", rate="1gbit")]
    figures.append(f"[{min(of_mpi):.2f} to {max(of_mpi):.1f} times]")
    readme = " ".join(PAGES[0].read_text().split())
    assert [figure for figure in figures if figure not in readme] == []


def test_a_generator_of_steps_has_at_most_fifteen_lines():
    trees = [ast.parse(path.read_text()) for path in ROOT.glob("ringreduce/algorithms/*.py")]
    found = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    steps = [n for n in found if any(isinstance(x, ast.Yield | ast.YieldFrom) for x in ast.walk(n))]
    bodies = [each.body[ast.get_docstring(each) is not None :] for each in steps]
    assert max(body[-1].end_lineno - body[0].lineno + 1 for body in bodies) == 15


def test_the_badges_of_the_readme_say_what_the_package_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = re.findall(r"!\[(.*?)\]\(https://img\.shields\.io/badge/(.*?)\)", PAGES[0].read_text())
    # In the address of a badge two hyphens stand for one.
    written = {text: unquote(address).replace("--", "-") for text, address in badges}
    python, licence = project["requires-python"].removeprefix(">=") + "+", project["license"]
    assert written == {
        f"Python {python}": f"Python-{python}-blue",
        licence: f"license-{licence}-blue",
    }
