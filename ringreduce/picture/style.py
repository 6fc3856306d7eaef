"""The one style of all pictures: elements of SVG, colours, sizes of text, and the document.

An element has the colours for a light page as its attributes, so every program that reads SVG shows
them.  `document` adds a style sheet with the colour for a dark page of each colour in the picture.

>>> element("circle", r=5.0, stroke_width=1.5)
'<circle r="5" stroke-width="1.5"/>'
>>> text(8, 20, "a < b", 12, fill="#000000")
'<text x="8" y="20" font-size="12" fill="#000000">a &lt; b</text>'
>>> svg = document(9, 9, "a dot", [element("circle", r=2, fill=INK)])
>>> 'fill="#1f2328"' in svg, "prefers-color-scheme" in svg
(True, True)
>>> 'fill="#e6edf3"' in in_dark(svg), "<style>" in in_dark(svg)
(True, False)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

INK, FAINT = "#1f2328", "#59636e"
"""Text, and text of less weight."""
PAPER, EDGE, FRAME, LANE, GRID = "#ffffff", "#d0d7de", "#f6f8fa", "#e4e9ef", "#d8dee4"
"""Backgrounds and lines that separate: of the picture, a node, a rank's step, a chart."""
BLUE, ORANGE, GREEN, PURPLE = "#104aa0", "#a84300", "#2a806a", "#6b2f60"
"""Lines, and text about them."""
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, "#1488d8", "#a67d17", "#4f120f", "#1d0858")
"""Colours for things of one kind, which colour-blind people can tell apart too."""
TINTS = ("#c3d6f2", "#f6cfae", "#bfe0d3", "#e3c6dd")
"""The first colours of `PALETTE` as backgrounds of text."""
FAMILY = "system-ui, sans-serif"
TITLE_SIZE, FACTS_SIZE, NAME_SIZE, NUMBER_SIZE = 18.0, 12.0, 12.0, 11.0
DASHED, DOTTED = "5 3", "1 3"
MARGIN = 20.0
"""Space between the border of a picture and its elements."""
DARK = {
    INK: "#e6edf3",
    FAINT: "#9ba4af",
    PAPER: "#0d1117",
    EDGE: "#3d444d",
    FRAME: "#151b23",
    LANE: "#262c36",
    GRID: "#2f3742",
    **dict(
        zip(
            (*PALETTE, *TINTS),
            (
                *("#4a8cf7", "#ef8a2f", "#45cf9f", "#b07ab4"),
                *("#a5e9ff", "#f7e04a", "#d14a36", "#b3a6fa"),
                *("#1f3d70", "#6b3a10", "#1d5443", "#533857"),
            ),
            strict=True,
        )
    ),
}
"""Colour on a light page -> the colour on a dark one."""
_ATTRIBUTES = ("fill", "stroke", "stop-color")
_BEGIN, _END = "<style>@media (prefers-color-scheme: dark) {", "}</style>"


def document(width: float, height: float, title: str, elements: Sequence[str]) -> str:
    """Return an SVG document with a background, in colours for light and dark pages."""
    size: dict[str, float | str] = {"width": width, "height": height}
    card = {"x": 0.5, "y": 0.5, "width": width - 1, "height": height - 1, "rx": 10}
    body = [tooltip(title), element("rect", **card, fill=PAPER, stroke=EDGE), *elements]
    picture = element(
        "svg",
        "\n".join(["", *body, ""]),
        xmlns="http://www.w3.org/2000/svg",
        **size,
        viewBox=f"0 0 {width:.12g} {height:.12g}",
        role="img",
        font_family=FAMILY,
        fill=INK,
    )
    head, rest = picture.split("\n", 1)
    return "\n".join([head, _BEGIN + _rules(picture) + _END, rest]) + "\n"


def in_light(svg: str) -> str:
    return re.sub(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n", "", svg)


def in_dark(svg: str) -> str:
    attribute = "|".join(_ATTRIBUTES)
    return re.sub(
        rf'({attribute})="(#\w+)"',
        lambda found: f'{found[1]}="{DARK.get(found[2], found[2])}"',
        in_light(svg),
    )


def _rules(picture: str) -> str:
    return "".join(
        f'[{name}="{light}"]{{{name}:{dark}}}'
        for light, dark in DARK.items()
        for name in _ATTRIBUTES
        if f' {name}="{light}"' in picture
    )


_WIDTHS = {
    **dict.fromkeys(" ijlI.,|'", 0.33),
    **dict.fromkeys("frt-()[]:;/!·", 0.44),
    **dict.fromkeys("mwMW%@…", 1.0),
}
"""Widths of letters in font sizes, rounded up: those of DejaVu Sans, which is a wide font."""
_LETTER, _BOLD = 0.67, 1.13
"""The width of other letters, and of bold ones as a multiple."""


def element(name: str, content: str | None = None, /, **attributes: float | str) -> str:
    """Return an element around `content`, which is SVG; attributes are named with _ for -."""
    words = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_value(value))}"
        for key, value in attributes.items()
    )
    return f"<{name}{words}/>" if content is None else f"<{name}{words}>{content}</{name}>"


def text(x: float, y: float, words: str, size: float, **attributes: float | str) -> str:
    return element("text", escape(words), x=x, y=y, font_size=size, **attributes)


def tooltip(words: str) -> str:
    return element("title", escape(words))


def text_width(words: str, size: float, *, bold: bool = False) -> float:
    """Estimate the width of a line of text, rather too high."""
    widths = sum(_WIDTHS.get(letter, _LETTER) for letter in words)
    return widths * size * (_BOLD if bold else 1)


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):.12g}"
