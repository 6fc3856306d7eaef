"""Facts that pages and tests take from the source.

They are the fields of a class, the commands with their options, and the environment variables.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A field of a dataclass, as its source has it."""

    name: str
    type: str
    default: str
    """Its default as source code; "" without one."""
    text: str
    """The string behind the field, or the help in its metadata; "" without either."""


def fields(kind: type) -> list[Field]:
    """Return the fields of a dataclass, in order."""
    body = definition(kind).body
    helps = {field.name: field.metadata.get("help", "") for field in dataclasses.fields(kind)}
    found = []
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        name = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""
        if isinstance(node, ast.AnnAssign) and name in helps:  # no ClassVar
            text = _string(after) or helps[name]
            found.append(Field(name, ast.unparse(node.annotation), _default(node, kind), text))
    return found


def definition(kind: type) -> ast.ClassDef:
    """Return the source of a class.  A public class names `ringreduce` as its module."""
    for module in list(sys.modules.values()):
        inner = getattr(module, "__name__", "").startswith("ringreduce.")
        if inner and vars(module).get(kind.__name__) is kind:
            for node in ast.parse(inspect.getsource(module)).body:
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                    return node
    raise LookupError(f"no source of {kind}")


def _string(node: ast.stmt) -> str:
    """Return a string that stands alone, "" for another statement."""
    constant = node.value if isinstance(node, ast.Expr) else None
    if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
        return inspect.cleandoc(constant.value)
    return ""


def _default(node: ast.AnnAssign, kind: type) -> str:
    if node.value is None:
        return ""
    field = next(f for f in dataclasses.fields(kind) if f.name == ast.unparse(node.target))
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.default_factory.__name__}()"
    return repr(field.default)


# --- the command line -----------------------------------------------------------------------------


def commands() -> str:
    """Return a section of Markdown for each command: its usage, and a table of its options."""
    from ringreduce.launch import cli

    parser, known = cli.parsers()
    helps = {choice.dest: choice.help for action in parser._actions for choice in _choices(action)}
    parts = [_usage("ringreduce [-h] [--version] COMMAND ...")]
    for name, command in known.items():
        about = command.description or _sentence(helps[name] or "")
        parts += [f"## ringreduce {name}", _usage(command.format_usage()), about, _table(command)]
        module = cli.options_module(name)
        if module is not None:
            parts += [f"Options of `python -m {cli.PROGRAMS[name]}`:"]
            parts.append(_table(module.parser(f"ringreduce {name}")))
    return "\n\n".join(parts)


def _choices(action: argparse.Action) -> list[argparse.Action]:
    """The commands of a parser, as argparse lists them."""
    return getattr(action, "_choices_actions", [])


def _usage(text: str) -> str:
    words = " ".join(text.removeprefix("usage: ").split())
    return f"```console\n$ {words}\n```"


def _table(parser: argparse.ArgumentParser) -> str:
    rows = ["| option | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS:
            text = parser._get_formatter()._expand_help(action) if action.help else ""
            rows.append(f"| {_cell(_option(action))} | {_cell(_sentence(text))} |")
    return "\n".join(rows)


def _option(action: argparse.Action) -> str:
    """An option as a user writes it: ``-n N``, ``--ranks N``."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`{value.lower()}`"
    takes = f" {value}" if value and action.nargs != 0 else ""
    return ", ".join(f"`{flag}{takes}`" for flag in action.option_strings)


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


# --- the environment ------------------------------------------------------------------------------


def environment_variables() -> str:
    """Return a table of the variables that `config.Environment` reads."""
    from ringreduce.config import Environment

    rows = ["| variable | meaning |", "|---|---|"]
    for field in fields(Environment):
        if field.name != "launched":
            rows.append(f"| `RINGREDUCE_{field.name.upper()}` | {_cell(field.text)} |")
    return "\n".join(rows)
