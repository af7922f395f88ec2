"""One colour and one marker per mixer, the same in every figure, the legend and the table.

The eight colours of either theme keep an OKLab distance of at least 0.085 under simulated protanopia, deuteranopia and
tritanopia, and a contrast of at least 3 with their surface. Seven markers against eight colours: no pair returns before 56.
"""

LIGHT = ("#3b4252", "#1f5dc2", "#977a1e", "#11a1b4", "#8e4088", "#ec6480", "#1c6402", "#9982f8")
DARK = ("#d8dee9", "#0a7bda", "#e5c70c", "#45c5c4", "#c64f96", "#fc8a80", "#69870d", "#a797f9")

MARKERS = "os^DvPX"
GLYPHS = "●■▲◆▼✚✖"  # the markers again, for HTML

# What is not data: text, secondary text, grid lines, and the ground that markers are cut out of. (light, dark)
CHROME = {
    "ink": ("#1d2430", "#e6e9ef"),
    "muted": ("#667085", "#98a2b3"),
    "grid": ("#e4e7ec", "#2b313c"),
    "surface": ("#fefefe", "#14181f"),
}
INK, MUTED, GRID, SURFACE = (light for light, _ in CHROME.values())


def colour(index: int) -> str:
    """The colour of mixer number `index` on a light surface."""
    return LIGHT[index % len(LIGHT)]


def marker(index: int) -> str:
    """The matplotlib marker of mixer number `index`."""
    return MARKERS[index % len(MARKERS)]


def glyph(index: int) -> str:
    """The same marker as a character."""
    return GLYPHS[index % len(GLYPHS)]


def variables() -> dict[str, tuple[str, str]]:
    """The CSS variables of both themes: name -> (light, dark)."""
    mixers = {f"mixer-{i}": pair for i, pair in enumerate(zip(LIGHT, DARK, strict=True))}
    return CHROME | mixers
