"""The report holds every mixer and figure, needs nothing beside itself, and is the same for the same results."""

import csv
import itertools
import json
import re
import shlex
from html.parser import HTMLParser

import pytest

from needlework.eval.retrieval import interval
from needlework.report import picture, write_report
from needlework.report.drawing import spread

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


@pytest.fixture(scope="module")
def whole(example, tmp_path_factory):
    """The page of seven mixers."""
    return report(example(), tmp_path_factory.mktemp("page"))


def test_every_mixer_is_in_every_figure_the_legend_and_the_table(example, whole):
    figures = re.findall(r"<figure>.*?</figure>", whole, flags=re.DOTALL)
    legend, tables = re.search(r"<nav.*?</nav>", whole, re.DOTALL)[0], re.findall(r"<table>.*?</table>", whole, re.DOTALL)
    assert len(tables) == 2
    assert len(figures) == 10
    for i, mixer in enumerate(example()["mixers"]):
        for part in [*figures, legend, *tables]:
            assert mixer["title"] in part and f'data-mixer="{i}"' in part
        assert all(mixer["equation"] in table for table in tables) and f"{mixer['parameters']:,}" in tables[1]


def test_the_page_is_well_formed_and_asks_nothing_of_the_network(whole):
    page = Page(whole)
    assert page.open == []
    links = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href", "action")]
    assert {link for link in links if not link.startswith("#")} == {"results.csv"}  # beside the page
    assert {tag for tag, _, _ in page.attributes}.isdisjoint({"link", "img", "iframe", "object"})
    assert set(re.findall(r"https?://[^\s\"'<>]+", whole)) <= {"http://www.w3.org/1999/xlink"}
    assert "@import" not in whole and "url(" not in whole.replace("url(#", "")


def test_a_reference_inside_a_figure_finds_its_definition(whole):
    ids = [value for _, name, value in Page(whole).attributes if name == "id"]
    wanted = set(re.findall(r'href="#([^"]+)"', whole)) | set(re.findall(r"url\(#([^)]+)\)", whole))
    assert wanted <= set(ids)


def test_equal_results_give_equal_bytes(example, whole, tmp_path):
    assert report(example(), tmp_path) == whole


def test_names_are_escaped_everywhere(example, tmp_path):
    results = example(mixers=2)
    hostile = '<script>alert("1")</script> & $x^2$'
    results["name"] = results["machine"] = results["mixers"][0]["title"] = results["mixers"][0]["equation"] = hostile
    results["config"] = {"</pre>": hostile}
    text = report(results, tmp_path)
    assert "<script>alert" not in text and "</pre>&quot;" not in text
    assert Page(text).open == []
    assert "".join(Page(text).text).count(hostile) >= 10


def test_the_configuration_can_be_copied_out(example, whole):
    copied = re.search(r"<pre>(.*?)</pre>", whole, re.DOTALL)[1]
    assert json.loads("".join(Page(copied).text)) == example()["config"]


def test_every_colour_of_a_figure_follows_the_theme(whole):
    figures = "".join(re.findall(r"<svg.*?</svg>", whole, flags=re.DOTALL))
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", figures))
    assert len(colours) > 8 and all(colour == "none" or colour.startswith("var(--") for colour in colours)


def test_a_command_serves_a_model_of_the_page_from_its_folder(example, tmp_path):
    results = example(mixers=2)
    asked = "".join(Page(re.search(r'<pre class="ask">.*?</pre>', report(results, tmp_path), re.DOTALL)[0]).text)
    command, question = asked.split("\n")
    assert command == f"needlework serve {results['mixers'][0]['name']}/checkpoint"
    body = json.loads(shlex.split(question)[-1])
    assert question.startswith("curl 127.0.0.1:8000/v1/completions ") and body == {"prompt": "def main(", "max_tokens": 64}


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


def test_the_table_says_how_many_digits_were_scored(example, whole, tmp_path):
    assert "single needle 1,280 at each length, several needles 2,560 at each length" in whole
    results = example()
    for mixer in results["mixers"]:
        mixer["needle"]["256"]["digits"] = 5120
    assert "single needle 5,120 / 1,280 / 1,280 / 1,280," in report(results, tmp_path)


