"""Colours for any number of chunks: equally strong, and different from their neighbours.

>>> colours(3)
['#2b87d9', '#cc566e', '#649420']
"""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, radians, sin

from ringreduce.picture.svg import element
from ringreduce.schedules.schedule import Chunks, chunk_of

_FIRST_HUE = 250.0
"""Blue."""
_FEW = 6
_MOST_STOPS = 8
"""The most colours of one message."""
_NO_CHUNK = "#8c959f"
_LIGHTNESS = 0.61
"""Lightness of at most `_FEW` colours."""
_LIGHTNESSES = (0.64, 0.48, 0.56)
"""Lightnesses of more colours, in turn: the hues of neighbours are too close to distinguish."""


def colours(number: int) -> list[str]:
    """Return `number` colours as ``#rrggbb``: hues evenly round the circle, legible on white.

    The hues are those of OKLCH, in which equal lightness looks equally light.
    Source: Björn Ottosson, "A perceptual color space for image processing", 2020.
    """
    lightnesses = (_LIGHTNESS,) if number <= _FEW else _LIGHTNESSES
    return [
        _hex(lightnesses[i % len(lightnesses)], _FIRST_HUE + 360 * i / number)
        for i in range(number)
    ]


class Paints:
    """The paint of messages: the colour of their chunk, or a gradient through several colours."""

    def __init__(self, chunks: int) -> None:
        self.colours = colours(chunks)
        self._gradients: dict[Chunks, str] = {}

    def of(self, chunks: Chunks) -> str:
        """Return the value of a ``stroke`` or ``fill``; a copy has the colour of its chunk."""
        chunks = tuple(dict.fromkeys(map(chunk_of, chunks)))
        if len(chunks) < 2:
            return self.colours[chunks[0]] if chunks else _NO_CHUNK
        return f"url(#{self._gradients.setdefault(chunks, f'paint{len(self._gradients)}')})"

    def definitions(self) -> Iterable[str]:
        """Yield the elements of the gradients that `of` has returned."""
        for chunks, name in self._gradients.items():
            last = min(len(chunks), _MOST_STOPS) - 1
            stops = "".join(
                element(
                    "stop",
                    offset=round(i / last, 3),
                    stop_color=self.colours[chunks[i * (len(chunks) - 1) // last]],
                )
                for i in range(last + 1)
            )
            yield element("linearGradient", stops, id=name)


def _hex(lightness: float, hue: float) -> str:
    """Return the most vivid colour of this lightness and hue that a screen can show."""
    candidates = (_linear_rgb(lightness, percent / 100, hue) for percent in range(15, -1, -1))
    rgb = next(rgb for rgb in candidates if all(0 <= value <= 1 for value in rgb))
    return "#" + "".join(f"{round(255 * _gamma(value)):02x}" for value in rgb)


def _linear_rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _gamma(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
