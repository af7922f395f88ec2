"""`--corpus`: a recipe on one's own text keeps its kind of tokenizer, says what it read, and refuses what does not fit its model."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from needlework.data import Files, Packages, StoreConfig
from needlework.experiment.recipe import OWN_TEXT, Recipe, text, with_corpus
from needlework.recipes import comparison, demo


@pytest.fixture
def own(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    source = Path(ast.__file__).read_text(encoding="utf-8")
    for i in range(40):
        (folder / f"{i}.txt").write_text(source[1500 * i : 1500 * (i + 1)], encoding="utf-8")
    return folder


def of_store(vocabulary: int, model: int) -> Recipe:
    recipe = demo.recipe("softmax")
    corpus = StoreConfig(source=Packages(), vocabulary=vocabulary)
    return dataclasses.replace(recipe, corpus=corpus, model=recipe.model.replaced(vocab_size=model))


def test_a_store_stays_a_store_of_its_vocabulary(own, tmp_path):
    recipe = with_corpus(of_store(600, 600), [own])
    assert recipe.corpus == StoreConfig(source=Files(paths=(str(own),)), vocabulary=600)
    assert text(recipe, tmp_path / "corpora").tokenizer.get_vocab_size() > 400
    assert with_corpus(comparison.recipe("softmax"), [own]).corpus.vocabulary == comparison.VOCABULARY


def test_bytes_stay_bytes(own, tmp_path):
    recipe = with_corpus(demo.recipe("softmax"), [own])
    assert (recipe.corpus.kind, recipe.corpus.paths, recipe.corpus.max_bytes) == ("files", (str(own),), OWN_TEXT)
    assert text(recipe, tmp_path).tokenizer.get_vocab_size() == 257


def test_the_rest_of_the_recipe_stays(own):
    recipe = demo.recipe("softmax")
    assert dataclasses.replace(with_corpus(recipe, [own]), corpus=recipe.corpus) == recipe


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(own, tmp_path):
    with pytest.raises(
        ValueError, match=r"recipe softmax: the tokenizer has 257 tokens, more than the model's vocabulary of 256"
    ):
        recipe = demo.recipe("softmax")
        text(with_corpus(dataclasses.replace(recipe, model=recipe.model.replaced(vocab_size=256)), [own]), tmp_path)
    with pytest.raises(ValueError, match=r"more than the model's vocabulary of 300"):
        text(with_corpus(of_store(600, 300), [own]), tmp_path / "corpora")


def test_text_that_changed_is_read_anew(own, tmp_path):
    before = text(with_corpus(of_store(300, 600), [own]), tmp_path / "corpora").manifest["sha256"]
    assert text(with_corpus(of_store(300, 600), [own]), tmp_path / "corpora").manifest["sha256"] == before
    (own / "0.txt").write_text("other words\n" * 99)
    assert text(with_corpus(of_store(300, 600), [own]), tmp_path / "corpora").manifest["sha256"] != before


RECIPE = """
import dataclasses
from needlework.data import CorpusConfig, NeedleMix, Packages, StoreConfig
from needlework.layers import SwiGLU
from needlework.experiment.recipe import Phase
from needlework.recipes import demo

def bpe(vocabulary=600):
    recipe = demo.recipe("gated-deltanet")
    phase = dataclasses.replace(recipe.phases[1], steps=2, batch=2, length=64)
    return dataclasses.replace(
        recipe, name="bpe", phases=(phase,), train=dataclasses.replace(recipe.train, steps=2, checkpoint_every=2),
        model=recipe.model.replaced(vocab_size=600), corpus=StoreConfig(source=Packages(), vocabulary=vocabulary),
        evaluate=dataclasses.replace(recipe.evaluate, lengths=(64,), tokens=64, rows=1, tasks=("needle",)),
    )

def large():
    return bpe(700)
"""


def test_train_on_own_text_keeps_the_tokenizer_and_prints_what_was_read(own, tmp_path, needlework):
    (own / "image.png").write_bytes(b"\0")
    (tmp_path / "own.py").write_text(RECIPE)
    printed = needlework("train", f"{tmp_path / 'own.py'}:bpe", "--corpus", own, "--runs", tmp_path / "runs")
    assert "40 files, " in printed and "1 file skipped, no text: image.png" in printed
    manifest = json.loads((tmp_path / "runs" / "bpe" / "bpe" / "manifest.json").read_text())
    assert manifest["source"]["kind"] == "files" and 400 < manifest["tokenizer"]["vocabulary"] <= 600
    tokenizer = json.loads((tmp_path / "runs" / "bpe" / "bpe" / "checkpoint" / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == manifest["tokenizer"]["vocabulary"]
    needlework("train", f"{tmp_path / 'own.py'}:large", "--corpus", own, "--runs", tmp_path / "large", ok=False)
    assert not (tmp_path / "large" / "bpe" / "bpe" / "training").exists()  # before training
