"""Results of suites side by side with the papers' numbers: intervals, marks, what is missing; and the papers' numbers themselves."""

import json
import tomllib
from importlib.resources import files

import numpy as np
import pytest

from needlework.eval.suites import SUITES
from needlework.eval.suites.number import number
from needlework.report import bootstrap
from needlework.report.evaluations import is_evaluation, load_evaluations, write_page
from needlework.report.published import published

TABLES = tomllib.loads(files("needlework.report").joinpath("published.toml").read_text(encoding="utf-8"))["table"]


def needles(*values):
    """Of 2 to 10 needles at 2K."""
    return {f"mniah_{n}@2048 accuracy": value for n, value in zip((2, 4, 6, 8, 10), values, strict=True)}


def four_needles(*values):
    lengths = (2048, 4096, 6144, 8192, 16384, 32768, 65536)
    return {f"mniah_4@{n} accuracy": value for n, value in zip(lengths, values, strict=True)}


# the specification's published numbers: model, suite, column, number
SPECIFIED = [
    ("Gated DeltaNet 500M", "zeroshot-ccq", {"wikitext word_perplexity": 26.33, "mean of 7": 48.98}),
    ("CCQ-Gated DeltaNet 500M", "zeroshot-ccq", {"wikitext word_perplexity": 25.59, "mean of 7": 49.87}),
    ("GLA 500M", "zeroshot-ccq", {"wikitext word_perplexity": 27.27, "mean of 7": 48.54}),
    ("CCQ-GLA 500M", "zeroshot-ccq", {"wikitext word_perplexity": 26.17, "mean of 7": 49.73}),
    ("Gated DeltaNet 1.3B", "zeroshot-ccq", {"wikitext word_perplexity": 17.98, "mean of 7": 55.64}),
    ("CCQ-Gated DeltaNet 1.3B", "zeroshot-ccq", {"wikitext word_perplexity": 18.01, "mean of 7": 56.24}),
    ("GLA 1.3B", "zeroshot-ccq", {"wikitext word_perplexity": 18.80, "mean of 7": 55.75}),
    ("CCQ-GLA 1.3B", "zeroshot-ccq", {"wikitext word_perplexity": 16.92, "mean of 7": 56.10}),
    ("Gated DeltaNet 500M", "ruler", {"niah_single_2@8192 accuracy": 24.8}),
    ("CCQ-Gated DeltaNet 500M", "ruler", {"niah_single_2@8192 accuracy": 50.8}),
    ("GLA 1.3B", "ruler", {"niah_single_3@4096 accuracy": 29.2}),
    ("CCQ-GLA 1.3B", "ruler", {"niah_single_3@4096 accuracy": 64.8}),
    ("LUCID 1B", "mniah", needles(76.6, 55.8, 43.6, 33.8, 25.2)),
    ("Standard 1B", "mniah", needles(74.2, 51.0, 38.8, 30.6, 24.8)),
    ("LUCID 1B, fine-tuned", "mniah", four_needles(51.6, 51.4, 40.4, 33.2, 14, 12, 2)),
    ("Standard 1B, fine-tuned", "mniah", four_needles(33.6, 37.4, 26.0, 23.2, 4, 4, 2)),
    ("CARVE 1.3B", "zeroshot-carve", {"wikitext word_perplexity": 15.72, "mean of 9": 53.74}),
    ("GDN-2 1.3B", "zeroshot-carve", {"wikitext word_perplexity": 15.90, "mean of 9": 53.11}),
    ("CARVE + SWA 1.3B", "zeroshot-carve", {"wikitext word_perplexity": 15.41, "mean of 9": 55.61}),
    ("CARVE without the content gate 1.3B", "zeroshot-carve", {"wikitext word_perplexity": 15.89}),
    ("CARVE 1.3B", "ruler", {f"niah_multikey_1@{n} accuracy": x for n, x in ((1024, 76.8), (2048, 55.2), (4096, 41.4))}),
    ("GDN-2 1.3B", "ruler", {f"niah_multikey_1@{n} accuracy": x for n, x in ((1024, 72.6), (2048, 51.4), (4096, 37.8))}),
    ("Q-Delta 340M", "zeroshot-qdelta", {"wikitext word_perplexity": 26.89, "mean of 8": 47.24}),
    ("Gated DeltaNet 340M", "zeroshot-qdelta", {"mean of 8": 46.01}),
    ("Q-Delta 1.3B", "zeroshot-qdelta", {"mean of 8": 53.47}),
    ("Gated DeltaNet 1.3B", "zeroshot-qdelta", {"mean of 8": 52.77}),
    ("Q-Delta 1.3B", "ruler", {"S-NIAH": 90.02}),
    ("Gated DeltaNet 1.3B", "ruler", {"S-NIAH": 83.51}),
    ("Polar + memory 370M, ten cells", "induction", {"induction@65536 accuracy": 63}),
    ("Polar + memory 370M, the headline", "induction", {"induction@65536 accuracy": 92.5}),
    ("NoPE + memory 370M, ten cells", "induction", {"induction@65536 accuracy": 13}),
    ("RoPE + memory 370M", "induction", {"induction@65536 accuracy": 0}),
]  # fmt: skip
# means that a paper prints and its own columns do not have
WRONG = {("CARVE 1.3B", 53.74): 53.643, ("CARVE 1.3B", 31.09): 31.195, ("CARVE + SWA 1.3B", 45.89): 44.385}


