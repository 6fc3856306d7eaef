"""Settings from a TOML file and the command line, and back to TOML.

The command line overrides the file, and the file overrides a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ringreduce.train.settings import Outputs, Settings

FIELDS = {field.name: field for kind in (Settings, Outputs) for field in dataclasses.fields(kind)}
_PATHS = ("checkpoint_dir", "metrics", "tensorboard", "plot")


@dataclasses.dataclass(frozen=True)
class Given:
    """The settings that were given, by field name; all others are as before, or the defaults."""

    values: Mapping[str, Any]

    def outputs(self) -> Outputs:
        """Return what to write.  Raises ValueError for invalid settings."""
        return Outputs(**self._of(Outputs))

    def settings(self, before: Mapping[str, Any] | None = None) -> Settings:
        """Return what to train; `before` are the settings of the checkpoint to continue, if any.

        Raises ValueError for invalid settings, and for changes that a run cannot make midway.
        """
        asked = self._of(Settings)
        if before is None:
            return Settings(**asked)
        for name, value in asked.items():
            if FIELDS[name].metadata.get("fixed") and value != before[name]:
                raise ValueError(
                    f"{name} is {value}, but the checkpoint was made with {before[name]}; "
                    "that cannot change in the middle of a run"
                )
        return Settings(**{**before, **asked})

    def _of(self, kind: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in self.values.items() if name in names}


def read(argv: Sequence[str], prog: str = "python -m ringreduce.train") -> Given:
    """Read the command line, and the file that it may name.

    Prints the error and raises SystemExit with code 2 if either is wrong.
    """
    parser = _parser(prog)
    asked = vars(parser.parse_args(argv))
    if "hidden" in asked:
        asked["hidden"] = tuple(asked["hidden"])
    file = asked.pop("config", None)
    try:
        given = Given({**(read_toml(file) if file is not None else {}), **asked})
        # Refused here and now if it cannot work.
        given.outputs()
        given.settings()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return given


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a file: name -> value.

    Raises OSError if the file cannot be read, ValueError for invalid TOML and unknown settings.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        return {name: from_plain(name, value) for name, value in table.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_plain(name: str, value: Any) -> Any:
    """Return a setting's value from its value in TOML or JSON.

    Raises ValueError for an unknown name, or a value of the wrong type.
    """
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, 1)
        raise ValueError(
            f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    default: Any = FIELDS[name].default
    choices = FIELDS[name].metadata["choices"]
    kind: Any = str if name in _PATHS or choices else type(default)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple:
        if not (isinstance(value, list) and all(type(each) is int for each in value)):
            raise ValueError(f"{name} is {value!r}; wanted a list of whole numbers")
        return tuple(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}; wanted {_KINDS[kind]}")
    if choices and value not in choices:
        raise ValueError(f"{name} is {value!r}; wanted one of {', '.join(choices)}")
    return Path(value).expanduser() if name in _PATHS else value


def to_plain(settings: Settings) -> dict[str, Any]:
    """Return the settings as values for JSON and TOML; `from_plain` is the inverse."""
    values = dataclasses.asdict(settings).items()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def to_toml(values: Mapping[str, Any]) -> list[str]:
    """Return a line of TOML for each plain value."""
    # JSON's numbers, lists, bools and strings are valid TOML, except one character.
    written = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    return [f"{name} = {text}".replace("\x7f", "\\u007f") for name, text in written.items()]


_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


class _Parser(argparse.ArgumentParser):
    """Prints errors without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help explains all options\n")


def explained() -> str:
    """Return the help of all options, for the end of another command's help."""
    return _parser("").format_help().partition("options:\n")[2]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Train a small network, data-parallel over all ranks.",
        epilog="The last line has the accuracy on samples that are held out, the time of training, "
        "the ranks and the efficiency.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="TOML",
        help="a file of options, by their names with _ for -; those given here go before",
    )
    for kind, title in ((Settings, "what is trained"), (Outputs, "what is written, and where")):
        _add(parser.add_argument_group(title), dataclasses.fields(kind))
    return parser


def _add(group: argparse._ArgumentGroup, fields: Iterable[dataclasses.Field[Any]]) -> None:
    for field in fields:
        default, about = field.default, field.metadata
        flag, text = "--" + field.name.replace("_", "-"), about["help"]
        if isinstance(default, tuple):
            text += f" (default: {' '.join(map(str, default))})"
            group.add_argument(flag, type=int, nargs="+", metavar="WIDTH", help=text)
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
            group.add_argument(flag, type=type(default), metavar=name, help=text)
