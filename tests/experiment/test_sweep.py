"""A sweep from the command line: many recipes in pieces, results side by side, a page."""

import ast
import json
import shlex
from pathlib import Path

import pytest

OWN = """
import dataclasses
from needlework.data import CorpusConfig, NeedleMix
from needlework.report.claims import Claim
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase
from needlework.train import AdamW, Cooldown, TrainConfig
from needlework.recipes import demo

MIXERS = {{"softmax": None, "qdelta": None}}
FAMILIES = {{"All": ("softmax", "qdelta")}}
GLANCE = ("qdelta",)
CLAIMS = (Claim("Q-Delta finds more than softmax", "qdelta", "softmax", ("needle",), (1.0,)),)
LIMITS = "Nothing at all."

def both():
    return tuple(
        dataclasses.replace(
            demo.recipe(mixer, CorpusConfig(kind="files", paths=({text!r},), held_out=0.3)),
            phases=(Phase(steps=6, batch=2, length=96, task=NeedleMix(dense_pairs=(1, 2), sparse_pairs=(1, 1))),),
            train=TrainConfig(
                steps=6, seed=seed, optim=AdamW(lr=4e-3), schedule=Cooldown(warmup=2, flat=0.3), checkpoint_every=3
            ),
            evaluate=Evaluation(lengths=(96, 192), tokens=192, rows=2, tasks=("needle",), positions=512, diagnose=128),
        )
        for seed in (0, 1) for mixer in MIXERS
    )

def none():
    return ()
"""


@pytest.fixture
def own(tmp_path):
    text, module = tmp_path / "text.txt", tmp_path / "my own.py"
    text.write_text(Path(ast.__file__).read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    module.write_text(OWN.format(text=str(text)))
    return module


@pytest.mark.slow
def test_a_sweep_runs_in_pieces_and_its_page_is_made_of_its_results(needlework, own, tmp_path):
    runs = ("--runs", tmp_path / "runs", "--workers", 1)

    stopped = needlework("sweep", f"{own}:both", *runs, "--minutes", 0)
    assert "4 runs are left" in stopped
    first = needlework("sweep", f"{own}:both", *runs, "--only", "qdelta")
    results = tmp_path / "runs" / "my own" / "results"
    assert {path.name for path in results.glob("*.json")} == {"qdelta-0.json", "qdelta-1.json"}
    assert "2 of 4 runs are done" in needlework("sweep", f"{own}:both", *runs)
    assert "0 of 2 done; about" in first
    # what it says to do next can be done, also where names need quotes
    suggested = [line for line in first.splitlines() if line.startswith("all done; needlework report ")]
    needlework(*shlex.split(suggested[0])[3:])
    assert (results / "README.md").exists()
    entry = json.loads((results / "softmax-1.json").read_text())
    assert entry["seed"] == 1 and entry["config"]["train"]["steps"] == 6 and len(entry["corpus"]["sha256"]) == 64
    assert {"machine", "versions", "commit", "positions", "diagnostics", "train"} <= entry.keys()

    needlework("report", results, "--of", own, "--to", tmp_path / "page")
    page = (tmp_path / "page" / "README.md").read_text()
    assert "2 mixers, 2 seeds each" in page and "Q-Delta finds more than softmax" in page and "Nothing at all." in page


def test_a_run_that_its_guard_ends_is_a_result_and_is_not_run_again(forked_workers, needlework, own, tmp_path):
    small = ("sweep", f"{own}:both", "--runs", tmp_path / "runs", "--workers", 1, "--only", "softmax")
    # any rise is a spike, and at this rate there is one
    spoilt = ("--set", "train.guard.spike=1.0001", "--set", "train.guard.window=1", "--set", "train.optim.lr=1.0")
    assert "its running median" in needlework(*small, *spoilt, ok=False)
    results = tmp_path / "runs" / "my own" / "results"
    entry = json.loads((results / "softmax-0.json").read_text())
    assert 1 < entry["ended"]["step"] <= entry["ended"]["steps"] == 6 and "its running median" in entry["ended"]["why"]
    assert {"machine", "versions", "commit", "corpus", "config"} <= entry.keys() and "loss" not in entry
    assert "2 of 2 runs are done" in needlework(*small, *spoilt)
    assert "ended early" in needlework("report", results, "--of", own, ok=False)


def test_a_sweep_of_nothing_is_refused(needlework, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN.format(text=""))
    assert "returned an empty tuple, expected a tuple of Recipes" in needlework("sweep", f"{own}:none", ok=False)
    assert "returned Recipe, expected a tuple of Recipes" in needlework("sweep", "demo:softmax", ok=False)


def test_the_old_command_names_the_new_one_in_one_line_and_does_the_same(needlework):
    said = needlework("study", "demo:softmax", ok=False)
    assert said.splitlines()[0] == "needlework study is now needlework sweep"
    assert said.endswith(needlework("sweep", "demo:softmax", ok=False)) and len(said.splitlines()) == 2
