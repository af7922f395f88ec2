"""First commands that fail, signals, and two processes at once: what is refused, what is kept, what goes on."""

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from needlework.cli.recipes import load_recipe
from needlework.cli.stop import ENDS, Stop
from needlework.eval.retrieval import Retrieval
from needlework.experiment.compare import compare
from needlework.experiment.sweep import sweep
from needlework.train import begun, latest, load

OWN = """
import dataclasses
from needlework.experiment.runner import Evaluation
from tests.experiment.test_runner import demo, tiny
from needlework.data import CorpusConfig

def small():
    return dataclasses.replace(
        tiny(CorpusConfig(kind="files", paths=({text!r},), held_out=0.2)), evaluate=Evaluation(lengths=(96, 128), tokens=256, rows=2)
    )

def endless():
    one = small()
    phases = (dataclasses.replace(one.phases[0], steps=1 << 20),)
    return dataclasses.replace(one, train=dataclasses.replace(one.train, steps=1 << 20), phases=phases)

def slow():  # to measure: in pieces of a few hundredths of a second
    return dataclasses.replace(small(), evaluate=Evaluation(lengths=tuple(range(96, 296)), tokens=2_000, rows=2))

def several():
    return (endless(), dataclasses.replace(slow(), name="slow"))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "text.txt").write_text(Path(ast.__file__).read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    (folder / "own.py").write_text(OWN.format(text=str(folder / "text.txt")))
    return folder / "own.py"


def started(*arguments):
    """`needlework …` in a process, and a group, of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-m", "needlework", *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def until(process, *happened):
    """Waits; fails with what it said if the process ends before."""
    while not all(ask() for ask in happened):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def pieces(run):
    files = list(run.glob("measuring-*.json"))
    return len(json.loads(files[0].read_text())["pieces"]) if files else 0


WRONG = [
    "train.optim.lr=-1",
    "train.optim.rates=(('none',1.0),)",
    "evaluate.lengths=(0,)",
    "evaluate.lengths=(20_000,)",
    "loss=x",
]


def test_a_first_command_that_fails_leaves_nothing_and_the_corrected_one_runs(needlework, own, tmp_path):
    train = ("train", f"{own}:small", "--runs", tmp_path / "runs")
    for setting in WRONG:
        needlework(*train, "--set", setting, ok=False)
        assert not (tmp_path / "runs").exists()
    assert "checkpoint: " in needlework(*train)


def test_a_run_that_ends_before_its_first_checkpoint_may_begin_anew_with_another_config(needlework, own, tmp_path):
    train = ("train", f"{own}:small", "--runs", tmp_path, "--set", "train.checkpoint_every=100")
    said = needlework(*train, "--set", "train.optim.lr=1e30", ok=False)
    assert "there is no checkpoint yet: the run may begin anew with another config" in said
    assert "begun anew with another config (qdelta.train.optim.lr)" in needlework(*train)
    log = (tmp_path / "qdelta" / "qdelta" / "training" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == list(range(1, 13))
    assert "qdelta.train.optim.lr" in needlework(*train, "--set", "train.optim.lr=1e-3", ok=False)


def test_a_comparison_and_a_sweep_that_cannot_run_leave_nothing(own, tmp_path):
    good = load_recipe(f"{own}:small")
    bad = dataclasses.replace(good, name="bad", evaluate=dataclasses.replace(good.evaluate, lengths=(96, 20_000)))
    quiet = Console(quiet=True)
    with pytest.raises(ValueError, match=r"recipe bad: corpus: 20002 tokens in a row are needed"):
        compare("it", (good, bad), tmp_path / "it", quiet)
    with pytest.raises(ValueError, match=r"recipe bad: corpus: 20002 tokens in a row are needed"):
        sweep((good, bad), tmp_path / "it", quiet, workers=1)
    assert not list(tmp_path.iterdir())


def test_a_sweep_s_result_of_another_config_is_not_taken_for_this_one_s(own, tmp_path, monkeypatch):
    """Without workers: what is asked of them is what counts."""
    asked = []
    monkeypatch.setattr("needlework.experiment.sweep.work", lambda jobs, *_: asked.append([path.name for path in jobs]))
    recipe = load_recipe(f"{own}:small")
    other = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, clip=2.0, compile=True))
    result = tmp_path / "it" / "results" / "qdelta-0.json"
    result.parent.mkdir(parents=True)
    quiet = Console(quiet=True)
    result.write_text(json.dumps({"config": recipe.to_dict(), "loss": {}}))
    assert sweep((recipe,), tmp_path / "it", quiet, workers=1) == []
    with pytest.raises(RuntimeError, match=r"qdelta-0\.json is of another config \(train\.clip\)"):
        sweep((other,), tmp_path / "it", quiet, workers=1)
    result.write_text(json.dumps({"config": recipe.to_dict(), "ended": {"step": 1}}))
    assert sweep((recipe,), tmp_path / "it", quiet, workers=1) == []  # it would end there again
    assert sweep((other,), tmp_path / "it", quiet, workers=1) == [result]
    assert asked == [[], [], ["qdelta-0"]]


