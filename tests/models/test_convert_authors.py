"""The authors' Q-Delta and ATMA: their modules by their own names, written out here from the papers' equations in float64."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from needlework.experiment.pretrained import load_model
from needlework.models.convert import convert
from tests.models.peers import filled

VOCABULARY, D, T = 53, 32, 40


def rms(x, weight=None, eps=1e-6):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def l2(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def convolved(x, weight):
    """Causal and depthwise: x [T C], weight [C 1 W]."""
    return F.conv1d(F.pad(x.T, (weight.shape[-1] - 1, 0)), weight, groups=len(weight)).T


class Model:
    """The tensors of a state dict of given shapes, in float64, and tokens."""

    def __init__(self, shapes, tokens=T):
        self.tensors = {name: filled(name, shape) for name, shape in shapes.items()}
        self.ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(0))

    def __getitem__(self, name):
        return self.tensors[name].double()

    def map(self, name, x):
        y = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def as_ours(self, config, folder):
        """The logits [T V] of the converted folder, in float64 too."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
        convert(folder, folder.with_name("ours"))
        with torch.no_grad():
            return load_model(folder.with_name("ours")).double()(self.ids[None]).logits[0]


# Q-Delta

H, HV, K, V, HIDDEN = 2, 4, 8, 12, 24
QDELTA = dict(
    model_type="qdelta", attn_mode="chunk", bos_token_id=1, conv_size=4, eos_token_id=2, expand_v=1.5, fuse_cross_entropy=True,
    head_dim=K, hidden_act="swish", hidden_ratio=4, hidden_size=D, initializer_range=0.02, intermediate_size=HIDDEN, norm_eps=1e-6,
    num_heads=H, num_v_heads=HV, num_hidden_layers=2, tie_word_embeddings=False, use_cache=True, use_gate=True, use_short_conv=True,
    lamb_bias=0.9, vocab_size=VOCABULARY,
)  # fmt: skip


def qdelta_shapes():
    attn = {"q_proj": H * K, "k_proj": H * K, "v_proj": HV * V, "g_proj": HV * V, "a_proj": HV, "b_proj": HV, "lamb_proj": HV}
    layer = {f"attn.{name}.weight": [n, D] for name, n in attn.items()}
    layer |= {f"attn.{x}_conv1d.weight": [n, 1, 4] for x, n in (("q", H * K), ("k", H * K), ("v", HV * V))}
    layer |= {"attn.A_log": [HV], "attn.dt_bias": [HV], "attn.o_norm.weight": [V], "attn.o_proj.weight": [D, HV * V]}
    layer |= {
        "attn_norm.weight": [D],
        "mlp_norm.weight": [D],
        "mlp.gate_proj.weight": [HIDDEN, D],
        "mlp.up_proj.weight": [HIDDEN, D],
    }
    layer |= {"mlp.down_proj.weight": [D, HIDDEN]}
    shapes = {"model.embeddings.weight": [VOCABULARY, D], "model.norm.weight": [D], "lm_head.weight": [VOCABULARY, D]}
    return shapes | {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}


