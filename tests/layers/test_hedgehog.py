"""Hedgehog's maps and layers against their page (spec/baselines.md): quadratic, with the sums of the weights written out."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from needlework.layers import CCQ, Attention, FixedGate, Hedgehog, Linear, LowRankGate, Memory, Recurrent, Softmax, distillation
from needlework.layers.config import Width
from needlework.layers.features import FeatureConfig, FeatureMap
from needlework.testing.compare import relative
from tests.layers.test_recurrent import DIM, H, K, V, build, finished, heads, projected, sample


def phi(x: Tensor, own, joint: bool) -> Tensor:
    """The features of one head's vectors x [.. K], of a map W [K K] and b or 0."""
    W, b = own
    y = x @ W.T + b
    up, down = y.exp(), (-y).exp()
    if joint:
        up, down = up.square(), down.square()
        return torch.cat([up, down], -1) / (up.sum(-1, keepdim=True) + down.sum(-1, keepdim=True))
    return torch.cat([up / up.sum(-1, keepdim=True), down / down.sum(-1, keepdim=True)], -1)


def mapped(module, x: Tensor, joint: bool) -> Tensor:
    """x [B T H K] -> [B T H 2K]."""
    shared = module.bias is not None
    own = [(module.weight, module.bias) if shared else (module.weight[h], 0.0) for h in range(H)]
    return torch.stack([phi(x[:, :, h], own[h], joint) for h in range(H)], 2)


@pytest.mark.parametrize("of", ("own", "shared"))
@pytest.mark.parametrize("map", ("halves", "joint"))
def test_a_hedgehog_layer_is_attention_by_its_features_with_every_gradient(map, of):
    write = Linear(features=Hedgehog(map=map, heads=of), normalise=True)
    mixer, x = build(write=write, conv=None), sample(13).requires_grad_()
    q, k, v = heads(projected(mixer, x))
    features = mixer.write.features
    q, k = mapped(features.q, q, map == "joint"), mapped(features.k, k, map == "joint")
    a = torch.einsum("bihc,bjhc->bhij", q, k).tril()
    o = torch.einsum("bhij,bjhv->bihv", a / (a.sum(-1, keepdim=True) + 1e-12), v)
    inputs, dy = [x, *mixer.parameters()], sample(13).flip(0)
    y, want = mixer(x)[0], finished(mixer, x, o)
    assert relative(y.detach(), want.detach()) < 1e-12
    for found, expected in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True):
        assert relative(found, expected) < 1e-11


