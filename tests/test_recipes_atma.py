"""ATMA's recipe is the training of its page, exactly, and its grid every cell once."""

import json

import pytest
import torch

from needlework.layers import Distractor, Strong
from needlework.models import NeedleworkForCausalLM
from needlework.models.presets import count_parameters
from needlework.recipes import atma


def test_the_grid_is_120_different_cells():
    """3 kinds × 5 regularisers × distractor × memory × window."""
    cells = atma.grid()
    assert len(cells) == len({cell.name for cell in cells}) == len({json.dumps(cell.to_dict()) for cell in cells}) == 120
    assert sum(cell.objective.distractor is not None for cell in cells) == 60
    assert sum(cell.model.mixer("a").attend.window == 1024 for cell in cells) == 60
    assert [sum(cell.objective.share == share for cell in cells) for share in (1, 0.99)] == [24, 96]  # a is 0 for baseline
    assert {cell.tokens() for cell in cells} == {996_147_200}


@pytest.mark.parametrize(
    ("cell", "parameters"),
    [(atma.nope, 369_717_376), (atma.polar, 369_758_464), (atma.rope, 369_692_800), (atma.polar_memory_window, 378_220_864)],
)
def test_a_cell_has_its_page_s_parameters(cell, parameters):
    assert count_parameters(cell().model) == parameters


def test_each_parameter_gets_its_page_s_optimiser_and_rate():
    """Muon 0.02 with decay on matrices in blocks; embedding 0.3, unembedding 1/320, the rest 0.01, without."""
    recipe = atma.polar_memory()
    with torch.device("meta"):
        model = NeedleworkForCausalLM(recipe.model)
    names = {p: name for name, p in model.named_parameters()}
    groups = [g for optimiser in recipe.train.optim.build(model.named_parameters()) for g in optimiser.param_groups]
    found = {names[p]: (group["lr"], group["weight_decay"], "ns_steps" in group) for group in groups for p in group["params"]}
    assert found.keys() == set(names.values())
    for name, p in model.named_parameters():
        if name == "model.embed.weight":
            expected = (0.3, 0, False)
        elif name == "lm_head.weight":
            expected = (1 / 320, 0, False)
        elif p.ndim == 2 and name.startswith("model.blocks") and not name.endswith("v_null"):
            expected = (0.02, 0.01, True)
        else:
            expected = (0.01, 0, False)
        assert found[name] == expected, name
    assert all(tuple(g["betas"]) == (0.8, 0.95) and g["eps"] == 1e-10 for g in groups if "betas" in g)


def test_the_rate_is_flat_for_570_steps_and_then_falls_to_nothing():
    """×1 for the first 30 % of 1,900 steps, no warm-up, then linear to 0."""
    train = atma.polar_memory().train
    rates = [train.schedule.multiplier(step, train.steps) for step in (0, 569, 570, 1235, 1899, 1900)]
    assert rates == pytest.approx([1, 1, 1, 0.5, 1 / 1330, 0]) and train.steps == 1900 and train.clip == 1


def test_the_published_cells_are_as_they_were():
    """Dead convolutions, cross entropies summed over 4 × 2,048 tokens, `strong` times N, nope's random keys without norm."""
    strong = atma.cell("nope", memory=True, regulariser="strong", distractor=True, published=True)
    assert strong.model.mixer("c").published_init and strong.model.mixer("a").published_eps
    assert strong.model.mixer("a").memory.published_eps
    assert strong.objective.regulariser == Strong(summed=True) and strong.objective.distractor == Distractor(raw_keys=True)
    assert strong.objective.share == 0.99 * 8192 == 0.99 * 2048 * strong.phases[0].batch / strong.train.accumulate
    for kind in ("rope", "polar"):
        assert atma.cell(kind, distractor=True, published=True).objective.distractor == Distractor()
    ours = atma.cell("nope", memory=True, regulariser="strong", distractor=True)
    assert not (ours.model.mixer("c").published_init or ours.model.mixer("a").published_eps)
    assert ours.objective.summed_over is None and ours.objective.regulariser == Strong()


def test_a_window_is_of_training_and_goes_before_the_model_is_read():
    config = atma.polar_memory_window().model
    assert config.mixers != atma.polar_memory().model.mixers == config.full_context().mixers
