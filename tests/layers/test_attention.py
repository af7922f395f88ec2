"""The attention layers, the memory beside them and the gated convolution against their pages, written out by hand."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, logsigmoid, pad, relu, silu

import needlework.layers.attention as attention_file
from needlework.layers import (
    Attention,
    Canon,
    Delta,
    Differential,
    GatedConv,
    HalfRope,
    Lucid,
    Memory,
    Polar,
    RetentionGate,
    Rope,
    Softmax,
    SquaredReLU,
    SwiGLU,
)
from needlework.layers.config import Width
from needlework.layers.norm import l2, published_rms, rms
from needlework.layers.projection import Projection
from needlework.ops.delta import recurrent_delta
from needlework.ops.polar import recurrent_polar
from needlework.testing.compare import relative

DIM, HQ, HKV, D = 32, 4, 2, 8


def build(config, seed: int = 0) -> torch.nn.Module:
    """A layer in float64, away from starts at zero."""
    torch.manual_seed(seed)
    mixer = config.build(DIM).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return mixer


def attention(attend, **settings) -> Attention:
    return Attention(**{"heads": HQ, "kv_heads": HKV, "head_dim": D, "attend": attend} | settings)


def sample(T: int = 21) -> Tensor:
    return torch.randn(2, T, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def linear(module, x: Tensor) -> Tensor:
    y = x @ module.weight.T
    return y if module.bias is None else y + module.bias


def convolution(weight: Tensor, x: Tensor) -> Tensor:
    """Causal, depthwise, x [B T C]."""
    return conv1d(pad(x.mT, (weight.shape[-1] - 1, 0)), weight, groups=len(weight)).mT


# ATMA's layer


def projected(mixer, x: Tensor) -> tuple[Tensor, ...]:
    """q, gate, k, v: the q projection makes first d query, last d gate, per head."""
    q, gate = linear(mixer.q_proj, x).unflatten(-1, (HQ, 2, D)).unbind(-2)
    k, v = (linear(p, x).unflatten(-1, (HKV, D)) for p in (mixer.k_proj, mixer.v_proj))
    return q, gate, k, v


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def remembered(memory, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ln γ = logσ(W_γ x + b + 3.9), β = σ(W_β x + b), kv heads repeated, unit q and k, scale 1; W_mem( rms(r) ⊙ σ(W_g x) )."""
    k, v = (z.repeat_interleave(HQ // HKV, 2) for z in (k, v))
    g = logsigmoid(linear(memory.write.gate.project, x) + 3.9)
    beta = torch.sigmoid(linear(memory.write.beta.project, x))
    r = recurrent_delta(l2(q), l2(k), v, g, beta, scale=1.0).o
    return linear(memory.mem_proj, norm(r).flatten(-2) * torch.sigmoid(linear(memory.g_proj, x)))


def test_atmas_polar_layer_with_memory_is_its_page_written_out():
    """spec/polar.md, "The layer and the model": norm, then canon on q, k, v; out = W_o(c ⊙ σ(gate)) + W_μ mag; memory added."""
    config = attention(Polar(), qk_norm=True, conv=Canon(), output_gate=True, bias=True, memory=Memory())
    mixer, x = build(config), sample()
    q, gate, k, v = projected(mixer, x)
    q, k = norm(q), norm(k)
    qkv = torch.cat([z.flatten(-2) for z in (q, k, v)], -1)
    assert mixer.conv.weight.shape == ((HQ + 2 * HKV) * D, 1, 4)
    q, k, v = (qkv + convolution(mixer.conv.weight, qkv)).unflatten(-1, (-1, D)).split([HQ, HKV, HKV], 2)
    rule = mixer.attend
    c, magnitude, _ = recurrent_polar(q, k, v, rule.alpha, rule.beta, rule.gamma, rule.null_base, rule.v_null)
    y = linear(mixer.o_proj, (c * torch.sigmoid(gate)).flatten(-2)) + linear(rule.mag_proj, magnitude)
    y = y + remembered(mixer.memory, x, q, k, v)
    assert rule.mag_proj.bias is not None
    assert relative(mixer(x)[0].detach(), y.detach()) < 1e-12


def test_atmas_rope_layer_with_memory_is_its_page_written_out():
    """spec/polar.md: no canon, half-truncated rotary, score scale 0.12; the memory takes the pre-rotary q, k, v."""
    config = attention(
        Softmax(scale=0.12), qk_norm=True, position=HalfRope(), output_gate=True, bias=True, memory=Memory()
    )  # fmt: skip
    mixer, x = build(config), sample()
    q, gate, k, v = projected(mixer, x)
    q, k = norm(q), norm(k)
    y = remembered(mixer.memory, x, q, k, v)
    q, k = (half_rotated(z) for z in (q, k))
    o = softmax_read(q, k, v, 0.12)
    y = y + linear(mixer.o_proj, (o * torch.sigmoid(gate)).flatten(-2))
    assert relative(mixer(x)[0].detach(), y.detach()) < 1e-12


def half_rotated(x: Tensor) -> Tensor:
    """The first d/4 frequencies (1/1024)^{linspace(0, 1, d/4)}, the other d/4 zero; channel i turns with channel i + d/2.

    As ATMA's code turns them, y₁ = x₁ cos + x₂ sin, y₂ = x₂ cos − x₁ sin: by minus the angle of `Rope`.
    """
    d = x.shape[-1]
    frequencies = torch.cat([(1 / 1024) ** torch.linspace(0, 1, d // 4, dtype=x.dtype), torch.zeros(d // 4, dtype=x.dtype)])
    z = torch.complex(x[..., : d // 2], x[..., d // 2 :])
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * frequencies
    z = z * torch.polar(torch.ones_like(angle), -angle)
    return torch.cat([z.real, z.imag], -1)


def softmax_read(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = (z.repeat_interleave(q.shape[2] // z.shape[2], 2) for z in (k, v))
    scores = scale * torch.einsum("bthd,bshd->bhts", q, k)
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, -math.inf).softmax(-1), v)


def test_a_polar_rule_starts_as_its_page_says():
    """spec/polar.md: α −1, β −1.5, γ 0.5, null_base 2, v_null 0."""
    rule = attention(Polar()).build(DIM).attend
    starts = {name: getattr(rule, name).unique().tolist() for name in ("alpha", "beta", "gamma", "null_base", "v_null")}
    assert starts == {"alpha": [-1.0], "beta": [-1.5], "gamma": [0.5], "null_base": [2.0], "v_null": [0.0]}


def test_the_memorys_retention_starts_at_a_half_life_of_35_tokens():
    """ln γ = logσ(3.9) where W_γ x = 0 (the card of `RetentionGate`)."""
    gate = RetentionGate()
    assert round(-math.log(2) / logsigmoid(torch.tensor(gate.offset)).item()) == 35
    assert Memory().write == Delta(gate=gate)


@pytest.mark.parametrize("bound", [3.0, (3.0,) * HQ, (None, 3.0, None, 40.0)])
def test_a_bound_caps_the_half_lives_it_names_and_leaves_the_others(bound):
    """spec/polar.md, "Retention bound": half-life h tokens ⇔ g ← min(g, −ln 2/h)."""
    torch.manual_seed(1)  # the gate's weights: with some, no token of a head is capped
    width = Width(DIM, HKV, HQ, D, D, True)
    free, bounded = (RetentionGate(offset=o, bound=b).build(width).double() for o, b in ((0.0, None), (0.0, bound)))
    bounded.load_state_dict(free.state_dict())  # a bound is no parameter
    x = 4 * sample()
    g, capped = free(x), bounded(x)
    for head, h in enumerate(bound if isinstance(bound, tuple) else (bound,) * HQ):
        limit = math.inf if h is None else -math.log(2) / h
        assert torch.equal(capped[..., head], g[..., head].clamp(max=limit))
        assert h is None or 0 < (g[..., head] > limit).sum() < g[..., head].numel()  # it caps some, and not all
    assert bounded(torch.full_like(x, 1e6)).isfinite().all()


def test_one_head_s_bound_changes_its_memory_alone():
    """A value written 6 tokens ago: at most 2^−6 of it is left where the half-life is at most 1 token."""
    settings = {"conv": Canon(), "qk_norm": True, "bias": True}
    gates = (RetentionGate(), RetentionGate(bound=(None, 1.0, None, None)))
    free, bounded = (build(attention(Polar(), memory=Memory(write=Delta(gate=g)), **settings)) for g in gates)
    x, states = sample(7), []
    for mixer in (free, bounded):
        states.append(mixer(x, output_final_state=True)[1].memory.write)  # [B HQ D D]
    others = [0, 2, 3]
    assert torch.equal(states[0][:, others], states[1][:, others]) and not torch.equal(states[0][:, 1], states[1][:, 1])


def test_a_bound_that_fits_no_heads_is_refused():
    width = Width(DIM, HKV, HQ, D, D, True)
    with pytest.raises(ValueError, match="bound has 2 half-lives, expected 1 or one a head = 4"):
        RetentionGate(bound=(None, 3.0)).build(width)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-7)])
def test_the_published_norms_have_the_epsilon_of_the_dtype(dtype, eps):
    """spec/polar.md, "eps": q, k and read norms; on small numbers it decides."""
    x = (1e-3 * sample()).to(dtype)
    wide = x.float()
    assert torch.equal(published_rms(x), (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(dtype))
    config = attention(Polar(), qk_norm=True, memory=Memory(published_eps=True), published_eps=True)
    published, ours = config.build(DIM), attention(Polar(), qk_norm=True, memory=Memory()).build(DIM)
    assert published.q_norm is published.k_norm is published.memory.norm is published_rms
    assert ours.q_norm is ours.k_norm is ours.memory.norm is rms
    # one row's map has the norm in it
    r, gate = (1e-3 * torch.randn(2, *sizes, dtype=dtype) for sizes in ((4, 8), (32,)))
    for memory in (published.to(dtype).memory, ours.to(dtype).memory):
        memory.mem_proj = Projection(32, DIM, bias=False).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(memory._out(gate[:1], r[:1]), memory._out(gate, r)[:1])


# positions


def test_rope_keeps_norms_and_sees_relative_positions_only():
    """spec/lucid.md: so P sees relative positions only."""
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    at = lambda t: torch.tensor([[t]])
    rope = Rope()
    assert relative(rope(q, at(40)).norm(), q.norm()) < 1e-12
    for shift in (1, 100):
        near, far = ((rope(q, at(7 + s)) * rope(k, at(2 + s))).sum() for s in (0, shift))
        assert relative(far, near) < 1e-12
    assert torch.equal(rope(q, at(0)), q)


def test_ropes_frequencies_fall_from_1_by_powers_of_the_base():
    """Frequencies base^{−2i/d}; LUCID's base is 10,000, 64,000 in its fine-tune (spec/lucid.md)."""
    for base in (10_000.0, 64_000.0):
        x = torch.cat([torch.ones(8), torch.zeros(8)]).double().view(1, 1, 1, 16)
        turned = Rope(base=base)(x, torch.tensor([[1]]))[0, 0, 0]
        expected = base ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        assert relative(torch.atan2(turned[8:], turned[:8]), expected) < 1e-12


def test_a_published_rope_checkpoint_turns_as_its_own_code_turns_it():
    """transformers' Llama, and the class that ATMA's models were trained with, each written out."""
    x = torch.randn(1, 9, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9)[None]
    a, b = x.chunk(2, -1)
    angle = torch.arange(9, dtype=torch.float64)[:, None, None] * 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    llama = x * angle.cos().repeat(1, 1, 2) + torch.cat([-b, a], -1) * angle.sin().repeat(1, 1, 2)
    assert relative(Rope()(x, positions), llama) < 1e-12
    frequencies = torch.cat([(1 / 1024) ** torch.linspace(0, 1, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)])
    angle = torch.arange(9, dtype=torch.float64)[:, None, None] * frequencies
    atma = torch.cat([a * angle.cos() + b * angle.sin(), a * -angle.sin() + b * angle.cos()], -1)
    assert relative(HalfRope()(x, positions), atma) < 1e-12


@pytest.mark.parametrize(
    ("position", "attend", "head_dim", "multiple"),
    [
        (Rope(), Softmax(), 5, 2), (HalfRope(), Softmax(), 5, 4), (HalfRope(), Softmax(), 2, 4),
        (HalfRope(), Polar(), 6, 4), (Rope(), Differential(), 6, 4), (HalfRope(), Differential(), 12, 8),
    ],
)  # fmt: skip
def test_a_head_that_a_position_cannot_turn_is_refused_where_the_layer_is_built(position, attend, head_dim, multiple):
    config = Attention(heads=2, head_dim=head_dim, attend=attend, position=position)
    message = f"attention: head_dim is {head_dim}, expected a multiple of {multiple} with the position '{position.kind}'"
    with pytest.raises(ValueError, match=message):
        config.build(8)
    dataclasses.replace(config, head_dim=multiple).build(8)
    channels = position.multiple + 1
    with pytest.raises(ValueError, match=f"{position.kind}: got vectors of {channels} channels, expected a multiple of"):
        position(torch.ones(1, 1, 1, channels), torch.zeros(1, 1))


TURNED = {
    "softmax": Softmax(),
    "a window": Softmax(window=5),
    "differential": Differential(),
    "differential in a window": Differential(window=5),
    "polar": Polar(),
    **{f"lucid {p}": Lucid(precondition=p) for p in ("key", "qk", "rowmax", "beta")},
}


@pytest.mark.parametrize("position", [Rope(), HalfRope()], ids=lambda p: p.kind)
@pytest.mark.parametrize("rule", TURNED)
def test_positions_are_relative_under_every_attend_rule(rule, position, monkeypatch):
    mixer, x = build(attention(TURNED[rule], position=position)), sample()
    here = mixer(x)[0].detach()
    before = attention_file.token_positions
    monkeypatch.setattr(attention_file, "token_positions", lambda *args: before(*args) + 100)
    assert relative(mixer(x)[0].detach(), here) < 1e-12
    monkeypatch.setattr(attention_file, "token_positions", lambda *args: 2 * before(*args))
    assert relative(mixer(x)[0].detach(), here) > 1e-3  # they are not without effect


# Diff Transformer's layer


@pytest.mark.parametrize("layer", [0, 3])
def test_a_differential_layer_is_its_page_written_out(layer):
    """2410.05258, Eq. 1-3: q₁, q₂, k₁, k₂ turn each by itself, λ_init = 0.8 − 0.6 e^{−0.3 l}; spec/baselines.md."""
    config = attention(Differential(), position=Rope())
    torch.manual_seed(0)
    mixer, x = config.build(DIM, layer).double(), sample()
    positions = torch.arange(x.shape[1])[None]
    q = linear(mixer.q_proj, x).unflatten(-1, (HQ, 2, D // 2))
    k = linear(mixer.k_proj, x).unflatten(-1, (HKV, 2, D // 2))
    v = linear(mixer.v_proj, x).unflatten(-1, (HKV, D))
    first, second = (
        softmax_read(Rope()(q[..., i, :], positions), Rope()(k[..., i, :], positions), v, (D // 2) ** -0.5) for i in (0, 1)
    )
    start = mixer.attend.start  # held in float32
    assert start.item() == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * layer))
    q1, k1, q2, k2 = mixer.attend.vectors
    o = first - ((q1 * k1).sum().exp() - (q2 * k2).sum().exp() + start) * second
    o = (1 - start) * mixer.attend.norm.weight * norm(o)
    assert relative(mixer(x)[0].detach(), linear(mixer.o_proj, o.flatten(-2)).detach()) < 1e-12


def test_a_differential_layer_starts_where_it_is_told():
    by_layer, told = (attention(Differential(start=start)) for start in (None, 0.5))
    starts = [c.build(DIM, layer).attend.start.item() for c in (by_layer, told) for layer in (0, 11)]
    assert starts == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-3.3), 0.5, 0.5])


# LUCID's layer


@pytest.mark.parametrize("precondition", ["key", "qk", "rowmax", "beta"])
def test_a_lucid_layer_is_its_page_written_out(precondition):
    """spec/lucid.md: P of the keys that attention scores with (after RoPE), one solve per key-value head, O = softmax(QKᵀ/√d) Y."""
    mixer, x = build(attention(Lucid(precondition=precondition), position=Rope())), sample()
    T, positions = x.shape[1], torch.arange(x.shape[1])[None]
    q, k, v = (linear(p, x).unflatten(-1, (h, D)) for p, h in ((mixer.q_proj, HQ), (mixer.k_proj, HKV), (mixer.v_proj, HKV)))
    q, k = Rope()(q, positions), Rope()(k, positions)
    unit = lambda z: z / z.norm(dim=-1, keepdim=True)
    future = torch.ones(T, T).triu(1).bool()
    if precondition == "rowmax":
        s = torch.einsum("bihd,bjhd->bhij", k, k) / D**0.5
        s = s.masked_fill(future, -math.inf)
        P = torch.exp(s - s.amax(-1, keepdim=True))
    else:
        P = torch.exp(D**0.5 * (torch.einsum("bihd,bjhd->bhij", unit(k), unit(k)) - 1)).masked_fill(future, 0)
    if precondition == "beta":
        beta = 2 * torch.sigmoid(x @ mixer.attend.beta.weight.T).mT  # [B Hkv T]
        P = P.tril(-1) + torch.diag_embed(1 / beta)
    y = torch.linalg.solve(P, v.transpose(1, 2)).transpose(1, 2)
    if precondition == "qk":
        q, k = D**0.5 * unit(q), D**0.5 * unit(k)
    o = softmax_read(q, k, y, D**-0.5)
    assert relative(mixer(x)[0].detach(), linear(mixer.o_proj, o.flatten(-2)).detach()) < 1e-12


def test_lucid_holds_no_more_bytes_than_softmax():
    """spec/lucid.md: the cache holds k and the solved y in place of v; with a window its last W rows."""
    for window in (None, 7):
        lucid, softmax = (attention(rule(window=window)).build(DIM) for rule in (Lucid, Softmax))
        for T in (3, 21):
            rows = min(T, window or T)
            length = 8  # bytes of the token count
            expected = HKV * (D + D) * rows * 2 + length
            assert lucid.state_size(T, torch.bfloat16) == softmax.state_size(T, torch.bfloat16) == expected


def test_the_memory_beside_lucid_takes_the_raw_values():
    """spec/README.md: what the memory adds beside LUCID is what it adds beside softmax attention."""
    x, added = sample(), []
    for attend in (Lucid(), Softmax()):
        config = attention(attend, memory=Memory())
        mixer, without = build(config), build(dataclasses.replace(config, memory=None))
        without.load_state_dict({k: v for k, v in mixer.state_dict().items() if not k.startswith("memory")})
        added.append((mixer(x)[0] - without(x)[0]).detach())
    assert relative(*added) < 1e-12


# convolutions and channel mixers


def test_the_gated_convolution_is_its_page_written_out():
    """spec/polar.md: in_proj D → 3D (B, C, x); y = C ⊙ conv₃(B ⊙ x); out_proj; projections with bias, kernel without."""
    mixer, x = build(GatedConv()), sample()
    b, c, z = linear(mixer.in_proj, x).chunk(3, -1)
    assert mixer.conv.weight.shape == (DIM, 1, 3) and mixer.in_proj.bias is not None
    expected = linear(mixer.out_proj, c * convolution(mixer.conv.weight, b * z))
    assert relative(mixer(x)[0].detach(), expected.detach()) < 1e-12


def test_a_gated_convolution_whose_projections_both_start_at_zero_never_learns():
    """spec/polar.md: the published models' 12 convolution layers: every gradient exactly zero but the output bias's."""
    mixer, x = GatedConv(published_init=True).build(DIM).double(), sample()
    torch.nn.init.zeros_(mixer.out_proj.weight)
    torch.nn.init.zeros_(mixer.out_proj.bias)
    mixer(x)[0].square().sum().backward()  # at zero output even the bias rests
    assert not any(p.grad.any() for p in mixer.parameters())
    (mixer(x)[0] * x).sum().backward()
    assert [name for name, p in mixer.named_parameters() if p.grad.any()] == ["out_proj.bias"]


def test_channel_mixers_are_their_pages_written_out():
    """spec/polar.md: fc D → 8D split (a, b), b ⊙ relu(a)², with biases; SwiGLU: W_down(silu(W_gate x) ⊙ W_up x), without."""
    x = sample()
    squared, swiglu = build(SquaredReLU(hidden=4 * DIM)), build(SwiGLU(hidden=3 * DIM))
    a, b = linear(squared.fc, x).chunk(2, -1)
    assert squared.fc.weight.shape == (8 * DIM, DIM) and squared.fc.bias is not None
    assert relative(squared(x).detach(), linear(squared.proj, b * relu(a).square()).detach()) < 1e-12
    assert not any(name.endswith("bias") for name, _ in swiglu.named_parameters())
    expected = linear(swiglu.down_proj, silu(linear(swiglu.gate_proj, x)) * linear(swiglu.up_proj, x))
    assert relative(swiglu(x).detach(), expected.detach()) < 1e-12


def test_q_and_k_norms_have_no_weight():
    """spec/polar.md: q/k norms and the memory's read norm have no weight; RMS norm per head."""
    mixer = attention(Polar(), qk_norm=True, memory=Memory()).build(DIM)
    assert not any("norm" in name for name, _ in mixer.named_parameters())
    x = sample(3)
    assert relative(rms(x), norm(x)) < 1e-12
