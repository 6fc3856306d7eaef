"""The gallery: a picture of every algorithm, drawn from the schedule that runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.picture import to_svg

FOLDER = "gallery"
"""Folder of the pictures on the site."""
_NODES = {"hierarchical": [[0, 1, 2], [3, 4]], "torus": [[0, 1, 2, 3, 4, 5]]}
"""The ranks of each node for algorithms that four ranks on one node would not show."""
_FOUR = [[0, 1, 2, 3]]
_NAME = re.compile(r"`(\w+)(?:\([^`]*\))?`(?:(?:, `[^`]*`)*\]\((#[\w-]+)\))?")
"""A name in a table of algorithms, and the anchor that it links to."""


def algorithms() -> Iterator[tuple[str, str, list[list[int]]]]:
    """Yield collective, algorithm and nodes of every picture."""
    for collective, known in ALGORITHMS.items():
        for name in known:
            yield collective, name, _NODES.get(name, _FOUR)


def draw(site: Path) -> None:
    """Write all pictures into the folder of the site."""
    (site / FOLDER).mkdir(exist_ok=True)
    for collective, name, nodes in algorithms():
        schedule = build(collective, name, nodes)
        drawn = to_svg(schedule, nodes if len(nodes) > 1 else None)
        (site / FOLDER / f"{collective}-{name}.svg").write_text(drawn)


def markdown(tables: str) -> str:
    """Return the text of the gallery; `tables` is the page with the tables of algorithms."""
    known, parts, before = descriptions(tables), [], ""
    for collective, name, nodes in algorithms():
        if collective != before:
            parts.append(f"## {collective}")
            before = collective
        parts += [f"### {collective}: {name}", *_entry(collective, name, nodes)]
        if (collective, name) in known:
            parts.insert(-2, known[collective, name])
    return "\n\n".join(parts)


def _entry(collective: str, name: str, nodes: list[list[int]]) -> Iterator[str]:
    size = sum(map(len, nodes))
    words = f"{collective} by {name} among {size} ranks"
    yield f'<img class="algorithm" src="{FOLDER}/{collective}-{name}.svg" alt="{words}">'
    layout = ",".join(str(len(node)) for node in nodes)
    given = f"--nodes {layout}" if len(nodes) > 1 else f"-n {size}"
    given += "" if collective == "all_reduce" else f" --collective {collective}"
    yield f"```console\n$ ringreduce explain {given} --algorithm {name} --svg {name}.svg\n```"


def descriptions(tables: str) -> dict[tuple[str, str], str]:
    """Return the steps and the use of each algorithm, as its table has them, with a link."""
    found, collectives = {}, ["all_reduce"]
    for line in tables.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or "`" not in line or len(cells) not in (4, 5):
            continue
        if len(cells) == 5:
            collectives = re.findall(r"`(\w+)`", cells.pop(0)) or collectives
        names, steps, _, best = cells
        listed = _NAME.findall(names)
        words = f"Steps among n ranks: {steps}. Best for: {best}."
        if len(listed) > 1 and steps == "these are":  # the row that says so of several
            words = "A broadcast backwards."
        for name, anchor in listed:
            link = f" [How it works](algorithms.md{anchor})." if anchor else ""
            for collective in collectives:
                found.setdefault((collective, name), words + link)
    return found
