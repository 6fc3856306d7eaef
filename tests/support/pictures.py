"""Read a picture: its shapes, their boxes, and the contrast of its texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from xml.etree import ElementTree as ET

from ringreduce.picture.style import text_width


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and self.right >= other.right
            and self.bottom >= other.bottom
        )

    def meets(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
    return root


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "0"))


def whole(picture: ET.Element) -> Box:
    return Box(0, 0, number(picture, "width"), number(picture, "height"))


def box(rect: ET.Element) -> Box:
    x, y = number(rect, "x"), number(rect, "y")
    return Box(x, y, x + number(rect, "width"), y + number(rect, "height"))


def text_box(element: ET.Element) -> Box:
    left, base, high = (number(element, name) for name in ("x", "y", "font-size"))
    wide = text_width(element.text or "", high, bold=element.get("font-weight") == "bold")
    left -= {"middle": wide / 2, "end": wide}.get(element.get("text-anchor", ""), 0)
    return Box(left, base - high, left + wide, base)


def groups(picture: ET.Element, name: str) -> list[ET.Element]:
    return [g for g in picture.iter("g") if name in g.get("class", "").split()]


def placed(
    element: ET.Element, x: float = 0, y: float = 0
) -> Iterator[tuple[ET.Element, list[Box]]]:
    """Yield every visible shape, in the order of drawing, with its boxes.

    The boxes of a path are the points that it goes through.
    """
    moved = re.match(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
    if moved:
        x, y = x + float(moved[1]), y + float(moved[2])
    found = []
    if element.tag == "rect":
        found = [box(element)]
    elif element.tag == "circle":
        cx, cy, r = (number(element, name) for name in ("cx", "cy", "r"))
        found = [Box(cx - r, cy - r, cx + r, cy + r)]
    elif element.tag == "text":
        found = [text_box(element)]
    elif element.tag == "path":
        points = re.findall(r"[MLC ](-?[\d.]+),(-?[\d.]+)", element.get("d", ""))
        found = [Box(float(px), float(py), float(px), float(py)) for px, py in points]
    if found:
        yield element, [Box(a + x, b + y, c + x, d + y) for a, b, c, d in found]
    for child in element:
        yield from placed(child, x, y)


def shapes(picture: ET.Element) -> list[Box]:
    return [each for _, boxes in placed(picture) for each in boxes]


def linear_rgb(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in channels]


def contrast(a: str, b: str) -> float:
    """Return the contrast of two colours, from 1 to 21.  Source: WCAG 2.2."""
    high, low = sorted(
        (
            sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear_rgb(colour), strict=True))
            for colour in (a, b)
        ),
        reverse=True,
    )
    return (high + 0.05) / (low + 0.05)


def contrasts(picture: ET.Element) -> list[tuple[str, float]]:
    """Return each text with its contrast to its background.

    The background is the text's halo, or the last rectangle below its middle.
    """
    found, behind = [], []
    for element, (first, *_) in placed(picture):
        if element.tag == "rect" and element.get("fill") != "none":
            behind.append((first, element.get("fill", "")))
        if element.tag == "text":
            middle = (first.left + first.right) / 2, (first.top + first.bottom) / 2
            under = [fill for rect, fill in behind if rect.holds(Box(*middle, *middle))]
            ink = element.get("fill") or picture.get("fill", "")
            found.append((element.text or "", contrast(ink, element.get("stroke") or under[-1])))
    return found
