"""The whole model compiles as one graph, forward and backward, and gives the loss and gradients that it gives without."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from needlework.layers import SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.testing.compare import assert_close
from recipes.demo import COMPARE

SIZES = Sizes(heads=2, key_dim=8, value_dim=12, attention_heads=4, kv_heads=2, head_dim=8, half_life=32.0, content_chunk=8)
VOCABULARY = 31


@pytest.mark.parametrize("mixer", COMPARE)
def test_a_model_in_training_compiles_without_a_graph_break(mixer):
    torch.manual_seed(0)
    config = NeedleworkConfig(
        vocab_size=VOCABULARY, hidden_size=16, layout="M", mixers={"M": CATALOG[mixer].make(SIZES)}, mlp=SwiGLU(hidden=24)
    )
    model = NeedleworkForCausalLM(config).double().train()
    with torch.no_grad():
        for p in model.parameters():  # away from starts at zero, where a branch could hide
            p.add_(0.05 * torch.randn_like(p))
    tokens = torch.randint(VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))

    def found(forward):
        model.zero_grad()
        logits = forward(tokens, labels=tokens).logits  # the loss beside them rounds to float32
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    torch._dynamo.reset()
    assert_close(found(torch.compile(model, fullgraph=True, backend="aot_eager")), found(model), "compiled")
