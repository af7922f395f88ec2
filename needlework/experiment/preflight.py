"""Errors that would end a run later, raised before it begins. Writes nothing."""

import dataclasses

import torch

from needlework.data import Corpus
from needlework.experiment.evaluate import check_measurement
from needlework.experiment.recipe import Recipe
from needlework.models import NeedleworkForCausalLM
from needlework.models.loss import liger
from needlework.train import Batch, Piece, World, losses_of, summary_writer

SHORT = 64  # tokens of the row of `_one_step`


def check(recipe: Recipe, corpus: Corpus, world: World | None = None) -> None:
    """ValueError, with the recipe's name, for whatever would fail in training or measuring on these ranks."""
    try:
        with torch.random.fork_rng([]):
            _train(recipe, corpus, World() if world is None else world)
            assert recipe.model.mixers is not None  # a dict once the config is made
            check_measurement(recipe.model.mixers, corpus, recipe.evaluate)
    except (ValueError, ImportError) as error:
        raise ValueError(f"recipe {recipe.name}: {error}") from error


def _train(recipe: Recipe, corpus: Corpus, world: World) -> None:
    model, train = recipe.model, recipe.train
    tokens = 1 + max(corpus.tokenizer.get_vocab().values())
    if tokens > model.vocab_size:
        raise ValueError(f"the tokenizer has {tokens} tokens, the model a vocabulary of {model.vocab_size}")
    with torch.device("meta"):
        train.optim.build(NeedleworkForCausalLM(model).named_parameters())
    if train.tensorboard:
        summary_writer()
    if recipe.loss == "liger":
        liger(model.softcap, "cuda" if torch.cuda.is_available() else "cpu")
    step, batch = 0, None
    for phase in recipe.phases:
        batch = recipe.batch(corpus, step * train.accumulate)
        world.own(batch.labels)
        if phase.length % world.sequence:
            raise ValueError(f"a phase's rows of {phase.length} tokens do not make {world.sequence} equal segments")
        step += phase.steps
    if world.sequence > 1 and recipe.objective is not None and recipe.objective.distractor is not None:
        raise ValueError("objective: a distractor needs whole sequences, parallel.sequence splits them")
    assert batch is not None  # a recipe has a phase
    _one_step(recipe, batch)


def _one_step(recipe: Recipe, batch: Batch) -> None:
    """One step on one layer of each mixer and a short row: layers, the objective and the loss raise here what they would raise later."""
    vocabulary = min(recipe.model.vocab_size, 512)
    layout = "".join(dict.fromkeys(recipe.model.layout))
    model = NeedleworkForCausalLM(recipe.model.replaced(layout=layout, vocab_size=vocabulary))
    ids = batch.input_ids[:1, :SHORT] % vocabulary
    here = dataclasses.replace(recipe, loss="torch") if recipe.loss == "liger" else recipe
    found = losses_of(model, here.losses, Piece(ids, ids), recipe.train.autocast)
    found.cross_entropy.backward(retain_graph=True)
    if found.auxiliary is not None:
        found.auxiliary.backward()
