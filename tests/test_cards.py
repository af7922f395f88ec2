"""Every op has a card with the same headings, and a folder with the same files."""

from pathlib import Path

import pytest

import needlework
from needlework.ops.specs import OPS, specs
from needlework.testing import cards

HEADINGS = ["Equation", "Paper", "Choices and errata", "State and cost", "Limits", "Range", "Error", "Diagnostics"]
FOLDER = Path(needlework.__file__).parent / "ops"


@pytest.mark.parametrize("op", OPS)
def test_a_card_has_the_headings_in_their_order(op):
    lines = (FOLDER / op / "README.md").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert [line[3:] for line in lines if line.startswith("## ")] == HEADINGS


@pytest.mark.parametrize("op", OPS)
def test_a_folder_is_complete(op):
    for name in ("__init__.py", "README.md", "reference.py", "chunk.py", "op.py", "spec.py"):
        assert (FOLDER / op / name).is_file(), f"ops/{op}/{name} is missing"


def test_every_op_is_in_the_battery():
    assert {spec.name.split("/")[0] for spec in specs()} == set(OPS)


@pytest.mark.parametrize("spec", specs(), ids=lambda s: s.name)
def test_a_card_names_every_limit_that_its_spec_tests(spec):
    card = (FOLDER / spec.name.split("/")[0] / "README.md").read_text()
    section = card.split("## Limits")[1].split("\n## ")[0]
    for limit in spec.limits:
        assert limit.name in section, f"{limit.name!r} of {spec.name} is not in the card's Limits"


@pytest.mark.parametrize("op", OPS)
def test_a_card_s_error_table_has_every_spec_within_its_budget(op):
    lines = cards.section(cards.card(op).read_text()).splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    assert header == ["worst error ÷ budget", "float32", "bfloat16", "float16"]
    assert [name for name, *_ in rows] == [spec.name for spec in specs() if spec.name.split("/")[0] == op]
    assert all(len(figures) == 3 and all(0 <= float(x) <= 1 for x in figures) for _, *figures in rows)
