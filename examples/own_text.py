"""Train on text of your own, from Python.

You learn: a recipe is a frozen value that fixes a whole run (model, text, phases, training, measurement). Take one, give it your files
with `with_corpus`, change fields with `dataclasses.replace`, hand it to `run`. What it leaves is a transformers checkpoint and its
measurements. The command line's form is `needlework train demo:qdelta --corpus PATH`.

The text is written here, so that the example needs no download.
"""

import dataclasses
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import needlework.models  # noqa: F401 (registers the checkpoint's class)
from needlework.data import Text
from needlework.experiment.recipe import Phase, Recipe, with_corpus
from needlework.experiment.runner import run
from needlework.recipes import demo

STEPS = 60


def write_text(folder: Path) -> None:
    """A file a chapter: .txt files are documents; records of .jsonl and .parquet files are, too."""
    folder.mkdir()
    animals, places = ("fox", "hen", "owl", "cat"), ("barn", "field", "wood", "yard")
    for chapter in range(12):
        lines = [f"The {animals[i % 4]} is in the {places[(i + chapter) % 4]}." for i in range(80)]
        (folder / f"{chapter:02}.txt").write_text("\n".join(lines), encoding="utf-8")


def own_recipe(text: Path) -> Recipe:
    """The demo's Q-Delta model on this text alone, for a minute's patience."""
    recipe = with_corpus(demo.recipe("qdelta"), [text])
    return dataclasses.replace(
        recipe,
        name="fables",
        phases=(Phase(steps=STEPS, batch=4, length=64, task=Text()),),
        train=dataclasses.replace(recipe.train, steps=STEPS),
        evaluate=dataclasses.replace(recipe.evaluate, lengths=(64, 128), tokens=256, rows=1, tasks=()),
    )


def main(folder: Path) -> None:
    write_text(folder / "text")
    result = run(own_recipe(folder / "text"), folder / "runs" / "fables" / "fables")
    losses = result["train"]["loss"]
    print(f"{result['train']['tokens']:,} tokens: loss {losses[0]:.2f} -> {losses[-1]:.2f} nats a byte")
    assert losses[-1] < losses[0] / 2

    checkpoint = folder / "runs" / "fables" / "fables" / "checkpoint"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        made = model.generate(**tokenizer("The fox is", return_tensors="pt"), max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(made[0]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
