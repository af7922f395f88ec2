"""What a sweep says to do next can be done: the command runs as it is printed, or none is printed."""

import json
import shlex

import pytest

from needlework.cli.reports import page_of
from needlework.report import sweep_page

MODULE = "MIXERS = {'qdelta': None}\nFAMILIES = {}\nGLANCE = ()\nCLAIMS = ()\nLIMITS = ''\n"
RUN = {
    "name": "qdelta", "seed": 0, "title": "Q-Delta", "lengths": [64], "train_length": 64, "tasks": ["needle"], "corpus": {"sha256": "0"},
    "machine": "a CPU", "versions": {"torch": "2"}, "commit": None, "parameters": 10, "state_bytes": {"64": 1}, "loss": {"64": 1.0},
    "train": {"steps": [1], "loss": [1.0], "tokens": 64, "seconds": 1.0, "tokens_per_second": 64.0},
    "needle": {"64": {"accuracy": 0.5, "exact": 0.5, "digits": 4, "values": 2}},
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path):
    """A folder of results and a module, with names that a shell would take apart."""
    results, module = tmp_path / "my $runs" / "results", tmp_path / "it's mine.py"
    results.mkdir(parents=True)
    (results / "qdelta-0.json").write_text(json.dumps(RUN))
    module.write_text(MODULE)
    return results, module


def test_the_command_that_is_suggested_makes_the_page(sweep, needlework, monkeypatch):
    results, module = sweep
    program, *arguments = shlex.split(page_of(results, str(module)))
    made = []
    monkeypatch.setattr(sweep_page, "write_page", lambda sweep, directory, *_: made.append((list(sweep.runs), directory)))
    needlework(*arguments)
    assert program == "needlework" and made == [(["qdelta"], results)]


@pytest.mark.parametrize("name", ["MIXERS", "FAMILIES", "GLANCE", "CLAIMS", "LIMITS"])
def test_a_module_that_makes_no_page_is_named_and_nothing_is_suggested(sweep, needlework, name):
    results, module = sweep
    module.write_text(MODULE.replace(name, "OTHER"))
    why = f"{module} has no {name}, which a page is made of"
    assert page_of(results, str(module)) == f"results: {results} (no page of them: {why})"
    assert needlework("report", results, "--of", module, ok=False) == f"needlework: {why}\n"


def test_results_that_make_no_page_suggest_none(sweep):
    results, module = sweep
    (results / "qdelta-1.json").write_text(json.dumps(RUN | {"seed": 1, "lengths": [128]}))
    assert page_of(results, str(module)).startswith(f"results: {results} (no page of them: {results / 'qdelta-1.json'}: ")
