"""flash-linear-attention's PaTH attention: its modules by their own names, written out here from its equations in float64."""

import pytest
import torch
from torch.nn import functional as F

from needlework.layers import Path
from needlework.models.convert.described import Described
from needlework.models.convert.layouts import LAYOUTS
from tests.models.test_convert_authors import VOCABULARY, D, Model, convolved, l2, near, rms

HEADS, HIDDEN, RANK = 4, 24, 32
T = 150  # two blocks of 64, and one cut short
K = D // HEADS
# as its config.json says it; the width of the bottleneck and of the convolution are its layer's defaults
CONFIG = dict(
    model_type="path_attn", attnres_block_size=None, bos_token_id=1, elementwise_affine=True, eos_token_id=2, fuse_cross_entropy=True,
    fuse_linear_cross_entropy=False, fuse_norm=True, fuse_swiglu=True, hidden_act="swish", hidden_ratio=4, hidden_size=D,
    initializer_range=0.02, intermediate_size=HIDDEN, norm_eps=1e-6, num_heads=HEADS, num_hidden_layers=2, num_kv_heads=None,
    pad_token_id=None, tie_word_embeddings=False, use_cache=True, use_forget_gate=False, use_l2warp=False, use_low_rank_w=True,
    use_w_shortconv=True, vocab_size=VOCABULARY,
)  # fmt: skip
VARIANTS = {
    "low rank, convolved": {},
    "full, plain, grouped": dict(use_low_rank_w=False, use_w_shortconv=False, num_kv_heads=2),
}


def shapes(config):
    kv = (config["num_kv_heads"] or HEADS) * K
    attn = {"q_proj.weight": [D, D], "k_proj.weight": [kv, D], "v_proj.weight": [kv, D], "o_proj.weight": [D, D]}
    attn |= {"bt_proj.weight": [kv // K, D], "bt_proj.bias": [kv // K]}
    if config["use_low_rank_w"]:
        attn |= {"w_proj.0.weight": [RANK, D], "w_proj.1.weight": [kv, RANK]}
    else:
        attn |= {"w_proj.weight": [kv, D]}
    if config["use_w_shortconv"]:
        attn |= {"w_conv1d.weight": [kv, 1, 3]}
    layer = {f"attn.{name}": shape for name, shape in attn.items()} | {"attn_norm.weight": [D], "mlp_norm.weight": [D]}
    layer |= {f"mlp.{name}_proj.weight": [HIDDEN, D] for name in ("gate", "up")} | {"mlp.down_proj.weight": [D, HIDDEN]}
    around = {"model.embeddings.weight": [VOCABULARY, D], "model.norm.weight": [D], "lm_head.weight": [VOCABULARY, D]}
    return around | {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}


def attended(q, k, v, beta, w):
    """PaTH of q [T Hq K], every cached key carried on by every token."""
    G, o = q.shape[1] // k.shape[1], []
    for i in range(T):
        past = k[:i]
        past = past - (beta[i][:, None] * (past * w[i]).sum(-1, keepdim=True)) * w[i]
        k = torch.cat([past, k[i:]])
        seen = [x.repeat_interleave(G, 1) for x in (k[: i + 1], v[: i + 1])]
        o.append(torch.einsum("hj,jhv->hv", (torch.einsum("hk,jhk->hj", q[i], seen[0]) * K**-0.5).softmax(-1), seen[1]))
    return torch.stack(o)


def literal(m, config):
    x = m["model.embeddings.weight"][m.ids]
    for n in range(2):
        at = f"model.layers.{n}."
        h = rms(x, m[at + "attn_norm.weight"])
        w = (
            m.map(at + "attn.w_proj.1", m.map(at + "attn.w_proj.0", h))
            if config["use_low_rank_w"]
            else m.map(at + "attn.w_proj", h)
        )
        if config["use_w_shortconv"]:
            w = F.silu(convolved(w, m[at + "attn.w_conv1d.weight"]))
        q, k, v, w = (z.view(T, -1, K) for z in (*(m.map(f"{at}attn.{c}_proj", h) for c in "qkv"), w))
        o = attended(q, k, v, 2 * m.map(at + "attn.bt_proj", h).sigmoid(), l2(w))
        x = x + m.map(at + "attn.o_proj", o.flatten(1))
        h = rms(x, m[at + "mlp_norm.weight"])
        x = x + m.map(at + "mlp.down_proj", F.silu(m.map(at + "mlp.gate_proj", h)) * m.map(at + "mlp.up_proj", h))
    return m.map("lm_head", rms(x, m["model.norm.weight"]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_path_has_the_logits_of_its_layout(variant, tmp_path):
    config = CONFIG | VARIANTS[variant]
    model = Model(shapes(config), T)
    assert near(model.as_ours(config, tmp_path / "source"), literal(model, config))


def test_a_config_that_says_nothing_has_the_defaults_of_its_class():
    said = {name: CONFIG[name] for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    for mixer in LAYOUTS["path_attn"](Described(said, "config.json")).config.each_layer():
        assert (mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.attend) == (32, None, 1, Path(rank=32, conv=3))


def test_a_forget_gate_is_refused_by_its_key():
    """It adds G_i − G_j before the scale, which no layer here does."""
    with pytest.raises(ValueError, match="use_forget_gate is True, which no layer of needlework has"):
        LAYOUTS["path_attn"](Described(CONFIG | {"use_forget_gate": True}, "config.json"))
