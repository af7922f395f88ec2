"""What would end a run later is refused before it begins, in a sentence that names the recipe; nothing is left behind."""

import dataclasses

import pytest
import torch

from needlework.data import CorpusConfig, NeedleMix, Text, byte_tokenizer, load_corpus
from needlework.experiment.evaluate import Evaluation, measure
from needlework.experiment.preflight import check
from needlework.experiment.recipe import Phase, build
from needlework.experiment.runner import run
from needlework.experiment.tasks import TASKS
from needlework.layers.catalog import CATALOG
from needlework.layers.distract import Distractor
from needlework.layers.objective import Objective
from needlework.train import AdamW, World

from .test_runner import TASK, tiny


@pytest.fixture(scope="module")
def corpus(small_text):
    return load_corpus(small_text, byte_tokenizer())


def evaluated(recipe, **fields):
    return dataclasses.replace(recipe, evaluate=dataclasses.replace(recipe.evaluate, **fields))


def trained(recipe, **fields):
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, **fields))


def mixer(recipe, **fields):
    changed = recipe.model.mixers["M"] | fields
    return dataclasses.replace(recipe, model=recipe.model.replaced(mixers={"M": changed}))


def phase(recipe, **fields):
    whole = dataclasses.replace(recipe.phases[0], steps=12, **fields)
    return dataclasses.replace(recipe, phases=(whole,))


WRONG = {
    "a vocabulary": (lambda r: dataclasses.replace(r, model=r.model.replaced(vocab_size=200)), "257 tokens.* vocabulary of 200"),
    "an optimiser": (lambda r: trained(r, optim=AdamW(lr=1.0, rates=(("no such", 0.1),))), "no parameter is named no such"),
    "a loss": (lambda r: dataclasses.replace(r, loss="ligre"), "loss_impl: got 'ligre'"),
    "liger": (lambda r: dataclasses.replace(r, loss="liger"), "its kernels run on CUDA"),
    "an objective": (
        lambda r: dataclasses.replace(r, objective=Objective(distractor=Distractor())), "needs a layer with attention"
    ),
    "a row too short for an episode": (lambda r: phase(r, length=16), "too short for the smallest episode"),
    "a row longer than the text": (lambda r: phase(r, length=200_000), "training text has"),
    "plain text that a row may need": (
        lambda r: phase(r, length=60_000, task=NeedleMix(dense=0.999, sparse=0.0)), "may take 60001 tokens of text"
    ),
    "windows longer than the text": (lambda r: phase(r, length=60_000, task=Text()), "training tokens"),
    "text held out": (lambda r: evaluated(r, lengths=(96, 100_000), tasks=()), "100002 tokens in a row are needed"),
    "rows too short for a task": (lambda r: evaluated(r, lengths=(40,)), "4 pairs and their queries need T >= 87"),
    "long documents": (lambda r: evaluated(r, positions=20_000), "long documents: 2 stretches of 20001 tokens"),
    "a diagnosis": (lambda r: evaluated(r, diagnose=30), "T = 30 is too short for its sentence of 47 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_would_end_a_run_is_refused_before_anything_is_written(small_text, tmp_path, what):
    change, says = WRONG[what]
    wrong = change(tiny(small_text))
    with pytest.raises(ValueError, match=rf"(?s)recipe {wrong.name}: .*({says})"):
        run(wrong, tmp_path / "run" / "qdelta")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_checked_at_every_length(small_text, corpus, task):
    """Refused exactly where measuring would fail."""
    model = build(tiny(small_text))
    for lengths in ((8,), (20,), (8, 512), (512, 16_000)):
        recipe = evaluated(tiny(small_text), lengths=lengths, tasks=(task,), tokens=8)
        raised = []
        for attempt in (lambda r: check(r, corpus), lambda r: measure(model, corpus, r.evaluate)):
            try:
                attempt(recipe)
            except ValueError as error:
                raised.append(str(error).removeprefix("recipe qdelta: "))
        assert len(raised) in (0, 2) and len(set(raised)) <= 1
    assert check(evaluated(tiny(small_text), lengths=(512,), tasks=(task,)), corpus) is None


def test_the_least_lengths_are_measured(small_text, corpus):
    for lengths in ((1,), (1, 2)):
        recipe = evaluated(tiny(small_text), lengths=lengths, tasks=(), tokens=4, positions=1)
        check(recipe, corpus)
        assert set(measure(build(recipe), corpus, recipe.evaluate)["loss"]) == set(map(str, lengths))


@pytest.mark.parametrize("name", CATALOG)
def test_every_mixer_s_recipe_passes_and_leaves_the_generators_alone(small_text, corpus, name):
    before = torch.get_rng_state()
    check(tiny(small_text, name), corpus)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_diagnosis_of_what_it_is_not_made_for_is_refused(small_text, corpus):
    recipe = evaluated(tiny(small_text, "carve"), diagnose=64)
    check(recipe, corpus)
    two = mixer(recipe, write=recipe.model.mixers["M"]["write"] | {"write_rank": 2})
    check(evaluated(two, diagnose=None), corpus)
    with pytest.raises(ValueError, match="diagnosis is of write_rank 1 and prediction 'previous', the model has 2"):
        check(two, corpus)


def test_what_ranks_cannot_share_is_refused_in_every_phase(small_text, corpus):
    world = World()
    world.shard = 2
    with pytest.raises(ValueError, match="1 rows cannot be dealt to shard = 2 ranks"):  # the second phase's
        check(tiny(small_text), corpus, world)
    world.shard, world.sequence = 1, 5
    with pytest.raises(ValueError, match="rows of 64 tokens do not make 5 equal segments"):
        check(tiny(small_text), corpus, world)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lengths": (0,)}, r"lengths is \(0,\), expected .*>= 1"),
        ({"lengths": ()}, r"lengths is \(\), expected at least one"),
        ({"lengths": (512, 256)}, r"lengths is \(512, 256\), expected .*each more than the last"),
        ({"lengths": (256, 256)}, r"lengths is"),
        ({"lengths": (256.5,)}, r"lengths is \(256\.5,\), expected"),
        ({"tokens": 0}, r"tokens is 0, expected .*>= 1"),
        ({"rows": -1}, r"rows is -1, expected .*>= 1"),
        ({"seed": -1}, r"seed is -1, expected .*>= 0"),
        ({"positions": 0}, r"positions is 0, expected .*>= 1"),
        ({"diagnose": 1}, r"diagnose is 1, expected .*>= 2"),
    ],
)
def test_an_evaluation_out_of_range_is_refused_when_it_is_made(fields, says):
    with pytest.raises(ValueError, match=f"evaluate: {says}"):
        Evaluation(**fields)


@pytest.mark.parametrize("field", ["steps", "batch", "length"])
def test_a_phase_of_nothing_is_refused_when_it_is_made(field):
    with pytest.raises(ValueError, match=rf"phase: {field} is 0, expected .*>= 1"):
        Phase(**{"steps": 1, "batch": 1, "length": 64, "task": TASK} | {field: 0})


def test_a_text_of_dense_episodes_alone_may_be_shorter_than_a_row(tmp_path):
    (tmp_path / "little.txt").write_text("A little text. " * 8)
    little = load_corpus(CorpusConfig(kind="files", paths=(str(tmp_path),)), byte_tokenizer())
    batch = NeedleMix(dense=1.0, sparse=0.0).batch(little, 0, 0, 2, 500)
    assert batch.input_ids.shape == (2, 500)
