"""Mamba-2's layer against its page (spec/baselines.md), token by token, its limits and its start."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from needlework.layers import CCQ, GatedNorm, HeadNorm, Linear, Mamba2, Recurrent, ShortConv
from needlework.ops.ccq import recurrent_ccq
from needlework.testing.compare import relative
from tests.layers.test_recurrent import build, finished, heads, projected, sample

D, G, HV, N, P = 32, 2, 4, 8, 16  # groups are H, N is K, P is V


def layer(groups: int = G, **settings) -> torch.nn.Module:
    published = {"conv": ShortConv(bias=True), "norm": GatedNorm(), "write": Mamba2()}
    return build(heads=groups, value_heads=HV, key_dim=N, value_dim=P, **published | settings)


def by_tokens(mixer, h: Tensor, groups: int) -> Tensor:
    """h [T D] of one sequence, in the paper's letters; the published projection is [z x B C δ]."""
    rule, I = mixer.write, HV * P
    maps = mixer.g_proj, mixer.v_proj, mixer.k_proj, mixer.q_proj, rule.project
    z, x, B, C, delta = (h @ m.weight.T for m in maps)
    line = torch.cat([C, B, x], -1)  # as the library orders the channels of its convolution
    padded = torch.cat([line.new_zeros(3, line.shape[1]), line])
    weight, bias = mixer.conv.weight[:, 0], mixer.conv.bias
    line = torch.stack([silu(bias + (weight.T * padded[t : t + 4]).sum(0)) for t in range(len(h))])
    C, B, x = line.split([groups * N, groups * N, I], -1)
    S, y = h.new_zeros(HV, N, P), []
    for t in range(len(h)):
        for j in range(HV):
            g = j // (HV // groups)
            step, A = softplus(delta[t, j] + rule.dt_bias[j]), -rule.A_log[j].exp()
            b, c, own = B[t, g * N : (g + 1) * N], C[t, g * N : (g + 1) * N], x[t, j * P : (j + 1) * P]
            now = (step * A).exp() * S[j] + b[:, None] * (step * own)
            S = torch.cat([S[:j], now[None], S[j + 1 :]])
            y.append(now.T @ c + rule.D[j] * own)
    y = torch.stack(y).view(len(h), I) * silu(z)
    mean = y.unflatten(-1, (groups, -1)).square().mean(-1).repeat_interleave(I // groups, -1)
    return y / (mean + 1e-5).sqrt() * mixer.norm.weight @ mixer.o_proj.weight.T


@pytest.mark.parametrize("groups", (1, G))
def test_a_layer_is_its_page_written_out_with_every_gradient(groups):
    mixer, h = layer(groups), sample(13)[0].requires_grad_()
    dy = sample(13)[1]
    inputs = [h, *mixer.parameters()]
    y, want = mixer(h[None])[0][0], by_tokens(mixer, h, groups)
    assert relative(y.detach(), want.detach()) < 1e-12
    for found, expected in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True):
        assert relative(found, expected) < 1e-11


