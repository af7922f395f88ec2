"""SSMax, ALiBi and forgetting attention, query by query from their equations: whole, in a window, after pages and packed."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from needlework.layers import Alibi, Attention, Fox, Softmax, SSMax
from needlework.layers.alibi import slopes
from needlework.layers.config import Width
from needlework.testing.compare import EXACT, relative

DIM, HQ, HKV, D, T = 8, 6, 2, 4, 23


def tensors(T=T, B=1, seed=0):
    """x [B T D] of the layer, and q, k, v by heads."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (B, T, DIM), (B, T, HQ, D), (B, T, HKV, D), (B, T, HKV, D)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def rule(config):
    torch.manual_seed(0)
    made = config.build(Width(DIM, HKV, HQ, D, D)).double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return made


def by_queries(made, x, q, k, v, start=0):
    """o [T Hq V] of one sequence."""
    c, o = made.config, []
    if isinstance(c, Fox):
        G = logsigmoid(x @ made.project.weight.T + made.project.bias).cumsum(0)
    for i in range(len(q)):
        own = []
        for h in range(HQ):
            seen = [j for j in range(i + 1) if c.window is None or i - j < c.window]
            a = torch.stack([q[i, h] @ k[j, h // (HQ // HKV)] for j in seen]) * (c.scale or D**-0.5)
            if isinstance(c, SSMax):
                a = a * made.s[h] * math.log(len(seen))
            if isinstance(c, Alibi):
                a = a - slopes(HQ)[h] * torch.tensor([i - j for j in seen], dtype=a.dtype)
            if isinstance(c, Fox):
                a = a + torch.stack([G[i, h] - G[j, h] for j in seen])
            own.append(a.softmax(0) @ torch.stack([v[j, h // (HQ // HKV)] for j in seen]))
        o.append(torch.stack(own))
    return torch.stack(o)


RULES = [
    kind(window=window, scale=scale) for kind in (SSMax, Alibi, Fox) for window, scale in ((None, None), (5, 0.7), (1, None))
]
CARRY = {"initial_state": None, "output_final_state": False, "cu_seqlens": None}


@pytest.mark.parametrize("config", RULES, ids=lambda c: f"{c.kind}-{c.window}")
def test_a_rule_is_its_equation_with_every_gradient(config):
    made, given = rule(config), tensors()
    given = [z.requires_grad_() for z in given]
    o, _, _ = made(*given, **CARRY)
    want = by_queries(made, *(z[0] for z in given))
    assert relative(o[0].detach(), want.detach()) <= EXACT
    inputs, do = (
        [*given, *made.parameters()],
        torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype),
    )
    found, expected = (torch.autograd.grad(z, inputs, do, allow_unused=True, materialize_grads=True) for z in (o[0], want))
    scale = max(float(g.norm()) for g in expected)
    for got, one in zip(found, expected, strict=True):
        assert float((got - one).norm()) <= EXACT * max(float(one.norm()), 1e-3 * scale)


@torch.no_grad()
@pytest.mark.parametrize("config", [c for c in RULES if c.window != 1], ids=lambda c: f"{c.kind}-{c.window}")
def test_pages_and_packing_change_nothing(config):
    made, given = rule(config), tensors()
    whole, _, _ = made(*given, **CARRY)
    state, parts = None, []
    for piece in zip(*(z.split([1, 9, 1, 12], 1) for z in given), strict=True):
        o, _, state = made(*piece, initial_state=state, output_final_state=True, cu_seqlens=None)
        parts.append(o)
    assert relative(torch.cat(parts, 1), whole) <= EXACT
    ends = torch.tensor([0, 4, 4, 23])
    packed, _, _ = made(*given, **CARRY | {"cu_seqlens": ends})
    for a, b in ((0, 4), (4, 23)):
        own, _, _ = made(*(z[:, a:b] for z in given), **CARRY)
        assert relative(packed[:, a:b], own) <= EXACT


def test_alibis_slopes_are_its_papers():
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(16) == pytest.approx([2 ** (-h / 2) for h in range(1, 17)], rel=1e-15)
    assert slopes(12) == pytest.approx([*slopes(8), *slopes(16)[0:8:2]], rel=1e-15)
    assert slopes(1) == [2.0**-8]


@torch.no_grad()
def test_alibi_is_forgetting_attention_whose_gates_are_constants():
    """ln f = −m."""
    alibi, fox, given = rule(Alibi()), rule(Fox()), tensors()
    fox.project.weight.zero_()
    fox.project.bias.copy_(torch.tensor([math.exp(-m) for m in slopes(HQ)], dtype=torch.float64).logit())
    assert relative(fox(*given, **CARRY)[0], alibi(*given, **CARRY)[0]) <= EXACT


@torch.no_grad()
def test_a_gate_that_forgets_nothing_and_a_scale_that_does_not_grow_are_softmax_attention():
    softmax, fox, given = rule(Softmax()), rule(Fox()), tensors()
    fox.project.bias.fill_(torch.inf)
    assert relative(fox(*given, **CARRY)[0], softmax(*given, **CARRY)[0]) <= EXACT
    ssmax = rule(SSMax())
    ssmax.s.fill_(1 / math.log(T))
    assert relative(ssmax(*given, **CARRY)[0][:, -1], softmax(*given, **CARRY)[0][:, -1]) <= EXACT


@torch.no_grad()
def test_a_long_past_costs_no_digit():
    """In float32, after gates that sum to −1e6: the differences are those of float64, where a float32 sum would be off by 0.06."""
    made, given = rule(Fox()), [z.float() for z in tensors(T=40)]
    _, _, state = made.float()(*(z[:, :20] for z in given), **CARRY | {"output_final_state": True})
    far = state._replace(decay=state.decay - 1e6, total=state.total - 1e6)
    rest = [z[:, 20:] for z in given]
    near, late = (made(*rest, **CARRY | {"initial_state": s})[0] for s in (state, far))
    assert relative(late.double(), near.double()) <= 16 * torch.finfo(torch.float32).eps


def test_what_is_held_of_a_token():
    """Forgetting attention: 8 Hq bytes a token beside k and v, and 8 Hq of a sequence; the others what softmax attention holds."""
    size = lambda attend: (
        Attention(heads=HQ, kv_heads=HKV, head_dim=D, attend=attend).build(DIM).state_size(100, torch.bfloat16)
    )
    plain = 100 * 2 * HKV * D * 2 + 8
    assert size(Softmax()) == size(SSMax()) == size(Alibi()) == plain
    assert size(Fox()) == plain + 100 * 8 * HQ + 8 * HQ
    assert size(Fox(window=10)) == 10 * (2 * HKV * D * 2 + 8 * HQ) + 8 + 8 * HQ
