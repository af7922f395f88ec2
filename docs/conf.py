"""Sphinx's settings. `make docs` builds the site into site/, strict, without a network.

Beyond settings: docstrings.py turns the docstrings into reStructuredText; outside.py makes pages of the files elsewhere in the
repository that a page links to, so that every link holds in the site as it does in the repository.
"""

import sys
from importlib import metadata
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import docstrings  # noqa: E402
import outside  # noqa: E402

project = "needlework"
release = metadata.version("needlework")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "needlework"
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = html_show_sphinx = False
smartquotes = False
pygments_style = "friendly"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False


def setup(app):
    app.connect("config-inited", outside.make_pages)
    app.connect("source-read", outside.move_links)
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("autodoc-process-signature", docstrings.shorten)
