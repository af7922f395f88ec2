"""The command line as a newcomer meets it: help, tables, a whole comparison in small, clear errors."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from needlework import cli
from needlework.cli.entry import repeated
from needlework.models import presets
from needlework.testing.ranks import said_in
from needlework.testing.rows import chosen
from needlework.train import latest, load


def test_the_module_runs_as_a_program_and_a_mistake_is_no_traceback():
    command = [sys.executable, "-m", "needlework", "generate", "nowhere", "--prompt", "x", "--temperature", "-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("needlework: --temperature: got -1, expected 0") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("module, command", [("typer", "mixers"), ("transformers", "presets")])
def test_without_the_extras_it_says_what_to_install(module, command):
    bare = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_module('needlework', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", bare, command], capture_output=True, text=True)
    said, _, packages = done.stderr.partition("; pip install ")
    assert done.returncode == 1 and said == f"needlework: {module} is not installed"
    assert [re.match(r"[\w-]+", line)[0] for line in shlex.split(packages)] == [
        module
    ]  # an index has it, and it alone is wanting


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe of one's own: a Python file with a function that returns a Recipe."""
    import ast

    folder = tmp_path_factory.mktemp("own")
    (folder / "text.txt").write_text(open(ast.__file__, encoding="utf-8").read()[:40_000], encoding="utf-8")
    path = folder / "own.py"
    path.write_text(
        "import dataclasses\n"
        "from needlework.data import CorpusConfig, NeedleMix\n"
        "from needlework.experiment.runner import Evaluation, Phase\n"
        "from needlework.recipes import demo\n"
        "def small(steps=4):\n"
        f"    recipe = demo.recipe('gated-deltanet', CorpusConfig(kind='files', paths=({str(folder / 'text.txt')!r},)))\n"
        "    return dataclasses.replace(\n"
        "        recipe, train=dataclasses.replace(recipe.train, steps=steps),\n"
        "        phases=(Phase(steps=steps, batch=2, length=64, task=NeedleMix(dense_pairs=(1, 2), sparse_pairs=(1, 1))),),\n"
        "        evaluate=Evaluation(lengths=(96, 128), tokens=128, rows=2))\n"
        "def endless():\n"
        "    return small(1 << 20)\n"
    )
    return path


def test_every_command_has_help_that_says_what_it_does(needlework):
    overview = needlework("--help")
    for command in ("compare", "train", "eval", "generate", "convert", "look", "push", "mixers", "presets"):
        assert command in overview
        assert len(needlework(command, "--help")) > 200


def test_presets_as_json_are_the_papers_counts(needlework, monkeypatch):
    counts = {"atma-polar-memory": 378_220_864, "qdelta-340m": 380_017_148}
    monkeypatch.setattr(presets, "PRESETS", {name: presets.PRESETS[name] for name in counts})
    assert json.loads(needlework("presets", "--json")) == counts


def test_mixers_prints_a_row_for_each_of_the_catalog(needlework):
    from needlework.layers.catalog import CATALOG

    table = needlework("mixers")
    assert all(f"{name} " in table for name in CATALOG)


def test_train_then_eval_then_generate(needlework, recipe, tmp_path):
    out = needlework("train", f"{recipe}:small", "--runs", tmp_path, "--name", "one", "--set", "train.optim.lr=1e-3")
    checkpoint = tmp_path / "one" / "gated-deltanet" / "checkpoint"
    assert "checkpoint" in out and checkpoint.is_dir()
    told = [line.split(",")[0] for line in out.splitlines() if ": step " in line]
    assert told[0] == "Gated DeltaNet: step 1 of 4 (25%)" and told[-1] == "Gated DeltaNet: step 4 of 4 (100%)"
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["gated-deltanet"]["train"]["optim"]["lr"] == 1e-3
    assert cli.load_checkpoint(checkpoint)[0].device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    text = recipe.parent / "text.txt"
    entry = json.loads(needlework("eval", checkpoint, "--corpus", text, "--length", 96, "--task", "needle", "--json"))
    assert set(entry["loss"]) == set(entry["needle"]) == {"96"} and "needles" not in entry
    assert "def " in needlework("generate", checkpoint, "--prompt", "def ", "--tokens", 4)
    assert "train.optim.lr" in needlework("train", f"{recipe}:small", "--runs", tmp_path, "--name", "one", ok=False)


def command(pipe, said, *arguments):
    """`needlework …`, for a process of its own."""
    said_in(said)
    sys.argv = ["needlework", *map(str, arguments)]
    cli.main()


