"""The error budget: what its ratio is where there is nothing to compare."""

import math

import pytest
import torch

from needlework.testing import verdict
from needlework.testing.errors import error_over_budget, mean_of_draws

EXACT = torch.linspace(1, 2, 24, dtype=torch.float64).view(1, 2, 3, 4)
ROUNDED = EXACT.float() + 1e-6


@pytest.mark.parametrize("head", range(3))
@pytest.mark.parametrize("which", ["fast", "definition", "literal"])
def test_a_nan_is_over_every_budget_wherever_it_lies(which, head):
    ways = {"fast": ROUNDED, "definition": ROUNDED, "literal": ROUNDED}
    ways[which] = ROUNDED.clone()
    ways[which][0, 1, head, 2] = math.nan
    assert error_over_budget(ways["fast"], EXACT, ways["definition"], ways["literal"], 2) == (math.inf, head)
    [ratio] = verdict.ratios_by_group(ways["fast"], EXACT, ways["definition"], ways["literal"], 1)
    assert ratio == math.inf


def test_an_error_is_over_the_budget_of_an_exact_definition_and_no_error_is_within_it():
    exact = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    off = torch.ones(1, 1, 2, 4)
    off[0, 0, 1] += 1e-3
    assert error_over_budget(off, exact, exact.float(), exact.float(), 2) == (math.inf, 1)
    assert error_over_budget(exact.float(), exact, exact.float(), exact.float(), 2) == (0.0, 0)


def test_draws_end_when_every_tensor_is_within_its_budget_in_their_mean():
    given = iter([{"o": 0.5, "dk": 4.0}, {"o": 0.5, "dk": 0.5}, {"o": 0.5, "dk": 0.25}, {"o": 9.0, "dk": 9.0}])
    found = mean_of_draws(given)
    assert found == {"o": pytest.approx(0.5), "dk": pytest.approx((4 * 0.5 * 0.25) ** (1 / 3))}
    assert next(given) == {"o": 9.0, "dk": 9.0}
    assert mean_of_draws([{"o": math.inf}, {"o": 0.1}])["o"] == math.inf
    assert mean_of_draws([{"o": 0.0}])["o"] < 1e-5
