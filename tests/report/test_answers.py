"""Answers to hand-made runs whose difference, interval, p and verdict are known."""

import math

import pytest

from needlework.report.answers import LOOK, Asked, Measure, answers, at

SHARE = Measure(at("x", "share"), "points", times=100, floor=0.1, ceiling=1.0)
NATS = Measure(at("x", "share"), "nats", lower=True)
APART = Asked("A", "a beats b", "e", "", "a", "b", SHARE, 0.03, 4)
FORKED = APART._replace(trunk="t")


def runs(name, shares, **more):
    return [{"name": name, "seed": seed, "x": {"share": share}} | more for seed, share in enumerate(shares)]


def forks(a, b):
    pairs = zip(a, b, strict=True)
    return [
        {"name": "t", "seed": s, "gate": {"step": 9}, "branches": {"a": {"x": {"share": x}}, "b": {"x": {"share": y}}}}
        for s, (x, y) in enumerate(pairs)
    ]


def answer(a, b, asked=APART, *more):
    entries = forks(a, b) if asked.trunk else runs("a", a) + runs("b", b)
    return answers((asked, *more), {"e": entries})[0]


@pytest.mark.parametrize("asked", [APART, FORKED], ids=["apart", "forked"])
@pytest.mark.parametrize(
    "a, b, word",
    [
        ((0.6, 0.61, 0.6, 0.6), (0.3, 0.3, 0.3, 0.31), "holds"),
        ((0.3, 0.3, 0.3, 0.31), (0.6, 0.61, 0.6, 0.6), "opposite"),
        ((0.5, 0.501, 0.5, 0.5), (0.5, 0.5, 0.5, 0.5), "negligible"),
        ((0.54, 0.54, 0.541, 0.54), (0.5, 0.5, 0.5, 0.5), "holds"),  # by more than 3 points
        ((0.52, 0.52, 0.52, 0.52), (0.5, 0.5, 0.5, 0.5), "negligible"),  # sure, and less than 3 points
        ((0.52, 0.54, 0.53, 0.53), (0.5, 0.5, 0.5, 0.5), "undecided"),  # 3 points, and not more
        ((0.6, 0.4, 0.9, 0.5), (0.5, 0.5, 0.5, 0.5), "undecided"),
        ((0.1, 0.12, 0.05, 0.1), (0.11, 0.0, 0.1, 0.13), "no range: at chance"),
        ((1.0, 0.98, 0.99, 1.0), (0.99, 0.99, 0.98, 1.0), "no range: at the ceiling"),
        ((0.9,), (0.5,), "open: 1 of 4 seeds"),
        ((), (), "not run yet"),
    ],
)
def test_every_verdict_has_its_numbers(a, b, word, asked):
    assert answer(a, b, asked).word == word


def test_a_margin_is_beaten_if_the_interval_lies_beyond_it():
    """d = 0.1 ± 4.30·0.02/√3: its distance to 0.03 has t = 0.07/(0.02/√3), two-sided with two degrees of freedom."""
    found = answer((0.38, 0.4, 0.42), (0.3, 0.3, 0.3), FORKED._replace(seeds=3))
    t = 0.07 / (0.02 / math.sqrt(3))
    assert (found.mean, found.half) == (pytest.approx(0.1), pytest.approx(4.3027 * 0.02 / math.sqrt(3), rel=1e-4))
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2)) and found.word == "holds" and found.n == 3
    assert (
        answer((0.36, 0.4, 0.44), (0.3, 0.3, 0.3), FORKED._replace(seeds=3)).word == "undecided"
    )  # 0 is outside, the margin is not


def test_less_is_better_where_the_measure_says_so():
    found = answer((0.2, 0.21, 0.2, 0.2), (0.5, 0.5, 0.5, 0.51), APART._replace(measure=NATS))
    assert found.word == "holds" and found.mean == pytest.approx(0.3)
    assert found.better.values == (0.2, 0.21, 0.2, 0.2)


def test_runs_of_their_own_are_groups_and_branches_are_pairs():
    """Both sides move together from trunk to trunk."""
    a, b = (0.3, 0.5, 0.72, 0.91), (0.2, 0.4, 0.6, 0.8)
    assert answer(a, b).word == "undecided" and answer(a, b, FORKED).word == "holds"


def test_welch_is_what_the_table_says():
    found = answers(
        (APART._replace(seeds=2),), {"e": runs("a", (0.3, 0.5, 0.4)) + runs("b", (0.1 - 0.05 / 2**0.5, 0.1 + 0.05 / 2**0.5))}
    )[0]
    assert found.mean == pytest.approx(0.3) and found.n == 2
    assert found.half == pytest.approx(4.3027 * math.sqrt(0.01 / 3 + 0.0025 / 2), rel=1e-4)


def test_at_half_only_a_sure_answer_is_one():
    """Two of four pairs: t with one degree of freedom needs 636 for p < 0.001."""
    asked = FORKED._replace(seeds=4)
    error = 0.0001  # of the mean: differences of d ± 0.0001
    sure, unsure = 0.03 + 700 * error, 0.03 + 500 * error
    assert answer((0.3 + sure - error, 0.3 + sure + error), (0.3, 0.3), asked).word == "holds"
    assert answer((0.3 + unsure - error, 0.3 + unsure + error), (0.3, 0.3), asked).word == "open: 2 of 4 seeds"
    assert answer((0.3, 0.3), (0.3, 0.3), asked).word == "open: 2 of 4 seeds"  # negligible is not said at half
    assert LOOK == 0.001


def test_holm_is_over_the_claims_that_are_judged_together():
    a, b = (0.39, 0.4, 0.42, 0.38), (0.3, 0.3, 0.3, 0.3)
    alone = answer(a, b, FORKED)
    other = FORKED._replace(better="b", worse="a")
    twice = answer(a, b, FORKED, other)
    assert twice.p == pytest.approx(2 * alone.p) and alone.word == "holds"
    assert answer(a, b, FORKED, FORKED._replace(experiment="none")).p == alone.p


def test_runs_that_did_not_pass_their_gate_are_not_scored_and_are_counted():
    entries = runs("a", (0.6, 0.61, 0.6, 0.6), gate={"step": 3}) + runs("b", (0.3, 0.3, 0.31, 0.3), gate={"step": 4})
    entries[1] |= {"gate": {"step": None}}
    entries[6] = {"name": "b", "seed": 2, "ended": {"step": 1}, "gate": {"step": 4}}
    found = answers((APART._replace(seeds=3),), {"e": entries})[0]
    assert found.better.values == (0.6, 0.6, 0.6) and found.worse.values == (0.3, 0.3, 0.3) and found.passed == (7, 8)
    trunk = forks((0.6,), (0.3,)) + [{"name": "t", "seed": 9, "gate": {"step": None}, "branches": {}}]
    assert answers((FORKED,), {"e": trunk})[0].passed == (1, 2)
