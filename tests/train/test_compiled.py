"""A whole training step compiles without a graph break, for every mixer, in half precision, recomputing."""

from dataclasses import replace

import pytest
import torch

from needlework.layers import SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.testing.rows import chosen
from needlework.train import Piece, World, shard
from needlework.train.losses import backward

from .tiny import CONFIG

SIZES = Sizes(heads=2, key_dim=8, value_dim=12, attention_heads=4, kv_heads=2, head_dim=8, half_life=32.0, content_chunk=8)
VOCABULARY = 31


def of_targets(model, piece):
    return model(piece.input_ids, targets=piece.labels)


@pytest.fixture(autouse=True)
def aot_eager(monkeypatch):
    """The graphs of the forward and the backward are made and run; no C++ is compiled."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **settings: compile(model, backend="aot_eager", **settings))
    torch._dynamo.reset()


@pytest.mark.parametrize("mixer", chosen(CATALOG, ("qdelta",)))
def test_a_training_step_of_every_mixer_is_one_graph(mixer):
    torch.manual_seed(0)
    config = NeedleworkConfig(
        vocab_size=VOCABULARY, hidden_size=16, layout="M", mixers={"M": CATALOG[mixer].make(SIZES)}, mlp=SwiGLU(hidden=24)
    )
    model = NeedleworkForCausalLM(config).train()
    with torch.no_grad():
        for p in model.parameters():  # away from starts at zero, where a branch could hide
            p.add_(0.05 * torch.randn_like(p))
    tokens = torch.randint(VOCABULARY, (2, 22), generator=torch.Generator().manual_seed(1))
    pieces = [Piece(tokens[:, :-1], tokens[:, 1:])]

    def found(called, autocast="bf16"):
        model.zero_grad()
        numbers = backward(called, of_targets, pieces, counted=42, parts=1, autocast=autocast)
        return {"loss": numbers.cross_entropy.sum()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    exact, eager = found(model, None), found(model)
    shard.prepare(model, replace(CONFIG, recompute=True), World())
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for name, x in found(compiled).items():
        # the same operations, rounded otherwise where autograd adds up in another order: no further off than half precision is twice
        own = (eager[name] - exact[name]).norm()
        assert (x - exact[name]).norm() <= 2 * own + 1e-6 * exact[name].norm(), name
