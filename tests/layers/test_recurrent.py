"""The recurrent layers against their pages, written out by hand around each op's definition; and how they start."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, logsigmoid, pad, silu, softplus

from needlework.layers import (
    CCQ,
    Carve,
    ChannelGate,
    Delta,
    FixedGate,
    Gdn2,
    Linear,
    LowRankGate,
    Plain,
    QDelta,
    Recurrent,
    ScalarGate,
    Silu,
)
from needlework.layers.norm import l2, rms
from needlework.ops.carve import recurrent_carve
from needlework.ops.ccq import recurrent_ccq
from needlework.ops.delta import recurrent_delta
from needlework.ops.qdelta import recurrent_qdelta
from needlework.testing.compare import relative

DIM, H, K, V = 32, 2, 8, 16


def build(seed: int = 0, **config) -> torch.nn.Module:
    """A layer in float64, away from starts at zero."""
    torch.manual_seed(seed)
    mixer = Recurrent(**{"heads": H, "key_dim": K, "value_dim": V} | config).build(DIM).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return mixer


def sample(T: int = 21) -> Tensor:
    return torch.randn(2, T, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def unit(x: Tensor) -> Tensor:
    """spec/delta.md: x / √(Σx² + 1e-6)."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def projected(mixer, x: Tensor) -> Tensor:
    return torch.cat([x @ p.weight.T for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1)


def heads(qkv: Tensor, value_heads: int = H) -> tuple[Tensor, ...]:
    q, k, v = qkv.split([H * K, H * K, value_heads * V], -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (value_heads, V))


def finished(mixer, x: Tensor, o: Tensor) -> Tensor:
    """Output RMS norm with one vector shared by the heads, the SiLU gate where there is one, W_o."""
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    o = o.flatten(-2)
    if mixer.g_proj is not None:
        o = o * silu(x @ mixer.g_proj.weight.T)
    return o @ mixer.o_proj.weight.T


# Q-Delta


def test_a_qdelta_layer_is_its_page_written_out():
    """spec/qdelta.md, "Layer": width 4 with SiLU, q and k of unit norm *before* x = k + λq, λ = σ(W_λ h − 0.9), no bias."""
    mixer, x = build(write=QDelta(), value_heads=2 * H), sample()
    assert not any(name.endswith(".bias") for name, _ in mixer.named_parameters())
    qkv = projected(mixer, x).mT
    qkv = silu(conv1d(pad(qkv, (3, 0)), mixer.conv.weight, groups=qkv.shape[1])).mT
    q, k, v = heads(qkv, 2 * H)
    rule = mixer.write
    g = -rule.gate.A_log.exp() * softplus(x @ rule.gate.project.weight.T + rule.gate.dt_bias)
    beta = torch.sigmoid(x @ rule.beta.project.weight.T)
    lam = torch.sigmoid(x @ rule.lam.project.weight.T - 0.9)
    o = recurrent_qdelta(unit(q), unit(k), v, g, beta, lam).o
    assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


def test_a_fixed_lambda_and_no_decay_are_the_papers_ablations():
    """spec/qdelta.md: λ fixed at 0.2, 0.5, 0.8, 1; no decay is g = 0."""
    for lam in (0.2, 0.5, 0.8, 1.0):
        mixer, x = build(write=QDelta(lam=lam, gate=None), conv=None), sample()
        q, k, v = heads(projected(mixer, x))
        beta = torch.sigmoid(x @ mixer.write.beta.project.weight.T)
        o = recurrent_qdelta(unit(q), unit(k), v, None, beta, torch.full_like(beta, lam)).o
        assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


def test_a_qdelta_layer_starts_as_published():
    """spec/qdelta.md: A_log = log U(0, 16), softplus(dt_bias) log-uniform in [1e-3, 1e-1]; λ ≈ 0.29 where W_λ h = 0."""
    n = 4096
    torch.manual_seed(0)
    mixer = Recurrent(heads=n, key_dim=1, value_dim=1, write=QDelta(), conv=None).build(1)
    A, dt = mixer.write.gate.A_log.exp(), softplus(mixer.write.gate.dt_bias).log()
    low, high = math.log(1e-3), math.log(1e-1)
    assert A.min() >= 0 and A.max() <= 16
    assert abs(A.mean() - 8) < 4 * 16 / (12 * n) ** 0.5  # four standard errors of a uniform's mean
    rounding = 8 * torch.finfo(torch.float32).eps  # of dt_bias, which is smaller than 8
    assert dt.min() >= low - rounding and dt.max() <= high + rounding
    assert abs(dt.mean() - (low + high) / 2) < 4 * (high - low) / (12 * n) ** 0.5
    lam = mixer.write.lam(torch.zeros(1, 1, 1))[0, 0, 0]
    assert round(lam.item(), 2) == 0.29


# the delta family


def decay(gate, x: Tensor) -> Tensor | None:
    """A scalar gate a head, a channel gate through a bottleneck, or none."""
    if gate is None:
        return None
    if gate.config.kind == "scalar_gate":
        return -gate.A_log.exp() * softplus(x @ gate.project.weight.T + gate.dt_bias)
    down, up = gate.project
    logit = (x @ down.weight.T @ up.weight.T + gate.dt_bias).unflatten(-1, (2 * H, K))
    return -gate.A_log.exp()[:, None] * softplus(logit)


WRITES = {
    "linear attention": Linear(),
    "DeltaNet": Delta(),
    "Gated DeltaNet": Delta(gate=ScalarGate()),
    "KDA": Delta(gate=ChannelGate(rank=4)),
    "GDN-2": Gdn2(gate=ChannelGate(rank=4)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_layer_of_the_delta_family_is_its_page_written_out(write):
    """spec/delta.md: unit q and k where something is erased, β = σ(W_β x), GDN-2's erase b = σ(W_b x) [K] and write w = σ(W_w x) [V]."""
    mixer, x = build(write=write, conv=None, value_heads=2 * H), sample()
    q, k, v = heads(projected(mixer, x), 2 * H)
    if write.kind != "linear":
        q, k = unit(q), unit(k)
    rule, gates = mixer.write, {}
    if write.kind == "delta":
        gates = {"beta": torch.sigmoid(x @ rule.beta.project.weight.T)}
    if write.kind == "gdn2":
        of = {name: (x @ p.weight.T).unflatten(-1, (2 * H, -1)) for name, p in (("erase", rule.erase), ("write", rule.write))}
        gates = {name: torch.sigmoid(logit) for name, logit in of.items()}
    o = recurrent_delta(q, k, v, decay(rule.gate, x), **gates).o
    assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


# CARVE


@pytest.mark.parametrize("read", [Plain(), CCQ()], ids=lambda read: read.kind)
def test_a_carve_layer_is_its_page_written_out(read):
    """spec/carve.md: SiLU, unit q and k, f and b_x through rank V, one write gate a head; with CCQ, o and m follow the cleaned q."""
    mixer, x = build(write=Carve(rank=4, content_chunk=8), read=read, conv=Silu(), output_gate=False), sample()
    q, k, v = heads(silu(projected(mixer, x)))
    rule = mixer.write
    f, b = ((x @ m[0].weight.T @ m[1].weight.T).unflatten(-1, (H, K)) for m in (rule.f, rule.b))
    assert rule.f[0].weight.shape == rule.b[0].weight.shape == (V, DIM)
    q, k = unit(q), unit(k)
    if read.kind == "ccq":
        q = recurrent_ccq(q, k, eta(mixer, x)).q
    parameters = rule.A_log, rule.dt_bias, rule.w1, rule.w2
    o = recurrent_carve(q, k, v, f, b + rule.erase_bias, x @ rule.w.weight.T, *parameters, content_chunk=8).o
    assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


def test_carves_erase_gate_starts_with_half_lives_from_32_to_8192_tokens():
    """spec/carve.md: bias = ln(2^{1/h} − 1), h log-uniform in 32 … 8,192 over the channels: log(1 − σ(bias)) = −ln 2 / h."""
    bias = Recurrent(heads=1, key_dim=128, value_dim=V, write=Carve(), conv=None).build(DIM).write.erase_bias[0].double()
    h = -math.log(2) / logsigmoid(-bias)
    steps = h.log().diff()
    assert h.min() >= 32 and h.max() <= 8192
    rounding = 16 * torch.finfo(torch.float32).eps  # of the biases, which are smaller than 16
    torch.testing.assert_close(steps, torch.full_like(steps, math.log(8192 / 32) / 128), rtol=0, atol=2 * rounding)


@pytest.mark.parametrize(("bias", "half_life"), [(0, 1), (-4, 38), (-7, 760)])
def test_a_constant_erase_bias_gives_every_channel_one_half_life(bias, half_life):
    """spec/carve.md: σ(0) would halve the state at every token, −4 is a half-life of 38 tokens, −7 of 760."""
    retention = logsigmoid(torch.tensor(-bias, dtype=torch.float64))
    assert round(float(-math.log(2) / retention)) == half_life


# CCQ


def eta(mixer, x: Tensor) -> Tensor:
    return torch.sigmoid(x @ mixer.read.project.weight.T + mixer.read.bias)


def test_ccq_on_gla_reads_against_unit_keys_while_the_write_keeps_its_own():
    """spec/ccq.md: k is L2-normalised in Σ, also where the backbone writes with unnormalised keys. GLA: rank r, logσ(·)/16."""
    mixer, x = build(write=Linear(gate=LowRankGate(rank=4)), read=CCQ(), conv=None), sample()
    q, k, v = heads(projected(mixer, x))
    gate = mixer.write.gate
    down, up = gate.project
    g = logsigmoid(x @ down.weight.T @ up.weight.T + up.bias).unflatten(-1, (H, K)) / 16
    cleaned = recurrent_ccq(q, unit(k), eta(mixer, x)).q
    o = recurrent_delta(q, k, v, g, q_read=cleaned).o
    assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


def test_aligned_statistics_forget_with_the_mean_decay_of_a_key_head():
    """spec/ccq.md: ḡ is the mean over the channels, and over the value heads that share the key head."""
    write = Linear(gate=LowRankGate(rank=4))
    mixer, x = build(write=write, read=CCQ(aligned=True), conv=None, value_heads=2 * H), sample()
    q, k, v = heads(projected(mixer, x), 2 * H)
    down, up = mixer.write.gate.project
    g = logsigmoid(x @ down.weight.T @ up.weight.T + up.bias).unflatten(-1, (2 * H, K)) / 16
    forgets = torch.stack([g[:, :, 2 * h : 2 * h + 2].mean((2, 3)) for h in range(H)], 2)
    cleaned = recurrent_ccq(q, unit(k), eta(mixer, x), forgets).q
    o = recurrent_delta(q, k, v, g, q_read=cleaned).o
    assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


def test_on_qdelta_the_raw_query_writes_and_the_cleaned_one_reads():
    """spec/ccq.md."""
    mixer, x = build(write=QDelta(gate=None), read=CCQ(), conv=None), sample()
    q, k, v = (unit(z) if i < 2 else z for i, z in enumerate(heads(projected(mixer, x))))
    rule = mixer.write
    beta = torch.sigmoid(x @ rule.beta.project.weight.T)
    lam = torch.sigmoid(x @ rule.lam.project.weight.T - 0.9)
    o = recurrent_qdelta(q, k, v, None, beta, lam, q_read=recurrent_ccq(q, k, eta(mixer, x)).q).o
    assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


def test_ccq_starts_at_a_tenth():
    """spec/ccq.md: b_λ = logit 0.1 = −2.1972; W_λ [H D] with bias."""
    read = Recurrent(heads=H, key_dim=K, value_dim=V, write=QDelta(), read=CCQ()).build(DIM).read
    assert [round(b, 4) for b in read.bias.tolist()] == [-2.1972] * H
    assert read.project.weight.shape == (H, DIM) and read.project.bias is None


# gates and norms


def test_retnets_gate_is_one_number_a_head():
    """spec/delta.md: g_h = log(1 − 2^{−5−h})."""
    write = Recurrent(heads=4, key_dim=K, value_dim=V, write=Linear(gate=FixedGate())).build(DIM).write
    g = write.gates(sample(3))[0]["g"]
    torch.testing.assert_close(g[0, 0].exp(), 1 - torch.tensor([1 / 32, 1 / 64, 1 / 128, 1 / 256], dtype=torch.float64))


def test_norms_have_an_epsilon_of_1e_6():
    """spec/README.md; PyTorch's default is the dtype's own, 0.0078 in bfloat16."""
    assert round(torch.finfo(torch.bfloat16).eps, 4) == 0.0078
    small = torch.full((8,), 1e-3, dtype=torch.float64)
    assert relative(rms(small), torch.full_like(small, 0.5**0.5)) < 1e-12  # mean x² = ε
    x = sample(5)
    assert relative(l2(x), unit(x)) < 1e-12
    for norm in (l2, rms):
        half = x.bfloat16()
        assert torch.equal(norm(half), norm(half.float()).bfloat16())


def test_the_gradient_of_the_l2_norm_is_the_pages():
    """spec/backward.md: y = x/n, n = √(Σx² + ε): dx = (dy − y (y·dy)) / n."""
    x, dy = sample(5).requires_grad_(), sample(5).flip(0)
    y = l2(x)
    n = (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    expected = (dy - y * (y * dy).sum(-1, keepdim=True)) / n
    assert relative(torch.autograd.grad(y, x, dy)[0], expected.detach()) < 1e-12


# a rule that starts as another, and leaves it


@pytest.mark.parametrize("rule", [{"write": QDelta(factor=0)}, {"write": Delta(gate=ScalarGate()), "read": CCQ(factor=0)}])
def test_a_rule_with_a_factor_of_zero_is_the_rule_without_it_bit_by_bit_and_its_factor_learns(rule):
    torch.manual_seed(0)
    plain = Recurrent(heads=H, key_dim=K, value_dim=V, write=Delta(gate=ScalarGate())).build(DIM)
    rich = Recurrent(heads=H, key_dim=K, value_dim=V, **rule).build(DIM)
    missing, unexpected = rich.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and {name.split(".")[-2] for name in missing if "factor" in name} == {"factor"}
    x = sample(150).float()
    y, state = rich(x, output_final_state=True)
    expected, other = plain(x, output_final_state=True)
    assert torch.equal(y, expected) and torch.equal(state.write, other.write)
    y.square().sum().backward()
    factor = rich.write.lam.factor if "read" not in rule else rich.read.factor
    assert (factor.value.grad != 0).all()
    assert all(not p.grad.any() for name, p in rich.named_parameters() if "lam.project" in name or "read.project" in name)


def test_a_factor_outside_its_range_counts_as_the_nearest_end_and_comes_back():
    write = Recurrent(heads=H, key_dim=K, value_dim=V, write=QDelta(factor=0.5)).build(DIM).write
    with torch.no_grad():
        write.lam.factor.value.copy_(torch.tensor([-0.3, 1.7]))
    lam = write.lam(torch.zeros(1, 1, DIM))[0, 0]
    full = torch.sigmoid(torch.tensor(-0.9))
    assert torch.allclose(lam, torch.stack([0 * full, full]), rtol=1e-6, atol=0)
    lam.sum().backward()
    assert torch.allclose(write.lam.factor.value.grad, full.expand(2))
    with pytest.raises(ValueError, match=r"qdelta: factor is 0\.5 and lam is 0\.2, expected None for one of them"):
        QDelta(factor=0.5, lam=0.2)
