"""Answers to hand-made runs whose difference, interval, p and verdict are known."""

import math

import pytest

from needlework.report.answers import LOOK, Asked, Measure, answers, at, compared

SHARE = Measure(at("x", "share"), "points", times=100, floor=0.1, ceiling=1.0)
NATS = Measure(at("x", "share"), "nats", lower=True)
APART = Asked("A", "a beats b", "e", "", "a", "b", SHARE, 0.03, 4)
FORKED = APART._replace(trunk="t")


def runs(name, shares, **more):
    return [{"name": name, "seed": seed, "x": {"share": share}} | more for seed, share in enumerate(shares)]


def forks(a, b):
    pairs = zip(a, b, strict=True)
    return [
        {
            "name": "t",
            "seed": s,
            "gate": {"step": 9, "most": 9},
            "branches": {"a": {"x": {"share": x}}, "b": {"x": {"share": y}}},
        }
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
        ((0.1, 0.0, 0.05, 0.1), (0.1, 0.1, 0.1, 0.14), "undecided"),  # one run is above chance
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
    entries = runs("a", (0.3, 0.5, 0.4)) + runs("b", (0.1 - 0.05 / 2**0.5, 0.1 + 0.05 / 2**0.5))
    entries.append({"name": "b", "seed": 2, "ended": {"step": 1}})
    found = answers((APART._replace(seeds=3),), {"e": entries})[0]
    assert found.mean == pytest.approx(0.3) and found.n == 2
    assert found.half == pytest.approx(4.3027 * math.sqrt(0.01 / 3 + 0.0025 / 2), rel=1e-4)


def test_at_half_only_a_sure_answer_is_one():
    """Two of four pairs: t with one degree of freedom needs 636 for p < 0.001."""
    error = 0.0001  # of the mean: differences of d ± 0.0001
    sure, unsure = 0.03 + 700 * error, 0.03 + 500 * error
    assert answer((0.3 + sure - error, 0.3 + sure + error), (0.3, 0.3), FORKED).word == "holds"
    assert answer((0.3 + unsure - error, 0.3 + unsure + error), (0.3, 0.3), FORKED).word == "open: 2 of 4 seeds"
    assert answer((0.3, 0.3), (0.3, 0.3), FORKED).word == "open: 2 of 4 seeds"  # negligible is not said at half
    assert LOOK == 0.001


def test_between_half_and_all_the_answer_is_that_of_half():
    """Eight pairs whose first four are unsure; the fifth to the seventh change nothing, whatever they are, and the eighth lets all count."""
    asked = FORKED._replace(seeds=8)
    b = (0.3,) * 8
    a = (0.30, 0.40, 0.30, 0.40, 0.55, 0.56, 0.55, 0.56)
    found = {n: answer(a[:n], b[:n], asked) for n in (3, 4, 5, 6, 7, 8)}
    assert (found[3].word, found[3].mean) == ("open: 3 of 8 seeds", None)  # there is no look before half
    for n in (4, 5, 6, 7):
        assert found[n].word == f"open: {n} of 8 seeds" and found[n].looked == 4
        assert found[n]._replace(word="", ran=4, passed=(4, 4)) == found[4]._replace(word="")
    assert found[8].word == "holds" and found[8].n == found[8].looked == 8


def test_the_first_half_is_the_seeds_that_come_first_and_not_those_that_end_first():
    asked = APART._replace(seeds=8, first=10)
    entries = [e | {"seed": e["seed"] + 10} for e in runs("a", (0.9,) * 8) + runs("b", (0.3,) * 8)]
    of = lambda *seeds: answers((asked,), {"e": [e for e in entries if e["seed"] in seeds]})[0]
    assert of(10, 11, 12, 14, 15).word == "open: 5 of 8 seeds" and of(10, 11, 12, 14, 15).better is None
    assert of(10, 11, 12, 13, 15).word == "holds" and of(10, 11, 12, 13, 15).n == 4
    assert of(0, 1, 2, 3).word == "not run yet"


def test_what_half_of_the_seeds_decided_stays_so():
    a, b = (0.9, 0.9, 0.9, 0.9001, 0.3, 0.0, 0.3, 0.0), (0.3,) * 8
    asked = FORKED._replace(seeds=8)
    assert answer(a[:4], b[:4], asked).word == answer(a, b, asked).word == "holds"
    assert answer(a[::-1], b, asked).word == "undecided"


def test_holm_is_over_all_claims_that_were_planned():
    """One that has not run keeps its place; what holds beside it holds whatever its runs say, and its p does not rise."""
    a, b = (0.39, 0.4, 0.42, 0.38), (0.3, 0.3, 0.3, 0.3)
    alone = answer(a, b, FORKED)
    other = FORKED._replace(better="b", worse="a")
    assert answer(a, b, FORKED, other).p == pytest.approx(2 * alone.p) and alone.word == "holds"
    absent = FORKED._replace(experiment="none")
    assert answer(a, b, FORKED, absent).p == pytest.approx(2 * alone.p)
    assert answer(a, b, FORKED, *[absent] * 5).p == pytest.approx(6 * alone.p)
    for later in ((0.3, 0.3, 0.3, 0.3), (0.4, 0.2, 0.4, 0.2), (0.9, 0.9, 0.9, 0.91), (0.9, 0.9)):
        packs = {"e": forks(a, b), "none": forks(later, b[: len(later)])}
        assert answers((FORKED, absent), packs)[0].p <= answer(a, b, FORKED, absent).p


LOST = [
    pytest.param({"gate": {"step": None, "most": 9}}, id="no gate"),
    pytest.param({"gate": {"step": 10, "most": 9}}, id="a gate that was passed too late"),
    pytest.param({"ended": {"step": 1}}, id="ended by its guard"),
]


@pytest.mark.parametrize("lost", LOST)
def test_a_run_that_is_over_and_not_scored_does_not_leave_its_claim_open(lost):
    gate = {"gate": {"step": 3, "most": 9}}
    entries = runs("a", (0.6, 0.61, 0.6, 0.9), **gate) + runs("b", (0.3, 0.3, 0.31, 0.3), **gate)
    entries[3] |= lost
    found = answers((APART,), {"e": entries})[0]
    assert found.word == "holds" and (found.n, found.ran) == (3, 4)
    assert found.better.values == (0.6, 0.61, 0.6) and len(found.worse.values) == 4
    assert found.passed == ((8, 8) if "ended" in lost else (7, 8))
    trunks = forks((0.6, 0.61, 0.6, 0.9), (0.3, 0.3, 0.31, 0.3))
    trunks[3] = {"name": "t", "seed": 3} | (lost if "ended" in lost else lost | {"branches": {}})
    found = answers((FORKED,), {"e": trunks})[0]
    assert (found.word, found.n, found.ran, found.passed) == ("holds", 3, 4, (3, 4))


def test_a_branch_that_its_guard_ended_takes_its_pair_along():
    trunks = forks((0.6, 0.61, 0.6, 0.9), (0.3, 0.3, 0.31, 0.3))
    trunks[3]["branches"]["b"] = {"ended": {"step": 1}}
    found = answers((FORKED,), {"e": trunks})[0]
    assert found.better.values == (0.6, 0.61, 0.6) and (found.word, found.passed) == ("holds", (4, 4))


@pytest.mark.parametrize("scored", [0, 1])
def test_a_claim_without_a_pair_of_scored_runs_a_side_is_undecided_once_all_are_over(scored):
    trunks = [e | {"gate": {"step": None, "most": 9}, "branches": {}} for e in forks((0.6,) * 4, (0.3,) * 4)]
    trunks[:scored] = forks((0.6,) * scored, (0.3,) * scored)
    found = answers((FORKED,), {"e": trunks})[0]
    assert (found.word, found.n, found.ran, found.half) == ("undecided", scored, 4, None)


def test_a_comparison_without_a_verdict_is_of_every_run_that_there_is():
    asked = FORKED._replace(seeds=8)
    found = compared(asked, forks((0.4, 0.5, 0.6), (0.3, 0.3, 0.3)))
    assert (found.word, found.p, found.n, found.mean) == ("", None, 3, pytest.approx(0.2))
    assert compared(asked, []).better is None


def test_less_than_chance_and_the_best_there_is_have_no_range_where_less_is_better():
    nll = Measure(at("x", "share"), "nats", lower=True, floor=2.3, ceiling=0.0)
    asked = APART._replace(measure=nll)
    assert answer((2.3, 2.4, 2.28, 2.3), (2.3, 2.3, 2.9, 2.3), asked).word == "no range: at chance"
    assert answer((0.0, 0.01, 0.02, 0.0), (0.01, 0.0, 0.02, 0.03), asked).word == "no range: at the ceiling"
    assert answer((0.0, 0.01, 0.02, 0.0), (0.01, 0.0, 0.02, 0.04), asked).word == "undecided"
