"""A row tuned on several calls at once: what counts is the geometric mean of their times."""

import pytest
import torch

from needlework.ops.runtime import launch_configs

ENGINE = "delta/scalar"


@pytest.fixture
def tune(bench):
    pytest.importorskip("triton")
    return bench("tune")


def moved():
    """Constants that are now forced."""
    return launch_configs._forced[ENGINE][1]


@pytest.mark.parametrize("loss, taken", [(1.9, True), (2.1, False)])
def test_a_constant_that_halves_one_call_may_not_cost_another_twice_as_much(tune, loss, taken):
    row = launch_configs.rows(ENGINE)[-1]
    (other, *_) = tune.neighbours("num_warps", row.launch["gate"]["num_warps"])
    gains = {"first": 0.5, "second": loss}
    timer = lambda call: gains[call] if moved().get("gate") == {"num_warps": other} else 1.0
    best, before, after = tune.search(row, ["first", "second"], lambda: "", timer=timer)
    assert best == ({"gate": {"num_warps": other}} if taken else {})
    assert before == 1.0 and after == pytest.approx((0.5 * loss) ** 0.5 if taken else 1.0)


def test_a_row_is_tuned_on_calls_of_the_tuning_seeds_that_pick_it(tune, bench, monkeypatch):
    draw = bench("draw")
    monkeypatch.setattr(launch_configs, "capability", lambda device: (9, 0))
    found = tune.by_row("gated", torch.device("cuda"))
    assert {"sm90-k128", "sm90-k256", "sm90-k128-f16", "sm90-k256-f16"} <= {row.name for row in found}
    for row, calls in found.items():
        assert 1 <= len(calls) <= tune.TOGETHER
        for call in calls:
            assert call.seed in draw.TUNING and draw.memory(call) <= tune.MEMORY
            picked = launch_configs._picked(ENGINE, (9, 0), call.dtype, call.K, call.V, frozenset())
            assert picked.name == row.name