@pytest.mark.parametrize(("model", "suite", "values"), SPECIFIED, ids=lambda x: x if isinstance(x, str) else "")
def test_the_papers_numbers_are_those_of_the_specification(model, suite, values):
    rows = [row for one in published(suite) for row in one.rows if row.model == model]
    for column, value in values.items():
        assert value in [row.values.get(column) for row in rows], column


def test_every_published_column_is_one_of_its_suite_and_every_row_has_it():
    for one in TABLES:
        suite = SUITES[one["suite"]]
        kept = {item.task: item.metrics for item in suite.items}
        for column in one["columns"]:
            task, _, metric = column.partition(" ")
            assert column in [mean.name for mean in suite.means] or metric in kept[task.partition("@")[0]], column
        for row in one["rows"]:
            assert len(row["values"]) == len(one["columns"]) == len(row.get("spread", row["values"]))


def test_a_published_mean_is_that_of_its_columns_or_named_as_wrong():
    checked = 0
    for one in TABLES:
        for mean in SUITES[one["suite"]].means:
            columns = [f"{task} {metric}" for task, metric in mean.of]
            if not {mean.name, *columns} <= {*one["columns"]}:
                continue
            for row in one["rows"]:
                values = dict(zip(one["columns"], row["values"], strict=True))
                found, printed = sum(values[c] for c in columns) / len(columns), values[mean.name]
                assert found == pytest.approx(WRONG.get((row["model"], printed), printed), abs=0.0101), row["model"]
                checked += 1
    assert checked == 53


def test_an_interval_is_of_the_documents_drawn_again():
    shares = number([1.0] * 30 + [0.0] * 70)
    low, high = bootstrap.interval(shares)
    deviation = (0.3 * 0.7 / 100) ** 0.5
    assert low == pytest.approx(0.3 - 1.96 * deviation, abs=0.02) and high == pytest.approx(0.3 + 1.96 * deviation, abs=0.02)
    assert bootstrap.interval(shares) == (low, high), "the same each time"
    low, high = bootstrap.interval(number([1.0] * 10))
    assert high == 1 and low == pytest.approx(0.722, abs=1e-3), "Wilson's: ten of ten are not all"
    assert bootstrap.interval(number([2.0])) is None is bootstrap.interval(number([3.0, 3.0]))


def test_an_interval_of_a_perplexity_draws_weights_with_their_documents():
    found = bootstrap.draws(number([2.0, 20.0], [1, 10], exp=True))
    assert found == pytest.approx(np.exp(2)), "both documents have two nats a word"
    heavy = bootstrap.draws(number([1.0, 0.0], [1, 3], exp=True))
    assert {*heavy.round(4)} == {1.0, round(np.exp(0.25), 4), round(np.e, 4)}


def test_a_mean_draws_its_tasks_apart():
    one = number([0.0, 1.0] * 50)
    low, high = bootstrap.interval(one)
    mean = bootstrap.interval_of_mean([one] * 4)
    assert mean[1] - mean[0] == pytest.approx((high - low) / 2, rel=0.15)


