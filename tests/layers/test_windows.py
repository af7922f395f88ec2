"""Every attend rule in a window, written out query by query: whole, in pieces after pages, and packed. The op's two forms and the
layers' masks, pages and kernels are compared with each other elsewhere: a window that is wrong in all of them shows only here."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from needlework.layers import Differential, Lucid, Polar, Softmax
from needlework.layers.config import Width
from needlework.ops.attention import fused as attention
from needlework.testing.compare import EXACT, relative

DIM, HQ, HKV, D = 8, 4, 2, 16
T = 70  # more than a block of 64
WINDOWS = (1, 4, 66)


def seen(i: int, window: int) -> list[int]:
    """The token itself and the window − 1 before it."""
    return [j for j in range(i + 1) if i - j < window]


def softmax_of(q, k, v, window):
    """o_i = Σ_j softmax_j(q_i·k_j / √d) v_j; q, k [T d], v [T V]."""
    rows = [torch.softmax(k[seen(i, window)] @ q[i] / math.sqrt(len(q[i])), 0) @ v[seen(i, window)] for i in range(len(q))]
    return torch.stack(rows)


def solved(k, v, window, rowmax):
    """y_i A_ii = v_i − Σ_{j<i} A_ij y_j over what the window shows; A_ij = e^{√d (k̂_i·k̂_j − 1)}, or e^{s_ij − max_j s_ij}."""
    y, unit, root = [], k / k.norm(dim=-1, keepdim=True), math.sqrt(k.shape[1])
    for i in range(len(k)):
        at = seen(i, window)
        s = k[at] @ k[i] / root if rowmax else root * (unit[at] @ unit[i] - 1)
        A = (s - s.max()).exp() if rowmax else s.exp()
        y.append((v[i] - sum((a * y[j] for a, j in zip(A[:-1], at[:-1], strict=True)), 0 * v[i])) / A[-1])
    return torch.stack(y)


def softmax_head(rule, h, q, k, v, window):
    return softmax_of(q, k, v, window), None


def differential_head(rule, h, q, k, v, window):
    q1, k1, q2, k2 = rule.vectors
    lam = (q1 @ k1).exp() - (q2 @ k2).exp() + rule.start
    first, second = (softmax_of(a, b, v, window) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
    o = first - lam * second
    return (1 - rule.start) * rule.norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt(), None


def lucid_head(rule, h, q, k, v, window):
    y = solved(k, v, len(k) if rule.config.solve == "global" else window, rule.config.precondition == "rowmax")
    return softmax_of(q, k, y, window), None


def polar_head(rule, h, q, k, v, window):
    directions, magnitudes = [], []
    for i in range(len(q)):
        at = seen(i, window)
        n = torch.tensor(len(at), dtype=q.dtype)
        temp = 1 + softplus(rule.alpha[h]) * n.log()
        null = rule.null_base[h] + softplus(rule.gamma[h]) * (n + 1).log().sqrt()
        *w, w_null = torch.softmax(temp * torch.cat([k[at] @ q[i] / math.sqrt(D), null[None]]), 0)
        w = torch.stack(w)
        s = w @ v[at] + w_null * rule.v_null[h]
        m_eff = w.sum() / (w / w.sum()).square().sum()
        directions.append(s / s.norm())
        magnitudes.append(torch.tanh(softplus(rule.beta[h]) * (1 + m_eff).log()))
    return torch.stack(directions), torch.stack(magnitudes)


RULES = {
    "softmax": (Softmax, {}, softmax_head),
    "differential": (Differential, {}, differential_head),
    "lucid": (Lucid, {}, lucid_head),
    "lucid, rowmax": (Lucid, {"precondition": "rowmax"}, lucid_head),
    "lucid, solved globally": (Lucid, {"solve": "global"}, lucid_head),
    "polar": (Polar, {}, polar_head),
}


def build(kind, settings, window):
    torch.manual_seed(0)
    rule = kind(window=window, **settings).build(Width(DIM, HKV, HQ, D, D, False)).double()
    with torch.no_grad():
        for p in rule.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return rule


def tokens(B: int):
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, T, DIM), (B, T, HQ, D), (B, T, HKV, D), (B, T, HKV, D))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def definition(head, rule, q, k, v, window):
    """o [T Hq V] of one document, and what the rule adds [T dim]; query head h reads key head h // (Hq / Hkv)."""
    group = HQ // HKV
    found = [head(rule, h, q[:, h], k[:, h // group], v[:, h // group], window) for h in range(HQ)]
    o = torch.stack([o for o, _ in found], 1)
    return o, None if found[0][1] is None else torch.stack([m for _, m in found], 1) @ rule.mag_proj.weight.T


def agrees(o, added, want):
    for got, exact in (
        (o, torch.cat([o for o, _ in want])),
        *([] if added is None else [(added, torch.cat([a for _, a in want]))]),
    ):
        assert relative(got.flatten(0, 1), exact) <= EXACT


each = pytest.mark.parametrize(("kind", "settings", "head"), RULES.values(), ids=RULES)
windows = pytest.mark.parametrize("window", WINDOWS)


@torch.no_grad()
@windows
@each
def test_a_window_shows_a_token_and_as_many_before_it_as_it_says(kind, settings, head, window):
    """At once, and in pieces: an empty cache, pages that fill, a ring that goes round, one token."""
    rule, (x, q, k, v) = build(kind, settings, window), tokens(2)
    want = [definition(head, rule, q[b], k[b], v[b], window) for b in range(2)]
    o, added, _ = rule(x, q, k, v, initial_state=None, output_final_state=False, cu_seqlens=None)
    agrees(o, added, want)
    state, pieces = None, []
    for piece in zip(*(z.split((2, 5, 62, 1), 1) for z in (x, q, k, v)), strict=True):
        *made, state = rule(*piece, initial_state=state, output_final_state=True, cu_seqlens=None)
        pieces.append(made)
    o, added = (None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*pieces, strict=True))
    agrees(o, added, want)


@torch.no_grad()
@windows
@each
def test_packed_documents_have_the_window_each(kind, settings, head, window):
    """From nothing, and each after pages of its own."""
    rule, (x, q, k, v) = build(kind, settings, window), tokens(1)
    first, second = torch.tensor([0, 1, 1, 8]), torch.tensor([0, 0, 3, 62])  # documents of 1, 3 and 66 tokens
    *made, state = rule(*(z[:, :8] for z in (x, q, k, v)), initial_state=None, output_final_state=True, cu_seqlens=first)
    *more, _ = rule(*(z[:, 8:] for z in (x, q, k, v)), initial_state=state, output_final_state=False, cu_seqlens=second)
    places = [[*range(a, b), *range(8 + c, 8 + d)] for a, b, c, d in zip(first, first[1:], second, second[1:], strict=False)]
    want = [definition(head, rule, *(z[0, at] for z in (q, k, v)), window) for at in places]
    order = torch.tensor([token for at in places for token in at])
    o, added = (None if a is None else torch.cat([a, b], 1)[:, order] for a, b in zip(made, more, strict=True))
    agrees(o, added, want)


@torch.no_grad()
@windows
def test_a_streamed_window_is_the_window(window):
    """The path of a GPU, its blocks' masks asked one pair at a time."""
    bound = attention.oldest(torch.empty(1, T, 1, 1), torch.tensor([0, 3, 3, T]), window)
    mask = attention.visible(bound).mask_mod
    start = lambda i: 0 if i < 3 else 3
    for i in range(T):
        assert [j for j in range(T) if mask(0, 0, torch.tensor(i), torch.tensor(j))] == [
            start(i) + j for j in seen(i - start(i), window)
        ]
