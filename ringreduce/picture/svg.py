"""Write elements of SVG.

>>> element("circle", r=5.0, stroke_width=1.5)
'<circle r="5" stroke-width="1.5"/>'
>>> text(8, 20, "a < b", 12, fill="#000000")
'<text x="8" y="20" font-size="12" fill="#000000">a &lt; b</text>'
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

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
