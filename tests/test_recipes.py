"""The recipes of the papers' models: each trains 20 steps at reduced width, all else unchanged; and the comparison's sizes."""

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest

from needlework.data import CorpusConfig
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Recipe, run, training_entry
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.models.presets import count_parameters, preset
from needlework.recipes import atma, carve, ccq, comparison, lucid, qdelta
from needlework.testing.rows import chosen
from tests.models.test_presets import COUNTS, UNPRINTED

PAPERS = {
    f"{module.__name__.rpartition('.')[2]}:{name}": value
    for module in (atma, carve, ccq, lucid, qdelta)
    for name, value in vars(module).items()
    if isinstance(value, partial)
}
NARROW = {
    "heads": 2, "kv_heads": 1, "value_heads": None, "key_dim": 8, "value_dim": 8, "head_dim": 8, "rank": 4, "content_chunk": 8, "window": 16,
    "hidden": 24,
}  # fmt: skip


def narrow(config):
    """A component config with every size small, and nothing else changed."""
    if isinstance(config, dict):
        return {k: NARROW[k] if k in NARROW and v is not None else narrow(v) for k, v in config.items()}
    return config


def shrunk(recipe: Recipe, corpus: CorpusConfig) -> Recipe:
    """20 steps of 4 rows of 32 bytes through one layer of each kind; optimiser, schedule and clip are the recipe's."""
    letters = "".join(dict.fromkeys(recipe.model.layout))
    small = {
        "vocab_size": 257,
        "hidden_size": 16,
        "layout": letters,
        "mixers": narrow(recipe.model.mixers),
        "mlp": narrow(recipe.model.mlp),
    }
    phase = dataclasses.replace(recipe.phases[0], steps=20, batch=4, length=32)
    train = dataclasses.replace(recipe.train, steps=20, accumulate=2, checkpoint_every=20, compile=False)
    return dataclasses.replace(
        recipe, model=recipe.model.replaced(**small), corpus=corpus, phases=(phase,), train=train, start=None,
        evaluate=Evaluation(lengths=(32,), tokens=32, rows=1, tasks=("needle",)),
    )  # fmt: skip


# one of each paper: what the others differ in is their model, which test_presets.py builds
QUICK = (
    "atma:polar_memory_distractor",
    "carve:carve_1_3b_swa",
    "ccq:ccq_gdn_500m",
    "lucid:lucid_1b_beta",
    "qdelta:qdelta_340m",
)


@pytest.mark.parametrize("name", chosen(PAPERS, QUICK))
def test_every_papers_recipe_trains_twenty_steps_at_reduced_width(name, small_text, tmp_path):
    recipe = PAPERS[name]()
    entry = run(shrunk(recipe, small_text), tmp_path / "run")
    losses = entry["train"]["loss"]
    assert len(losses) == 20 and all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] or recipe.train.schedule.warmup > 1000  # such a warm-up has hardly begun


@pytest.fixture(scope="module")
def sizes():
    return {*COUNTS.values(), *(count_parameters(preset(name)) for name in UNPRINTED)}


@pytest.mark.parametrize("name", PAPERS)
def test_every_papers_recipe_is_a_preset_at_its_exact_size(name, sizes):
    recipe = PAPERS[name]()
    assert count_parameters(recipe.model) in sizes
    tokens_a_step = recipe.phases[0].batch * recipe.phases[0].length
    assert tokens_a_step in {2**19, 2**20, 2**21, 2**22}


def test_a_fine_tune_starts_from_what_was_trained_before(small_text, tmp_path):
    first = run(shrunk(lucid.lucid_1b(), small_text), tmp_path / "first" / "run")
    recipe = shrunk(lucid.lucid_1b_65k(), small_text)
    assert recipe.model.mixers["M"]["position"]["base"] == 64_000.0
    started = dataclasses.replace(recipe, start=str(tmp_path / "first" / "run" / "checkpoint"))
    entry = run(started, tmp_path / "second" / "run")
    assert entry["train"]["loss"][0] < first["train"]["loss"][0]
    nowhere = dataclasses.replace(recipe, start=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"expected a folder with config\.json and model.safetensors"):
        run(nowhere, tmp_path / "third" / "run")
    other = dataclasses.replace(shrunk(carve.carve_125m(), small_text), start=started.start)
    with pytest.raises(ValueError, match="holds another model"):
        run(other, tmp_path / "fourth" / "run")


