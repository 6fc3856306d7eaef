"""The misuses of docs/messages.md, and the answers that the library gives to them.

    python -m tests.support.misuses

writes the answers into the page anew.  `tests.test_misuses` compares the answers with the page.
"""

from __future__ import annotations

import ast
import os
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpi4py
import numpy as np

import ringreduce as rr
from tests.support.mpi import ROOT

PAGE = ROOT / "docs/messages.md"
_ROW = re.compile(r"^\| (.*?) \|(?: (.*))? \|$")
_CODE = re.compile(r"(`+)(.*?)\1")


@dataclass(frozen=True)
class Misuse:
    """A row of the page: what was written, and what is answered, each line by line."""

    section: str
    wrote: str
    answer: str

    def __str__(self) -> str:
        return self.wrote


def misuses() -> list[Misuse]:
    """Return the rows of the page."""
    found, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        row = _ROW.match(line)
        if row and row[1] != "written":
            found.append(Misuse(section, _plain(row[1]), _plain(row[2] or "")))
    return found


def _plain(cell: str) -> str:
    """Return the text of a cell: its lines of code, or its words."""
    lines = [code.strip() if len(ticks) > 1 else code for ticks, code in _CODE.findall(cell)]
    return "\n".join(lines) or cell


def _cell(text: str) -> str:
    quoted = [f"`` {line} ``" if "`" in line else f"`{line}`" for line in text.splitlines()]
    return "<br>".join(quoted)


# --- one misuse -----------------------------------------------------------------------------------


class _Tensor:
    """Answers as a tensor of torch that requires a gradient does."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


_Tensor.__name__ = "Tensor"


class _Sparse:
    """Has the methods of a matrix of scipy.sparse that matter here."""

    def toarray(self) -> np.ndarray:
        return np.eye(4)


_Sparse.__name__ = "csr_matrix"
_TORCH = types.SimpleNamespace(ones=lambda *_, **__: _Tensor())
_SCIPY = types.SimpleNamespace(sparse=types.SimpleNamespace(eye=lambda _: _Sparse()))


def _in_a_forked_process(call: Callable[[], Any]) -> None:
    """Make a call in a child of this process, and raise its error here."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, _text_of(call).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        kind, _, text = pipe.read().decode().partition(": ")
    raise {"ValueError": ValueError}.get(kind, RuntimeError)(text)


def _text_of(call: Callable[[], Any]) -> str:
    """Return the type and text of the error of a call, or the text of its result."""
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _names(comm: rr.Communicator) -> dict[str, Any]:
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {
        **{"rr": rr, "np": np, "MPI": MPI, "comm": comm, "torch": _TORCH, "scipy": _SCIPY},
        **{"x": np.arange(4.0), "y": np.zeros(4), "n": np.arange(4)},
        "in_a_forked_process": _in_a_forked_process,
    }


def written(comm: rr.Communicator, code: str) -> str:
    """Run a line as a user writes it, and return what is answered: an error, or the result."""
    *before, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    names = _names(comm)

    def run() -> Any:
        exec(compile(ast.Module(before, []), code, "exec"), names)
        return eval(compile(ast.Expression(last.value), code, "eval"), names)

    return _text_of(run)


def by_one_rank(comm: rr.Communicator, code: str) -> str | None:
    """Run a line on rank 0 alone; the next call of all ranks must work.  Other ranks return None.

    The call before makes the fast path known to the communicator.
    """
    comm.all_reduce(np.arange(4.0))
    answer = written(comm, code) if comm.rank == 0 else None
    assert comm.all_reduce(comm.rank + 1).item() == 3
    return answer


def by_all_ranks(comm: rr.Communicator, code: str) -> str:
    """Run a line on all ranks; the next call must work if the communicator is still open."""
    answer = written(comm, code)
    if comm._engine.usable:
        assert comm.all_reduce(comm.rank + 1).item() == 3
    return answer


Program = Callable[[rr.Communicator, str], str | None]
ON_RANKS: dict[str, Program] = {
    **dict.fromkeys(
        (
            *("Names of other libraries", "The start", "Arrays", "Ops", "Roots", "Results"),
            *("Other arguments", "Algorithms of your own"),
        ),
        by_one_rank,
    ),
    **dict.fromkeys(
        ("Ranks that disagree", "After the end", "What looks wrong and is right"), by_all_ranks
    ),
}
"""Section -> what the ranks of a communicator do."""
NEEDS_MPI = "Ranks that start differently"
CONFIGS = {"messages": rr.Config(), "shared memory": rr.Config(shared_memory=True)}


def answer_of_threads(misuse: Misuse, config: rr.Config) -> str | None:
    """Return the answer, the same on all ranks that get one, of two ranks that are threads."""
    program = ON_RANKS[misuse.section]
    return _one(rr.spawn(program, 2, misuse.wrote, config=config, timeout_s=20))


def _one(answers: list[str | None]) -> str | None:
    got = dict.fromkeys(answer for answer in answers if answer is not None)
    return "\n".join(got)


def over_mpi(transport: str) -> dict[str, str | None]:
    """On each rank of an MPI job: what this rank is answered to each misuse."""
    answers = {}
    for misuse in misuses():
        program = ON_RANKS.get(misuse.section, by_all_ranks if misuse.section == NEEDS_MPI else None)
        if program is not None:
            with rr.init(transport=transport, timeout_s=20) as comm:
                answers[misuse.wrote] = program(comm, misuse.wrote)
    return answers


# --- the page -------------------------------------------------------------------------------------


def main() -> None:
    """Write the answers of ranks that are threads into the page."""
    text = PAGE.read_text()
    for misuse in misuses():
        if misuse.section in ON_RANKS:
            answer = answer_of_threads(misuse, CONFIGS["messages"]) or ""
            row = re.compile(rf"^\| {re.escape(_cell(misuse.wrote))} \|.*\|$", re.M)
            line = f"| {_cell(misuse.wrote)} | {_cell(answer)} |"
            text = row.sub(lambda _, line=line: line, text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