def qdelta(m):
    x = m["model.embeddings.weight"][m.ids]
    for n in range(2):
        at = f"model.layers.{n}."
        h = rms(x, m[at + "attn_norm.weight"])
        q, k, v = (F.silu(convolved(m.map(f"{at}attn.{c}_proj", h), m[f"{at}attn.{c}_conv1d.weight"])) for c in "qkv")
        q, k = (l2(z.view(T, H, K)).repeat_interleave(HV // H, 1) for z in (q, k))
        beta, lam = m.map(at + "attn.b_proj", h).sigmoid(), (m.map(at + "attn.lamb_proj", h) - 0.9).sigmoid()
        g = -m[at + "attn.A_log"].exp() * F.softplus(m.map(at + "attn.a_proj", h) + m[at + "attn.dt_bias"])
        G = g.cumsum(0)
        D_ts = (G[:, None] - G[None]).exp().permute(2, 0, 1)  # [HV T T]
        # what their kernels compute in a chunk of 64: k_t·x_s where the rule has x_t·k_s
        A = (beta.T[..., None] * D_ts * torch.einsum("thk,shk->hts", k, k + lam[..., None] * q)).tril(-1)
        u = torch.linalg.solve_triangular(
            A + torch.eye(T), (beta[..., None] * v.view(T, HV, V)).transpose(0, 1), upper=False, unitriangular=True
        )
        o = K**-0.5 * (D_ts * torch.einsum("thk,shk->hts", q, k)).tril() @ u
        o = rms(o.transpose(0, 1), m[at + "attn.o_norm.weight"]) * F.silu(m.map(at + "attn.g_proj", h)).view(T, HV, V)
        x = x + m.map(at + "attn.o_proj", o.flatten(1))
        h = rms(x, m[at + "mlp_norm.weight"])
        x = x + m.map(at + "mlp.down_proj", F.silu(m.map(at + "mlp.gate_proj", h)) * m.map(at + "mlp.up_proj", h))
    return m.map("lm_head", rms(x, m["model.norm.weight"]))


def near(found, expected):
    return (found - expected).norm() <= 1e-12 * expected.norm()


def test_the_authors_qdelta_is_read_under_its_names_with_the_transposed_coupling(tmp_path):
    m = Model(qdelta_shapes())
    assert near(m.as_ours(QDELTA, tmp_path / "source"), qdelta(m))


def test_another_constant_in_qdeltas_lambda_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lamb_bias is 0\.5, which no layer of needlework has; expected 0\.9"):
        Model(qdelta_shapes()).as_ours(QDELTA | {"lamb_bias": 0.5}, tmp_path / "source")


# ATMA

HQ, d = 4, 8
ATMA = dict(
    vocab_size=VOCABULARY, num_hidden_layers=4, hidden_size=D, head_dim=d, attn_kernel_size=4, conv_kernel_size=3,
    max_position_embeddings=1024, rms_norm_eps=1e-6, tie_word_embeddings=False, attn_kernel="triton", polar_variant="full",
    attn_window=16, mem_gamma_bias=3.9, mem_beta_bias=0.0,
)  # fmt: skip


def atma_shapes(kind, memory):
    with_bias = lambda maps: {
        f"{name}.{leaf}": s if leaf == "weight" else s[:1] for name, s in maps.items() for leaf in ("weight", "bias")
    }
    block = {"norm1.weight": [D], "norm2.weight": [D]} | with_bias({"mlp.fc": [8 * D, D], "mlp.proj": [D, 4 * D]})
    conv = with_bias({"attn.in_proj": [3 * D, D], "attn.out_proj": [D, D]}) | {"attn.conv.weight": [D, 1, 3]}
    attn = with_bias({"attn.q": [2 * HQ * d, D], "attn.k": [d, D], "attn.v": [d, D], "attn.proj": [D, HQ * d]})
    if kind != "rope":
        attn |= {"attn.canon_q.weight": [HQ * d, 1, 4], "attn.canon_k.weight": [d, 1, 4], "attn.canon_v.weight": [d, 1, 4]}
    else:
        attn |= {"attn.rotary.angular_freq": [d // 2]}
    if kind == "polar":
        attn |= with_bias({"attn.mu_proj": [D, HQ]}) | {"attn.v_null": [HQ, d]}
        attn |= {f"attn.{name}": [HQ] for name in ("null_base", "null_slope_raw", "len_gain_raw", "mag_beta_raw")}
    if memory:
        maps = {"w_gamma": [HQ, D], "w_beta": [HQ, D], "gate": [HQ * d, D], "proj": [D, HQ * d]}
        attn |= with_bias({f"attn.mem.{name}": shape for name, shape in maps.items()})
    shapes = {"embed.weight": [VOCABULARY, D], "norm.weight": [D], "proj.weight": [VOCABULARY, D], "proj.bias": [VOCABULARY]}
    own = [block | (attn if n == 2 else conv) for n in range(4)]
    return shapes | {f"blocks.{n}.{name}": shape for n in range(4) for name, shape in own[n].items()}


def attention(m, at, x, kind, memory):
    eps = torch.finfo(torch.float64).eps  # theirs is the dtype's own
    q, gate = m.map(at + "q", x).view(T, HQ, 2 * d).chunk(2, -1)
    k, v = (m.map(at + name, x).view(T, 1, d) for name in "kv")
    q, k = rms(q, eps=eps), rms(k, eps=eps)
    if kind != "rope":
        q, k, v = (
            (z := y.flatten(1), (z + convolved(z, m[f"{at}canon_{name}.weight"])).view(y.shape))[1]
            for name, y in (("q", q), ("k", k), ("v", v))
        )
    k, v = k.expand(T, HQ, d), v.expand(T, HQ, d)
    remembered = recalled(m, at + "mem.", x, q, k, v, eps) if memory else 0
    if kind == "rope":
        frequencies = torch.cat([(1 / 1024) ** torch.linspace(0, 1, d // 4, dtype=torch.float64), torch.zeros(d // 4)])
        angle = torch.arange(T)[:, None, None] * frequencies
        turn = lambda z: torch.cat(
            [(p := z.chunk(2, -1))[0] * angle.cos() + p[1] * angle.sin(), p[1] * angle.cos() - p[0] * angle.sin()], -1
        )
        q, k = turn(q), turn(k)
    scores = torch.einsum("thd,shd->hts", q, k) * (0.12 if kind == "rope" else d**-0.5)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    count = 0
    if kind == "polar":
        n = torch.arange(1, T + 1, dtype=torch.float64)
        temp = 1 + F.softplus(m[at + "len_gain_raw"])[:, None] * n.log()
        null = m[at + "null_base"][:, None] + F.softplus(m[at + "null_slope_raw"])[:, None] * (n + 1).log().sqrt()
        scores = (temp[..., None] * scores).masked_fill(hidden, -math.inf)
        w = torch.cat([scores, (temp * null)[..., None]], -1).softmax(-1)
        s = torch.einsum("hts,shd->htd", w[..., :-1], v) + w[..., -1:] * m[at + "v_null"][:, None]
        o = s / s.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        real = w[..., :-1] / w[..., :-1].sum(-1, keepdim=True)
        m_eff = (1 - w[..., -1]) / real.square().sum(-1)
        count = m.map(at + "mu_proj", torch.tanh(F.softplus(m[at + "mag_beta_raw"])[:, None] * torch.log1p(m_eff)).T)
    else:
        o = torch.einsum("hts,shd->htd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
    return m.map(at + "proj", (o.transpose(0, 1) * gate.sigmoid()).flatten(1)) + count + remembered


def recalled(m, at, x, q, k, v, eps):
    """S ← γ (S − β k (Sᵀk)ᵀ) + β k vᵀ, read by q."""
    gamma, beta = (m.map(at + "w_gamma", x) + 3.9).sigmoid(), m.map(at + "w_beta", x).sigmoid()
    q, k, S, r = l2(q), l2(k), torch.zeros(HQ, d, d, dtype=torch.float64), []
    for t in range(T):
        S = gamma[t, :, None, None] * S
        S = S + torch.einsum("h,hk,hv->hkv", beta[t], k[t], v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        r.append(torch.einsum("hkv,hk->hv", S, q[t]))
    return m.map(at + "proj", rms(torch.stack(r), eps=eps).flatten(1) * m.map(at + "gate", x).sigmoid())


def atma(m, kind, memory):
    x = m["embed.weight"][m.ids]
    for n in range(4):
        at = f"blocks.{n}."
        h = rms(x, m[at + "norm1.weight"])
        if n == 2:
            x = x + attention(m, at + "attn.", h, kind, memory)
        else:
            b, c, z = m.map(at + "attn.in_proj", h).chunk(3, -1)
            x = x + m.map(at + "attn.out_proj", c * convolved(b * z, m[at + "attn.conv.weight"]))
        a, b = m.map(at + "mlp.fc", rms(x, m[at + "norm2.weight"])).chunk(2, -1)
        x = x + m.map(at + "mlp.proj", b * a.relu().square())
    z = m.map("proj", rms(x, m["norm.weight"]))
    return 15 * z * torch.rsqrt(z.square() + 225)


@pytest.mark.parametrize(("kind", "memory"), [("polar", True), ("nope", False), ("rope", True)])
def test_the_authors_atma_is_read_under_its_names(kind, memory, tmp_path):
    m = Model(atma_shapes(kind, memory))
    ours = m.as_ours(ATMA | {"attn_type": kind, "mem_enabled": memory}, tmp_path / "source")
    assert near(ours, atma(m, kind, memory))


def test_an_attention_of_atmas_code_that_the_paper_does_not_have_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="attn_type is 'wall', which no layer of needlework has; expected 'polar' or 'nope' or 'rope'"
    ):
        Model(atma_shapes("nope", False)).as_ours(ATMA | {"attn_type": "wall"}, tmp_path / "source")