def test_gla_hedgehog_shares_a_channels_gate_between_its_two_features():
    write = Linear(gate=LowRankGate(rank=4), features=Hedgehog(map="joint", heads="shared"))
    mixer, x = build(write=write, conv=None), sample(13)
    q, k, v = heads(projected(mixer, x))
    q, k = (mapped(m, z, True) for m, z in ((mixer.write.features.q, q), (mixer.write.features.k, k)))
    down, up = mixer.write.gate.project
    g = logsigmoid(x @ down.weight.T @ up.weight.T + up.bias).unflatten(-1, (H, K)) / 16
    S, o = x.new_zeros(2, H, 2 * K, V), []
    for t in range(x.shape[1]):
        S = torch.cat([g[:, t], g[:, t]], -1).exp()[..., None] * S + k[:, t, ..., None] * v[:, t, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    assert relative(mixer(x)[0].detach(), finished(mixer, x, torch.stack(o, 1)).detach()) < 1e-12


def test_more_channels_than_the_kernels_take_run_as_two_calls(monkeypatch):
    for write in (
        Linear(features=Hedgehog(), normalise=True),
        Linear(gate=LowRankGate(rank=4), features=Hedgehog(), normalise=True),
        Linear(gate=FixedGate(), features=Hedgehog()),
    ):
        whole = build(write=write)
        monkeypatch.setattr("needlework.layers.linear.WIDEST", 11)  # 16 features are 11 and 5
        cut = build(write=write)
        monkeypatch.undo()
        cut.load_state_dict(whole.state_dict())
        (y, one), (z, two) = (mixer(sample(), output_final_state=True) for mixer in (whole, cut))
        assert relative(z.detach(), y.detach()) < 1e-12
        assert relative(torch.cat(two.write, -2).detach(), one.write.detach()) < 1e-12


@dataclass(frozen=True, kw_only=True)
class Positive(FeatureConfig):
    """e^x: positive features as they are, in a test."""

    kind = "positive"

    def build(self, width: Width) -> FeatureMap:
        return _Positive(width)


class _Positive(FeatureMap):
    def __init__(self, width: Width):
        super().__init__()
        self.channels = width.key_dim

    def forward(self, q, k):
        return q.exp(), k.exp()


def test_with_positive_features_and_no_denominator_it_is_linear_attention():
    mixer, x = build(write=Linear(features=Positive()), conv=None), sample()
    q, k, v = heads(projected(mixer, x))
    a = torch.einsum("bihc,bjhc->bhij", q.exp(), k.exp()).tril()
    o = torch.einsum("bhij,bjhv->bihv", a, v)
    assert relative(mixer(x)[0].detach(), finished(mixer, x, o).detach()) < 1e-12


def test_both_maps_start_as_the_identity_and_are_two_functions():
    """42 % apart in the spec's random test."""
    width, x = Width(DIM, H, H, K, V), sample()[..., : H * K].unflatten(-1, (H, K))
    found = [Hedgehog(map=map).build(width).double()(x, x)[0] for map in ("halves", "joint")]
    halves = torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    joint = torch.cat([2 * x, -2 * x], -1).softmax(-1)
    assert relative(found[0].detach(), halves) < 1e-12 and relative(found[1].detach(), joint) < 1e-12
    assert relative(halves / 2, joint) > 0.1


def test_unnormalised_halves_weigh_a_key_by_hyperbolic_cosines():
    """W = I: with the sums of e^y and e^−y put back, φ(q)·φ(k) = 2 Σ_c cosh(q_c + k_c), the paper's exponential map."""
    q, k = sample()[..., : 2 * K].chunk(2, -1)
    features = Hedgehog().build(Width(DIM, 1, 1, K, V)).double()
    fq, fk = (x[..., 0, :].unflatten(-1, (2, K)) for x in features(q[..., None, :], k[..., None, :]))
    sums = lambda x: torch.stack([x.exp().sum(-1), (-x).exp().sum(-1)], -1)  # [B T 2]
    weight = ((fq * fk).sum(-1) * sums(q) * sums(k)).sum(-1)
    assert relative(weight.detach(), 2 * torch.cosh(q + k).sum(-1)) < 1e-12


def test_disjoint_halves_leave_a_read_finite_in_float32():
    features = Hedgehog().build(Width(DIM, 1, 1, K, V))
    x = torch.zeros(1, 1, 1, K)
    x[..., 0] = 60
    q, k = features(x, -x)
    assert q.min() >= 1e-12 and (q * k).sum() > 0


def test_a_map_that_heads_share_has_its_page_s_parameters():
    """2(K² + K) a layer at K 256: 131,584."""
    with torch.device("meta"):
        width = Width(1024, 6, 6, 256, 512)
        shared, own = (Hedgehog(map="joint", heads=of).build(width) for of in ("shared", "own"))
    count = lambda module: sum(p.numel() for p in module.parameters())
    assert count(shared) == 131_584 and count(own) == 2 * 6 * 256**2


def test_the_state_is_its_pages():
    """4·HV·2K·(V + 1) bytes."""
    mixer = build(write=Linear(features=Hedgehog(), normalise=True), conv=None, value_heads=2 * H)
    assert mixer.state_size(1000, torch.bfloat16) == 4 * 2 * H * 2 * K * (V + 1)


def test_distillation_has_its_loss_and_its_hand_derived_gradient():
    torch.manual_seed(0)
    B, T = 2, 7
    q, k = torch.randn(2, B, T, H, K, dtype=torch.float64)
    features = Hedgehog().build(Width(DIM, H, H, K, V)).double()
    with torch.no_grad():
        for p in features.parameters():
            p.add_(0.3 * torch.randn_like(p))
    fq, fk = (x.detach().requires_grad_() for x in features(q, k))

    class Given(FeatureMap):
        def forward(self, q, k):
            return fq, fk

    loss = distillation(Given(), q, k)
    want, dq, dk = 0.0, torch.zeros_like(fq), torch.zeros_like(fk)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                p = torch.softmax(torch.stack([q[b, i, h] @ k[b, j, h] for j in range(i + 1)]) / K**0.5, 0)
                a = torch.stack([fq[b, i, h] @ fk[b, j, h] for j in range(i + 1)]).detach()
                want -= (p * (a / a.sum()).log()).sum() / (B * H * T)
                for j in range(i + 1):
                    slope = (1 / a.sum() - p[j] / a[j]) / (B * H * T)
                    dq[b, i, h] += slope * fk[b, j, h].detach()
                    dk[b, j, h] += slope * fq[b, i, h].detach()
    assert relative(loss.detach(), want) < 1e-12
    for found, expected in zip(torch.autograd.grad(loss, (fq, fk)), (dq, dk), strict=True):
        assert relative(found, expected) < 1e-12
    distillation(features, q, k).backward()
    assert all(p.grad.any() for p in features.parameters())


def test_what_cannot_be_says_why():
    with pytest.raises(ValueError, match="linear: normalise is True, expected False without features"):
        Linear(normalise=True)
    with pytest.raises(ValueError, match="ccq: linear has normalise=True, expected False"):
        Recurrent(heads=H, key_dim=K, value_dim=V, write=Linear(features=Hedgehog(), normalise=True), read=CCQ()).build(DIM)
    with pytest.raises(ValueError, match=r"memory: write is .*expected a rule of one row a token without features"):
        Attention(heads=H, head_dim=K, attend=Softmax(), memory=Memory(write=Linear(features=Hedgehog()))).build(DIM)
