"""Texts are coloured where a terminal shows them, unless the user says otherwise."""

from __future__ import annotations

import doctest
import io

import pytest

from ringreduce.console import colours
from ringreduce.console.colours import Colours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "enabled"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": "0"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"FORCE_COLOR": ""}, False),
        (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"TERM": "xterm"}, True),
        (io.StringIO(), {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_a_terminal_and_two_variables_decide(
    stream: io.StringIO, variables: dict[str, str], enabled: bool
) -> None:
    assert Colours.of(stream, variables=variables).enabled is enabled


@pytest.mark.parametrize("name", ["good", "bad", "doubtful", "strong"])
def test_a_colour_ends_where_the_text_ends(name: str) -> None:
    on, off = (getattr(Colours(enabled), name) for enabled in (True, False))
    assert off("text") == "text"
    assert on("text").startswith("\x1b[")
    assert on("text").endswith("mtext\x1b[0m")
    assert on("") == ""


def test_the_example_is_true() -> None:
    assert doctest.testmod(colours) == (0, 1)