@pytest.mark.parametrize("size", chosen([comparison.SMALL, comparison.MEDIUM], quick=[comparison.SMALL]), ids=["60M", "125M"])
@pytest.mark.parametrize("mixer", comparison.MIXERS)
def test_the_comparisons_models_are_within_one_percent_of_their_size(mixer, size):
    assert abs(count_parameters(comparison.model(mixer, size)) / size.parameters - 1) < 0.01


def test_the_comparison_differs_in_the_mixer_alone():
    recipes = comparison.small()
    assert len(recipes) == 3 * len(comparison.MIXERS)
    for seed in comparison.SEEDS:
        same = {dataclasses.replace(r, name="one", title="", model=None) for r in recipes if r.train.seed == seed}
        assert len(same) == 1
    assert recipes[0].tokens() >= 150_000_000
    named = {name for claim in comparison.CLAIMS for name in (claim.better, claim.worse)} | {
        m for f in comparison.FAMILIES.values() for m in f
    }
    assert named <= comparison.MIXERS.keys() and comparison.MIXERS.keys() <= {
        m for f in comparison.FAMILIES.values() for m in f
    }


def test_blind_carve_is_carve_whose_content_projection_is_zero():
    import torch

    from needlework.models import NeedleworkForCausalLM

    torch.manual_seed(0)
    sighted, blind = (
        NeedleworkForCausalLM(NeedleworkConfig(vocab_size=31, hidden_size=256, layout="M", mixers=comparison.MIXERS[name].mixers(
            dataclasses.replace(comparison.SMALL, dim=256)
        )))
        for name in ("carve", "carve-blind")
    )  # fmt: skip
    missing, unexpected = blind.load_state_dict(sighted.state_dict(), strict=False)
    assert not missing and {name.rpartition(".")[2] for name in unexpected} == {"w1", "w2"}
    tokens = torch.randint(31, (1, 150))
    assert torch.equal(sighted(tokens).logits, blind(tokens).logits)  # W₂ starts at zero


def test_every_papers_compute_is_told_beside_ours():
    """6 · parameters · tokens in multiples of 6 · 60M · 157,286,400."""
    assert "14,000 (CARVE 1.3B)" in comparison.LIMITS and 1.325e9 * 100e9 / (60e6 * 157_286_400) == pytest.approx(
        14_000, rel=0.01
    )
    assert "40 (ATMA)" in comparison.LIMITS and 378e6 * 1e9 / (60e6 * 157_286_400) == pytest.approx(40, rel=0.01)
    assert all(name in comparison.LIMITS for name in comparison.PAPERS) and "orders of magnitude" not in comparison.LIMITS


def test_void_runs_are_of_mixers_of_the_comparison_and_have_a_reason_and_commits():
    for name, void in comparison.VOID.items():
        assert name in comparison.MIXERS and void.reason
        assert void.commits and all(len(commit) >= 10 for commit in void.commits)


def test_state_bytes_are_those_of_serving(small_text):
    """What grows is half as large in bfloat16 as in float32; what is fixed is float32 in both."""
    result = SimpleNamespace(losses=(1.0,), tokens=1, seconds=1.0, tokens_per_second=1.0)
    for name, fixed, row in (("softmax", 0, 2 * 8), ("gla", 2 * 8 * 8 * 4, 0)):
        recipe = shrunk(comparison.recipe(name), small_text)
        for autocast, width in ((None, 4), ("bf16", 2)):
            of = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, autocast=autocast))
            entry = training_entry(of, NeedleworkForCausalLM(of.model), result)
            assert entry["state_bytes"]["32"] == fixed + (32 * row * width + 8 if row else 0)
