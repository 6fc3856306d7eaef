"""`ringreduce completion`: print a script with which a shell completes the command line.

On each TAB the script starts `ringreduce`, whose parsers say what fits there (`complete`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from argcomplete import autocomplete
from argcomplete.shell_integration import shellcode

from ringreduce.algorithms import ALGORITHMS
from ringreduce.pipeline.generators import SCHEDULES

_WORDS: Mapping[str, Iterable[str]] = {
    "collective": ALGORITHMS,
    "data": ("digits", "synthetic"),
    "dtype": ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "complex64"),
    "pipeline": SCHEDULES,
    "transport": ("shm", "mpi"),
}
"""Words for the values of options without choices, by the names under which they are stored."""


def script(shell: str) -> str:
    """Return the script for `shell`: bash, zsh or fish."""
    use_defaults = False  # or bash would offer files for a number
    return shellcode(["ringreduce"], use_defaults, shell)


def complete(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    options_module: Callable[[str], ModuleType | None],
    **how: Any,
) -> None:
    """Print what completes the last word of the line COMP_LINE, and end the process.

    `commands` has the parser of each command.  `options_module` returns the module that has the
    parser of the program that a command starts, or None.  `how` has arguments of
    ``argcomplete.autocomplete``.
    """
    words = os.environ["COMP_LINE"].split()
    for name, command in commands.items():
        options = options_module(name) if name in words else None
        for action in options.parser("")._actions if options else ():
            if command._option_string_actions.keys().isdisjoint(action.option_strings):
                command._add_action(action)
        for action in command._actions:
            if not (action.choices or action.type is Path or action.dest == "program"):
                vars(action)["completer"] = _words
    autocomplete(parser, **how)


def _words(action: argparse.Action, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """Return the words for the value of an option: its own, or those for what it names."""
    if action.dest == "algorithm":
        collective = getattr(parsed_args, "collective", None) or "all_reduce"
        return ("auto", *ALGORITHMS.get(collective, ()))
    return getattr(action, "words", None) or _WORDS.get(action.dest, ())
