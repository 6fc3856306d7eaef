"""The style of all pictures: colours that everybody can tell apart, on light and dark pages."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from ringreduce.picture.style import (
    BLUE,
    DARK,
    FAINT,
    FRAME,
    GREEN,
    INK,
    LANE,
    ORANGE,
    PALETTE,
    PAPER,
    PURPLE,
    TINTS,
    document,
    element,
    in_dark,
    in_light,
)
from tests.support.pictures import contrast, linear_rgb

SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
"""Linear RGB -> what is seen.  Source: Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009."""
OF_CONES = [[0.4122, 0.5363, 0.0515], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.63]]
OKLAB = [[0.2105, 0.7936, -0.0041], [1.978, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
"""Source: Björn Ottosson, "A perceptual color space for image processing", 2020."""


def of_page(colour: str, page: str) -> str:
    return colour if page == "light" else DARK[colour]


def seen(colour: str, sight: str) -> np.ndarray:
    """Return a colour as it is seen, in OKLab: distances are about as large as they look."""
    rgb = np.clip(np.asarray(SIGHT[sight]) @ linear_rgb(colour), 0, 1)
    return np.asarray(OKLAB) @ np.cbrt(np.asarray(OF_CONES) @ rgb)


@pytest.mark.parametrize("page", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_colours_of_chunks_can_be_told_apart(page: str, sight: str) -> None:
    looks = [seen(of_page(colour, page), sight) for colour in PALETTE]
    # 0.02 is just noticeable side by side.
    assert min(np.linalg.norm(a - b) for a, b in combinations(looks, 2)) > 0.08


def test_colours_that_look_alike_to_some_would_be_noticed() -> None:
    red, green = (seen(colour, "deuteranopia") for colour in ("#a04000", "#5c6000"))
    assert np.linalg.norm(red - green) < 0.08


@pytest.mark.parametrize("page", ["light", "dark"])
@pytest.mark.parametrize("behind", [PAPER, FRAME, LANE])
@pytest.mark.parametrize("colour", PALETTE)
def test_lines_stand_out(colour: str, behind: str, page: str) -> None:
    """WCAG requires a contrast of 3 for graphics."""
    assert contrast(of_page(colour, page), of_page(behind, page)) >= 3


@pytest.mark.parametrize("page", ["light", "dark"])
@pytest.mark.parametrize(
    ("text", "behind"),
    [
        *((text, PAPER) for text in (INK, FAINT, BLUE, ORANGE, GREEN, PURPLE)),
        *((INK, tint) for tint in TINTS),
        *((text, FRAME) for text in (INK, FAINT)),
    ],
)
def test_text_can_be_read(text: str, behind: str, page: str) -> None:
    assert contrast(of_page(text, page), of_page(behind, page)) >= 4.5


def test_each_colour_of_a_picture_has_a_dark_one() -> None:
    dots = [element("circle", r=1, fill=colour, stroke=colour) for colour in DARK]
    svg = document(9, 9, "dots", dots)
    rules = re.findall(r'\[(fill|stroke)="(#\w+)"\]\{(\w+):(#\w+)\}', svg)
    assert {(name, light): dark for name, light, _, dark in rules} == {
        (name, light): dark for name in ("fill", "stroke") for light, dark in DARK.items()
    }
    assert all(name == rule for name, _, rule, _ in rules)


def test_a_light_picture_is_the_one_without_its_style_sheet() -> None:
    svg = document(9, 9, "a dot", [element("circle", r=1, fill=BLUE)])
    assert "<style>" in svg
    assert "<style>" not in in_light(svg)
    assert set(svg.splitlines()) > set(in_light(svg).splitlines())


def test_a_dark_picture_has_dark_colours_alone() -> None:
    svg = document(9, 9, "a dot", [element("circle", r=1, fill=BLUE)])
    assert set(re.findall(r'"(#\w+)"', in_dark(svg))) <= set(DARK.values())


def test_another_style_sheet_of_the_picture_is_kept() -> None:
    svg = document(9, 9, "a dot", [element("style", ".dot{opacity:0}")])
    assert in_light(svg).count("<style>") == in_dark(svg).count("<style>") == 1
