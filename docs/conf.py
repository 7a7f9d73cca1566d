"""How Sphinx builds the site: `make docs`."""

import importlib.metadata
import pathlib
import shutil

project = "lazyinline"
copyright = "the lazyinline authors"
version = release = importlib.metadata.version("lazyinline")
html_title = f"lazyinline {version}"

extensions = [
    "myst_parser",  # pages are Markdown, so that they read well on their own, too
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",  # [source] beside each public name
    "sphinx_copybutton",
]
myst_heading_anchors = 3
exclude_patterns = ["README.md"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures are long, and the docstrings say what is taken
napoleon_use_rtype = False

html_theme = "furo"  # no font, script or picture from elsewhere
html_show_sphinx = False
# Pages that answer come before design pages and the changelog.
html_search_scorer = str(pathlib.Path(__file__).with_name("scorer.js"))
copybutton_exclude = ".linenos, .gp, .go"


def setup(app):
    """Pictures in <picture>, one for light and one for dark, are copied as they are."""
    app.connect("build-finished", copy_figures)


def copy_figures(app, error):
    """Puts docs/figures beside the pages."""
    if error is None:
        to = pathlib.Path(app.outdir, "figures")
        to.mkdir(exist_ok=True)
        for figure in pathlib.Path(app.srcdir, "figures").glob("*.svg"):
            shutil.copy(figure, to)
