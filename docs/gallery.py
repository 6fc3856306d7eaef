"""The gallery: a picture of every algorithm, drawn from the schedule that runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.picture import to_svg
from ringreduce.schedules.check import check

FOLDER = "gallery"
"""Folder of the pictures on the site."""
_NODES = {"hierarchical": [[0, 1, 2], [3, 4]], "torus": [[0, 1, 2, 3, 4, 5]]}
"""The ranks of each node for algorithms that four ranks on one node would not show."""
_FOUR = [[0, 1, 2, 3]]


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
    anchors = dict(re.findall(r"\[`(\w+)[^\]]*\]\((#[\w-]+)\)", tables))
    parts, before = [], ""
    for collective, name, nodes in algorithms():
        if collective != before:
            parts.append(f"## {collective}")
            before = collective
        parts += [f"### {collective}: {name}", *_described(collective, name, nodes)]
        if name in anchors:
            parts.append(f"[How it works](algorithms.md{anchors[name]})")
    return "\n\n".join(parts)


def _described(collective: str, name: str, nodes: list[list[int]]) -> Iterator[str]:
    schedule = build(collective, name, nodes)
    proof = check(schedule)
    where = f" on nodes of {' and '.join(str(len(n)) for n in nodes)}" if len(nodes) > 1 else ""
    yield f"{proof.steps} steps and {proof.messages} messages among {schedule.size} ranks{where}."
    words = f"{collective} by {name} among {schedule.size} ranks"
    yield f'<img class="algorithm" src="{FOLDER}/{collective}-{name}.svg" alt="{words}">'
    given = (
        f"--nodes {','.join(str(len(n)) for n in nodes)}"
        if len(nodes) > 1
        else f"-n {schedule.size}"
    )
    command = f"ringreduce explain {given} --collective {collective} --algorithm {name}"
    yield f"```console\n$ {command} --svg {name}.svg\n```"
