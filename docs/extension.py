"""What the site shows besides its pages.

- Links out of `docs/` lead to the repository.  A picture for light and dark pages is one file.
- The fields of a dataclass are attributes of its entry in the reference.
- Code such as `comm.all_reduce(x)` in a page links to the reference.
- ``{commands}`` and ``{environment-variables}`` are made from the source, ``{gallery}`` from the
  schedules that run, ``{examples}`` from the folder of examples.
"""

from __future__ import annotations

import dataclasses
import inspect
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

import facts
import gallery
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import ringreduce

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()\.\./[^)\s]+(?=\))")
"""The target of a Markdown link that leaves the folder of its page."""
_PICTURE = re.compile(r'<picture>.*?<img src="([^"]*)" alt="([^"]*)">\s*</picture>', re.S)
"""A choice of files, which GitHub needs: the file, and its text."""
_CODE = re.compile(r"(?:(rr|ringreduce|comm|work|dp)\.)?([A-Za-z_][\w.]*)(\(.*\))?", re.S)
"""A name in code, what it is an attribute of, and its arguments."""
_OF = {
    "rr": "ringreduce",
    "ringreduce": "ringreduce",
    "comm": "ringreduce.Communicator",
    "work": "ringreduce.Work",
    "dp": "ringreduce.train.DataParallel",
}
"""What the names of the pages' examples stand for."""
_MADE_BY_THE_LIBRARY = tuple(
    f"ringreduce.{name}" for name in ("Communicator", "SharedArray", "Work")
)
"""Classes that users do not make themselves: their constructors are not shown."""


_SECTIONS = ("Raises:", "Example:")
"""What follows the fields in the docstring of a dataclass."""


def link_the_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let relative links out of `docs/` lead to the repository, as they do on GitHub."""
    folder = PurePosixPath("docs", docname).parent

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(str(folder / link[0]))
        inside = path.startswith("docs/")
        return link[0] if inside else f"{app.config.repository_url}/blob/main/{path}"

    source[0] = _LINK.sub(target, source[0])


def unfold_pictures(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show the first file of each ``<picture>``: it adapts to the mode of the page by itself."""
    source[0] = _PICTURE.sub(r"![\2](\1)", source[0])


# --- the reference --------------------------------------------------------------------------------


def add_fields(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Describe the fields of a dataclass as attributes."""
    if what == "class" and dataclasses.is_dataclass(value):
        described = []
        for field in facts.fields(value):
            default = [f"   :value: {field.default}"] if field.default else []
            described += [f".. attribute:: {field.name}", f"   :type: {field.type}", *default, ""]
            described += [f"   {line}" for line in field.text.splitlines()] + [""]
        first = next((i for i, line in enumerate(lines) if line in _SECTIONS), len(lines))
        lines[first:first] = described


def hide_constructor(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: Any, result: Any
) -> tuple[str, str] | None:
    """Leave out the arguments of classes that users do not make."""
    raised = inspect.isclass(value) and issubclass(value, Exception)
    return ("", "") if signature and (raised or name in _MADE_BY_THE_LIBRARY) else None


class LinkCode(SphinxPostTransform):
    """Link names in code to their entries in the reference."""

    default_priority = 20

    def run(self, **_: Any) -> None:
        domain = self.env.domains["py"]
        assert isinstance(domain, PythonDomain)
        for code in list(self.document.findall(nodes.literal)):
            if isinstance(code.parent, (nodes.reference, nodes.title)):
                continue
            entry = domain.objects.get(entry_of(code.astext(), domain.objects.keys()))
            here = self.env.current_document.docname
            if entry is not None:
                link = make_refnode(
                    self.app.builder, here, entry.docname, entry.node_id, code.deepcopy()
                )
                code.replace_self(link)


def entry_of(code: str, known: Any) -> str:
    """Return the full name of the entry that `code` names, or "" if it names none."""
    match = _CODE.fullmatch(code)
    if not match:
        return ""
    of, name, arguments = match.groups()
    if of:
        full = f"{_OF[of]}.{name}"
    elif name.partition(".")[0] in ringreduce.train.__all__:
        full = f"ringreduce.train.{name}"
    elif name[0].isupper():
        full = f"ringreduce.{name}"
    else:
        full = f"ringreduce.Communicator.{name}" if arguments else ""
    return full if full in known else ""


# --- pages that are made from the source ----------------------------------------------------------


class Made(SphinxDirective):
    """A directive that is replaced by Markdown."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the source may have changed, though the page has not
        return self.parse_text_to_nodes(self.markdown(), allow_section_headings=True)

    def markdown(self) -> str:
        """Return the text."""
        raise NotImplementedError


class Commands(Made):
    """Every command with its options."""

    def markdown(self) -> str:
        return facts.commands()


class EnvironmentVariables(Made):
    """The variables that ringreduce reads."""

    def markdown(self) -> str:
        return facts.environment_variables()


class Gallery(Made):
    """A picture of every algorithm."""

    def markdown(self) -> str:
        return gallery.markdown((ROOT / "docs/algorithms.md").read_text())


class Examples(Made):
    """Every program of the folder of examples."""

    def markdown(self) -> str:
        programs = sorted((ROOT / "examples").glob("*.py"))
        scripts = sorted((ROOT / "examples").glob("*.sh"))
        return "\n\n".join(map(_example, [*programs, *scripts]))


def _example(path: Path) -> str:
    source = path.read_text().rstrip()
    language = {".py": "python", ".sh": "bash"}[path.suffix]
    title = path.stem.replace("_", " ").capitalize()
    return f"## {title}\n\n`examples/{path.name}`\n\n````{language}\n{source}\n````"


def draw_gallery(app: Sphinx, error: Exception | None) -> None:
    """Write the pictures of the gallery beside the pages."""
    if error is None and app.builder.format == "html" and "gallery" in app.env.found_docs:
        gallery.draw(Path(app.outdir))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register everything with Sphinx."""
    app.add_config_value("repository_url", "", "env")
    app.add_directive("commands", Commands)
    app.add_directive("environment-variables", EnvironmentVariables)
    app.add_directive("gallery", Gallery)
    app.add_directive("examples", Examples)
    app.add_post_transform(LinkCode)
    app.connect("source-read", unfold_pictures)
    app.connect("source-read", link_the_repository)
    # Before napoleon reads the docstring.
    app.connect("autodoc-process-docstring", add_fields, priority=100)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("build-finished", draw_gallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
