"""What a suite is: each paper's tasks, metrics and mean; nothing averaged over fewer; what cannot be had is named and skipped."""

import math

import pytest

from needlework.eval.suites import SUITES, find, run
from needlework.eval.suites.number import Unavailable, number
from needlework.eval.suites.suite import Cell, Item, Mean, Suite

PAPERS = {
    "zeroshot-ccq": {
        "piqa": "acc", "hellaswag": "acc_norm", "winogrande": "acc", "arc_easy": "acc_norm", "arc_challenge": "acc_norm",
        "social_iqa": "acc", "boolq": "acc",
    },
    "zeroshot-carve": {
        "lambada_openai": "acc", "piqa": "acc", "winogrande": "acc", "arc_easy": "acc", "arc_challenge": "acc", "openbookqa": "acc",
        "social_iqa": "acc", "boolq": "acc", "hellaswag": "acc_norm",
    },
    "zeroshot-lucid": {
        "copa": "acc", "hellaswag": "acc", "multirc": "acc", "piqa": "acc", "race_middle": "acc", "record": "em",
        "storycloze_2016": "acc", "wic": "acc", "winogrande": "acc",
    },
    "zeroshot-qdelta": {
        "lambada_openai": "acc", "piqa": "acc", "hellaswag": "acc_norm", "winogrande": "acc", "arc_easy": "acc",
        "arc_challenge": "acc_norm", "social_iqa": "acc", "boolq": "acc",
    },
}  # fmt: skip


class Fixed(Item):
    """The length as a number, in two documents; at lengths above 30 there is no such task."""

    def measure(self, subject, length):
        if length > 30:
            raise Unavailable("no text is as long")
        return Cell(metrics={metric: number([length - 1, length + 1]) for metric in self.metrics})


class Subject:
    positions = None


def suite(**changes):
    items = (
        Fixed(task="one", metrics=("m",)),
        Fixed(task="two", metrics=("m",)),
        Fixed(task="short", metrics=("m",), only=(10,)),
    )
    means = (
        Mean(name="mean", of=(("one", "m"), ("two", "m"))),
        Mean(name="all", of=(("one", "m"), ("two", "m"), ("short", "m"))),
    )
    return Suite(name="s", title="", source="", **{"items": items, "lengths": (10, 20), "means": means} | changes)


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_suite_has_its_tasks_its_metrics_and_their_mean(name):
    found, averaged = SUITES[name], PAPERS[name]
    (mean,) = found.means
    assert dict(mean.of) == averaged and mean.name == f"mean of {len(averaged)}"
    kept = {item.task: item.metrics for item in found.items}
    assert all(metric in kept[task] for task, metric in averaged.items())
    language = {task: metrics for task, metrics in kept.items() if task not in averaged or "perplexity" in metrics}
    assert language == (
        {} if name == "zeroshot-lucid" else {"wikitext": ("word_perplexity",), "lambada_openai": ("perplexity", "acc")}
    )


def test_the_other_suites_have_the_tasks_that_they_name():
    sizes = {name: len(found.items) for name, found in SUITES.items() if name not in PAPERS}
    assert sizes == {
        "ruler": 13, "mniah": 10, "induction": 1, "perplexity": 6, "recall": 12, "longbench": 14, "babilong": 20, "infinitebench": 11,
    }  # fmt: skip
    assert SUITES["perplexity"].lengths == (4096, 6144, 8192, 10_240, 12_288, 14_336, 16_384, 18_432, 20_480)
    assert [(item.keys, item.asked) for item in SUITES["mniah"].items] == [
        *((n, 1) for n in (2, 4, 6, 8, 10)),
        *((n, n) for n in (2, 4, 6, 8, 10)),
    ]
    for found in SUITES.values():
        tasks = [item.task for item in found.items]
        assert len(set(tasks)) == len(tasks)
        for mean in found.means:
            assert {task for task, _ in mean.of} <= set(tasks)


def test_an_unknown_suite_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown suite 'rulr' \(did you mean 'ruler'\?\); known: zeroshot-ccq, .*infinitebench"
    ):
        find("rulr")


def test_cells_are_the_items_at_the_lengths_that_are_asked():
    keys = lambda *asked: [(item.task, length) for item, length in suite().cells(*asked)]
    assert keys() == [("one", 10), ("one", 20), ("two", 10), ("two", 20), ("short", 10)]
    assert keys((30,), ("two", "short")) == [("two", 30)]
    assert [n for _, n in suite(always=(0,)).cells((5,), ("one",))] == [0, 5]
    with pytest.raises(ValueError, match=r"suite s: unknown task 'tow' \(did you mean 'two'\?\); known: one, two, short"):
        suite().cells((), ("tow",))
    with pytest.raises(ValueError, match=r"suite s: length is 20, expected one of 10"):
        suite().cells((20,), ("short",))


def test_a_mean_is_never_over_fewer_tasks():
    cells = run.measure(suite(), Subject(), (10, 20, 40))
    averages = suite().averages(cells)
    assert averages["mean@10"] == {"value": 10, "missing": [], "of": [("one", "m"), ("two", "m")]}
    assert averages["mean@40"]["value"] is None and averages["mean@40"]["missing"] == ["one@40", "two@40"]
    assert averages["all@10"]["value"] == 10 and "all@20" not in averages, "at 20 there is no `short`, so no such mean"
    partly = suite().averages(run.measure(suite(), Subject(), (10,), ("one",)))
    assert partly["mean@10"] == {"value": None, "missing": ["two@10"], "of": [("one", "m"), ("two", "m")]}


def test_what_cannot_be_had_is_named_and_the_rest_is_measured():
    said = []
    cells = run.measure(suite(), Subject(), (40, 20), say=said.append)
    assert cells["one@40"] == {"skipped": "no text is as long"} and cells["one@20"]["metrics"]["m"]["value"] == 20
    assert said[:2] == ["s 1/4: one@40", "one@40 is skipped: no text is as long"]


def test_what_is_kept_is_not_measured_again():
    kept = {"one@10": Cell(metrics={"m": number([7])})}
    once = lambda name, make: kept[name] if name in kept else make()
    cells = run.measure(suite(), Subject(), (10,), once=once)
    assert cells["one@10"]["metrics"]["m"]["value"] == 7 and cells["two@10"]["metrics"]["m"]["value"] == 10


def test_a_model_with_a_table_of_positions_reads_no_further():
    subject = Subject()
    subject.positions = 15
    cells = run.measure(suite(), subject)
    assert "metrics" in cells["one@10"]
    assert cells["one@20"] == {"skipped": "the model has 15 positions, and this takes 20; see --length"}


def test_a_suite_without_its_packages_says_what_to_install():
    with pytest.raises(ValueError, match=r"suite s needs no_such_module: pip install 'lm-eval\[ruler,longbench\]>=0.4.13'"):
        run.check(suite(needs=("math", "no_such_module")))


def test_a_number_keeps_its_documents():
    assert number([0.0, 1.0, 1.0, 0.0]) == {"value": 0.5, "documents": [0.0, 1.0, 1.0, 0.0]}
    found = number([6.0, 1.0], [2, 5], exp=True)
    assert found["value"] == pytest.approx(math.e) and found["weights"] == [2, 5] and found["exp"]
    for documents, why in (([], "no document"), ([float("nan")], "nan"), ([800.0], r"e\^800")):
        with pytest.raises(Unavailable, match=why):
            number(documents, exp=True)
