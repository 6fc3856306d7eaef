"""Settings from a TOML file and the command line, and back to TOML.

The command line overrides the file, and the file overrides a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from ringreduce.errors import did_you_mean
from ringreduce.train.settings import Outputs, Settings, checked
from ringreduce.train.strategies import (
    OPTIONS,
    Strategy,
    by_name,
    check_whole_model,
    default,
    named_algorithm,
    table,
)
from ringreduce.train.toml_mistakes import line_of, what_is_wrong

GROUPS: Mapping[str, Mapping[str, dataclasses.Field[Any]]] = {
    "what is trained": {field.name: field for field in dataclasses.fields(Settings)},
    "how ranks divide it": OPTIONS,
    "what is written, and where": {field.name: field for field in dataclasses.fields(Outputs)},
}
"""Title -> the options of the command line below it, by name."""
FIELDS = {name: field for group in GROUPS.values() for name, field in group.items()}


@dataclasses.dataclass(frozen=True)
class Given:
    """The settings that were given, by field name; all others are as before, or the defaults."""

    values: Mapping[str, Any]

    def outputs(self) -> Outputs:
        """Return what to write.  Raises ValueError for invalid settings."""
        return Outputs(**self._of("what is written, and where"))

    def settings(self, before: Mapping[str, Any] | None = None) -> Settings:
        """Return what to train; `before` are the settings of the checkpoint to continue, if any.

        Raises ValueError for invalid settings, and for changes that a run cannot make midway.
        """
        asked = self._of("what is trained")
        if before is None:
            return Settings(**asked)
        # An older checkpoint lacks newer settings; its data may be elsewhere now.
        settings = Settings(**{**before, **asked})
        for name in asked:
            value, was = getattr(settings, name), before.get(name, FIELDS[name].default)
            if FIELDS[name].metadata.get("fixed") and value != was:
                raise ValueError(
                    f"{name} is {value}, but the checkpoint was made with {was}; that cannot "
                    "change in the middle of a run"
                )
        return settings

    def strategy(self, before: Mapping[str, Any] | None = None) -> Strategy | None:
        """Return the strategy; None if none is named.

        `before` are the strategy and options of the checkpoint to continue, if any.  They are
        passed over if another strategy is named.

        Raises ValueError for options that cannot be combined.
        """
        asked = self._of("how ranks divide it")
        if before and asked.get("strategy") in (None, before.get("strategy")):
            asked = {**before, **asked}
        strategy = by_name(asked.pop("strategy", "auto"), asked)
        if strategy is not None and "algorithm" in self.values:
            named_algorithm(strategy, self.values["algorithm"])
        return strategy

    def check_strategy(self) -> None:
        """Raise ValueError or ImportError if the strategy cannot work."""
        if (strategy := self.strategy()) is not None:
            strategy.check_installed()

    def _of(self, group: str) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name in GROUPS[group]}


def read(argv: Sequence[str], prog: str = "python -m ringreduce.train") -> Given:
    """Read the command line and its file; SystemExit with code 2 if either cannot work."""
    with reading(parser(prog), argv) as values:
        given = Given(values)
        resumes = given.outputs().resume
        given.settings()
        # Without its name, the strategy is that of a checkpoint.
        if "strategy" in values or not resumes:
            given.check_strategy()
    return given


@contextmanager
def reading(command_line: argparse.ArgumentParser, argv: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the options of a command line, and of the file that it may name: name -> value.

    The command line overrides the file.  Prints the error and raises SystemExit with code 2 if
    either is wrong, and for an error of the block, which begins with the name of an option.
    """
    options, rest = command_line.parse_known_args(argv)
    if rest:
        meant = did_you_mean(rest[0], command_line._option_string_actions)
        command_line.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    asked: dict[str, Any] = vars(options)
    if asked.get("strategy") == "help":
        print(table())
        raise SystemExit(0)
    file: Path | None = asked.pop("config", None)
    try:
        from_file = {} if file is None else read_toml(file)
    except OSError as error:
        command_line.error(f"--config {file}: {error.strerror}")
    except ValueError as error:
        command_line.error(str(error))
    try:
        yield from_file | {n: tuple(v) if isinstance(v, list) else v for n, v in asked.items()}
    except (ImportError, ValueError) as error:
        name, where = str(error).partition(" ")[0], ""
        if file is not None and name in from_file.keys() - asked.keys():
            where = f"{file}, line {line_of(file.read_text(encoding='utf-8-sig'), name)}: "
        command_line.error(f"{where}{error}")


