"""The site: every public name has a reference entry with an example that runs, every page's Python runs, every link has its file."""

import doctest
import importlib
import inspect
import re
from dataclasses import is_dataclass
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
FAMILIES = [*(f"needlework.ops.{op}" for op in (*OPS, "conv", "linear")), "needlework.ops.familiar"]
CONFIGURED = ("data", "train", "serve", "experiment.recipe", "experiment.gate", "experiment.evaluate", "experiment.answers")


def public(module: str) -> dict[str, object]:
    """What a package names for its readers, or a module defines: the classes and functions, by their full names."""
    here = importlib.import_module(module)
    inside = "needlework" if hasattr(here, "__path__") else module
    ours = {name: x for name, x in vars(here).items() if getattr(x, "__module__", "").startswith(inside)}
    return {f"{module}.{name}": x for name, x in ours.items() if not name.startswith("_")}


def is_config(x: object) -> bool:
    """Whether it is a class whose fields are given by name and checked, or that has a kind."""
    return inspect.isclass(x) and is_dataclass(x) and (hasattr(x, "kind") or hasattr(x, "__post_init__"))


OPERATORS = [name for family in FAMILIES for name, x in public(family).items() if inspect.isfunction(x)]
CONFIGS = [name for part in CONFIGURED for name, x in public(f"needlework.{part}").items() if is_config(x)]
COMPONENTS = [name for part in ("layers", "models", "models.convert") for name in public(f"needlework.{part}")]
EXAMPLES = [*OPERATORS, *COMPONENTS, *CONFIGS]


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
