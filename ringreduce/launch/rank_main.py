"""The program of each rank that `ringreduce run` starts: it runs the user's script or module.

The script or module runs as under `python`.  Rank 0 reads the launcher's standard input, the
others an empty one.  The program gains four things that plain mpiexec lacks:

- The rank ends when its launcher is killed.
- A rank that fails ends the job with its traceback and its exit code.
- Each rank keeps one core where every core gets the same number of ranks, of at least 2.
- Each rank has the variables of torchrun, such as RANK and MASTER_PORT.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from io import TextIOWrapper
from types import TracebackType

from ringreduce.errors import AllRanksEnd, MismatchError, PeerLostError
from ringreduce.recovery.wire import EXPECTED_SIZE, MORE_WORDS, Connection, to_launcher
from ringreduce.start.job import end_job, exit_code_of, install
from ringreduce.system import cores, place
from ringreduce.system.place import MPIS, RANK_VARIABLES, mpi_rank
from ringreduce.system.prctl import die_with_parent

_LONGEST = 512
"""Characters of the longest report."""


class Report:
    """Tells the launcher how a rank ends.  Without a launcher it tells nobody."""

    def __init__(self, launcher: Connection | None, environment: Mapping[str, str]) -> None:
        self._launcher = launcher
        names = (*RANK_VARIABLES, "RANK")
        rank = next((environment[name] for name in names if name in environment), "")
        if launcher is not None:
            launcher.send("hello", rank=rank)

    def end(self, how: str = "", code: int = 0, *, in_order: bool = False) -> None:
        """Report that this rank ends the job, and how; its exit code is `code`.

        With "" the rank ends but does not end the job; `in_order`: all ranks end with this
        code.  A child that the rank has forked reports nothing.
        """
        if self._launcher is not None:
            self._launcher.send("end", how=how[:_LONGEST], code=code, in_order=in_order)


def main() -> int:
    """Run the program as this rank of the job.  Returns its exit code.

    The words are a list in JSON: this process's argument, then the variables of `MORE_WORDS`.
    The working directory is not in `sys.path`.
    """
    pieces = [sys.argv[1]]
    while (piece := os.environ.pop(f"{MORE_WORDS}{len(pieces)}", None)) is not None:
        pieces.append(piece)
    program = json.loads("".join(pieces))
    die_with_parent()
    install()
    cores.keep_one(os.environ)
    place.fill(os.environ)
    complaint = size_complaint(os.environ)
    if complaint:
        print(complaint, file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not stream.isatty():
            # Ranks write to one file: a part of a line would mix with those of other ranks.
            stream.reconfigure(line_buffering=True, write_through=False)
    launcher = to_launcher()
    take_stdin(launcher, os.environ.get("RANK", "0"))
    report = Report(launcher, os.environ)  # its message lets the launcher note open connections
    return run(program, report)


def take_stdin(launcher: Connection | None, rank: str) -> None:
    """Have rank 0 read the launcher's standard input, and each other rank an empty one.

    Rank 0 keeps what mpiexec forwards: a terminal, or the input of a launcher on another host.
    """
    if rank != "0":
        file = os.open(os.devnull, os.O_RDONLY)
    elif launcher is not None and (answer := launcher.ask("stdin")) is not None and answer.files:
        (file,) = answer.files
    else:
        return
    os.dup2(file, 0)
    if file:
        os.close(file)
    # The stream of the start takes the kind of its file for granted, and is None without a file.
    encoding, errors = getattr(sys.stdin, "encoding", None), getattr(sys.stdin, "errors", None)
    sys.stdin = open(0, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115 - it stays


def size_complaint(environment: Mapping[str, str]) -> str:
    """Describe a wrong job size, else "".  `init` checks again, with the communicator's size."""
    expected = environment.get(EXPECTED_SIZE)
    started = {environment[names.size] for names in MPIS if names.size in environment}
    if expected is None or not started or expected in started:
        return ""
    return (
        f"ringreduce run: ranks that mpiexec started: {' or '.join(sorted(started))}, asked for: "
        f"{expected}; `ringreduce doctor` tells whether mpiexec and mpi4py belong to one MPI"
    )


def run(argv: Sequence[str], report: Report) -> int:
    """Run `script args...` or `[-P] -m module args...` as `__main__`.  Returns the exit code.

    An exception prints its traceback, without the frames of this module.  An exception or a
    nonzero exit code ends the job, with a `report`: the other ranks would wait for a rank that
    has left.
    """
    rank_pid = os.getpid()
    try:
        if argv[0] == "-P":
            _run_module(argv[2:])
        elif argv[0] == "-m":
            if not sys.flags.safe_path:
                sys.path.insert(0, os.getcwd())
            _run_module(argv[1:])
        else:
            _run_script(argv)
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        code, in_order = exit_code_of(stop), isinstance(stop, AllRanksEnd)
        how = f"called sys.exit({stop.code!r})" if code and not in_order else ""
        report.end(how, code, in_order=in_order)
        if in_order:
            return code
    except BaseException as error:
        report.end(_how(error), exit_code_of(error))
        error = error.with_traceback(_users_part(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        code = exit_code_of(error)
    else:
        code = 0
        report.end()
    if code and os.getpid() == rank_pid:  # a child that the script forked ends alone
        end_job(code)
        if mpi_rank() is None and os.environ.get("WORLD_SIZE", "1") != "1":
            os._exit(code)  # the launcher ends the other ranks, as MPI would have done
    return code


def _how(error: BaseException) -> str:
    """Return how a rank ends that `error` ends; "" if another rank has the error that counts."""
    if isinstance(error, PeerLostError) or (isinstance(error, MismatchError) and not error.speaks):
        return ""
    return f"raised {type(error).__name__}"


def _run_script(argv: Sequence[str]) -> None:
    """Run a script in this process's `__main__`, which stays for exit handlers and threads."""
    script = os.path.abspath(argv[0])
    sys.argv = list(argv)
    if _is_package(script):
        sys.path.insert(0, script)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    if script.endswith(".pyc"):
        code = SourcelessFileLoader("__main__", script).get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", script)
        code = loader.source_to_code(loader.get_data(script), script)
    names = vars(sys.modules["__main__"])
    runpy._run_code(code, names, None, "__main__", None, None, script)  # type: ignore[attr-defined]


def _is_package(script: str) -> bool:
    return os.path.isdir(script) or zipfile.is_zipfile(script)


def _run_module(argv: Sequence[str]) -> None:
    sys.argv = list(argv)
    runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Cut off the first frames of a traceback, which are of this module and of runpy."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace
