"""The options of jobs that go on after losses: `ringreduce run --elastic`, and `train`."""

from __future__ import annotations

import argparse
from collections.abc import Set
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.console.terminal import print_error
from ringreduce.supervisor.discovery import Discovery
from ringreduce.supervisor.events import EventFile
from ringreduce.supervisor.launcher import Job
from ringreduce.supervisor.membership import Rules

if TYPE_CHECKING:  # only jobs that go on after losses need it, and NumPy
    from ringreduce.supervisor.held import HeldFiles

_OF_ELASTIC = frozenset(
    [
        *("max_failures", "wait_s", "grace_s", "replace", "recovery", "discover"),
        *("slow", "events"),
        *("state_dir", "save_every_s", "resume"),
    ]
)
"""Options that need --elastic, by the names under which they are stored."""

_SAVE_EVERY_S = 60.0


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of `command` to its parser."""
    add = parser.add_argument
    add(
        "--elastic",
        type=_least_and_most,
        metavar="MIN[:MAX]",
        help="go on after ranks are lost, with at least MIN ranks; a program calls rr.elastic",
    )
    add(
        "--max-failures",
        type=int,
        metavar="K",
        help="the most ranks lost within an hour; default: 3 for each of MAX",
    )
    add(
        "--wait-s",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait where fewer than MIN are left; default: 60",
    )
    add(
        "--grace-s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds in which ranks end their step and leave after SIGTERM; default: 30",
    )
    add(
        "--discover",
        metavar="COMMAND",
        help="have as many ranks as the command finds room for; it prints host:slots, and is run "
        "every 5 seconds",
    )
    add("--replace", action="store_true", help="start a new rank for each that is lost")
    add(
        "--recovery",
        choices=("auto", "live", "relaunch"),
        default="auto",
        help="go on in the same processes (live, under Open MPI), or in a new MPI job (relaunch); "
        "default: live where the MPI can",
    )
    add(
        "--slow",
        choices=("report", "drop"),
        default="report",
        help="a rank that computes twice as long as the others: write an event (report), or have "
        "it leave (drop); default: report",
    )
    add("--events", type=Path, metavar="FILE", help="add a line of JSON for each event")
    if command == "train":  # which has a folder for checkpoints
        return
    add(
        "--state-dir",
        type=Path,
        metavar="FOLDER",
        help="where the rr.State is saved, regularly and at the end",
    )
    add(
        "--save-every-s",
        type=float,
        metavar="S",
        help=f"seconds between two states in --state-dir; default: {_SAVE_EVERY_S:g}",
    )
    add("--resume", action="store_true", help="go on from the state in --state-dir")


def rules_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Rules | None:
    """Return the rules of a job with --elastic, else None.  Raises ValueError for wrong options."""
    if options.command not in ("run", "train"):
        return None
    if options.elastic is None:
        if flag := given_option(parser, options, _OF_ELASTIC):
            raise ValueError(f"{flag} is for --elastic MIN:MAX; add it")
        return None
    if flag := given_option(parser, options, {"hosts", "nodes"}):
        raise ValueError(f"--elastic is for the ranks of one host, without {flag}")
    if options.command == "run":
        _check_saving(options)
    least, most = options.elastic
    most = options.ranks if most is None else most
    return Rules(**fields_of(Rules, options), least=least, most=most)


def fields_of(kind: type[Any], options: argparse.Namespace) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def _check_saving(options: argparse.Namespace) -> None:
    if options.resume and options.state_dir is None:
        raise ValueError("--resume from where? name a --state-dir")
    every_s = options.save_every_s
    if every_s is not None and options.state_dir is None:
        raise ValueError("--save-every-s to where? name a --state-dir")
    if every_s is not None and not every_s >= 0:
        raise ValueError(f"--save-every-s is {every_s:g}; wanted at least 0 seconds")


def supervise(
    command: argparse.ArgumentParser, options: argparse.Namespace, job: Job, rules: Rules
) -> int:
    """Run the job to its end.  Returns its exit code.

    Ends the program if a file or a folder cannot be used.  Raises LaunchError without an
    mpiexec.
    """
    from ringreduce.supervisor.elastic import ElasticSupervisor

    try:
        events = EventFile(options.events)
    except OSError as error:
        command.error(f"--events: {error}")
    held = _held(command, options)
    discovery = None if options.discover is None else Discovery(options.discover)
    try:
        if discovery is not None:
            ranks = discovery.first(rules)
            job, rules = replace(job, ranks=ranks), replace(rules, ranks=ranks)
        supervisor = ElasticSupervisor(job, rules, events, held, discovery)
    except OSError as error:
        command.error(f"--elastic: no socket for the ranks: {error}")
    except ValueError as error:
        command.error(str(error))
    return supervisor.run()


def _held(command: argparse.ArgumentParser, options: argparse.Namespace) -> HeldFiles:
    """Return the files to hold, with --resume the saved state.  Ends the program if that fails."""
    from ringreduce.recovery.saving import check_new, last_saved
    from ringreduce.supervisor.held import HeldFiles

    folder: Path | None = getattr(options, "state_dir", None)  # `train` has folders of its own
    if folder is None:
        return HeldFiles()
    prog = f"ringreduce {options.command}"
    every_s = _SAVE_EVERY_S if options.save_every_s is None else options.save_every_s
    try:
        if not options.resume:
            check_new(folder)
            return HeldFiles(folder, None, every_s)
        found = last_saved(folder, lambda why: print_error(f"{prog}: {why}"))
        return HeldFiles(folder, found, every_s)
    except (OSError, ValueError) as error:
        command.error(f"--state-dir: {error}")


def given_option(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Set[str]
) -> str | None:
    """Return the first option of `names` that has another value than its default, if any."""
    for action in parser._actions:
        if action.dest in names and getattr(options, action.dest) != action.default:
            return action.option_strings[-1]
    return None


def _least_and_most(text: str) -> tuple[int, int | None]:
    least, colon, most = text.partition(":")
    try:
        return int(least), int(most) if colon else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted MIN or MIN:MAX, such as 2:6") from None
