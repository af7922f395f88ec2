"""The language model written out from its weights: embedding, blocks, final norm, unembedding, loss."""

import pytest
import torch
from torch.nn.functional import silu

from needlework.layers import Attention, Delta, Recurrent, Rope, ScalarGate, Softmax, SquaredReLU, SwiGLU
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM

MIXERS = {
    "R": Recurrent(heads=2, key_dim=8, value_dim=8, write=Delta(gate=ScalarGate())),
    "S": Attention(heads=4, kv_heads=2, head_dim=8, attend=Softmax(window=5), position=Rope()),
}


def norm(module, x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight


def swiglu(mlp, x):
    return (silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T


def squared_relu(mlp, x):
    a, b = (x @ mlp.fc.weight.T + mlp.fc.bias).chunk(2, -1)
    return (b * a.clamp(min=0) ** 2) @ mlp.proj.weight.T + mlp.proj.bias


@pytest.mark.parametrize(
    ("mlp", "written_out", "tied", "cap"),
    [(SwiGLU(hidden=24), swiglu, True, None), (SquaredReLU(hidden=24), squared_relu, False, 2.5), (None, None, False, None)],
)
@torch.no_grad()
def test_logits_and_loss_are_the_weights_written_out(mlp, written_out, tied, cap):
    torch.manual_seed(0)
    config = NeedleworkConfig(
        vocab_size=31, hidden_size=16, layout="RSR", mixers=MIXERS, mlp=mlp, initializer_range=0.3,
        tie_word_embeddings=tied, softcap=cap, head_bias=not tied,
    )  # fmt: skip
    model = NeedleworkForCausalLM(config).double().eval()
    for p in model.parameters():  # norms start at one, and a bias at zero
        p.add_(0.2 * torch.randn_like(p))
    ids = torch.randint(31, (2, 9))
    x = model.model.embed.weight[ids]
    for block in model.model.blocks:
        x = x + block.mixer(norm(block.mixer_norm, x))[0]
        if mlp is not None:
            x = x + written_out(block.mlp, norm(block.mlp_norm, x))
    z = norm(model.model.norm, x) @ (model.model.embed if tied else model.lm_head).weight.T
    z = z if tied else z + model.lm_head.bias
    z = z if cap is None else cap * z / (z.square() + cap**2).sqrt()
    labels = ids.clone()
    labels[0, :4], labels[1, 7] = -100, -100
    out = model(ids, labels=labels)
    torch.testing.assert_close(out.logits, z, rtol=0, atol=1e-12)
    # every token but the first is foretold by the one before it
    lost = [-z[b, t - 1].log_softmax(-1)[labels[b, t]] for b in range(2) for t in range(1, 9) if labels[b, t] != -100]
    torch.testing.assert_close(out.loss.double(), torch.stack(lost).mean(), rtol=1e-6, atol=0)  # transformers' own, in float32
