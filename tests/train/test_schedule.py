import math
import re

import pytest

from needlework.train import Cooldown, Cosine

STEPS = 100


@pytest.mark.parametrize("schedule", [Cosine(warmup=10, floor=0.1), Cooldown(warmup=10, flat=0.3, floor=0.1)])
def test_warm_up_is_linear_and_skips_zero(schedule):
    assert [schedule.multiplier(s, STEPS) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]


def test_the_cosine_starts_at_the_peak_is_half_way_in_the_middle_and_ends_at_the_floor():
    schedule = Cosine(warmup=10, floor=0.5)
    assert schedule.multiplier(10, STEPS) == 1.0
    assert schedule.multiplier(55, STEPS) == pytest.approx(0.75, rel=1e-12)
    assert schedule.multiplier(STEPS, STEPS) == 0.5


def test_the_cooldown_is_flat_then_linear_to_the_floor():
    schedule = Cooldown(flat=0.5, floor=0.5)
    assert [schedule.multiplier(s, STEPS) for s in (0, 49, 50, 75, STEPS)] == [1.0, 1.0, 1.0, 0.75, 0.5]


def test_a_floor_of_zero_wastes_no_step():
    assert Cooldown(flat=0.3).multiplier(STEPS - 1, STEPS) > 0
    assert Cosine().multiplier(STEPS - 1, STEPS) > 0


def test_a_flat_share_of_one_never_cools_down():
    assert {Cooldown(flat=1.0).multiplier(s, STEPS) for s in range(STEPS)} == {1.0}


@pytest.mark.parametrize("schedule", [Cosine(warmup=10), Cooldown(warmup=10, flat=0.0)])
def test_a_run_no_longer_than_its_warm_up_ends_at_the_peak(schedule):
    assert schedule.multiplier(9, 10) == 1.0


@pytest.mark.parametrize(
    ("schedule", "field", "value"),
    [
        (Cosine, "warmup", -5),
        (Cosine, "warmup", 1.5),
        (Cosine, "floor", -0.1),
        (Cosine, "floor", 1.1),
        (Cosine, "floor", math.nan),
        (Cooldown, "warmup", -1),
        (Cooldown, "warmup", None),
        (Cooldown, "flat", -0.1),
        (Cooldown, "flat", 2.0),
        (Cooldown, "floor", math.inf),
    ],
)
def test_a_schedule_out_of_range_is_refused_by_name(schedule, field, value):
    with pytest.raises(ValueError, match=re.escape(f"{schedule.__name__.lower()}: {field} is {value!r}, expected ")):
        schedule(**({"flat": 0.5} if schedule is Cooldown else {}) | {field: value})
