"""`ringreduce completion`: print a script with which a shell completes the command line.

The script is made of the parsers of the commands, so it knows their options.  It starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ringreduce.algorithms import ALGORITHMS
from ringreduce.pipeline.generators import SCHEDULES

_ALGORITHMS = {collective: ("auto", *names) for collective, names in ALGORITHMS.items()}
_EVERY_ALGORITHM = tuple(dict.fromkeys(name for names in _ALGORITHMS.values() for name in names))
_DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "complex64")


@dataclass(frozen=True)
class Option:
    flags: tuple[str, ...]
    help: str
    takes_value: bool
    words: tuple[str, ...] = ()
    names_file: bool = False


@dataclass(frozen=True)
class Command:
    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...] = ()
    """The words that may stand without an option before them."""


def script(
    shell: str,
    parsers: Mapping[str, argparse.ArgumentParser],
    options_module: Callable[[str], ModuleType | None],
) -> str:
    """Return the script for `shell`: bash, zsh or fish; `parsers` has the parser of each command.

    `options_module` returns the module with the parser of the program that a command starts, or
    None.
    """
    commands = [_command(name, parser, options_module(name)) for name, parser in parsers.items()]
    if shell == "fish":
        return _lines(_fish(commands))
    heading = [f"# Printed by: ringreduce completion {shell}"]
    if shell == "zsh":
        heading.append("autoload -U +X bashcompinit && bashcompinit")
    return _lines([*heading, *_bash(commands)])


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


# --- what there is to complete --------------------------------------------------------------------


def _command(name: str, parser: argparse.ArgumentParser, options: ModuleType | None) -> Command:
    actions = [*parser._actions, *(options.parser("")._actions if options else ())]
    named = {
        action.option_strings[0]: _option(action)
        for action in actions
        if action.option_strings and action.help != argparse.SUPPRESS
    }
    positional = (a.choices for a in actions if not a.option_strings and a.choices)
    words = tuple(str(word) for choices in positional for word in choices)
    return Command(name, parser.description or "", tuple(named.values()), words)


def _option(action: argparse.Action) -> Option:
    words: tuple[str, ...] = tuple(map(str, action.choices or _words(action)))
    takes_value = action.nargs != 0
    return Option(
        tuple(action.option_strings),
        (action.help or "").replace("%%", "%"),
        takes_value,
        words if takes_value else (),
        names_file=action.type is Path,
    )


def _words(action: argparse.Action) -> tuple[str, ...]:
    """Return the words for an option without choices: its own, or those for what it names."""
    known = {
        "algorithm": _EVERY_ALGORITHM,
        "collective": tuple(ALGORITHMS),
        "data": ("digits", "synthetic"),
        "dtype": _DTYPES,
        "pipeline": tuple(SCHEDULES),
        "transport": ("shm", "mpi"),
    }
    return getattr(action, "words", None) or known.get(action.dest, ())


# --- bash, and zsh, which has a layer for bash's scripts ------------------------------------------

_BASH = """\
_ringreduce() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="" collective=all_reduce words="" files="" prefix="" next i
    COMPREPLY=()
    # bash makes three words of --option=value, and zsh one.
    if [[ "$word" == --*=* ]]; then
        before="${{word%%=*}}" prefix="${{word%%=*}}=" word="${{word#*=}}"
    elif [[ "$word" == "=" ]]; then
        word=""
    elif [[ "$before" == "=" ]]; then
        before="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        next="${{COMP_WORDS[i+1]}}"
        case "$command:${{COMP_WORDS[i]}}" in
            {commands})
                command="${{COMP_WORDS[i]}}" ;;
            *:--collective)
                [[ "$next" == "=" ]] && next="${{COMP_WORDS[i+2]}}"
                collective="$next" ;;
            *:--collective=*)
                collective="${{COMP_WORDS[i]#*=}}" ;;
            {run_values})
                [[ "$next" == "=" ]] || ((i++)) ;;
            run:=|run::)
                ((i++)) ;;
            run:-*) ;;
            run:*)  # the program, and then its own words
                files=1
                break ;;
        esac
    done
    case "$files$command:$before" in
        1*|{files})
            files=1 ;;
        *:--algorithm)
            case "$collective" in
{algorithms}
            esac ;;
{values}
        {numbers}) ;;
        *)
            case "$command" in
                run) [[ "$word" == -* ]] && words="{run}" || files=1 ;;
{options}
            esac ;;
    esac
    if [[ -n "$files" ]]; then
        local IFS=$'\n'
        type compopt &> /dev/null && compopt -o filenames
        COMPREPLY=($(compgen -P "$prefix" -f -- "$word"))
    else
        COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$word"))
    fi
}}
complete -F _ringreduce ringreduce"""


def _bash(commands: Sequence[Command]) -> Iterator[str]:
    offered = {command.name: _offered(command) for command in commands}
    valued = [(command.name, o) for command in commands for o in command.options if o.takes_value]
    others = [(name, option) for name, option in valued if option.words != _EVERY_ALGORITHM]
    without_words = [each for each in others if not each[1].words]
    yield _BASH.format(
        commands="|".join(f":{name}" for name in offered),
        run_values=_pattern([each for each in valued if each[0] == "run"]),
        files=_pattern([each for each in without_words if each[1].names_file]),
        algorithms=_cases(16, _ALGORITHMS.items()),
        values=_cases(8, [(_pattern([each]), each[1].words) for each in others if each[1].words]),
        numbers=_pattern([each for each in without_words if not each[1].names_file]),
        run=" ".join(offered.pop("run")),
        options=_cases(16, [('""', ["run", *offered, "--help", "--version"]), *offered.items()]),
    )


def _offered(command: Command) -> list[str]:
    return [*command.words, *(flag for option in command.options for flag in option.flags)]


def _pattern(options: Sequence[tuple[str, Option]]) -> str:
    return "|".join(f"{name}:{flag}" for name, option in options for flag in option.flags)


def _cases(indent: int, cases: Iterable[tuple[str, Iterable[str]]]) -> str:
    return "\n".join(
        f'{" " * indent}{pattern}) words="{" ".join(words)}" ;;' for pattern, words in cases
    )


# --- fish -----------------------------------------------------------------------------------------


def _fish(commands: Iterable[Command]) -> Iterator[str]:
    yield "# Printed by: ringreduce completion fish"
    for command in commands:
        start = "complete -c ringreduce -f -n __fish_use_subcommand"
        yield f"{start} -a {command.name} -d {shlex.quote(command.help)}"
        here = f"complete -c ringreduce -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            yield f"{here} -f -a {shlex.quote(' '.join(command.words))}"
        for option in command.options:
            flags = " ".join(_fish_flag(flag) for flag in option.flags)
            value = " -r" if option.names_file else " -x" if option.takes_value else " -f"
            if option.words:
                value += f" -a {shlex.quote(' '.join(option.words))}"
            yield f"{here} {flags}{value} -d {shlex.quote(option.help)}"


def _fish_flag(flag: str) -> str:
    kind = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
    return f"{kind} {flag.lstrip('-')}"
