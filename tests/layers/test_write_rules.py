"""The write rules beside the papers' own, token by token from their equations (spec/baselines.md), with every gradient."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from needlework.layers import (
    ChannelGate,
    Comba,
    Delta,
    DeltaProduct,
    Gdn2,
    Longhorn,
    OutputGate,
    Recurrent,
    Rwkv7,
    ScalarGate,
)
from needlework.testing.compare import relative
from tests.layers.test_recurrent import DIM, H, K, V, build, finished, heads, projected, sample, unit

HV = 2 * H


def recurrence(q: Tensor, decay: Tensor | None, writes, scale: float) -> Tensor:
    """o of q [B T HV K]: S ← Diag(decay) S, then S ← S − w (past ᵀ e)ᵀ + w uᵀ for each (w, e, u, past?) of `writes(t)` in order.

    past?: e reads the state before the token's decay.
    """
    S, o = q.new_zeros(*q.shape[::2], K, V), []
    for t in range(q.shape[1]):
        before = S
        if decay is not None:
            S = decay[:, t, :, None, None] * S if decay.dim() == 3 else decay[:, t, ..., None] * S
        for w, e, u, past in writes(t):
            read = torch.einsum("bhkv,bhk->bhv", before if past else S, e)
            S = S + w[..., None] * (u - read)[..., None, :]
        o.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(o, 1)


def same(mixer, x: Tensor, o: Tensor) -> None:
    """The layer's y and gradients are those of what was read, o."""
    inputs, dy = [x, *mixer.parameters()], sample(13).flip(0)
    y, want = mixer(x)[0], finished(mixer, x, o)
    assert relative(y.detach(), want.detach()) < 1e-12
    for found, expected in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True):
        assert relative(found, expected) < 1e-11


def given(**config):
    return build(conv=None, **config), sample(13).requires_grad_()


def decayed(gate, x: Tensor) -> Tensor:
    return (-gate.A_log.exp() * softplus(x @ gate.project.weight.T + gate.dt_bias)).exp()