def test_without_decay_and_skip_it_is_linear_attention_of_steps_times_values():
    mixer, h = layer(conv=None, norm=HeadNorm()), sample()
    with torch.no_grad():
        mixer.write.A_log.fill_(-torch.inf)  # A = 0
        mixer.write.D.zero_()
    q, k, v = projected(mixer, h).split([G * N, G * N, HV * P], -1)
    q, k, v = q.unflatten(-1, (G, N)), k.unflatten(-1, (G, N)), v.unflatten(-1, (HV, P))
    dt = softplus(h @ mixer.write.project.weight.T + mixer.write.dt_bias)
    scores = torch.einsum("btgn,bsgn->bgts", q, k).tril().repeat_interleave(HV // G, 1)
    o = torch.einsum("bhts,bshp->bthp", scores, dt[..., None] * v)
    assert relative(mixer(h)[0].detach(), finished(mixer, h, o).detach()) < 1e-12


def test_a_step_of_zero_keeps_the_state():
    mixer, h = layer(), sample()
    _, before = mixer(h[:, :9], output_final_state=True)
    with torch.no_grad():
        mixer.write.dt_bias.fill_(-torch.inf)
    _, after = mixer(h[:, 9:], before, output_final_state=True)
    assert torch.equal(after.write, before.write)


def test_two_groups_are_one_with_keys_and_queries_repeated():
    """A group's own norm apart: heads are normed one by one here."""
    two, one = (layer(groups, conv=None, norm=HeadNorm()) for groups in (G, HV))
    with torch.no_grad():
        own = {name: p for name, p in two.state_dict().items() if name not in ("q_proj.weight", "k_proj.weight")}
        one.load_state_dict(own, strict=False)
        for name in ("q_proj", "k_proj"):
            rows = getattr(two, name).weight.view(G, N, D).repeat_interleave(HV // G, 0)
            getattr(one, name).weight.copy_(rows.flatten(0, 1))
    assert relative(one(sample())[0].detach(), two(sample())[0].detach()) < 1e-12


def test_ccq_cleans_its_reads_against_unit_keys():
    mixer, h = layer(conv=None, norm=HeadNorm(), read=CCQ()), sample()
    q, k, v = heads(projected(mixer, h), HV)
    eta = torch.sigmoid(h @ mixer.read.project.weight.T + mixer.read.bias)
    cleaned = recurrent_ccq(q, k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(), eta).q
    dt = softplus(h @ mixer.write.project.weight.T + mixer.write.dt_bias)
    g = -mixer.write.A_log.exp() * dt
    S, o = h.new_zeros(2, HV, N, P), []
    for t in range(h.shape[1]):
        key = k[:, t].repeat_interleave(HV // G, 1)
        S = g[:, t, :, None, None].exp() * S + torch.einsum("bhn,bhp->bhnp", key, dt[:, t, :, None] * v[:, t])
        o.append(torch.einsum("bhnp,bhn->bhp", S, cleaned[:, t]) + mixer.write.D[:, None] * v[:, t])
    assert relative(mixer(h)[0].detach(), finished(mixer, h, torch.stack(o, 1)).detach()) < 1e-12


def test_it_starts_as_published():
    """A_log = log U(1, 16), softplus(dt_bias) log-uniform in [1e-3, 1e-1], D = 1; a half-life is 0.4 to 693 tokens."""
    torch.manual_seed(0)
    rule = Recurrent(heads=1, value_heads=4096, key_dim=1, value_dim=1, write=Mamba2(), conv=None).build(1).write
    A, dt, n = rule.A_log.exp(), softplus(rule.dt_bias).log(), 4096
    low, high = math.log(1e-3), math.log(1e-1)
    assert 1 <= A.min() and A.max() <= 16 and rule.D.eq(1).all()
    assert abs(A.mean() - 8.5) < 4 * 15 / (12 * n) ** 0.5  # four standard errors of a uniform's mean
    rounding = 8 * torch.finfo(torch.float32).eps
    assert low - rounding <= dt.min() and dt.max() <= high + rounding
    assert abs(dt.mean() - (low + high) / 2) < 4 * (high - low) / (12 * n) ** 0.5


def test_mamba_2s_order_of_norm_and_gate_is_another_function():
    one, other = layer(1), layer(1, norm=HeadNorm())
    other.load_state_dict({name: p for name, p in one.state_dict().items() if name != "norm.weight"}, strict=False)
    assert relative(one(sample())[0].detach(), other(sample())[0].detach()) > 0.1


def test_the_parts_of_a_state_are_those_of_its_page():
    """4·HV·N·P bytes and three rows of I + 2GN channels."""
    mixer = layer()
    assert mixer.state_size(1000, torch.bfloat16) == 4 * HV * N * P + 3 * (HV * P + 2 * G * N) * 2
    assert mixer.write.config != Linear()
