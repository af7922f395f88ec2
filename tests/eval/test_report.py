"""The report holds every mixer and figure, needs nothing beside itself, and is the same for the same results."""

import itertools
import json
import re
from html.parser import HTMLParser

import pytest

from needlework.eval import picture, write_report
from needlework.eval.drawing import spread
from needlework.eval.words import percent, size, summary

pytest.importorskip("matplotlib")

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a browser would find: the text, every attribute, and the tags still open at the end."""

    def __init__(self, source):
        super().__init__()
        self.text, self.attributes, self.open = [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def report(results, folder):
    write_report(results, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_every_mixer_is_in_every_figure_the_legend_and_the_table(example, tmp_path):
    text = report(example(), tmp_path)
    figures = re.findall(r"<figure .*?</figure>", text, flags=re.DOTALL)
    legend, table = re.search(r"<nav.*?</nav>", text, re.DOTALL)[0], re.search(r"<table.*?</table>", text, re.DOTALL)[0]
    assert len(figures) == 5
    for i, mixer in enumerate(example()["mixers"]):
        for part in [*figures, legend, table]:
            assert mixer["title"] in part and f'data-mixer="{i}"' in part
        assert mixer["equation"] in table and f"{mixer['parameters']:,}" in table


def test_the_page_is_well_formed_and_asks_nothing_of_the_network(example, tmp_path):
    page = Page(report(example(), tmp_path))
    assert page.open == []
    links = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href", "action")]
    assert all(link.startswith("#") for link in links)
    assert {tag for tag, _, _ in page.attributes}.isdisjoint({"link", "img", "iframe", "object"})
    text = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= {"http://www.w3.org/1999/xlink"}
    assert "@import" not in text and "url(" not in text.replace("url(#", "")


def test_a_reference_inside_a_figure_finds_its_definition(example, tmp_path):
    text = report(example(), tmp_path)
    ids = [value for _, name, value in Page(text).attributes if name == "id"]
    wanted = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert wanted <= set(ids)


def test_equal_results_give_equal_bytes(example, tmp_path):
    assert report(example(), tmp_path) == report(example(), tmp_path)


def test_names_are_escaped_everywhere(example, tmp_path):
    results = example(mixers=2)
    hostile = '<script>alert("1")</script> & $x^2$'
    results["name"] = results["machine"] = results["mixers"][0]["title"] = results["mixers"][0]["equation"] = hostile
    results["config"] = {"</pre>": hostile}
    text = report(results, tmp_path)
    assert "<script>alert" not in text and "</pre>&quot;" not in text
    assert Page(text).open == []
    assert "".join(Page(text).text).count(hostile) >= 10


def test_the_configuration_can_be_copied_out(example, tmp_path):
    text = report(example(), tmp_path)
    copied = re.search(r"<pre>(.*?)</pre>", text, re.DOTALL)[1]
    assert json.loads("".join(Page(copied).text)) == example()["config"]


def test_every_colour_of_a_figure_follows_the_theme(example, tmp_path):
    figures = "".join(re.findall(r"<svg.*?</svg>", report(example(), tmp_path), flags=re.DOTALL))
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", figures))
    assert len(colours) > 8 and all(colour == "none" or colour.startswith("var(--") for colour in colours)


@pytest.mark.filterwarnings("error")
def test_a_comparison_that_has_just_begun_has_a_report_too(example, tmp_path):
    assert "No mixer has finished yet." in report(example(mixers=0), tmp_path)
    results = example(mixers=1)
    results["mixers"][0]["train"].update(steps=[0], loss=[5.5])
    assert "Softmax attention" in report(results, tmp_path)


def test_a_missing_key_stops_the_report_before_it_is_written(example, tmp_path):
    results = example()
    del results["mixers"][3]["state_bytes"]
    with pytest.raises(ValueError, match=r"mixers\[3\] misses the key 'state_bytes'"):
        write_report(results, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_summary_names_the_best_and_the_smallest(example):
    sentence = summary(example())
    assert "98 % (Polar + memory)" in sentence
    assert "36 KiB, finds 66 % (Gated DeltaNet and Q-Delta)" in sentence


def test_the_picture_is_a_png_small_enough_for_a_readme(example, tmp_path):
    picture(example(), tmp_path / "report.png")
    data = (tmp_path / "report.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) <= 150 * 1024


def test_spread_labels_keep_their_order_and_their_distance():
    wanted = [0.5, 0.5, 0.1, 0.52, 0.98, 0.99]
    placed = spread(wanted, gap=0.1, low=0.0, high=1.0)
    ordered = [place for _, place in sorted(zip(wanted, placed, strict=True))]
    assert all(b - a >= 0.1 - 1e-12 for a, b in itertools.pairwise(ordered))
    assert min(placed) >= 0 and max(placed) <= 1
    assert placed[2] == 0.1  # nothing near it, so it stays


def test_numbers_are_written_as_people_write_them():
    assert [size(n) for n in (512, 16_384, 70_152, 2 << 20, 1010 * 1024)] == [
        "512 B",
        "16 KiB",
        "68.5 KiB",
        "2 MiB",
        "1010 KiB",
    ]
    assert [percent(x) for x in (1, 0.9531, 0.5, 0)] == ["100 %", "95.3 %", "50 %", "0 %"]


def test_the_table_says_how_many_digits_were_scored(example, tmp_path):
    results = example()
    assert "single needle 1,280 at each length, several needles 2,560 at each length" in report(results, tmp_path)
    for mixer in results["mixers"]:
        mixer["needle"]["256"]["digits"] = 5120
    assert "single needle 5,120 / 1,280 / 1,280 / 1,280," in report(results, tmp_path)
