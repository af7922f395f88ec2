"""Claims against hand-made runs whose difference, interval, p and verdict are known."""

import math

import pytest

from needlework.report import student
from needlework.report.claims import Claim, above_chance, apart, judge, paired
from needlework.report.sweep import Sweep

BETTER = Claim("b finds more", "b", "w", ("needle",), (1.0,))


def runs(shares, task="needle"):
    """seed -> share at the training length; at twice of it nothing is found."""
    return [{"seed": s, "name": "", task: {"8": {"accuracy": x}, "16": {"accuracy": 0.0}}} for s, x in shares.items()]


def sweep(**sides):
    return Sweep({name: runs(shares) for name, shares in sides.items()}, (8, 16), 8, ("needle",), "")


def verdict(better, worse, claim=BETTER, *more):
    of = lambda shares: shares if isinstance(shares, dict) else dict(enumerate(shares))
    return judge(sweep(b=of(better), w=of(worse)), (claim, *more))[0]


def test_students_t_is_what_the_tables_say():
    quantiles = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
    assert [round(student.quantile(n), 3) for n in range(1, 11)] == quantiles
    assert student.quantile(120) == pytest.approx(1.980, abs=5e-4) and student.quantile(5, 0.99) == pytest.approx(
        4.032, abs=5e-4
    )
    assert student.inside(1.0, 1) == pytest.approx(0.5) and student.inside(0.0, 4) == 0


def test_holm_multiplies_the_least_by_all_the_next_by_one_less_and_never_falls():
    assert student.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert student.holm([0.9, 0.8]) == [1.0, 1.0] and student.holm([]) == []


def test_shares_are_taken_above_chance():
    """One digit in ten; of a uuid one hexadecimal digit in sixteen."""
    (run,) = runs({0: 0.55})
    assert above_chance(run, ["needle"], [8]) == pytest.approx(0.5)
    assert above_chance(runs({0: 17 / 32}, "uuid")[0], ["uuid"], [8]) == pytest.approx(0.5)
    assert above_chance(run, ["needle"], [8, 16]) == pytest.approx((0.5 - 0.1 / 0.9) / 2)


def test_pairs_are_of_one_seed_and_not_of_one_place():
    """Seeds 3, 1, 2 beside 1, 2, 3: by place the differences would be 0.2, −0.1, 0.2."""
    found = verdict({3: 0.6, 1: 0.2, 2: 0.5}, {1: 0.1, 2: 0.4, 3: 0.5})
    assert found.difference.mean == pytest.approx(0.1 / 0.9) and found.difference.half == pytest.approx(0, abs=1e-9)
    assert found.better.values == pytest.approx([0.1 / 0.9, 0.4 / 0.9, 0.5 / 0.9])  # by seed
    assert verdict({0: 0.9, 1: 0.5}, {1: 0.4, 2: 0.1}).difference == pytest.approx((0.1 / 0.9, None, None, 1))


def test_a_difference_of_pairs_has_students_interval():
    found = paired({0: 0.3, 1: 0.5, 2: 0.4}, {0: 0.1, 1: 0.1, 2: 0.1})
    assert found.mean == pytest.approx(0.3) and found.n == 3
    assert found.half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert found.p == pytest.approx(1 - math.sqrt(27 / 29))  # t² = 27 with two degrees of freedom
    found = paired(
        {2: 0.4, 0: 0.3, 1: 0.5}, {0: 0.2, 1: 0.4, 2: 0.3, 7: 0.9}
    )  # in an order of their own, and one without its pair
    assert (found.mean, found.half, found.n) == (pytest.approx(0.1), pytest.approx(0, abs=1e-9), 3)


