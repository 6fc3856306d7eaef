"""The public names with their docstrings, and what is missing there."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import ringreduce as rr
from tests.support.mpi import ROOT


def _facts() -> Any:
    """The module of the site that reads facts from the source."""
    spec = importlib.util.spec_from_file_location("facts", ROOT / "docs/facts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


facts = _facts()

PACKAGES = ("pipeline", "train", "train.strategies")
"""Packages that `ringreduce` imports when they are used, and modules, with public names."""
MADE_BY_THE_LIBRARY = ("Communicator", "SharedArray", "Work")
"""Classes that users do not make themselves: their constructors have no entry."""
NEVER_RAISE = (
    *("is_elastic", "Work.done", "Communicator.leave"),
    *("train.Split.widths", "train.Trainer.arrays"),
)
PRIVATE = ":meta private:"
"""Marks, as for Sphinx, a method that the library alone calls."""


def names() -> dict[str, Any]:
    """Public name -> object: of `ringreduce`, and as ``train.name`` of its packages."""
    found = {name: getattr(rr, name) for name in rr.__all__}
    for package in PACKAGES:
        inner = attrgetter(package)(rr)
        found |= {f"{package}.{name}": getattr(inner, name) for name in inner.__all__}
    return {name: value for name, value in found.items() if name not in PACKAGES}


def entries() -> Iterator[tuple[str, Any]]:
    """Yield every public callable with its name: functions, classes and their methods.

    A method that a public base class describes has its entry there.
    """
    public = {value for value in names().values() if inspect.isclass(value)}
    for name, value in names().items():
        yield name, value
        if inspect.isclass(value):
            described = [vars(base) for base in value.__mro__[1:] if base in public]
            for key, method in members(value).items():
                if not any(key in of_base for of_base in described):
                    yield f"{name}.{key}", method


def members(kind: type) -> dict[str, Any]:
    """The public methods and properties of a class that ringreduce defines."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("ringreduce")]
    found = {key: value for base in reversed(ours) for key, value in vars(base).items()}
    return {
        key: value
        for key, value in found.items()
        if not key.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        and PRIVATE not in (value.__doc__ or "")
    }


def sections(docstring: str) -> dict[str, str]:
    """The parts of a docstring: "" has what comes before the first heading."""
    parts = re.split(r"^(Args|Returns|Raises|Attributes|Example):$", docstring, flags=re.M)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def lacking(name: str, value: Any) -> list[str]:
    """What the docstring of a public callable does not have."""
    parts = sections(inspect.getdoc(value) or "")
    summary = parts[""].strip().partition("\n")[0]
    found = [] if re.fullmatch(r"\S.*[.;:]", summary) else ["a summary in one line"]
    if isinstance(value, property):
        return found
    described = re.findall(r"^    (\*{0,2}\w+(?:, \w+)*): ", parts.get("Args", ""), re.M)
    known = {word for words in described for word in words.split(", ")}
    found += [f"argument {word}" for word in arguments(name, value) if word not in known]
    if inspect.isclass(value):
        found += [f"field {field}" for field in undescribed(value)]
    else:
        if value.__annotations__.get("return") != "None" and "Returns" not in parts:
            found.append("Returns")
        if "Raises" not in parts and name not in NEVER_RAISE and "Watcher" not in name:
            found.append("Raises")
    return found + ["an example"] * (">>>" not in parts.get("Example", ""))


def arguments(name: str, value: Any) -> list[str]:
    """The arguments that users pass, as a docstring writes them."""
    if inspect.isclass(value):
        if name in MADE_BY_THE_LIBRARY or issubclass(value, Exception):
            return []
        if dataclasses.is_dataclass(value) or getattr(value, "_is_protocol", False):
            return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        stars.get(parameter.kind, "") + parameter.name
        for parameter in inspect.signature(value).parameters.values()
        if parameter.name != "self"
    ]


def undescribed(kind: type) -> list[str]:
    """The fields of a dataclass that have no text."""
    if not dataclasses.is_dataclass(kind):
        return []
    return [field.name for field in facts.fields(kind) if not field.text]
