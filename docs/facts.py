"""Facts that pages and tests take from the source: the fields of a class, with their texts."""

from __future__ import annotations

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
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
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
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return inspect.cleandoc(str(node.value.value))
    return ""


def _default(node: ast.AnnAssign, kind: type) -> str:
    if node.value is None:
        return ""
    field = next(f for f in dataclasses.fields(kind) if f.name == ast.unparse(node.target))
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.default_factory.__name__}()"
    return repr(field.default)
