"""A run from text to results: what it writes, how it stops and resumes, what it refuses."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from needlework.data import NeedleMix
from needlework.experiment.runner import Evaluation, Phase, run
from needlework.recipes import demo
from needlework.report.words import percent, task_title
from needlework.testing.rows import chosen
from needlework.train import AdamW, Cooldown, GrowingState, Guard, TrainConfig

TASK = NeedleMix(dense_pairs=(1, 2), sparse_pairs=(1, 2))


def tiny(corpus, mixer="qdelta", **changes):
    """The demo's recipe, cut to 12 short steps."""
    recipe = demo.recipe(mixer, corpus)
    train = TrainConfig(
        steps=12, seed=0, optim=AdamW(lr=4e-3), schedule=Cooldown(warmup=2, flat=0.3, floor=0.02), checkpoint_every=5
    )
    return dataclasses.replace(
        recipe, train=train,
        phases=(Phase(steps=8, batch=2, length=64, task=TASK), Phase(steps=4, batch=1, length=96, task=TASK)),
        evaluate=Evaluation(lengths=(96, 192), tokens=192, rows=2), **changes,
    )  # fmt: skip


def weights(directory):
    return AutoModelForCausalLM.from_pretrained(directory / "checkpoint").state_dict()


def test_a_run_writes_a_checkpoint_that_auto_classes_load_and_its_result(small_text, tmp_path):
    recipe = tiny(small_text)
    entry = run(recipe, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == entry
    assert len(entry["train"]["loss"]) == 12 and entry["train"]["tokens"] == recipe.tokens()
    assert set(entry["loss"]) == set(entry["needle"]) == set(entry["needles"]) == {"96", "192"}
    assert entry["needle"]["96"]["digits"] == 8 and entry["needles"]["96"]["digits"] == 32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert tokenizer("é")["input_ids"] == list("é".encode()) and tokenizer.eos_token_id == 256
    assert json.loads((tmp_path / "manifest.json").read_text())["totals"]["files"] == 12
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert model.num_parameters() == entry["parameters"] and model.generation_config.eos_token_id == 256
    assert run(recipe, tmp_path) == entry  # done already: nothing is trained again


def test_a_runs_checkpoint_has_a_card_with_its_text_and_its_numbers(small_text, tmp_path):
    entry = run(tiny(small_text), tmp_path)
    card, folder = (tmp_path / "checkpoint" / "README.md").read_text(), tmp_path / "checkpoint"
    assert card.startswith("---\nlibrary_name: transformers\n") and "\n# Q-Delta\n" in card
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["sha256"] in card and json.loads((folder / "results.json").read_text()) == entry
    assert "The text is files of the author's; needlework does not know their licence." in card
    assert f"| loss on held-out text, nats | {entry['loss']['96']:.3f} | {entry['loss']['192']:.3f} |" in card
    assert f"| digits found, {task_title('needle')} | {percent(entry['needle']['96']['accuracy'])} |" in card
    assert f"| parameters | {entry['parameters']:,} |" in card and "| mixer M | recurrent + qdelta, 2 layers |" in card


@pytest.mark.parametrize("mixer", chosen(["qdelta", "carve", "atma"], quick=["atma"]))
def test_a_stopped_run_goes_on_bit_equal(small_text, tmp_path, mixer):
    recipe = tiny(small_text, mixer)
    whole = run(recipe, tmp_path / "whole")
    steps = []
    assert run(recipe, tmp_path / "cut", on_step=steps.append, stop=lambda: len(steps) == 7) is None
    assert not (tmp_path / "cut" / "result.json").exists()
    cut = run(recipe, tmp_path / "cut")
    assert cut["train"]["loss"] == whole["train"]["loss"]
    assert {k: cut[k] for k in ("loss", "needle", "needles")} == {k: whole[k] for k in ("loss", "needle", "needles")}
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_looks_at_its_models_states(small_text, tmp_path):
    """spec/qdelta.md: the rule's transition is no contraction, so a state may grow; the layer and the tensor are named before a loss is
    NaN."""
    recipe = tiny(small_text)
    looking = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, guard=Guard(state=1e-6, state_every=1)))
    with pytest.raises(
        GrowingState, match=r"step 1: the state S of model\.blocks\.\d\.mixer has the norm .* of row \d, more than 1e-06"
    ):
        run(looking, tmp_path)


def test_another_seed_is_another_run(small_text, tmp_path):
    recipe = tiny(small_text)
    other = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seed=1))
    assert run(recipe, tmp_path / "a")["train"]["loss"] != run(other, tmp_path / "b")["train"]["loss"]


def test_phases_that_do_not_add_up_are_refused(small_text):
    with pytest.raises(ValueError, match=r"the phases have 8 steps, train\.steps is 12"):
        dataclasses.replace(tiny(small_text), phases=(Phase(steps=8, batch=2, length=64, task=TASK),))


@pytest.mark.parametrize("mixer", demo.COMPARE)
def test_the_demo_s_models_match_in_parameters_within_2_percent(mixer):
    from needlework.models.presets import count_parameters

    assert count_parameters(demo.model(mixer)) == pytest.approx(demo.PARAMETERS, rel=0.02)
