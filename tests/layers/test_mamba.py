"""The first Mamba's layer, channel by channel and token by token (spec/baselines.md), its limits and its start."""

import math

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from needlework.layers import Mamba
from needlework.testing.compare import relative
from tests.layers.test_recurrent import DIM, sample

INNER, N, R = 12, 3, 4


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    mixer = Mamba(channels=INNER, state=N, rank=R).build(DIM).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return mixer


def by_tokens(mixer, h: Tensor) -> Tensor:
    """h [T D] of one sequence: h_dn ← e^{Δ_d A_dn} h_dn + Δ_d B_n x_d, y_d = Σ_n C_n h_dn + D_d x_d."""
    x, z = (h @ mixer.in_proj.weight.T).split(INNER, -1)
    padded = torch.cat([x.new_zeros(3, INNER), x])
    weight, bias = mixer.conv.weight[:, 0], mixer.conv.bias
    S, y = h.new_zeros(INNER, N), []
    for t in range(len(h)):
        now = silu(bias + (weight.T * padded[t : t + 4]).sum(0))
        delta, B, C = (mixer.x_proj.weight @ now).split([R, N, N])
        step = softplus(mixer.dt_proj.weight @ delta + mixer.dt_proj.bias)
        S = (-step[:, None] * mixer.A_log.exp()).exp() * S + (step * now)[:, None] * B
        y.append((S @ C + mixer.D * now) * silu(z[t]))
    return torch.stack(y) @ mixer.out_proj.weight.T


def test_a_layer_is_its_page_written_out_with_every_gradient():
    mixer, h = build(), sample(13)[0].requires_grad_()
    inputs, dy = [h, *mixer.parameters()], sample(13)[1]
    y, want = mixer(h[None])[0][0], by_tokens(mixer, h)
    assert relative(y.detach(), want.detach()) < 1e-12
    for found, expected in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True):
        assert relative(found, expected) < 1e-11


def test_a_step_of_zero_keeps_the_state():
    mixer, h = build(), sample()
    _, before = mixer(h[:, :9], output_final_state=True)
    with torch.no_grad():
        mixer.dt_proj.bias.fill_(-torch.inf)
    assert torch.equal(mixer(h[:, 9:], before, output_final_state=True)[1].S, before.S)


def test_it_starts_as_published():
    """A_dn from −n, D = 1, softplus(b) log-uniform in [1e-3, 1e-1], W_Δ uniform in ±R^-1/2."""
    torch.manual_seed(0)
    mixer, n = Mamba(channels=4096, state=N, rank=R).build(8), 4096
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, N + 1).expand(n, N)) and mixer.D.eq(1).all()
    dt, low, high = softplus(mixer.dt_proj.bias).log(), math.log(1e-3), math.log(1e-1)
    rounding = 8 * torch.finfo(torch.float32).eps
    assert low - rounding <= dt.min() and dt.max() <= high + rounding
    assert abs(dt.mean() - (low + high) / 2) < 4 * (high - low) / (12 * n) ** 0.5
    w = mixer.dt_proj.weight
    assert w.abs().max() <= R**-0.5 and abs(w.std() - (R * 3) ** -0.5) < 4 * (R * 3) ** -0.5 / (n * R) ** 0.5


def test_its_sizes_are_those_of_the_paper():
    with torch.device("meta"):
        mixer = Mamba().build(1000)
    assert mixer.in_proj.weight.shape == (4000, 1000) and mixer.dt_proj.weight.shape == (2000, 63)
    assert mixer.state_size(5, torch.bfloat16) == 4 * 2000 * 16 + 3 * 2000 * 2
