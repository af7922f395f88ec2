"""A measurement that is stopped goes on, piece by piece, to the result of one that never was."""

import dataclasses
import json
from functools import partial

import pytest
import torch

from needlework import diagnostics
from needlework.data import byte_tokenizer, load_corpus
from needlework.experiment.evaluate import Evaluation, Stopped, measure
from needlework.experiment.pieces import Pieces, measurement
from needlework.experiment.recipe import build
from needlework.experiment.runner import run
from needlework.train import InUse, alone

from .test_runner import tiny

EVERYTHING = Evaluation(lengths=(160, 192), tokens=384, rows=2, tasks=("needle", "passkey"), positions=256, diagnose=64)
PIECES = ["loss 160", "needle 160", "passkey 160", "loss 192", "needle 192", "passkey 192", "samples", "positions"]
PIECES += ["qdelta", "ccq", "carve", "lucid", "polar", "state norms"]


@pytest.fixture(scope="module")
def corpus(small_text):
    return load_corpus(small_text, byte_tokenizer())


class Counting:
    """Asks to stop when it has been asked `after` times."""

    def __init__(self, after=None):
        self.asked, self.after = 0, after

    def __call__(self):
        self.asked += 1
        return self.after is not None and self.asked > self.after


def test_a_measurement_stopped_anywhere_goes_on_to_the_same_bits(small_text, corpus, tmp_path):
    model = build(tiny(small_text, "carve"))
    whole = Counting()
    expected = measure(model, corpus, EVERYTHING, stop=whole)
    assert whole.asked > 10 * len(PIECES)  # within a forward pass, and within the walk of a diagnosis
    kept = [[]]
    for after in (20, 120, whole.asked // 2, whole.asked // 2):
        pieces = Pieces(tmp_path, {"of": "it"})
        assert list(pieces.done) == kept[-1]
        with pytest.raises(Stopped):
            measure(model, corpus, EVERYTHING, pieces.once, Counting(after))
        kept.append(list(pieces.done))
    assert kept[1] != kept[2] != kept[3] and kept[-1] == PIECES[: len(kept[-1])]
    pieces = Pieces(tmp_path, {"of": "it"})
    assert json.dumps(measure(model, corpus, EVERYTHING, pieces.once)) == json.dumps(expected)
    assert list(pieces.done) == PIECES
    assert not any(module._forward_pre_hooks for module in model.modules())  # nobody asks any more


@pytest.mark.parametrize(
    ("name", "walk"), [("qdelta", diagnostics.qdelta), ("carve", partial(diagnostics.carve, content_chunk=8))]
)
def test_the_walk_of_a_diagnosis_asks_at_every_token(small_text, corpus, name, walk):
    asked = []
    walk(build(tiny(small_text, name)), torch.zeros(1, 40, dtype=torch.long), ask=lambda: asked.append(1))
    assert len(asked) == 40


def test_pieces_of_something_else_are_not_taken(tmp_path):
    assert Pieces(tmp_path, {"seed": 1}).once("loss", lambda: 1.5) == 1.5
    assert Pieces(tmp_path, {"seed": 2}).once("loss", lambda: 2.5) == 2.5
    again = Pieces(tmp_path, {"seed": 1})
    assert again.once("loss", lambda: pytest.fail("made before")) == 1.5
    again.forget()
    assert Pieces(tmp_path, {"seed": 1}).done == {} and Pieces(tmp_path, {"seed": 2}).done == {"loss": 2.5}


def test_what_a_measurement_depends_on_is_its_weights_text_and_questions(small_text, corpus, tmp_path):
    recipe = tiny(small_text)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(seed)
        build(dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seed=seed))).save_pretrained(tmp_path / name)
        corpus.tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    of = lambda name, evaluation=EVERYTHING: measurement(tmp_path / name, corpus, evaluation, torch.device("cpu"))
    assert of("a") == of("b") != of("c") and of("a") != of("a", dataclasses.replace(EVERYTHING, rows=3))
    other = dataclasses.replace(corpus, manifest=corpus.manifest | {"sha256": "another"})
    assert measurement(tmp_path / "a", other, EVERYTHING, torch.device("cpu")) != of("a")


def test_a_run_that_is_stopped_while_it_is_measured_ends_in_the_result_of_one_that_was_not(small_text, tmp_path):
    recipe = dataclasses.replace(tiny(small_text), evaluate=dataclasses.replace(EVERYTHING, full_context=True))
    whole = run(recipe, tmp_path / "runs" / "whole" / "qdelta")
    directory = tmp_path / "runs" / "cut" / "qdelta"
    measuring = lambda: next(iter(directory.glob("measuring-*.json")), None)
    stop = lambda: (path := measuring()) is not None and len(json.loads(path.read_text())["pieces"]) > wanted
    for wanted in (1, 4, len(PIECES) + 3):  # the first piece is what training gave
        assert run(recipe, directory, stop=stop) is None and not (directory / "result.json").exists()
        assert len(json.loads(measuring().read_text())["pieces"]) == wanted + 1
    kept = json.loads(measuring().read_text())["pieces"]
    cut = run(recipe, directory)
    assert cut["train"] == kept["training"]["train"]  # seconds and pace are those of the training, not of who went on
    for entry in (whole, cut):
        entry["train"] = {name: value for name, value in entry["train"].items() if name in ("steps", "loss", "tokens")}
    assert json.dumps(cut) == json.dumps(whole)
    assert measuring() is None


def test_a_run_that_another_process_has_is_refused_and_loses_nothing(small_text, tmp_path):
    directory = tmp_path / "runs" / "it" / "qdelta"
    refused = []

    def intrude(progress):
        if progress.step == 6:
            with pytest.raises(InUse, match="is in use by process"):
                run(tiny(small_text), directory)
            refused.append("training")

    def stop():
        if list(directory.glob("measuring-*.json")) and "measuring" not in refused:
            with pytest.raises(InUse, match="is in use by process"), alone(directory):
                pass
            refused.append("measuring")
        return False

    assert run(tiny(small_text), directory, on_step=intrude, stop=stop)["train"]["steps"] == list(range(1, 13))
    assert refused == ["training", "measuring"]
    log = [json.loads(line)["step"] for line in (directory / "training" / "log.jsonl").read_text().splitlines()]
    assert log == list(range(1, 13))
    with alone(directory):
        pass
