"""The README is short, its code runs, and the pages beside it link to files that exist. tests/test_docs.py has the pages of docs/."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_at_most_150_lines_with_the_install_command_in_the_first_40():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert any("pip install -e" in line for line in lines[:40])


def test_the_first_two_commands_of_the_readme_are_those_of_a_fresh_machine():
    assert re.search(r"```\n(make demo).*\n(make test).*\n```", README).groups() == ("make demo", "make test")
    assert README.index("make demo") < README.index("pip install")


def test_the_python_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_each_row_of_speed_in_the_readme_is_a_row_of_the_page_of_performance():
    page = (ROOT / "docs" / "performance.md").read_text().splitlines()
    rows = [
        line.strip("| ").split(" | ")
        for line in README.split("## Speed")[1].split("##")[0].splitlines()
        if line.startswith("| ")
    ]
    assert len(rows) == 7
    for _, shape, ms, _, peer, ratio in rows[1:]:
        assert any(f" {shape} | fwd+bwd | {ms} | {peer} | {ratio} |" in line for line in page), (shape, ms)


@pytest.mark.parametrize("page", ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
def test_a_page_links_to_what_is_there(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert link.startswith("http") or ((ROOT / page).parent / link).exists(), link


def test_the_log_lists_every_page_by_its_title():
    log = ROOT / "docs" / "log"
    listed = dict(reversed(pair) for pair in re.findall(r"\[(.*)\]\((.*\.md)\)", (log / "index.md").read_text()))
    assert listed == {path.name: path.read_text().splitlines()[0].removeprefix("# ") for path in log.glob("2*.md")}
