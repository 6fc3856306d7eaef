"""The documentation site: it builds without a warning, and every link of it leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ringreduce
from ringreduce import train
from ringreduce.algorithms import ALGORITHMS
from ringreduce.launch import cli
from tests.support.mpi import ROOT, environment
from tests.support.public import entries, facts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("furo") is None, reason="needs pip install 'ringreduce[docs]'"
    ),
]


@dataclass
class Page(HTMLParser):
    """The anchors of a page, and what it refers to."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    """Targets of links."""
    loads: list[str] = field(default_factory=list)
    """What a browser loads to show the page."""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(given["href"])
        elif tag in ("img", "script", "source", "object"):
            self.loads += [given[key] for key in ("src", "srcset", "data") if key in given]


def broken(pages: dict[Path, Page], files: set[Path]) -> list[str]:
    """The links and loaded files of all pages that lead nowhere; `files` are those of the site."""
    found = []
    for path, page in pages.items():
        for target in {*page.links, *page.loads}:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            file = Path(normpath(path.parent / unquote(parts.path))) if parts.path else path
            anchors = pages[file].anchors if file in pages else set()
            if file not in files or (parts.fragment and unquote(parts.fragment) not in anchors):
                found.append(f"{path.name}: {target}")
    return found


def build(folder: Path, source: Path = ROOT / "docs") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", source, folder]
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


@pytest.fixture(scope="module")
def files(site) -> set[Path]:
    return {path for path in site.rglob("*") if path.is_file()}


def test_every_link_and_anchor_leads_somewhere(pages, files):
    assert sum(len(page.links) for page in pages.values()) > 300
    assert broken(pages, files) == []


def test_a_page_loads_nothing_from_elsewhere(pages):
    loaded = {target for page in pages.values() for target in page.loads}
    assert loaded
    assert [target for target in loaded if urlsplit(target).netloc] == []


def test_every_page_of_the_folder_is_on_the_site(site):
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert [path for path in sources if not (site / path.with_suffix(".html")).exists()] == []


def test_the_pages_are_in_the_order_in_which_they_are_read():
    captions = re.findall(r"^:caption: (.*)$", (ROOT / "docs/index.md").read_text(), re.M)
    begin = ["Start", "Tutorial", "How-to", "Algorithms", "Reference"]
    assert captions == [*begin, "Design", "Troubleshooting", "Coming from", "Changelog"]


def test_the_site_has_search_dark_mode_version_and_links_to_edit(site):
    html = (site / "calls.html").read_text()
    assert f"ringreduce {ringreduce.__version__}" in html
    assert 'action="search.html"' in html
    assert "theme-toggle" in html
    assert "/edit/main/docs/calls.md" in html


def test_every_public_name_has_an_entry(pages):
    anchors = set().union(*(page.anchors for page in pages.values()))
    wanted = {f"ringreduce.{name}" for name, _ in entries()}
    wanted |= {f"ringreduce.Config.{field.name}" for field in facts.fields(ringreduce.Config)}
    wanted |= {f"ringreduce.train.Settings.{f.name}" for f in facts.fields(train.Settings)}
    assert wanted - anchors == set()


def test_every_command_and_option_is_listed(site):
    html = (site / "reference/command-line.html").read_text()
    for name, command in cli.parsers()[1].items():
        assert f'id="ringreduce-{name}"' in html
        flags = {flag for action in command._actions for flag in action.option_strings}
        assert [flag for flag in flags if flag not in html] == []
    assert "--bucket-bytes" in html  # of the module that train starts
    assert "--iters" in html  # of the module that bench starts


def test_every_variable_is_listed(site):
    html = (site / "reference/environment.html").read_text()
    sources = [path.read_text() for path in (ROOT / "ringreduce").rglob("*.py")]
    names = {name for text in sources for name in re.findall(r"RINGREDUCE_[A-Z]\w+", text)}
    assert names
    assert [name for name in names if name not in html] == []


def test_code_in_a_page_links_to_the_reference(pages, site):
    links = pages[site / "calls.html"].links
    assert "reference/communicator.html#ringreduce.Communicator.all_reduce" in links
    assert "reference/init.html#ringreduce.init" in links


def test_the_gallery_has_a_picture_of_every_algorithm(site, pages):
    gallery = pages[site / "gallery.html"]
    shown = {target for target in gallery.loads if target.startswith("gallery/")}
    known = {f"gallery/{c}-{name}.svg" for c, names in ALGORITHMS.items() for name in names}
    assert shown == known
    assert all("<svg" in (site / target).read_text()[:200] for target in shown)
    assert "algorithms.html#ring" in gallery.links


def build_page(folder: Path, *paragraphs: str) -> subprocess.CompletedProcess[str]:
    """Build a site of one page, with the settings of the documentation."""
    source = folder / "docs"
    source.mkdir()
    for path in (ROOT / "docs").glob("*.py"):
        (source / path.name).write_text(path.read_text())
    (source / "_static").mkdir()
    (source / "_static/site.css").touch()
    (source / "index.md").write_text("\n\n".join(["# A page", *paragraphs]) + "\n")
    return build(folder / "site", source)


def test_a_page_with_a_link_that_leads_somewhere_is_built(tmp_path):
    assert build_page(tmp_path, "[this page](#a-page)").returncode == 0


def test_every_link_that_leads_nowhere_is_a_warning_and_fails_the_build(tmp_path):
    done = build_page(
        tmp_path,
        '<picture><source srcset="x.svg"><img src="none.svg" alt="none"></picture>',
        "[nowhere](nowhere.md)",
        "[no such heading](index.md#nowhere)",
        "![no picture](nowhere.svg)",
    )
    assert done.returncode == 1
    lines = re.findall(r"index\.md:(\d+): WARNING: ", done.stderr)
    assert sorted(lines) == ["3", "5", "7", "9"], done.stderr


@pytest.mark.parametrize(
    "body", ['<a href="gone.html">', '<a href="#gone">', '<img src="gone.svg">']
)
def test_a_broken_link_is_found(tmp_path, body):
    path = tmp_path / "page.html"
    path.write_text(f'<p id="here">{body}<a href="page.html#here">')
    assert len(broken({path: Page(path)}, {path})) == 1
