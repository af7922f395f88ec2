from dataclasses import replace

import pytest
import torch
from torch import nn

from needlework.layers import Delta, Recurrent, SwiGLU
from needlework.layers.norm import RMSNorm
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.train import World, full_state, shard, train

from .tiny import CONFIG, Tiny, batch


def test_blocks_are_what_the_outermost_lists_hold():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(1, 1)])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Module()
            self.body.blocks = nn.ModuleList([Inner(), Inner()])
            self.blocks_of_the_head = nn.ModuleList([nn.Linear(1, 1)])

    model = Outer()
    assert shard.blocks(model) == [*model.body.blocks, *model.blocks_of_the_head]


def test_norms_are_those_behind_the_lists():
    mixer = Recurrent(heads=1, key_dim=4, value_dim=4, write=Delta())
    model = NeedleworkForCausalLM(
        NeedleworkConfig(vocab_size=9, hidden_size=4, layout="RR", mixers={"R": mixer}, mlp=SwiGLU(hidden=4))
    )
    assert shard.norms(model) == [model.model.norm]


@pytest.mark.slow
def test_more_graphs_may_be_made_than_pytorch_makes_if_not_told():
    """Of a norm in nine shapes."""
    norm = RMSNorm(4)
    shard.prepare(norm, replace(CONFIG, compile=True), World())
    for rows in range(2, 11):
        assert norm(torch.ones(rows, 4)).shape == (rows, 4)


def test_alone_a_model_is_left_as_it_is():
    model = Tiny()
    shard.prepare(model, CONFIG, World())
    assert type(model) is Tiny


def test_recomputing_asks_the_model_and_is_refused_by_one_that_cannot(tmp_path):
    asked = []
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        model = Tiny()
        setattr(model, name, asked.append)
        shard.prepare(model, replace(CONFIG, recompute=True), World())
    assert asked == [{"use_reentrant": False}] * 2
    with pytest.raises(ValueError, match="recompute: Tiny has no activation_checkpointing_enable"):
        train(Tiny(), batch, replace(CONFIG, recompute=True), tmp_path)


def test_the_whole_state_of_a_model_that_is_not_sharded_is_its_own():
    model = Tiny()
    state = full_state(model)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
