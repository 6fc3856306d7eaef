"""The legend of a picture speaks of what the picture shows, and of nothing else."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from ringreduce.algorithms import build
from ringreduce.schedules.matching import Message, match
from ringreduce.schedules.schedule import chunk_of, source_of
from tests.picture.test_picture import read
from tests.support.each import each
from tests.support.strategies import EVERY_ALGORITHM, block_layout, steps_of

LEGEND_OF = {
    "is added in": lambda message: message.reduce,
    "replaces what is there": lambda message: (
        message.chunks and not message.reduce and not has_copies(message)
    ),
    "is kept as a copy": lambda message: has_copies(message),
    "an empty message": lambda message: not message.chunks,
}
"""Text of the legend -> whether it explains a message."""


def has_copies(message: Message) -> bool:
    return any(source_of(name) is not None for name in message.chunks)


def texts(picture: ET.Element) -> list[str]:
    legend = next(g for g in picture if "translate" in g.get("transform", ""))
    return [child.text or "" for child in legend.iter("text")]


def chunks_in(words: list[str]) -> list[int]:
    """The chunks that the legend names, such as 3, or 0-2, or 0-2, 5."""
    found = []
    for text in words:
        if re.fullmatch(r"[\d, -]+", text):
            for run in text.split(","):
                low, _, high = run.partition("-")
                found += range(int(low), int(high or low) + 1)
    return sorted(found)


@each("size", [1, 2, 3])
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_the_legend_speaks_of_what_is_there(collective: str, algorithm: str, size: int) -> None:
    schedule = build(collective, algorithm, block_layout(size))
    ranks = steps_of(schedule)
    messages = list(match(ranks))
    words = texts(read(schedule))
    assert chunks_in(words) == sorted({chunk_of(name) for m in messages for name in m.chunks})
    for text, explains in LEGEND_OF.items():
        assert (text in words) == any(map(explains, messages)), text
    assert ("adds all copies up" in words) == any(step.folds for steps in ranks for step in steps)
    widths = {sum(schedule.weights[chunk_of(name)] for name in m.chunks) for m in messages}
    assert ("thicker: more of the array" in words) == (len(widths) > 1)
