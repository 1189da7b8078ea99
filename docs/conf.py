"""The site that `make docs` builds from this folder into build/docs. It loads nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "Tandem"
html_title = "Tandem"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_show_copyright = html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 4  # headings get the anchors that GitHub gives them
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]  # JSON with "..." in it

default_role = "code"  # docstrings are Markdown, in which `x` is code
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True, "exclude-members": "__init__, __new__"}
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
linkcheck_ignore = [r"https?://(127\.0\.0\.1|localhost)\b"]
linkcheck_anchors = False  # pages make many of them by scripts
linkcheck_timeout, linkcheck_retries = 20, 2
toc_object_entries = False  # else copying them into every page takes half the time of the build


_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s:#]+)(?:#[^)\s]*)?\)")


def name_files_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Replaces links to files of the repository that the site does not have, such as examples, by their paths."""
    docs = Path(app.srcdir).resolve()

    def named(link: re.Match[str]) -> str:
        file = (docs / page).parent.joinpath(link[2]).resolve()
        return link[0] if file.is_relative_to(docs) else f"{link[1]} (`{file.relative_to(docs.parent)}`)"

    source[0] = _LINK.sub(named, source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", name_files_outside)
