"""Mamba-3's layer against its page, written out by hand around the op's definition; how it starts; what it refuses."""

import math

import pytest
import torch
from torch.nn.functional import silu, softplus

from needlework.layers import Mamba3
from needlework.ops.mamba3 import recurrent_mamba3
from needlework.testing.compare import relative

DIM, H, G, N, P = 32, 4, 2, 12, 6


def build(**config):
    """A layer in float64, away from its starts."""
    torch.manual_seed(0)
    mixer = Mamba3(**{"heads": H, "key_dim": N, "value_dim": P} | config).build(DIM).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return mixer


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def written_out(mixer, u, R, f, normed):
    """spec/baselines.md, "Mamba-3": one in_proj, its parts in the published order."""
    maps = "z x b c dt a lam angle".split()
    weight = torch.cat([getattr(mixer, f"{name}_proj").weight for name in maps])
    groups = mixer.b_proj.out_features // (R * N)
    sizes = [H * P, H * P, R * groups * N, R * groups * N, H, H, H, mixer.angle_proj.out_features]
    z, x, B, C, delta, A, l, a = (u @ weight.T).split(sizes, -1)
    z, x = z.unflatten(-1, (H, P)), x.unflatten(-1, (H, P))
    B, C = (y.unflatten(-1, (R, groups, N)) for y in (B, C))
    B, C = norm(B, mixer.b_norm.weight), norm(C, mixer.c_norm.weight)
    rows = []
    for y, bias in ((B, mixer.b_bias), (C, mixer.c_bias)):
        y = torch.stack([y[..., h // (H // groups), :] for h in range(H)], 2)  # [B T H R N]
        rows.append(y + bias)
    dt = softplus(delta + mixer.dt_bias)
    A = -f(A).clamp(min=1e-4)
    X, Z, O = (1, 1, 1) if R == 1 else (mixer.mimo_x, mixer.mimo_z, mixer.mimo_o)
    given = {"mimo_x": None if R == 1 else X, "pairs": mixer.config.pairs}
    o = recurrent_mamba3(rows[1], rows[0], x, A * dt, dt, l.sigmoid(), a, **given).o  # [B T H R P]
    y = o + mixer.D[:, None, None] * (x[..., None, :] * X)
    y = norm(y, mixer.norm_weight[:, None]) if normed else y
    y = (O * y * silu(z[..., None, :] * Z)).sum(-2)
    return y.flatten(-2) @ mixer.out_proj.weight.T


def rational(x):
    return torch.where(x >= 0, 1 + x, 1 / (1 - x))


@pytest.mark.parametrize(
    ("config", "f"),
    [
        ({}, softplus),
        ({"groups": G, "decay": "rational", "turning": "all", "pairs": "halves"}, rational),
        ({"rank": 3, "groups": G, "output_norm": True}, softplus),
        ({"output_norm": True}, softplus),
    ],
)
def test_a_layer_is_its_page_written_out(config, f):
    mixer = build(**config)
    u = 3 * torch.randn(2, 21, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = written_out(mixer, u, config.get("rank", 1), f, config.get("output_norm", False))
    assert relative(mixer(u)[0].detach(), want.detach()) <= 1e-12


def test_a_decays_by_at_least_its_floor():
    """−A >= 1e-4 whatever the logit: a token's Δ alone decays."""
    mixer = build()
    with torch.no_grad():
        mixer.a_proj.weight.zero_().add_(-100.0)
    tokens = mixer._tokens(torch.ones(1, 3, DIM, dtype=torch.float64))
    assert torch.allclose(tokens["g"], -1e-4 * tokens["dt"], rtol=1e-12, atol=0)


def test_it_starts_as_published():
    torch.manual_seed(0)
    mixer = Mamba3(heads=64, key_dim=N, value_dim=P, rank=4).build(DIM)
    dt = softplus(mixer.dt_bias)
    assert 1e-3 <= dt.min() < 3e-3 and 3e-2 < dt.max() <= 0.1 + 1e-6
    assert (mixer.b_bias == 1).all() and (mixer.c_bias == 1).all() and (mixer.D == 1).all()
    assert (mixer.mimo_x == 0.25).all() and (mixer.mimo_z == 1).all() and (mixer.mimo_o == 0.25).all()


@pytest.mark.parametrize("decay", ["softplus", "rational"])
def test_it_starts_at_a_half_life(decay):
    mixer = Mamba3(heads=H, key_dim=N, value_dim=P, decay=decay, half_life=50.0).build(DIM)
    g = mixer._tokens(torch.zeros(1, 3, DIM))["g"]
    torch.testing.assert_close(g, torch.full_like(g, -math.log(2) / 50))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_dim": 7}, "mamba3: key_dim is 7, expected an even number"),
        ({"groups": 3}, "mamba3: heads is 4, expected a multiple of groups = 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_where_it_is_built(fields, message):
    with pytest.raises(ValueError, match=message):
        Mamba3(**{"heads": H, "key_dim": N, "value_dim": P} | fields).build(DIM)
