"""The site: every public name has a reference entry with an example that runs, every page's Python runs, every link has its file."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

from needlework.ops.specs import OPS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "source" not in path.relative_to(DOCS).parts]
ENTRY = re.compile(r"^\.\. auto(?:function|class):: (\S+)$", re.MULTILINE)
DOCUMENTED = {name for page in (DOCS / "reference").glob("*.md") for name in ENTRY.findall(page.read_text())}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FORMS = ("chunk_", "recurrent_", "step_", "paged_", "write_")

public_ops = [
    f"needlework.ops.{op}.{name}"
    for op in OPS
    for name in vars(importlib.import_module(f"needlework.ops.{op}"))
    if name.startswith(FORMS)
] + [f"needlework.ops.conv.{name}" for name in ("causal_conv", "causal_conv_slots", "step_conv")]
familiar = importlib.import_module("needlework.ops.familiar")
public_ops += [
    f"{familiar.__name__}.{name}"
    for name, x in vars(familiar).items()
    if getattr(x, "__module__", "") == familiar.__name__ and name.startswith(FORMS)
]


def public(module: str) -> list[str]:
    """The classes and functions that a module names for its readers."""
    named = {name: value for name, value in vars(importlib.import_module(module)).items() if not name.startswith("_")}
    ours = (name for name, value in named.items() if getattr(value, "__module__", "").startswith("needlework"))
    return [f"{module}.{name}" for name in ours]


EXAMPLES = [*public_ops, *public("needlework.layers"), *public("needlework.models"), *public("needlework.models.convert")]


def named(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_public_name_is_in_the_reference_with_an_example_that_runs(name):
    assert name in DOCUMENTED, f"no page of docs/reference has {name}"
    (test, *_) = doctest.DocTestFinder(recurse=False).find(named(name), name, globs={}) or [None]
    assert test is not None and test.examples, f"{name}: its docstring has no >>> example"
    torch.manual_seed(0)
    said = []
    results = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
    assert not results.failed, "".join(said)


def test_every_entry_of_the_reference_is_there_and_has_a_docstring():
    assert not [name for name in sorted(DOCUMENTED) if not named(name).__doc__]


with_python = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", with_python, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """The blocks of a page in order, as one module; a page's own folder is where they run."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space = {"__name__": "__page__"}
    for block in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), space)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_relative_link_points_to_a_file(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in LINK.findall(prose) if not re.match(r"\w+:|#", link)]
    assert not [link for link in links if not (page.parent / link).exists()]