def result(title, cells, means=(), **changes):
    said = {
        "suite": "zeroshot-qdelta",
        "title": "tasks",
        "source": "a paper",
        "length_is": "window",
        "fixture": False,
        "limit": None,
    }
    return said | {"checkpoint": {"title": title}, "cells": cells, "means": dict(means)} | changes


HALF = {"metrics": {"acc": number([0.0, 1.0] * 8)}}
OURS = result(
    "ours",
    {
        "piqa@2048": HALF | {"warnings": ["2 ×: cut"]},
        "wikitext@2048": {"metrics": {"word_perplexity": number([3.0], [1], exp=True)}},
    },
    {"mean of 8@2048": {"value": 0.5, "missing": [], "of": [["piqa", "acc"]]}},
)
OTHER = result(
    "other", {"piqa@2048": {"skipped": "no data"}}, {"mean of 8@2048": {"value": None, "missing": ["piqa@2048"], "of": [["piqa", "acc"]]}},
    fixture=True, limit=5,
)  # fmt: skip


def test_the_page_sets_ours_beside_the_papers(tmp_path):
    page = write_page([OURS, OTHER], tmp_path).read_text()
    lines = page.splitlines()
    head = next(line for line in lines if line.startswith("| model"))
    assert head == "| model | piqa acc | wikitext word_perplexity ↓ | mean of 8 |"
    ours = next(line for line in lines if line.startswith("| **ours**"))
    assert ours.startswith("| **ours** | 50 [") and "| 20.09 |" in ours and ours.count("[") == 2
    assert "| **other** (FIXTURE, first 5 documents) |  |  | — |" in lines
    assert "| Q-Delta 340M (Q-Delta, arXiv 2606.08804, ablation) |  | 26.89 | 47.24 |" in lines
    for said in (
        "- ours: piqa@2048: 2 ×: cut",
        "- other: piqa@2048 was not measured: no data",
        "the eight tasks are not named",
    ):
        assert said in page
    assert write_page([OURS, OTHER], tmp_path).read_text() == page


def test_a_spread_is_the_papers_own(tmp_path):
    carve = result(
        "x", {"wikitext@2048": {"metrics": {"word_perplexity": number([3.0], [1], exp=True)}}}, suite="zeroshot-carve"
    )
    assert (
        "| CARVE 1.3B, three seeds (CARVE, arXiv 2606.27229, Table 6) | 15.72 ± 0.04 |"
        in write_page([carve], tmp_path).read_text()
    )


def test_each_length_has_a_table_and_a_papers_number_stands_at_its_own(tmp_path):
    share = {"metrics": {"accuracy": number([1.0, 0.0])}}
    ruler = result("x", {"niah_single_2@1024": share, "niah_single_2@8192": share}, suite="ruler")
    _, first, second = write_page([ruler], tmp_path).read_text().split("\n### ")
    row = "| CCQ-Gated DeltaNet 500M (CCQ, arXiv 2606.01294, Table 3) |"
    assert first.startswith("1,024\n") and f"{row} 100 |" in first
    assert second.startswith("8,192\n") and f"{row} 50.8 |" in second


def test_a_folder_of_results_is_told_from_a_sweeps(tmp_path, needlework):
    assert not is_evaluation(tmp_path)
    (tmp_path / "ours.zeroshot-qdelta.json").write_text(json.dumps(OURS))
    (tmp_path / "measuring-0.json").write_text('{"of": {}, "pieces": {}}')
    assert is_evaluation(tmp_path) and len(load_evaluations(tmp_path)) == 1
    assert needlework("report", tmp_path) == f"page: {tmp_path / 'evaluation.md'}\n"
    (tmp_path / "b.ruler.json").write_text(json.dumps({"suite": "ruler", "cells": {}}))
    with pytest.raises(ValueError, match=r"b\.ruler\.json: misses the key 'title'"):
        load_evaluations(tmp_path)
    (tmp_path / "b.ruler.json").write_text("[]")
    with pytest.raises(ValueError, match=r"b\.ruler\.json: expected a suite's result"):
        load_evaluations(tmp_path)
