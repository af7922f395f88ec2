"""The whole training step compiles as one graph, forward and backward, and gives the loss and gradients that it gives without."""

import pytest
import torch

from needlework.layers import Distractor, GatedConv, Objective, Rope, SquaredReLU, Strong, SwiGLU, Zipfian
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, loss
from needlework.testing.compare import assert_close
from needlework.testing.rows import chosen

SIZES = Sizes(heads=2, key_dim=8, value_dim=12, attention_heads=4, kv_heads=2, head_dim=8, half_life=32.0, content_chunk=8)
VOCABULARY = 31


def model(mixers: dict, layout: str = "M", **settings) -> NeedleworkForCausalLM:
    torch.manual_seed(0)
    config = NeedleworkConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "layout": layout, "mixers": mixers, "mlp": SwiGLU(hidden=24)} | settings
    )
    found = NeedleworkForCausalLM(config).double().train()
    with torch.no_grad():
        for p in found.parameters():  # away from starts at zero, where a branch could hide
            p.add_(0.05 * torch.randn_like(p))
    return found


def step(model, forward, objective: Objective | None = None) -> dict[str, torch.Tensor]:
    """A training step's loss and gradients; the cross entropy in pieces of 16 rows."""
    tokens = torch.randint(VOCABULARY, (2, 22), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    torch.manual_seed(2)
    found = forward(tokens[:, :-1], targets=tokens[:, 1:], objective=objective)
    total = found.share * found.cross_entropy / 42
    if found.auxiliary is not None:
        total = total + found.auxiliary
    total.backward()
    return {"loss": total.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(loss, "LOGITS", 16 * VOCABULARY)
    torch._dynamo.reset()


def compiled(model, **settings):
    return torch.compile(model, fullgraph=True, backend="aot_eager", **settings)


# one that reads, one that solves, one with content; below one with memory; test_battery.py compiles every op
@pytest.mark.parametrize("mixer", chosen(CATALOG, ("ccq", "lucid", "carve")))
def test_a_training_step_compiles_without_a_graph_break(mixer):
    one = model({"M": CATALOG[mixer].make(SIZES)})
    assert_close(step(one, compiled(one)), step(one, one), "compiled")


@pytest.mark.parametrize(
    ("regulariser", "recompute"),
    [pytest.param(Zipfian(), False, id="kept"), pytest.param(Strong(), True, id="recomputed", marks=pytest.mark.slow)],
)
def test_atma_s_whole_objective_compiles_too(regulariser, recompute):
    one = model(
        {"M": CATALOG["atma"].make(SIZES), "c": GatedConv()}, "cM", mlp=SquaredReLU(hidden=24),
        tie_word_embeddings=False, head_bias=True, softcap=15.0,
    )  # fmt: skip
    if recompute:
        one.gradient_checkpointing_enable({"use_reentrant": False})
    objective = Objective(regulariser=regulariser, distractor=Distractor(), regulariser_weight=0.2, distractor_weight=0.2)
    assert_close(step(one, compiled(one), objective), step(one, one, objective), "compiled")


@pytest.mark.slow
def test_no_angle_is_made_again_for_every_head():
    """A compiler that sees cos and sin fuses them into whatever turns by them."""
    from torch._inductor.utils import run_and_get_code

    x, at = torch.randn(2, 9, 4, 8), torch.arange(9)[None]
    turned, (code,) = run_and_get_code(torch.compile(lambda x: Rope()(x, at), fullgraph=True), x)
    torch.testing.assert_close(turned, Rope()(x, at))
    assert "rope_angles" in code and "cos(" not in code and "sin(" not in code


# a write rule, content, positions, a number of the layer's own, slopes of its own, memory
@pytest.mark.parametrize("mixer", chosen(CATALOG, ("qdelta", "carve", "softmax", "differential", "alibi", "mamba3", "atma")))
def test_layers_alike_are_compiled_once(mixer):
    """Blocks are compiled one by one, as training does; what is a layer's own must not be a constant of its graph. The first block has one
    summand, the others two."""
    one = model({"M": CATALOG[mixer].make(SIZES)}, "MMMM")
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in one.model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=counted)
    step(one, one)
    assert len(graphs) == 2
