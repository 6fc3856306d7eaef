"""Scales of charts: from values to positions, and the values that are written beside an axis.

>>> linear([0.0, 9.0]).ticks
((0, '0'), (2, '2'), (4, '4'), (6, '6'), (8, '8'))
>>> logarithmic([0.4, 30.0]).ticks
((0.5, '0.5'), (1, '1'), (2, '2'), (5, '5'), (10, '10'), (20, '20'))
>>> powers_of_two([8, 4096], size_text, most=4).ticks
((8, '8 B'), (64, '64 B'), (512, '512 B'), (4096, '4 KiB'))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_MOST = 7
_PAD = 1.08
"""A logarithmic scale ends this factor outside the values."""


@dataclass(frozen=True)
class Scale:
    """The values from `low` to `high`, which are positive if the scale is logarithmic."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    """(value, its text), ascending."""
    is_log: bool = False

    def share(self, value: float) -> float:
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def has(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.is_log)


def linear(values: Iterable[float], most: int = _MOST) -> Scale:
    """Return a linear scale that covers the finite `values`, with at most `most` ticks.

    The ticks are multiples of 1, 2 or 5 times a power of ten.
    """
    found = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    if low == high:
        low, high = low - 0.5, high + 0.5
    step = next(
        step
        for step in _round_numbers((high - low) / most)
        if math.floor(high / step) - math.ceil(low / step) < most
    )
    multiples = range(math.ceil(low / step), math.floor(high / step) + 1)
    digits = max(0, -math.floor(math.log10(step)))
    ticks = [round(n * step, digits) for n in multiples]
    return Scale(low, high, tuple((_plain(tick), number_text(tick)) for tick in ticks))


def logarithmic(values: Iterable[float], most: int = _MOST) -> Scale:
    """Return a logarithmic scale that covers the positive `values`, with at most `most` ticks.

    The ticks are 1, 2 and 5 times powers of ten, or powers of ten alone.
    """
    low, high = _positive_ends(values)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [tick for tick in _decades(low, high, steps) if low <= tick <= high]
        if len(ticks) <= most:
            break
    every = -(-len(ticks) // most) or 1
    texts = tuple((_plain(tick), number_text(tick)) for tick in ticks[::every])
    return Scale(low, high, texts, is_log=True)


def powers_of_two(values: Iterable[float], words: Callable[[int], str], most: int = _MOST) -> Scale:
    """Return a logarithmic scale from the least to the greatest of the positive `values`.

    The ticks are powers of two, at most `most`; `words` writes one.
    """
    low, high = _positive_ends(values, pad=1.0)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    least = max(1, -(-(last - first) // (most - 1)))
    # The distance after which the last tick is nearest to the end of the scale.
    every = min(range(least, least + 3), key=lambda distance: (last - first) % distance)
    ticks = tuple((2**k, words(2**k)) for k in range(first, last + 1, every) if k >= 0)
    return Scale(low, high, ticks, is_log=True)


def number_text(value: float) -> str:
    """Write a number with separators and without needless zeros: 12,000 or 0.25."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}".replace("e-0", "e-")


def size_text(nbytes: int) -> str:
    """Write a size: 8 B, 64 KiB, 1.5 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.5g} {unit}"
    return f"{nbytes} B"


def _round_numbers(least: float) -> Iterable[float]:
    exponent = math.floor(math.log10(least))
    while True:
        for factor in (1, 2, 5):
            yield factor * 10.0**exponent
        exponent += 1


def _decades(low: float, high: float, steps: Sequence[int]) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**exponent for exponent in exponents for step in steps]


def _positive_ends(values: Iterable[float], pad: float = _PAD) -> tuple[float, float]:
    found = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    low, high = min(found) / pad, max(found) * pad
    return (low, high) if low < high else (low / 2, high * 2)


def _plain(value: float) -> float:
    return int(value) if value == int(value) else value