def check_ranks(given: Given, nodes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if these nodes cannot use the strategy; ranks check a run that resumes."""
    if given.outputs().resume:
        return
    strategy = given.strategy() or default(nodes)
    strategy.check_device(given.outputs().device)
    strategy.check(nodes, given.settings().for_ranks(sum(map(len, nodes))))


def check_elastic_run(given: Given, nodes: Sequence[Sequence[int]], most: int = 0) -> None:
    """Check that the run can go on after a rank is lost, and with up to `most` ranks.

    The ranks check the strategy of a run that continues from a checkpoint.

    Raises ValueError if it cannot.
    """
    outputs = given.outputs()
    if outputs.seeds > 1:
        raise ValueError(f"seeds is {outputs.seeds}; --elastic is for one run")
    if outputs.plot is not None and outputs.metrics is None:
        raise ValueError(
            "plot needs metrics with --elastic: a new rank 0 reads the earlier steps from there"
        )
    if outputs.resume:
        return
    strategy = given.strategy() or default(nodes)
    check_whole_model(strategy, outputs.device, "--elastic goes on")
    shards = given.settings().batch_shards
    if shards and shards < most:
        raise ValueError(f"batch_shards is {shards}; --elastic allows up to {most} ranks")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a file, or raise OSError, or ValueError, which names the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}, {what_is_wrong(text, str(error))}") from None
    settings = {}
    for name, value in table.items():
        try:
            if isinstance(value, dict):
                raise ValueError(f"[{name}] is a table; write the settings without one")
            settings[name] = from_plain(name, value)
        except ValueError as error:
            raise ValueError(f"{path}, line {line_of(text, name)}: {error}") from None
    return settings


def from_plain(name: str, value: Any) -> Any:
    """Return a setting's value from its value in TOML or JSON, or raise ValueError."""
    if name not in FIELDS:
        raise ValueError(f"unknown setting {name!r}{did_you_mean(name, FIELDS)}")
    return checked(FIELDS[name], value)


def to_toml(values: Mapping[str, Any]) -> list[str]:
    # JSON's numbers, lists, bools and strings are valid TOML, except one character.
    written = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    return [f"{name} = {text}".replace("\x7f", "\\u007f") for name, text in written.items()]


class _OptionParser(argparse.ArgumentParser):
    """Prints errors without the list of all options, and names the choice that is closest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help explains all options\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            meant = did_you_mean(value, choices)
            text = f"unknown value {value!r}; wanted one of {', '.join(choices)}{meant}"
            raise argparse.ArgumentError(action, text)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the options; `prog` is the name of the command in messages."""
    command_line = new_parser(
        prog,
        description="Train a small network on all ranks.",
        epilog="The last line has the accuracy on samples that are held out, the time of training, "
        "the ranks and the efficiency.",
    )
    add_options(command_line)
    return command_line


def new_parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser without options; an option that is not given gets no value."""
    return _OptionParser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )


def add_options(command_line: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add the options of the trainer to a parser; `without` are names of options to leave out."""
    command_line.add_argument(
        "--config",
        type=Path,
        metavar="TOML",
        help="a file of options, by their names with _ for -; options on the command line "
        "override it",
    )
    for title, fields in GROUPS.items():
        group = command_line.add_argument_group(title)
        for name, field in fields.items():
            if name not in without:
                _add(group, field)


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that set these options; their values are not None."""
    words = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else [value])]
    return words


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    default, about = field.default, field.metadata
    flag, text = "--" + field.name.replace("_", "-"), about["help"]
    if isinstance(default, tuple):
        text += f" (default: {' '.join(map(str, default))})" * bool(default)
        metavar = about.get("metavar", "WIDTH")
        group.add_argument(flag, type=int, nargs="+", metavar=metavar, help=text)
    elif isinstance(default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif about["choices"]:
        text += f" (default: {default})"
        group.add_argument(flag, choices=about["choices"], help=text)
    elif default is None:
        group.add_argument(flag, type=Path, metavar=about.get("metavar", "FILE"), help=text)
    else:
        text += f" (default: {default})"
        name = {int: "N", float: "X"}.get(type(default), "NAME")
        words, kind = about.get("words", ()), cast(Callable[[str], Any], type(default))
        # The strategy refuses a text that is none of its words.
        read = (lambda w: kind(w) if w.removeprefix("-").isdecimal() else w) if words else kind
        action = group.add_argument(flag, type=read, metavar=name, help=text)
        vars(action)["words"] = words  # for the completion of shells
