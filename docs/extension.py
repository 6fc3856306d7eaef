"""What the site shows besides its pages: links to files of the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import PurePosixPath

from sphinx.application import Sphinx

_LINK = re.compile(r"(?<=\]\()\.\./[^)\s]+(?=\))")
"""The target of a Markdown link that leaves the folder of its page."""


def link_the_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let relative links out of `docs/` lead to the repository, as they do on GitHub."""
    folder = PurePosixPath("docs", docname).parent

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(str(folder / link[0]))
        inside = path.startswith("docs/")
        return link[0] if inside else f"{app.config.repository_url}/blob/main/{path}"

    source[0] = _LINK.sub(target, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register everything with Sphinx."""
    app.add_config_value("repository_url", "", "env")
    app.connect("source-read", link_the_repository)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
