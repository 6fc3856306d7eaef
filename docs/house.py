"""List the packages and draw their imports, from the packages' own first lines.

    python docs/house.py

writes the list into `developing.md` anew.  `docs/picture.py` draws the picture.  What a package may
import is `MAY_IMPORT` in `tests/support/imports.py`.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

from ringreduce.picture.style import (
    DASHED,
    FACTS_SIZE,
    FAINT,
    FRAME,
    MARGIN,
    NAME_SIZE,
    PALETTE,
    TINTS,
    TITLE_SIZE,
    document,
    element,
    text,
    text_width,
    tooltip,
)

PAGE = Path(__file__).with_name("developing.md")
sys.path.append(str(PAGE.parents[1]))

from tests.support.imports import (  # noqa: E402
    GROUND,
    LAZY,
    MAY_IMPORT,
    SOURCES,
    TREES,
    imports_of,
    package_of,
)

PUBLIC = "the public names"
PACKAGES = [name for name in MAY_IMPORT if name not in ("__main__", *GROUND)]


def first_sentence(package: str) -> str:
    """Return the first sentence of a package, or of a module of the first level."""
    tree = TREES["ringreduce" if package == PUBLIC else f"ringreduce.{package}"]
    words = " ".join((ast.get_docstring(tree) or "").split())
    return re.split(r"(?<=\.)\s", words, maxsplit=1)[0]


@cache
def loaded(package: str) -> set[str]:
    """Return what a package imports when it is loaded, besides the ground, not in functions."""
    found = set()
    for module in SOURCES:
        for node in TREES[module].body if _package(module) == package else ():
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = imports_of(module, ast.Module([node], []))
                found |= {_package(name) for name in names & SOURCES.keys()}
    return found - {package, *GROUND}


def _package(module: str) -> str:
    return package_of(module) or PUBLIC


@cache
def imported(package: str) -> set[str]:
    """Return what a package may import.  The public names import what they are the names of."""
    if package != PUBLIC:
        return MAY_IMPORT[package]
    names = imports_of("ringreduce", TREES["ringreduce"])
    users = {name for name in PACKAGES if PUBLIC in loaded(name)}
    inner = names & SOURCES.keys()
    return {_package(module) for module in inner} - users - {PUBLIC, *GROUND}


@cache
def layers() -> list[list[str]]:
    """Return the packages in layers, from the lowest: each loads packages of lower layers alone."""
    below = {name: loaded(name) for name in PACKAGES}
    left = TopologicalSorter(below | {PUBLIC: imported(PUBLIC)})
    left.prepare()
    found = []
    while left.is_active():
        found.append(sorted(left.get_ready()))
        left.done(*found[-1])
    return found


@cache
def level() -> dict[str, int]:
    return {name: n for n, layer in enumerate(layers()) for name in layer}


def block() -> str:
    """Return the list of packages, from the highest layer down to the ground."""
    order = [name for layer in layers()[::-1] for name in layer]
    rows = [("package", "what it is for", "it may import"), ("---",) * 3]
    for name in order:
        shown = name if name == PUBLIC else f"`{name}`"
        below = sorted(imported(name), key=order.index)
        rows.append((shown, first_sentence(name), ", ".join(below)))
    rows += [(f"`{name}`", first_sentence(name), "") for name in sorted(GROUND)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# --- the picture ----------------------------------------------------------------------------------

_HIGH, _ROW, _GAP = 30.0, 64.0, 20.0
"""Height of a box and of a layer, and the least space between boxes or lines of a layer."""
_TOP = 116.0
_SWEEPS = 100
"""How often each layer is put in order by its neighbours."""
Place = tuple[str, ...]
"""A package; or a package, one that it imports, and a layer that the line passes on its way."""


def lines() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return the lines down, without those that others imply, and those up."""
    edges = {(name, other) for name in level() for other in imported(name)}
    edges |= {(module.partition(".")[0], package) for module, package in LAZY}
    down = {(name, other) for name, other in edges if level()[other] < level()[name]}

    @cache
    def below(name: str) -> set[str]:
        direct = {other for above, other in down if above == name}
        return direct.union(*map(below, direct))

    implied = {(a, c) for a, c in down if any(c in below(b) for above, b in down if above == a)}
    return down - implied, edges - down