@pytest.mark.slow
def test_eval_goes_on_from_the_numbers_that_it_has(needlework, own, tmp_path, monkeypatch):
    from needlework.experiment import evaluate

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    needlework("train", f"{own}:small", "--runs", tmp_path)
    asked = []

    def counted(read, episodes, **settings):
        asked.append(1)
        if len(asked) == 8:  # the last task at the last length of the second command
            raise KeyboardInterrupt
        share = float(episodes.input_ids.sum() % 97) / 97
        return Retrieval(accuracy=share, exact=share / 3, digits=1, values=1, nll=share)

    monkeypatch.setattr(evaluate, "retrieval", counted)
    monkeypatch.setattr(evaluate, "loss", lambda read, ids, **settings: SimpleNamespace(mean=float(ids.sum() % 89) / 89))
    command = ("eval", tmp_path / "qdelta" / "qdelta" / "checkpoint", "--corpus", own.parent / "text.txt", "--json")
    command += ("--length", 128, "--length", 96)
    expected = needlework(*command)
    assert "stopped; 5 numbers are kept, and the same command goes on" in needlework(*command, ok=False)
    assert needlework(*command) == expected and len(asked) == 9
    assert not list((tmp_path / "cache" / "needlework" / "measuring").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where nothing can be kept
    assert needlework(*command) == expected
    assert "T >= 21" in needlework(*command, "--length", 20, ok=False)


def test_a_signal_interrupts_who_does_not_ask_once_and_who_asks_never():
    before = [signal.getsignal(sign) for sign in ENDS]
    with Stop():
        pass
    assert [signal.getsignal(sign) for sign in ENDS] == before
    with Stop() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # while what was interrupted is put away
        assert stop()
    with Stop() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop()
    signal.raise_signal(signal.SIGINT)  # while the process ends


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_measurement_that_is_told_to_end_ends_at_once_and_goes_on(own, tmp_path, end):
    run = tmp_path / "qdelta" / "qdelta"
    for wanted in (5, 50):
        process = started("train", f"{own}:slow", "--runs", tmp_path)
        until(process, lambda wanted=wanted: pieces(run) > wanted)
        process.send_signal(end)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
        assert process.returncode == 130 and "stopped and saved in" in said, said
        assert wanted < pieces(run) < 200  # of at least one for each of its 200 lengths
        assert load(latest(run / "training"))["run.step"] == 12


@pytest.mark.slow
def test_a_second_command_in_the_directory_is_refused_by_the_process_that_has_it(needlework, own, tmp_path):
    run = tmp_path / "qdelta" / "qdelta" / "training"
    train = ("train", f"{own}:endless", "--runs", tmp_path)
    process = started(*train)
    until(process, lambda: begun(run))
    for intruder in (train, (*train, "--set", "train.optim.lr=1e-4")):
        assert f"is in use by process {process.pid} on " in needlework(*intruder, ok=False)
    process.kill()
    process.communicate()
    steps = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert "train.optim.lr" in needlework(*train, "--set", "train.optim.lr=1e-4", ok=False)  # it is free, and another's


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_whose_every_process_is_told_to_end_saves_and_goes_on(own, tmp_path, end):
    """As Ctrl-C in a terminal, or a scheduler, does; and again and again, while it saves and while Python ends."""
    training, measuring = (tmp_path / "own" / name for name in ("qdelta-0", "slow-0"))
    process = started("sweep", f"{own}:several", "--runs", tmp_path, "--workers", 2)
    until(process, lambda: begun(training / "training"), lambda: pieces(measuring) > 5)
    while process.poll() is None:
        os.killpg(process.pid, end)
        time.sleep(0.02)
    said, _ = process.communicate()
    assert process.returncode == 130 and "Traceback" not in said, said
    last = json.loads((training / "training" / "log.jsonl").read_text().splitlines()[-1])["step"]
    assert load(latest(training / "training"))["run.step"] == last  # the step that it was in is saved
    assert pieces(measuring) > 5 and not list((tmp_path / "own" / "results").glob("*.json"))
