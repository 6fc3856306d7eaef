"""Settings of the documentation site.  One command builds it: sphinx-build -W docs site."""

import os
import sys
from pathlib import Path

import ringreduce

sys.path.insert(0, str(Path(__file__).parent))  # for `extension`

REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "ringreduce/ringreduce")
"""Owner and name, as GitHub's workflows state them."""

project = "ringreduce"
author = "the authors of ringreduce"
project_copyright = f"{author}, Apache-2.0"
version = release = ringreduce.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "extension"]
exclude_patterns = ["_build"]
repository_url = f"https://github.com/{REPOSITORY}"

# Pages are Markdown, as GitHub shows them.  An anchor that no heading has is a warning.
myst_heading_anchors = 3

# Quotes and dashes stay as they were typed: many are Python's, or begin an option.
smartquotes = False

# `name` in a docstring links to the entry of that name, if it has one.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"{project} {version}"
html_theme_options = {
    "source_repository": repository_url,
    "source_branch": "main",
    "source_directory": "docs/",
}