def placed(down: set[tuple[str, str]]) -> tuple[dict[Place, float], list[list[Place]]]:
    """Return the middle of each place, and the places of each layer from left to right."""
    rows: list[list[Place]] = [[(name,) for name in layer] for layer in layers()]
    near: dict[Place, list[Place]] = defaultdict(list)
    for line in sorted(down):
        for a, b in pairwise(way(*line)):
            near[a].append(b)
            near[b].append(a)
            if len(b) > 1:
                rows[int(b[2])].append(b)
    x = {place: 100.0 * n for row in rows for n, place in enumerate(row)}
    for sweep in range(_SWEEPS):
        for row in rows[:: 1 if sweep % 2 else -1]:
            wanted = {place: statistics.fmean(x[n] for n in near[place]) for place in row}
            row.sort(key=lambda place: (wanted[place], place))
            x[row[0]] = wanted[row[0]]
            for left, place in pairwise(row):
                x[place] = max(wanted[place], x[left] + (_wide(left) + _wide(place)) / 2 + _GAP)
            shift = statistics.fmean(wanted[place] - x[place] for place in row)
            x |= {place: x[place] + shift for place in row}
    first = min(x[place] - _wide(place) / 2 for place in x)
    return {place: at - first + MARGIN for place, at in x.items()}, rows


def way(name: str, other: str) -> list[Place]:
    """Return the places of a line down."""
    between = range(level()[name] - 1, level()[other], -1)
    return [(name,), *((name, other, str(n)) for n in between), (other,)]


def _wide(place: Place) -> float:
    return 0.0 if len(place) > 1 else text_width(place[0], NAME_SIZE, bold=True) + 20


def house() -> str:
    """Draw the packages in layers; a line leads from a package to one that it imports."""
    down, up = lines()
    x, rows = placed(down)
    bottom = _TOP + (len(rows) - 1) * _ROW
    y = {place: bottom - n * _ROW for n, row in enumerate(rows) for place in row}
    right, ground = max(x[place] + _wide(place) / 2 for place in x), bottom + _HIGH + _GAP
    title = f"The house: {len(PACKAGES) + len(GROUND)} packages and modules"
    facts = (
        "A line leads down to what a package imports. Lines that others imply are left out.",
        "A dashed line leads up: a function imports that package when it is called.",
    )
    elements = [text(MARGIN, 34, title, TITLE_SIZE, font_weight="bold")]
    elements += [text(MARGIN, 56 + 16 * n, f, FACTS_SIZE, fill=FAINT) for n, f in enumerate(facts)]
    elements += [_curve([(x[each], y[each]) for each in way(*line)]) for line in sorted(down)]
    for name, other in sorted(up):
        (x1, x2), (y1, y2) = ([at[(each,)] for each in (name, other)] for at in (x, y))
        aside, over = 1.1 * abs(y2 - y1), min(abs(x2 - x1) / 2, _ROW)
        bow = f"M{x1:g},{y1:g}Q{(x1 + x2) / 2 - aside:g},{(y1 + y2) / 2 - over:g} {x2:g},{y2:g}"
        style = {"fill": "none", "stroke": PALETTE[1], "stroke_dasharray": DASHED}
        elements.append(element("path", d=bow, stroke_width=1.5, **style))
    elements += [_box(*place, x[place], y[place]) for place in y if len(place) == 1]
    words = f"{', '.join(sorted(GROUND))}: every package may import them"
    slab = {"x": MARGIN, "y": ground, "width": right - MARGIN, "height": _HIGH, "rx": 6}
    elements.append(element("rect", **slab, fill=FRAME, stroke=FAINT))
    middle = {"text_anchor": "middle"}
    elements.append(text((MARGIN + right) / 2, ground + 19, words, NAME_SIZE, **middle))
    return document(right + MARGIN, ground + _HIGH + MARGIN, title, elements)


def _curve(points: list[tuple[float, float]]) -> str:
    """Return a line down through the points, upright at each."""
    parts = [f"M{points[0][0]:.1f},{points[0][1]:g}"]
    for (x1, y1), (x2, y2) in pairwise(points):
        parts.append(f"C{x1:.1f},{y1 + _ROW / 2:g} {x2:.1f},{y2 - _ROW / 2:g} {x2:.1f},{y2:g}")
    return element("path", d="".join(parts), fill="none", stroke=FAINT, stroke_width=1.5)


def _box(name: str, x: float, y: float) -> str:
    wide = _wide((name,))
    box = {"x": x - wide / 2, "y": y - _HIGH / 2, "width": wide, "height": _HIGH, "rx": 6}
    rect = element("rect", **box, fill=TINTS[0], stroke=PALETTE[0], stroke_width=1.5)
    words = text(x, y + 4.5, name, NAME_SIZE, text_anchor="middle", font_weight="bold")
    return element("g", tooltip(first_sentence(name)) + rect + words)


PICTURES: dict[str, Callable[[], str]] = {"house": house}


def main() -> None:
    """Write the list into the page."""
    place = re.compile(r"(?<=<!-- house -->\n\n).*?(?=\n\n<!-- end -->)", re.S)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(place.sub(lambda _: block(), page), encoding="utf-8")


if __name__ == "__main__":
    main()
