"""Effects beside the claims: of hand-made runs, and those that the issue of the second study quotes of the first."""

import math
from pathlib import Path

import pytest

from needlework.recipes import comparison
from needlework.report.asked import Measure
from needlework.report.claims import paired
from needlework.report.effects import Effect, effect, effects_section
from needlework.report.sweep import Sweep, load_sweep

FIRST = Path(__file__).parents[2] / "docs" / "results" / "first"
SHARE = Measure(lambda run: run["x"], "points", times=100)


def sweep(**mixers):
    runs = {name: [{"seed": s, "x": x, "title": name.upper()} for s, x in enumerate(of)] for name, of in mixers.items()}
    return Sweep(runs, (64,), 64, (), "")


def test_of_two_mixers_it_is_students_over_pairs():
    a, b = (0.5, 0.7, 0.61), (0.2, 0.3, 0.25)
    found = effect(sweep(a=a, b=b), Effect("", ("a",), ("b",), SHARE))
    assert found == pytest.approx(paired(dict(enumerate(a)), dict(enumerate(b))))


def test_a_main_effect_has_the_residual_of_mixers_and_seeds():
    """Parts of 0.4 and 0.1, an interaction, seeds that shift all: what is left is ± 0.01 in two mixers and two seeds, Σ r² = 4 · 0.005²."""
    left = (0.005, -0.005)
    shift = (0.0, 0.2)
    of = {"none": (0.1, 1), "one": (0.5, -1), "other": (0.2, 0), "both": (0.7, 0)}
    runs = {name: tuple(at + b + sign * r for b, r in zip(shift, left, strict=True)) for name, (at, sign) in of.items()}
    found = effect(sweep(**runs), Effect("", ("one", "both"), ("none", "other"), SHARE))
    assert found.mean == pytest.approx(0.45) and found.n == 2
    assert found.half == pytest.approx(3.1824 * math.sqrt(4 * 0.005**2 / 3 / 2), rel=1e-4)  # three degrees of freedom


def test_a_page_has_the_effects_whose_runs_there_are():
    runs = sweep(a=(0.5, 0.7), b=(0.2, 0.3), c=(0.2,))
    of = lambda *names: Effect(f"{names}", names[:1], names[1:], SHARE)
    assert effects_section(runs, (of("a", "c"), of("a", "none"))) == ""
    text = effects_section(runs, (of("a", "b"), of("a", "c")))
    assert "| A | B | +35.0 ± 63.5 points | 2 |" in text and "'c'" not in text


def test_the_first_study_shows_what_the_issue_says(tmp_path):
    """LUCID's held-out loss −0.082 ± 0.028; Polar's main effect +42 ± 7 points at 8 times the training length, memory's +27 ± 7."""
    names = {name for of in comparison.EFFECTS for name in of.better + of.worse}
    for name in names:
        for path in FIRST.glob(f"{name}-[0-9].json.xz"):
            (tmp_path / path.name).symlink_to(path)
    lucid, polar, memory = (effect(load_sweep(tmp_path), of) for of in comparison.EFFECTS)
    rounded = lambda found, digits: (round(found.mean, digits), round(found.half, digits), found.n)
    assert rounded(lucid, 3) == (-0.082, 0.028, 3)
    assert rounded(polar, 2) == (0.42, 0.07, 3) and rounded(memory, 2) == (0.27, 0.07, 3)
    page = (FIRST / "README.md").read_text()
    assert all(text in page for text in ("| -0.082 ± 0.028 nats a token |", "| +42.2 ± 7.1 points |", "| +26.6 ± 7.1 points |"))