def grouped(x: Tensor) -> Tensor:
    """A key head for each of its value heads."""
    return x.repeat_interleave(HV // H, -2)


@pytest.mark.parametrize("n", (1, 2, 3))
def test_deltaproduct_is_n_delta_rules_a_token(n):
    mixer, x = given(write=DeltaProduct(write_rank=n), value_heads=HV)
    q, k, v = projected(mixer, x).split([H * K, H * n * K, HV * n * V], -1)
    q = grouped(unit(q.unflatten(-1, (H, K))))
    k, v = unit(k.unflatten(-1, (H, n, K))).repeat_interleave(HV // H, 2), v.unflatten(-1, (HV, n, V))
    beta = 2 * torch.sigmoid(x @ mixer.write.beta.project.weight.T).unflatten(-1, (HV, n))

    def writes(t):
        for i in range(n):
            strength = beta[:, t, :, i, None]
            yield strength * k[:, t, :, i], k[:, t, :, i], v[:, t, :, i], False

    same(mixer, x, recurrence(q, decayed(mixer.write.gate, x), writes, K**-0.5))


def test_deltaproduct_of_one_is_gated_deltanet():
    one, delta = (build(write=write) for write in (DeltaProduct(write_rank=1), Delta(gate=ScalarGate(), allow_neg_eigval=True)))
    one.load_state_dict(delta.state_dict())
    assert relative(one(sample())[0].detach(), delta(sample())[0].detach()) < 1e-12


def test_comba_feeds_back_from_the_state_before_its_decay_and_corrects_its_query():
    mixer, x = given(write=Comba(), value_heads=HV)
    q, k, v = heads(projected(mixer, x), HV)
    q, k, rule = grouped(unit(q)), grouped(unit(k)), mixer.write
    beta = torch.sigmoid(x @ rule.beta.project.weight.T)
    share = torch.sigmoid(rule.feedback)[:, None]
    writes = lambda t: [(beta[:, t, :, None] * k[:, t], share * k[:, t], v[:, t], True)]
    same(mixer, x, recurrence(q - rule.correction[:, None] * k, decayed(rule.gate, x), writes, K**-0.5))


def test_comba_with_full_feedback_no_decay_and_no_correction_is_deltanet():
    comba, delta = build(write=Comba()), build(write=Delta())
    comba.load_state_dict(delta.state_dict(), strict=False)
    with torch.no_grad():
        comba.write.feedback.fill_(torch.inf)
        comba.write.correction.zero_()
        comba.write.gate.A_log.fill_(-torch.inf)
    assert relative(comba(sample())[0].detach(), delta(sample())[0].detach()) < 1e-12


def test_longhorn_solves_each_token_s_regression():
    """The closed form against the normal equations of ‖S − S'‖² + β‖v − Sᵀk‖²: (I + β k kᵀ) S = S' + β k vᵀ."""
    mixer, x = given(write=Longhorn(), value_heads=HV)
    q, k, v = heads(projected(mixer, x), HV)
    q, k = grouped(q), grouped(k)
    beta = torch.sigmoid(x @ mixer.write.beta.project.weight.T)
    S, o = x.new_zeros(2, HV, K, V), []
    for t in range(13):
        A = torch.eye(K, dtype=x.dtype) + beta[:, t, :, None, None] * k[:, t, ..., None] * k[:, t, :, None]
        S = torch.linalg.solve(A, S + beta[:, t, :, None, None] * k[:, t, ..., None] * v[:, t, :, None])
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / K**0.5)
    same(mixer, x, torch.stack(o, 1))


def rwkv7(mixer, x: Tensor):
    """q, v, and the decay, share, direction and written key of its page."""
    q, k, v = heads(projected(mixer, x))
    rule = mixer.write
    logit = lambda m, inner: inner(x @ m[0].weight.T) @ m[-1].weight.T + m[-1].bias
    w = (-math.exp(-0.5) * torch.sigmoid(logit(rule.decay, torch.tanh))).exp().unflatten(-1, (H, K))
    a = torch.sigmoid(logit(rule.share, lambda z: z)).unflatten(-1, (H, K))
    return q, v, w, a, unit(rule.xi * k), k * (1 + (a - 1) * rule.alpha)


def test_rwkv_7_takes_out_along_one_direction_and_writes_along_another():
    mixer, x = given(write=Rwkv7(rank=3))
    q, v, w, a, direction, key = rwkv7(mixer, x)
    zero = torch.zeros_like(v[:, 0])

    def writes(t):
        yield a[:, t] * direction[:, t], direction[:, t], zero, True
        yield key[:, t], torch.zeros_like(key[:, t]), v[:, t], False

    same(mixer, x, recurrence(q, w, writes, 1.0))


def test_rwkv_7_is_its_transition_matrix():
    """S ← (Diag(w) − (a ⊙ κ̂) κ̂ᵀ) S + k̃ vᵀ."""
    mixer, x = build(write=Rwkv7(rank=3), conv=None), sample(13)
    q, v, w, a, direction, key = rwkv7(mixer, x)
    S, o = x.new_zeros(2, H, K, V), []
    for t in range(13):
        turn = torch.diag_embed(w[:, t]) - (a * direction)[:, t, :, :, None] * direction[:, t, :, None]
        S = turn @ S + key[:, t, ..., None] * v[:, t, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    assert relative(mixer(x)[0].detach(), finished(mixer, x, torch.stack(o, 1)).detach()) < 1e-12


def test_rwkv_7_groups_no_values():
    with pytest.raises(ValueError, match="rwkv7: value_heads is 4, expected heads = 2"):
        Recurrent(heads=H, value_heads=HV, key_dim=K, value_dim=V, write=Rwkv7()).build(DIM)


@pytest.mark.parametrize("write", [Delta, Gdn2], ids=lambda write: write.kind)
def test_negative_eigenvalues_double_the_erase_gate_alone(write):
    once, twice = (build(write=write(allow_neg_eigval=wanted)) for wanted in (False, True))
    one, two = (mixer.write.gates(sample())[0] for mixer in (once, twice))
    for name in one.keys() - {"g"}:
        assert torch.equal(two[name], one[name] if name == "write" else 2 * one[name])


@pytest.mark.parametrize(("activation", "act"), [("sigmoid", torch.sigmoid), ("silu", silu)])
def test_an_output_gate_goes_through_a_bottleneck_of_v_channels(activation, act):
    """KDA: σ(W₂W₁x + b), W₁ D → V, after the norm; GDN-2: silu of the same rank."""
    mixer, x = build(write=Delta(), output_gate=OutputGate(activation=activation), conv=None), sample()
    ungated = build(write=Delta(), output_gate=False, conv=None)
    ungated.load_state_dict({name: p for name, p in mixer.state_dict().items() if not name.startswith("g_proj")})
    down, up = mixer.g_proj
    assert down.weight.shape == (V, DIM) and down.bias is None and up.bias.shape == (H * V,)
    with torch.no_grad():
        ungated.o_proj = torch.nn.Identity()
        want = (ungated(x)[0] * act(x @ down.weight.T @ up.weight.T + up.bias)) @ mixer.o_proj.weight.T
    assert relative(mixer(x)[0].detach(), want) < 1e-12


def test_a_channel_gate_starts_as_kda_and_gdn_2_were_published():
    """A_log = log U(1, 16); a scalar gate, Gated DeltaNet's, begins at 0."""
    n = 4096
    torch.manual_seed(0)
    for gate, low in ((ChannelGate(rank=1), 1), (ScalarGate(), 0)):
        A = Recurrent(heads=n, key_dim=1, value_dim=1, write=Delta(gate=gate), conv=None).build(1).write.gate.A_log.exp()
        assert low <= A.min() and A.max() <= 16
        assert abs(A.mean() - (16 + low) / 2) < 4 * (16 - low) / (12 * n) ** 0.5  # four standard errors of a uniform's mean
        assert A.min() < low + 0.1