def test_sides_that_are_no_pairs_are_compared_as_groups():
    """Welch: means 0.4 and 0.1, variances 0.01 and 0.0025 over 3 and 2."""
    found = apart({0: 0.3, 1: 0.5, 2: 0.4}, {7: 0.1 - 0.05 / math.sqrt(2), 8: 0.1 + 0.05 / math.sqrt(2)})
    error = math.sqrt(0.01 / 3 + 0.0025 / 2)
    assert found.mean == pytest.approx(0.3) and found.n == 2
    freedom = (0.01 / 3 + 0.0025 / 2) ** 2 / ((0.01 / 3) ** 2 / 2 + (0.0025 / 2) ** 2)
    assert math.floor(freedom) == 2 and found.half == pytest.approx(4.3027 * error, rel=1e-4)


def test_the_claim_says_whether_seeds_are_pairs():
    """Both sides move together from seed to seed: as pairs the difference is sure, as groups it is not."""
    better, worse = (0.3, 0.5, 0.72), (0.2, 0.4, 0.6)
    assert verdict(better, worse).word == "holds"
    assert verdict(better, worse, BETTER._replace(paired=False)).word == "undecided"
    assert verdict({5: 0.9, 6: 0.89, 7: 0.9}, {0: 0.2, 1: 0.21, 2: 0.2}, BETTER._replace(paired=False)).word == "holds"
    assert verdict({5: 0.9}, {0: 0.2}).word == "not run"  # no seed in common


@pytest.mark.parametrize(
    "better, worse, word",
    [
        ((0.6, 0.61, 0.6), (0.3, 0.3, 0.3), "holds"),
        ((0.3, 0.3, 0.3), (0.6, 0.61, 0.6), "opposite"),
        ((0.5, 0.501, 0.5), (0.5, 0.5, 0.5), "negligible"),
        ((0.51, 0.51, 0.51), (0.5, 0.5, 0.5), "negligible"),  # sure, and too small to matter
        ((0.6, 0.4, 0.5), (0.5, 0.5, 0.5), "undecided"),
        ((0.6, 0.4, 0.9), (0.5, 0.5, 0.5), "undecided"),
        ((0.1, 0.12, 0.05), (0.11, 0.0, 0.1), "no range: at chance"),
        ((1.0, 0.98, 0.99), (0.99, 0.99, 0.98), "no range: at the ceiling"),
        ((1.0, 0.98, 0.5), (0.99, 0.99, 0.98), "undecided"),  # one run is elsewhere
        ((0.9,), (0.5,), "one seed cannot say"),
        ((), (0.5,), "not run"),
    ],
)
def test_every_verdict_has_its_numbers(better, worse, word):
    assert verdict(better, worse).word == word


def test_holm_is_over_the_claims_that_are_judged_together():
    """p = 0.035 alone holds, beside another that is tested it does not; what has no range is not among them."""
    better, worse = (0.3, 0.5, 0.4), (0.1, 0.1, 0.1)
    assert verdict(better, worse).word == "holds" and verdict(better, worse).p == pytest.approx(1 - math.sqrt(27 / 29))
    twice = verdict(better, worse, BETTER, BETTER._replace(better="w", worse="b"))
    assert twice.word == "undecided" and twice.p == pytest.approx(2 - 2 * math.sqrt(27 / 29))
    assert verdict(better, worse, BETTER, BETTER._replace(better="w")).word == "holds"


def test_tasks_and_lengths_that_say_nothing_are_counted():
    """At the training length there is a difference, at twice of it both are at chance."""
    found = verdict((0.6, 0.61), (0.3, 0.3), BETTER._replace(multiples=(1.0, 2.0)))
    assert (found.cells, found.low, found.high) == (2, 1, 0)
    assert verdict((0.99, 0.6), (0.99, 0.98), BETTER).high == 0 and verdict((0.99, 0.98), (0.99, 0.98), BETTER).high == 1


def test_what_was_not_measured_is_not_run():
    assert verdict((0.5,), (0.5,), BETTER._replace(multiples=(64.0,))).word == "not run"
    assert verdict((0.5,), (0.5,), BETTER._replace(tasks=("uuid",))).word == "not run"
