"""The files that pages are made of: their HTML and the style that they share, in both themes."""

from importlib.resources import files
from string import Template

from .palette import variables


def template(name: str) -> Template:
    """A file of this package, whose $names are placeholders."""
    return Template(files("needlework.report").joinpath(name).read_text(encoding="utf-8"))


def style_sheet() -> str:
    """The style of every page, with the palette's variables."""
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in variables().items()) for i in (0, 1))
    return template("style.css").substitute(light_variables=light, dark_variables=dark).strip()