@pytest.mark.parametrize(
    ("end", "ranks"), chosen([(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)], quick=[(signal.SIGTERM, 1)])
)
def test_a_training_that_is_told_to_end_saves_its_last_step(forked, recipe, tmp_path, end, ranks):
    run, _ = forked(command, tmp_path / "said", "train", f"{recipe}:endless", "--runs", tmp_path, "--ranks", ranks)
    folder = tmp_path / "gated-deltanet" / "gated-deltanet" / "training"
    log = folder / "log.jsonl"
    while run.is_alive() and not (log.exists() and log.read_text()):
        time.sleep(0.1)
    os.kill(run.pid, end)
    run.join()
    assert "stopped and saved in" in (said := (tmp_path / "said").read_text()) and run.exitcode, said
    assert load(latest(folder))["run.step"] == json.loads(log.read_text().splitlines()[-1])["step"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("compare", "--mixer", "qdleta"), "did you mean 'qdelta'"),
        (("train", "demo"), "expected MODULE:FUNCTION"),
        (("train", "dmeo:qdelta"), "there is no needlework/recipes/dmeo.py"),
        (("train", "demo:qdelta", "--set", "train.stesp=3"), "did you mean 'steps'"),
        (("train", "demo:qdelta", "--set", "train.steps=many"), "expected a whole number >= 1 such as 900"),
        (("eval", "nowhere"), "expected a folder with config.json"),
        (("train", "demo:qdelta", "--set", "model.hiden_size=3"), "did you mean 'hidden_size'"),
        (("train", "demo:qdelta", "--set", "model.mixers.M.heads=two"), "got 'two', expected a whole number >= 1 such as 1"),
        (("compare", "--corpus", "nowhere.txt"), "nowhere.txt"),
        (("compare", "--corpus", "no[red]where.txt"), "no[red]where.txt"),
        (("compare", "--corpus", __file__, "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_status_1(needlework, arguments, says, tmp_path):
    runs = ("--runs", tmp_path) if arguments[0] != "eval" else ()
    assert says in " ".join(needlework(*arguments, *runs, ok=False).split())


def test_set_reaches_into_the_model(recipe):
    changed = cli.changed(
        cli.load_recipe(f"{recipe}:small"), ["model.mixers.M.heads=2", "model.layout=MMM", "model.softcap=15.0"]
    )
    assert changed.model.mixer("M").heads == 2 and changed.model.layout == "MMM" and changed.model.softcap == 15
    assert changed.model.num_hidden_layers == 3 and changed.model.mixer("M").key_dim == 64


@pytest.mark.slow
def test_compare_writes_the_report_and_the_same_command_goes_on(recipe, tmp_path):
    """In process, because the demo's recipe is shortened here."""
    from rich.console import Console

    from needlework.experiment.compare import compare

    chosen = cli.load_recipe(f"{recipe}:small")
    results = compare("demo", (chosen,), tmp_path / "demo", Console(quiet=True), workers=1)
    files = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"config.json", "manifest.json", "results.json", "report.html", "gated-deltanet"} <= files
    assert json.loads((tmp_path / "demo" / "results.json").read_text())["mixers"] == results["mixers"]
    again = compare("demo", (chosen,), tmp_path / "demo", Console(quiet=True), workers=1)
    assert again["mixers"] == results["mixers"]


def test_a_loss_that_is_not_finite_names_the_mixer_and_the_step(forked_workers, recipe, tmp_path):
    from rich.console import Console

    from needlework.experiment.claim import RunError
    from needlework.experiment.compare import compare

    wild = cli.changed(cli.load_recipe(f"{recipe}:small"), ["train.optim.lr=1e30"])
    with pytest.raises(RunError, match=r"gated-deltanet: step \d+: loss"):
        compare("wild", (wild,), tmp_path / "wild", Console(quiet=True), workers=1)


def test_a_run_that_fails_is_named_and_the_others_go_on(forked_workers, recipe, tmp_path):
    import dataclasses

    from rich.console import Console

    from needlework.experiment.claim import RunError
    from needlework.experiment.sweep import sweep

    good = cli.load_recipe(f"{recipe}:small")
    wild = dataclasses.replace(cli.changed(good, ["train.optim.lr=1e30"]), name="wild")
    with pytest.raises(RunError, match=r"^wild-0: step \d+: loss.*$"):
        sweep((wild, good), tmp_path / "both", Console(quiet=True), workers=1)
    results = tmp_path / "both" / "results"
    entries = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    assert entries.keys() == {"gated-deltanet-0", "wild-0"}
    assert "loss" in entries["gated-deltanet-0"] and "loss" in entries["wild-0"]["ended"]["why"]
    read = json.loads((results / "corpora" / f"{entries['wild-0']['corpus']['sha256'][:16]}.json").read_text())
    assert read["sha256"] == entries["wild-0"]["corpus"]["sha256"] and read["files"]


def die(recipe, directory):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_no_mistake_of_ours(forked_workers, recipe, tmp_path, monkeypatch):
    from rich.console import Console

    from needlework.experiment import workers
    from needlework.experiment.claim import RunError
    from needlework.experiment.sweep import sweep

    monkeypatch.setattr(workers, "_work", die)
    with pytest.raises(RunError, match=r"^gated-deltanet-0: a worker was killed .* the same command goes on"):
        sweep((cli.load_recipe(f"{recipe}:small"),), tmp_path / "one", Console(quiet=True), workers=1)


def test_an_option_of_many_values_is_the_option_many_times():
    assert repeated(["x", "--corpus", "a", "b", "--name", "n"], "--corpus") == [
        "x",
        "--corpus",
        "a",
        "--corpus",
        "b",
        "--name",
        "n",
    ]
