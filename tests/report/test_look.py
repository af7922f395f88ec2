"""The page of what is inside a model: every figure that the numbers have, explained, in one file."""

import re

import numpy as np
import pytest

from needlework.report.look import ByLayer, Look, Map, shown
from needlework.report.look_figures import MEASURES, painted
from needlework.report.look_page import write_look

RULES = {
    rule: sorted({m for one in MEASURES if one.rule == rule for m in one.measures}) for rule in {one.rule for one in MEASURES}
}


def build(rules=RULES, layers=8, heads=9):
    by_layer = lambda names, at: ByLayer(at, {name: [0.25 + 0.01 * n for n in range(len(at))] for name in names})
    weights = np.tril(np.random.RandomState(0).randn(heads, 20, 20))
    return Look(
        name="a <model>",
        layers=["qdelta + ccq"] * (layers - 1) + ["polar"],
        text="1,024 tokens of a & b.txt",
        rules={rule: by_layer(names, list(range(0, layers, 2))) for rule, names in rules.items()},
        norms=by_layer(("16", "32", "1024"), list(range(layers))),
        overwrite=by_layer(("0.25", "0.5", "1.0"), [0, 3]),
        chunks=by_layer(("16", "128"), [2]),
        maps=[Map(n, "qdelta", weights) for n in range(layers)] + [Map(0, "polar", np.abs(weights[:1]))],
        words="the <tokens> of the maps",
        notes=["ccq: not looked at: a reason"],
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("look") / "look.html"
    write_look(build(), path)
    return path.read_text(encoding="utf-8")


def test_every_figure_has_one_line_that_explains_it(page):
    figures = re.findall(r"<figure class=\"\w*\"><svg .*?</svg>\s*<figcaption>(.*?)</figcaption></figure>", page, re.DOTALL)
    assert len(figures) == page.count("<svg ") == len(MEASURES) + 3 + 7  # curves; maps of six layers, one of them with two
    assert all(figure and "\n" not in figure for figure in figures)
    for one in MEASURES:
        assert one.title in page


def test_the_page_stands_alone_and_is_the_same_twice(page, tmp_path):
    assert not re.search(r'(src|href)="(?!#|data:)', page) and "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    small = build(rules={"ccq": RULES["ccq"]}, layers=1, heads=1)._replace(norms=None, chunks=None)
    for name in ("one.html", "two.html"):
        write_look(small, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_names_and_texts_are_escaped_and_no_colour_is_of_one_theme_alone(page):
    assert "a &lt;model&gt;" in page and "a &amp; b.txt" in page and "the &lt;tokens&gt;" in page and "<tokens>" not in page
    drawn = re.sub(r"data:image/png;base64,[^\"]*", "", "".join(re.findall(r"<svg .*?</svg>", page, re.DOTALL)))
    assert not {*re.findall(r"#[0-9a-f]{6}\b", drawn)} - {"#ffffff"}  # all else is a variable
    assert "fill: #000000" not in page


def test_of_what_a_model_does_not_have_there_is_no_figure(tmp_path):
    empty = build(rules={}, layers=1)._replace(norms=None, overwrite=None, chunks=None, maps=[])
    write_look(empty, tmp_path / "look.html")
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert "<svg" not in page and "The numbers" not in page and "1 layer: 1 of polar." in page and "not looked at" in page


def test_long_models_show_their_first_and_last_layers():
    assert shown(range(3), 6) == [0, 1, 2] and shown(range(48), 4) == [0, 16, 31, 47]


def test_the_table_has_a_number_where_a_layer_has_the_rule(page):
    rows = re.findall(r'<tr><th scope="row">(\d+)<small>[^<]*</small></th>(.*?)</tr>', page)
    assert len(rows) == 8
    for layer, cells in rows:
        filled = [cell for cell in re.findall(r"<td>(.*?)</td>", cells) if cell]
        assert len(filled) == (0 if int(layer) % 2 else sum(map(len, RULES.values())))


def test_a_maps_largest_number_is_opaque_and_its_sign_a_colour():
    made = painted(np.array([[4.0, 0.0], [-1.0, 1.0]]))
    assert made[0, 0, 3] == 1 and made[0, 1, 3] == 0 and made[1, 1, 3] == made[1, 0, 3] == 0.5
    assert (made[0, 0, :3] == made[1, 1, :3]).all() and not (made[1, 0, :3] == made[1, 1, :3]).all()
    assert not painted(np.zeros((2, 2)))[..., 3].any()
