"""Find the line of a setting in TOML, and explain a text that is not valid TOML."""

from __future__ import annotations

import re
from collections.abc import Sequence


def line_of(text: str, name: str) -> int:
    """Return the number, from 1, of the line of TOML that sets `name`, or begins its table."""
    lines = text.splitlines()
    sets = re.compile(rf"""\s*\[?\s*["']?{re.escape(name)}["']?\s*[].=]""")
    return next((number for number, line in enumerate(lines, 1) if sets.match(line)), 1)


_PLACE = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)")
"""Matches the text of a TOMLDecodeError: the reason, and the line."""
_SETTING = re.compile(r"\s*([\w-]+)\s*([=:]?)\s*(.*?)\s*")
"""Matches a line that sets something: the name, the sign, the value."""


def what_is_wrong(text: str, error: str) -> str:
    """Return the number of the line that is no TOML, the line, and what to write instead."""
    lines = text.splitlines()
    place = _PLACE.fullmatch(error)
    reason, number = (place[1], place[2]) if place else (error, None)
    at = int(number) if number else len(lines)
    line = lines[at - 1].strip() if lines else ""
    return f"line {at}: {line!r} is no TOML; {_instead(line, lines[: at - 1]) or reason}"


def _instead(line: str, before: Sequence[str]) -> str:
    """Return what to write instead of a line that is no TOML; "" if the mistake is not known."""
    found = _SETTING.fullmatch(line)
    if not found:
        return ""
    name, sign, value = found.groups()
    for place, earlier in enumerate(map(_SETTING.fullmatch, before), 1):
        if earlier and earlier.group(1, 2) == (name, "="):
            return f"line {place} sets {name} already"
    if not value:
        return "the value is missing"
    if value.lower() in ("none", "null"):
        return f"leave {name} out for its default"
    for first, last in ("[]", '""', "''"):
        if value.startswith(first) and (len(value) == 1 or not value.endswith(last)):
            return f"the value does not end with {last}"
    instead = _as_toml(value)
    return f"write {name} = {instead}" if (sign, instead) != ("=", value) else ""


def _as_toml(value: str) -> str:
    """Return a value that is written as in Python or without its quotes as TOML wants it."""
    if value in ("True", "False"):
        return value.lower()
    if re.fullmatch(r"\(.*\)", value):
        return f"[{value[1:-1]}]"
    if number := re.fullmatch(r"(-?)(\d*)[.,](\d*)", value):
        return f"{number[1]}{number[2] or 0}.{number[3] or 0}"
    if re.fullmatch(r"[^\W\d].*", value) and value not in ("true", "false"):
        return f'"{value}"'
    return value
