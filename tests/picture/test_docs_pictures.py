"""The pictures of the pages: drawn by their program, in sight, legible, light and dark."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from ringreduce.picture.style import PALETTE, TINTS, in_dark, in_light
from tests.support.mpi import ROOT, environment
from tests.support.pictures import box, contrasts, groups, parse, placed, shapes, whole

DOCS = ROOT / "docs"
PICTURES = [path for path in sorted(DOCS.glob("*.svg")) if not path.stem.endswith("-dark")]
PAGES = sorted(DOCS.glob("*.md"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the program has drawn."""
    folder = tmp_path_factory.mktemp("pictures")
    command = [sys.executable, str(DOCS / "picture.py"), str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    return folder


OF_STRATEGIES = [path.stem for path in PICTURES if path.stem.startswith("strategy-")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "ring-animated", "hierarchical", "house", *OF_STRATEGIES])
def test_a_picture_in_the_docs_is_drawn_from_the_code_that_runs(name: str, drawn: Path) -> None:
    for file in (f"{name}.svg", f"{name}-dark.svg"):
        assert (drawn / file).read_text() == (DOCS / file).read_text()


def test_the_page_on_strategies_shows_all_their_pictures() -> None:
    page = (DOCS / "strategies.md").read_text()
    assert sorted(re.findall(r'img src="(.*?)\.svg"', page)) == OF_STRATEGIES
    assert len(OF_STRATEGIES) == 19


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_every_picture_has_its_dark_variant(path: Path) -> None:
    dark = path.with_name(f"{path.stem}-dark.svg")
    assert dark.read_text() == in_dark(path.read_text())


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("page", [in_light, in_dark], ids=["light", "dark"])
def test_texts_can_be_read(path: Path, page) -> None:
    found = contrasts(parse(page(path.read_text())))
    assert found
    assert [text for text, value in found if value < 4.5] == []


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_nothing_is_cut_off(path: Path) -> None:
    picture = parse(path.read_text())
    assert all(whole(picture).holds(shape) for shape in shapes(picture))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_several_colours(path: Path) -> None:
    assert len(set(re.findall(r'"(#\w{6})"', path.read_text())) & {*PALETTE, *TINTS}) > 1


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title(path: Path) -> None:
    """The first element, which a browser shows and reads aloud."""
    (first, *_) = parse(path.read_text()).iter("title")
    assert re.search(r"\d", first.text or "")


def test_heads_of_arrows_are_in_front_of_the_boxes() -> None:
    order = [shape for shape, _ in placed(parse((DOCS / "ring.svg").read_text()))]
    rects = [i for i, shape in enumerate(order) if shape.tag == "rect"]
    heads = [i for i, shape in enumerate(order) if shape.get("class") == "head"]
    assert len(heads) == 4 * 6
    assert max(rects) < min(heads)


def test_every_box_of_the_ring_has_its_chunk_number() -> None:
    numbers = [t.text for t in parse((DOCS / "ring.svg").read_text()).iter("text")]
    # 7 states of 4 ranks.
    assert [numbers.count(str(chunk)) for chunk in range(4)] == [28] * 4


def test_the_packages_in_the_house_stand_apart() -> None:
    _, *boxes = map(box, parse((DOCS / "house.svg").read_text()).iter("rect"))
    assert len(boxes) > 20
    assert not any(one.meets(other) for one, other in combinations(boxes, 2))


def test_the_animation_stops_if_the_reader_asks_for_that() -> None:
    svg = (DOCS / "ring-animated.svg").read_text()
    (classes,) = re.findall(r"reduced-motion: reduce\)\{([^{]*)\{animation:none\}\}", svg)
    names = {f".{name}" for name in re.findall(r'class="(\w+)', svg)}
    animated = set(re.findall(r"(\.\w+?)\d*\{animation-name", svg))
    assert set(classes.split(",")) == names
    assert animated == {".token", ".state", ".after"}


def test_without_animation_the_end_is_visible() -> None:
    """Every rank has every sum, no chunk is on its way, and one caption is shown."""
    svg = (DOCS / "ring-animated.svg").read_text()
    assert ".token,.caption:not(.state7){opacity:0}" in svg
    last = groups(parse(svg), "state7")
    assert [text.text for text in last[0]] == ["end", "each rank has the sum of all ranks' values"]
    assert len(groups(parse(svg), "after")) == 4 * 6


def test_every_message_of_the_animation_moves_to_its_receiver() -> None:
    picture = parse((DOCS / "ring-animated.svg").read_text())
    for step in range(6):
        tokens = groups(picture, f"token{step}")
        changed = {
            (float(g[0].get("x", "")), float(g[0].get("y", "")))
            for g in groups(picture, f"after{step}")
        }
        reached = set()
        for token in tokens:
            x, y = (float(token[0].get(name, "")) for name in ("x", "y"))
            dx, dy = re.findall(r"--[xy]:(-?[\d.]+)px", token.get("style", ""))
            reached.add((x + float(dx), y + float(dy)))
        assert len(reached) == 4
        assert reached == changed


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_shows_pictures_that_are_there_for_light_and_dark(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r'(?:src|srcset)="([^"]+)"', text):
        assert (page.parent / name).exists(), name
    lights = re.findall(r'<img src="([^"]+)\.svg" alt="[^"]{20,}">', text)
    darks = re.findall(r'"\(prefers-color-scheme: dark\)" srcset="([^"]+)-dark\.svg"', text)
    assert lights == darks
    assert not re.search(r"!\[[^]]*\]\([^)]*\.(svg|png)\)", text)


def test_pages_have_pictures() -> None:
    shown = {page.name: page.read_text().count("<picture>") for page in PAGES}
    assert (shown["performance.md"], shown["seeing.md"], shown["training.md"]) == (3, 1, 1)
