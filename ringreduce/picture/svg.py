"""Write elements of SVG.

>>> element("circle", r=5.0, stroke_width=1.5)
'<circle r="5" stroke-width="1.5"/>'
>>> text(8, 20, "a < b", 12, fill="#000000")
'<text x="8" y="20" font-size="12" fill="#000000">a &lt; b</text>'
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

_LETTER = 0.6
"""The width of a letter in font sizes, on average: that of DejaVu Sans, which is a wide one."""


def element(name: str, content: str | None = None, /, **attributes: float | str) -> str:
    """Return an element around `content`, which is SVG; attributes are named with _ for -."""
    words = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_value(value))}"
        for key, value in attributes.items()
    )
    return f"<{name}{words}/>" if content is None else f"<{name}{words}>{content}</{name}>"


def text(x: float, y: float, words: str, size: float, **attributes: float | str) -> str:
    """Return a line of text with its baseline at `y`."""
    return element("text", escape(words), x=x, y=y, font_size=size, **attributes)


def tooltip(words: str) -> str:
    """Return a tooltip for the element around it."""
    return element("title", escape(words))


def text_width(words: str, size: float) -> float:
    """Estimate the width of a line of text, rather too high."""
    return _LETTER * size * len(words)


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):.12g}"
