"""ATMA's distractor loss in its Polar, nope and rope forms against loops over queries and heads, and where its gradient goes."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from needlework.layers import Attention, Canon, Distractor, HalfRope, Lucid, Memory, Polar, Softmax
from needlework.testing.compare import EXACT, assert_close, relative

DIM, HQ, HKV, D, T = 32, 4, 2, 8, 13
KINDS = {
    "polar": {"attend": Polar(), "conv": Canon()},
    "nope": {"attend": Softmax(), "conv": Canon()},
    "rope": {"attend": Softmax(scale=0.12), "position": HalfRope()},
}


def build(kind: str, window: int | None = None):
    """ATMA's layer in float64, away from starts at zero."""
    settings = dict(KINDS[kind])
    settings["attend"] = dataclasses.replace(settings["attend"], window=window)
    torch.manual_seed(0)
    mixer = Attention(
        heads=HQ, kv_heads=HKV, head_dim=D, qk_norm=True, output_gate=True, bias=True, memory=Memory(), **settings
    )
    mixer = mixer.build(DIM).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return mixer


def sample(B: int = 2, length: int = T) -> Tensor:
    return torch.randn(B, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def canon(weight: Tensor, x: Tensor) -> Tensor:
    """x [T C] + its causal depthwise convolution of width 4, newest tap last."""
    padded = torch.cat([x.new_zeros(3, x.shape[1]), x])
    return x + sum(weight[:, 0, j] * padded[j : j + len(x)] for j in range(4))


def turned(x: Tensor) -> Tensor:
    """Half-truncated rotary of x [T H d], as ATMA's code turns it: by minus the angle."""
    turning = 1024 ** -torch.linspace(0, 1, D // 4, dtype=torch.float64)
    angle = torch.arange(len(x)).double()[:, None, None] * torch.cat([turning, torch.zeros(D // 4).double()])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], -1)


def literal(mixer, kind: str, x: Tensor, X: Tensor, raw: bool = False) -> Tensor:
    """The mean over batch, head and query; of nope and rope also over channels."""
    found = []
    for row, noise in zip(x, X, strict=True):
        q = norm(mixer.q_proj(row).unflatten(-1, (HQ, 2 * D))[..., :D])
        k, v = norm(mixer.k_proj(row).unflatten(-1, (HKV, D))), mixer.v_proj(row).unflatten(-1, (HKV, D))
        if kind == "rope":
            q, k = turned(q), turned(k)
        else:
            flat = canon(mixer.conv.weight, torch.cat([z.flatten(1) for z in (q, k, v)], 1)).unflatten(-1, (-1, D))
            q, k, v = flat.split([HQ, HKV, HKV], 1)
        k_r = mixer.k_proj(noise).detach().unflatten(-1, (HKV, D))
        k_r, v_r = k_r if raw else norm(k_r), mixer.v_proj(noise).detach().unflatten(-1, (HKV, D))
        for h in range(HQ):
            g = h // (HQ // HKV)
            for i in range(len(row)):
                if kind == "polar":
                    n = i + 1
                    temp = 1 + softplus(mixer.attend.alpha[h]) * math.log(n)
                    null = mixer.attend.null_base[h] + softplus(mixer.attend.gamma[h]) * math.sqrt(math.log(n + 1))
                    a = torch.cat([temp * (k_r[:, g] @ q[i, h]) / math.sqrt(D), (temp * null)[None]])
                    found.append(a.softmax(0)[:-1].sum())
                else:
                    scale = 0.12 if kind == "rope" else D**-0.5
                    first = 0 if mixer.config.attend.window is None else max(0, i + 1 - mixer.config.attend.window)

                    def read(keys, values, query=q[i, h], scale=scale):
                        return (scale * keys @ query).softmax(0) @ values

                    y = read(k[first : i + 1, g], v[first : i + 1, g])
                    both = (torch.cat([z_r[:, g], z[: i + 1, g]]) for z_r, z in ((k_r, k), (v_r, v)))
                    found.append((read(*both) - y).square().mean())
    return torch.stack(found).mean()


def evaluated(function, mixer, x: Tensor):
    """The loss and its gradient to the input and every parameter, by the same random keys."""
    x = x.detach().requires_grad_()
    torch.manual_seed(2)
    loss = function(x)
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, (x, *parameters), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(("x", *names), gradients, strict=True))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_distractor_and_every_gradient_are_the_formula_s(kind, window):
    """temp and null at n_i = i + 1, and y' over all earlier keys, also where the layer has a window."""
    mixer, x = build(kind, window), sample()
    loss, gradients = evaluated(lambda x: mixer.distraction(x, Distractor()), mixer, x)
    expected, wanted = evaluated(lambda x: literal(mixer, kind, x, torch.randn_like(x)), mixer, x)
    assert expected > 1e-3 and relative(loss, expected) < EXACT
    assert_close(gradients, wanted, kind, 10 * EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_reaches_what_it_shall_and_nothing_else(kind):
    """Polar: q (and what made it), canon, α, γ, null_base. Softmax: q, k, v, canon. Never gates, outputs, memory; never k_r, v_r."""
    mixer = build(kind)
    _, gradients = evaluated(lambda x: mixer.distraction(x, Distractor()), mixer, sample())
    reached = {name for name, g in gradients.items() if g.any()}
    own = {"x", "q_proj.weight", "q_proj.bias"}
    if kind == "polar":
        assert reached == own | {"conv.weight", "attend.alpha", "attend.gamma", "attend.null_base"}
    else:
        both = {f"{z}_proj.{p}" for z in "kv" for p in ("weight", "bias")}
        assert reached == own | both | ({"conv.weight"} if kind == "nope" else set())
    query = gradients["q_proj.weight"].unflatten(0, (HQ, 2, D))
    assert query[:, 0].any() and not query[:, 1].any()  # the gate's half is not reached


@pytest.mark.parametrize("kind", KINDS)
def test_twice_the_batch_leaves_the_loss_and_its_gradient(kind, monkeypatch):
    mixer, x = build(kind), sample()
    noise = torch.randn_like(x)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise.repeat(len(x) // 2, 1, 1))
    one, first = evaluated(lambda x: mixer.distraction(x, Distractor()), mixer, x)
    two, second = evaluated(lambda x: mixer.distraction(x, Distractor()), mixer, torch.cat([x, x]))
    assert relative(two, one) < EXACT
    assert_close(second | {"x": 2 * second["x"][:2]}, first, kind)  # each token pulls half as hard


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_distracted_by_all_random_keys_and_attend_in_their_own(kind, monkeypatch):
    """A packed row is its documents, each beside the R random keys of the row."""
    mixer, x = build(kind), sample(1, 12)
    noise = torch.randn_like(x)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise)
    with torch.no_grad():
        packed = mixer.distraction(x, Distractor(), torch.tensor([0, 5, 12]))
        alone = [literal(mixer, kind, part, noise) for part in x.split([5, 7], 1)]
    assert relative(packed, (5 * alone[0] + 7 * alone[1]) / 12) < EXACT


def test_raw_keys_are_the_published_nope_s():
    mixer, x = build("nope"), sample()
    loss, _ = evaluated(lambda x: mixer.distraction(x, Distractor(raw_keys=True)), mixer, x)
    expected, _ = evaluated(lambda x: literal(mixer, "nope", x, torch.randn_like(x), raw=True), mixer, x)
    plain, _ = evaluated(lambda x: mixer.distraction(x, Distractor()), mixer, x)
    assert relative(loss, expected) < EXACT and relative(plain, expected) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_loss_is_float32_and_near(kind):
    mixer, x = build(kind), sample()
    exact, _ = evaluated(lambda x: mixer.distraction(x, Distractor()), mixer, x)
    torch.manual_seed(2)
    noise = torch.randn_like(x)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch, "randn_like", lambda x: noise.float())
        half = mixer.float().distraction(x.float(), Distractor())
    assert half.dtype == torch.float32 and abs(half / exact - 1) < 0.03


def test_other_attention_has_no_distractor():
    mixer = Attention(heads=HQ, head_dim=D, attend=Lucid()).build(DIM)
    with pytest.raises(ValueError, match="defined for polar and softmax attention, this layer has lucid"):
        mixer.distraction(sample().float(), Distractor())