def test_every_picture_has_a_name_and_all_its_points_in_words(example, whole):
    text = whole
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    names = set()
    for drawn in pictures:
        title, desc = re.search(r'role="img" aria-labelledby="(\S+) (\S+)"', drawn).groups()
        names.add(re.search(rf'<title id="{title}">(.*?)</title>', drawn)[1])
        described = re.search(rf'<desc id="{desc}">(.*?)</desc>', drawn, re.DOTALL)[1]
        assert all(mixer["title"] in described for mixer in example()["mixers"])
    assert len(names) == len(pictures) and "Single needle: retrieval by length" in names
    assert "Gated DeltaNet at 8×: 59 %; " in text
    ids = [value for _, name, value in Page(text).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_a_share_of_few_values_has_a_long_bar_and_one_of_many_a_short_one():
    """Wilson's, of 9 of 10: the middle moves from 0.9 to (0.9 + 0.19208)/1.38416."""
    low, high = interval(0.9, 10)
    assert (low + high) / 2 == pytest.approx((0.9 + 1.96**2 / 20) / (1 + 1.96**2 / 10))
    assert (round(low, 3), round(high, 3)) == (0.596, 0.982)
    assert interval(1.0, 10)[1] == pytest.approx(1) and round(interval(1.0, 10)[0], 3) == 0.722
    assert interval(0.0, 10)[0] == pytest.approx(0, abs=1e-12)
    assert interval(0.5, 10_000)[1] - 0.5 == pytest.approx(1.96 * 0.5 / 100, rel=1e-3)


def test_the_bars_of_a_figure_are_those_of_its_values(example):
    from needlework.report.figures import retrieval_by_length, retrieval_by_state

    mixer = example(mixers=1)["mixers"][0]
    mixer["needle"]["2048"].update(accuracy=0.9, exact=0.8, digits=40, values=10)
    results = example(mixers=1) | {"mixers": [mixer]}
    for draw, x in ((retrieval_by_length, 2048), (retrieval_by_state, mixer["state_bytes"]["2048"])):
        lines = [line.get_xydata().tolist() for line in draw(results, "needle").axes[0].lines]
        low, high = interval(0.9, 10)
        assert [[x, low], [x, high]] in lines


def test_results_without_a_log_or_samples_have_a_page_too(example, tmp_path):
    results = example()
    for mixer in results["mixers"]:
        del mixer["train"]["log"], mixer["samples"]
    text = report(results, tmp_path)
    assert len(re.findall("<figure", text)) == 7 and "How they go on" not in text
    del results["mixers"][0]["train"]
    with pytest.raises(ValueError, match=r"mixers\[0\] misses the key 'train'"):
        report(results, tmp_path)


def test_samples_are_told_prompt_by_prompt(example, tmp_path):
    results = example(mixers=2)
    results["mixers"][1]["samples"] = [{"prompt": "another <one>", "continuation": "no", "text": "no"}]
    text = report(results, tmp_path)
    told = text[text.index("How they go on") :]
    assert "def spam(" in told and "self, softmax):" in told and "<td>eggs):</td>" in told and "<td>no</td>" not in told


def test_the_csv_has_a_row_a_mixer_task_and_length(example, tmp_path):
    results = example(mixers=2)
    report(results, tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 2 * 2 * 4 and [row["length"] for row in rows[:4]] == ["256", "512", "1024", "2048"]
    last = rows[-1]
    assert (last["mixer"], last["task"], last["multiple"]) == ("gdn", "needles", "8")
    score = results["mixers"][1]["needles"]["2048"]
    assert float(last["accuracy"]) == pytest.approx(score["accuracy"], rel=1e-5) and int(last["values"]) == score["values"]
    assert float(last["loss"]) == pytest.approx(results["mixers"][1]["loss"]["2048"], rel=1e-5) and last["seed"] == ""


def test_a_comparison_of_other_tasks_is_shown_by_their_names(example, tmp_path):
    results = example(mixers=3) | {"tasks": ["passkey"]}
    for mixer in results["mixers"]:
        mixer["passkey"] = mixer.pop("needle")
        del mixer["needles"]
    text = report(results, tmp_path)
    assert "Asked for passkey at 1×" in text and "digits found, passkey" in text and "needles" not in text
    with pytest.raises(ValueError, match="tasks is empty"):
        report(results | {"tasks": []}, tmp_path)


def test_one_length_stands_once_in_every_table(example, tmp_path):
    results = example(mixers=2) | {"lengths": [256]}
    text = report(results, tmp_path)
    assert '<th colspan="1">state at</th>' in text and "; at 1×" not in text
