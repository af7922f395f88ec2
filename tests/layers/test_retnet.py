"""RetNet's layer, token by token in both conventions (spec/baselines.md), and positions of a recurrent layer."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from needlework.layers import Delta, FixedGate, HalfRope, HeadNorm, Linear, PairRope, Recurrent, Rope
from needlework.testing.compare import relative
from tests.layers.test_recurrent import H, K, V, build, sample

RETNET = {"write": Linear(gate=FixedGate()), "conv": None}
# the authors': frequencies 10000^{−linspace(0, 1, K/2)} of neighbours, no weight; flash-linear-attention's: 10000^{−2i/K} of halves
CONVENTIONS = {
    "authors": (
        {"position": PairRope(), "norm": HeadNorm(weight=False)},
        [10_000 ** -(i / (K / 2 - 1)) for i in range(K // 2)],
    ),
    "framework": ({"position": Rope()}, [10_000 ** -(2 * i / K) for i in range(K // 2)]),
}


def turned(x: Tensor, at: int, convention: str) -> Tensor:
    """One vector [K] as complex numbers e^{i·at·θ}(a + ib)."""
    theta = torch.tensor(CONVENTIONS[convention][1], dtype=torch.float64)
    a, b = (x[0::2], x[1::2]) if convention == "authors" else (x[: K // 2], x[K // 2 :])
    z = torch.complex(a, b) * torch.polar(torch.ones_like(theta), at * theta)
    return torch.stack([z.real, z.imag], -1).flatten() if convention == "authors" else torch.cat([z.real, z.imag])


def by_tokens(mixer, x: Tensor, convention: str) -> Tensor:
    """x [T D] of one sequence."""
    q, k, v = ((x @ m.weight.T).unflatten(-1, (H, -1)) for m in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    S, y = [x.new_zeros(K, V) for _ in range(H)], []
    for t in range(len(x)):
        read = []
        for h in range(H):
            S[h] = (1 - 2.0 ** (-5 - h)) * S[h] + turned(k[t, h], t, convention)[:, None] * v[t, h]
            o = S[h].T @ turned(q[t, h], t, convention) / K**0.5
            read.append(o / (o.square().mean() + 1e-6).sqrt() * (1 if mixer.norm.weight is None else mixer.norm.weight))
        y.append(torch.cat(read) * silu(mixer.g_proj.weight @ x[t]))
    return torch.stack(y) @ mixer.o_proj.weight.T


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_layer_is_its_page_written_out_with_every_gradient(convention):
    mixer, x = build(**RETNET, **CONVENTIONS[convention][0]), sample(13)[0].requires_grad_()
    assert (mixer.norm.weight is None) == (convention == "authors")
    inputs, dy = [x, *mixer.parameters()], sample(13)[1]
    y, want = mixer(x[None])[0][0], by_tokens(mixer, x, convention)
    assert relative(y.detach(), want.detach()) < 1e-12
    for found, expected in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True):
        assert relative(found, expected) < 1e-11


def test_without_the_rotation_it_is_another_layer():
    """78 % off in the spec's random test."""
    mixer, plain = (build(**RETNET, position=position) for position in (Rope(), None))
    plain.load_state_dict(mixer.state_dict())
    assert relative(mixer(sample())[0].detach(), plain(sample())[0].detach()) > 0.1


@pytest.mark.parametrize("position", [PairRope(), Rope(), HalfRope()], ids=lambda p: p.kind)
def test_a_read_depends_on_distances_alone(position):
    """Where every document may start at any number: after 50 tokens that left nothing, the rest reads as if it came first."""
    mixer, x = build(write=Delta(), position=position), sample(9)
    _, state = mixer(sample(9).repeat(1, 6, 1)[:, :50], output_final_state=True)
    empty = state._replace(write=torch.zeros_like(state.write), conv=torch.zeros_like(state.conv))
    assert empty.length.tolist() == [50, 50]
    assert relative(mixer(x, empty)[0].detach(), mixer(x)[0].detach()) < 1e-12


def test_the_count_of_tokens_is_eight_bytes_of_state_and_only_where_positions_count():
    with_positions, without = (
        Recurrent(heads=H, key_dim=K, value_dim=V, **RETNET, position=p).build(32) for p in (Rope(), None)
    )
    assert with_positions.state_size(100, torch.float32) == without.state_size(100, torch.float32) + 8
    assert without(sample().float(), output_final_state=True)[1].length is None


def test_a_head_that_a_position_cannot_turn_is_refused():
    with pytest.raises(ValueError, match="pair_rope: got vectors of 7 channels, expected a multiple of 2"):
        Recurrent(heads=H, key_dim=7, value_dim=V, **RETNET, position=PairRope()).build(32)
