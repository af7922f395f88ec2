"""A page of numbers of which no two are alike: each is printed where it belongs, and nowhere else."""

import re
import statistics

import pytest

pytest.importorskip("matplotlib")

from needlework.report import write_report

LENGTHS = (100, 400)
TITLES = ("One", "Two", "Three")


def mixer(i):
    score = lambda a, e, d: {"accuracy": a, "exact": e, "digits": d, "values": d // 4}
    return {
        "name": TITLES[i].lower(), "title": TITLES[i], "equation": f"o = {i}", "parameters": 1000 + 100 * i,
        "state_bytes": {"100": 3000 + 1024 * i, "400": 9000 - 2048 * i},
        "train": {
            "steps": list(range(1, 41)), "loss": [5 - i / 10 - step / 20 for step in range(40)],
            "tokens": 64_000, "seconds": 77.0 + i, "tokens_per_second": 123.0 + 500 * i,
        },
        "loss": {"100": 2.111 + i, "400": 3.222 + i},
        "needle": {"100": score(0.91 - 0.1 * i, 0.83 - 0.1 * i, 80), "400": score(0.52 + 0.1 * i, 0.31 + 0.1 * i, 84)},
        "needles": {"100": score(0.63 - 0.1 * i, 0.44 - 0.1 * i, 320), "400": score(0.27 + 0.1 * i, 0.12 + 0.1 * i, 336)},
    }  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    results = {
        "name": "unlike", "date": "today", "train_length": 50, "lengths": list(LENGTHS), "seed": 7, "config": {"x": 1},
        "corpus": {"files": 11, "bytes": 2222, "sha256": "ab" * 32}, "versions": {"torch": "9"}, "machine": "here",
        "mixers": [mixer(i) for i in range(3)],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(results, path)
    return path.read_text()


def test_the_tables_rows_of_a_mixer_are_its_numbers_in_the_order_of_the_heads(page):
    rows = re.findall(r'<tr data-mixer="(\d)">(.*?)</th>(.*?)</tr>', page, re.S)
    assert [number for number, *_ in rows] == ["0", "1", "2"] * 2
    for i in range(3):
        m = mixer(i)
        (_, name, found), (_, same, cost) = rows[i], rows[3 + i]
        assert TITLES[i] in name and name == same
        scores = [m[task][str(T)] for task in ("needle", "needles") for T in LENGTHS]
        cells = lambda row: re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)
        assert cells(found) == [f"{100 * s['accuracy']:.1f}" for s in scores]
        tips = re.findall(r'data-tip="([\d.]+) % of (\d+) digits, ([\d.]+) % of (\d+) values whole"', found)
        assert [tuple(map(float, tip)) for tip in tips] == [
            pytest.approx((100 * s["accuracy"], s["digits"], 100 * s["exact"], s["values"])) for s in scores
        ]
        assert cells(cost) == [
            f"{m['parameters']:,}", ("−9.1 %", "0", "+9.1 %")[i],
            f"{m['state_bytes']['100'] / 1024:.3g} KiB", f"{m['state_bytes']['400'] / 1024:.3g} KiB",
            f"{statistics.mean(m['train']['loss'][36:]):.3f}", f"{m['loss']['100']:.3f}",
            f"{m['train']['tokens_per_second']:,.0f}", f"{m['train']['seconds']:.0f}",
        ]  # fmt: skip


def test_a_point_of_a_figure_tells_its_mixer_its_length_and_its_number(page):
    figures = re.findall(r"<figure>.*?<title[^>]*>(.*?)</title>(.*?)</figure>", page, re.S)
    tips = {label: re.findall(r'data-mixer="(\d)" data-tip="([^"]*)"', drawn) for label, drawn in figures}
    for i in range(3):
        m, title = mixer(i), TITLES[i]
        of = {label: [tip for number, tip in found if number == str(i)] for label, found in tips.items()}
        said = lambda task, T, m=m: f"{100 * m[task][str(T)]['accuracy']:.0f} %"
        at, size = {100: "2×", 400: "8×"}, f"{m['state_bytes']['400'] / 1024:.3g} KiB"
        last = statistics.mean(m["train"]["loss"][-9:])  # smoothed over eight neighbours on each side; the last has one side
        assert of == {
            **{
                f"{name}: retrieval by length": [f"{title} at {at[T]}: {said(task, T)}" for T in LENGTHS]
                for task, name in (("needle", "Single needle"), ("needles", "Several needles"))
            },
            "Single needle: retrieval by state size": [f"{title}: {said('needle', 400)} with {size}"],
            "Several needles: retrieval by state size": [f"{title}: {said('needles', 400)} with {size}"],
            "Training loss by step": [f"{title}: {last:.3f} nats at step 40"],
            "Loss by length": [f"{title} at {at[T]}: {m['loss'][str(T)]:.3f} nats" for T in LENGTHS],
            "Training speed": [f"{title}: {m['train']['tokens_per_second']:,.0f} tokens per second"],
        }


def test_the_sentence_names_the_best_near_far_and_with_the_smallest_state(page):
    assert (
        "Asked for a single needle at 2× the training length, the best finds 91 % of the digits (One); at 8×, 72 % (Three); "
        "with the smallest state there, 4.79 KiB, the best finds 72 % (Three)."
    ) in page
