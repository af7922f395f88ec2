"""What CCQ's paper and its settled page claim, bad input, and the hand-derived backward, tensor by tensor."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from needlework.ops.ccq import CurvatureState, chunk_ccq, empty_state, recurrent_ccq, step_ccq
from needlework.ops.ccq.reference import literal_ccq
from needlework.ops.ccq.spec import H, K, sample
from needlework.ops.common.samples import normal, uniform, unit
from needlework.testing.compare import assert_close, differentiate, relative
from needlework.testing.errors import operand


def inputs_of(B: int, T: int, *, seed: int = 0, **settings) -> dict[str, Tensor]:
    return sample(torch.Generator().manual_seed(seed), B, T, "random", **settings)


def state_of(n: list[float]) -> CurvatureState:
    """One row for each n; nothing in the rows where n = 0."""
    g = torch.Generator().manual_seed(1)
    keys = normal(g, len(n), H, 5, K)
    n = torch.tensor(n, dtype=torch.float64)[:, None].expand(-1, H).contiguous()
    return CurvatureState((keys.mT @ keys) * (n > 0)[..., None, None], keys.mean(2) * (n > 0)[..., None], n)


# gradients: "CCQ" of the settled backward, carried by the centred state


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
@pytest.mark.parametrize("groups", [1, 3])
def test_every_gradient_is_autograd_of_the_definition(groups, aligned, packed):
    B, T, n = (1, 45, [0, 7, 3, 2]) if packed else (3, 45, [0, 7, 3])
    settings = {"cu_seqlens": torch.tensor([0, 20, 20, 21, 45])} if packed else {}
    inputs = inputs_of(B, T, HV=groups * H, aligned=aligned)
    state = state_of(n)._asdict()

    def run(op):
        def call(x):
            given = CurvatureState(*(x[name] for name in state))
            rest = {name: x[name] for name in inputs}
            return op(**rest, initial_state=given, output_final_state=True, **settings)

        return differentiate(call, inputs | state)

    fast, exact = run(lambda **x: chunk_ccq(**x, chunk_size=16)), run(recurrent_ccq)
    assert_close(fast[0], exact[0], "value")
    assert_close(fast[1], exact[1], "gradient")


def test_dg_at_a_gate_of_minus_thirty_is_right_in_float32():
    """backward.md, "dg without cancellation": the row identity is noise there. Here T terms are summed, each rounded."""
    T = 128
    x = sample(torch.Generator().manual_seed(0), 2, T, "strong", aligned=True)
    x = {name: t.float() for name, t in x.items()}
    dg = differentiate(lambda x: (chunk_ccq(**x).q,), x)[1]["dg"]
    exact = differentiate(lambda x: (recurrent_ccq(**x).q,), {name: t.double() for name, t in x.items()})[1]["dg"]
    hard = x["g"] == -30
    assert (dg - exact)[hard].norm() <= T * torch.finfo(torch.float32).eps * exact[hard].norm()


@torch.no_grad()
def test_the_gradients_are_the_pages_formulas():
    """ccq.md: dq = (I − λΣ) dq̃, the forward op applied to dq̃; dλ_t = −dq̃_t·Σ_t q_t; and with c_t = λ_t/t

    dk_s = −N_s k_s + Σ_{t≥s} c_t [q_t (μ_t·dq̃_t) + dq̃_t (μ_t·q_t)],   N_s = Σ_{t≥s} c_t (q_t dq̃_tᵀ + dq̃_t q_tᵀ)
    """
    T = 40
    x = inputs_of(2, T)
    q, k, eta = x["q"], x["k"], x["eta"]
    y = torch.randn(q.shape, generator=torch.Generator().manual_seed(3), dtype=q.dtype)
    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (q, k, eta)]
        dq, dk, deta = torch.autograd.grad(chunk_ccq(*leaves).q, leaves, y)
    t = torch.arange(1, T + 1, dtype=q.dtype)[:, None, None]
    mean = k.cumsum(1) / t
    Sq = torch.einsum("bthkl,bthl->bthk", torch.einsum("bthk,bthl->bthkl", k, k).cumsum(1), q) / t
    Sq = Sq - mean * (mean * q).sum(-1, keepdim=True)
    later = lambda z: z.flip(1).cumsum(1).flip(1)
    c = eta[..., None] / t
    cross = torch.einsum("bthk,bthl->bthkl", c * q, y)
    N = later(cross + cross.mT)
    r = later(c * (q * (mean * y).sum(-1, keepdim=True) + y * (mean * q).sum(-1, keepdim=True)))
    page = {"dq": chunk_ccq(y, k, eta).q, "deta": -(y * Sq).sum(-1), "dk": r - torch.einsum("bthkl,bthl->bthk", N, k)}
    assert_close({"dq": dq, "deta": deta, "dk": dk}, page, "the page's gradient")


# the operator


@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
def test_no_direction_grows_and_none_is_lost(aligned):
    """ccq.md: the spectrum of I − λΣ lies in (0, 1]."""
    T = 70
    x = inputs_of(1, T, aligned=aligned)
    basis = torch.eye(K, dtype=torch.float64).repeat_interleave(H, 0).view(K, 1, H, K)
    table = CurvatureState(*(t.expand(K, *t.shape[1:]).clone() for t in empty_state(1, H, K, dtype=torch.float64)))
    for t in range(T):
        rest = {name: v[:, t].expand(K, *v.shape[2:]) for name, v in x.items() if name != "q"}
        cleaner = step_ccq(basis[:, 0], **rest, state=table).transpose(0, 1)  # [H K K]
        spectrum = torch.linalg.eigvalsh(cleaner)
        assert (spectrum > 0).all() and (spectrum <= 1 + 1e-14).all()
    assert (chunk_ccq(**x).q.norm(dim=-1) <= x["q"].norm(dim=-1) * (1 + 1e-14)).all()


def test_without_the_count_the_query_grows_with_the_sequence():
    """The paper: without the 1/t CCQ diverges on long sequences. The keys are isotropic, so Σ ≈ I/K and the factor is 1 − λt/K."""
    x = inputs_of(1, 1024)
    state = chunk_ccq(**x, output_final_state=True).state
    q, eta = x["q"][:, -1], 0.5
    unnormalised = q - eta * torch.einsum("bhkl,bhl->bhk", state.C, q)
    assert unnormalised.norm() > 0.9 * (eta * 1024 / K - 1) * q.norm()
    assert (q - eta * torch.einsum("bhkl,bhl->bhk", state.C / state.n[..., None, None], q)).norm() < q.norm()


def test_decaying_channels_separately_gives_an_indefinite_covariance():
    """ccq.md: the weights of one sum must be scalars per key; its example has the eigenvalue −0.23."""
    g = torch.Generator().manual_seed(0)
    keys, decay = unit(normal(g, 40, 4)), torch.tensor([0.05, 0.3, 0.8, 0.99], dtype=torch.float64)
    M, s, n = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    lowest = 0.0
    for k in keys:
        M, s, n = decay[:, None] * M + torch.outer(k, k), decay * s + k, decay * n + 1
        covariance = M / n[:, None] - torch.outer(s / n, s / n)
        lowest = min(lowest, float(torch.linalg.eigvalsh((covariance + covariance.mT) / 2)[0]))
    assert lowest < -0.05


def test_the_margin_of_target_over_distractor_grows_as_appendix_g_says():
    """Σ = σ² p pᵀ: the margin grows by λσ² (p·q)(p·k_d − p·k_τ)."""
    g = torch.Generator().manual_seed(0)
    p, q, target, distractor = unit(normal(g, 4, K))
    sigma, eta = 0.8, 0.6
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(8)
    k = (signs[:, None] * sigma * p).view(1, 16, 1, K)
    rows = q.expand(1, 16, 1, K)
    cleaned = chunk_ccq(rows, k, torch.full((1, 16, 1), eta, dtype=torch.float64)).q[0, -1, 0]
    gain = (cleaned - q) @ (target - distractor)
    torch.testing.assert_close(gain, eta * sigma**2 * (p @ q) * (p @ distractor - p @ target), rtol=1e-12, atol=0)


# the state


@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
def test_two_halves_merge_into_the_whole(aligned):
    """Chan's merge: C = e^G C_a + C_b + (n m/(n+m)) d dᵀ, so that a sequence can be split over machines."""
    x = inputs_of(2, 80, aligned=aligned)
    a, b, whole = (
        chunk_ccq(**{name: t[:, part] for name, t in x.items()}, output_final_state=True).state
        for part in (slice(0, 37), slice(37, 80), slice(0, 80))
    )
    decay = x["g"][:, 37:].sum(1).exp() if aligned else torch.ones_like(a.n)
    n, d = decay * a.n, b.mean - a.mean
    total = n + b.n
    C = decay[..., None, None] * a.C + b.C + torch.einsum("bh,bhk,bhl->bhkl", n * b.n / total, d, d)
    merged = CurvatureState(C, a.mean + (b.n / total)[..., None] * d, total)
    assert_close(merged._asdict(), whole._asdict(), "merged halves")


def test_the_centred_state_converts_to_the_plain_sums():
    """ccq.md: (M, s, n) = (C + n μμᵀ, nμ, n); K² + K + 1 numbers a head."""
    x = inputs_of(2, 50)
    state = chunk_ccq(**x, output_final_state=True).state
    n = state.n[..., None]
    M = state.C + n[..., None] * torch.einsum("bhk,bhl->bhkl", state.mean, state.mean)
    sums = {"M": torch.einsum("bthk,bthl->bhkl", x["k"], x["k"]), "s": x["k"].sum(1), "n": torch.full_like(state.n, 50)}
    assert_close({"M": M, "s": n * state.mean, "n": state.n}, sums, "plain sums")
    assert sum(t[0, 0].numel() for t in state) == K * K + K + 1


def test_padding_is_not_counted():
    """In a packed batch the shorter sequences are padded: n is each one's own number of tokens, and exact."""
    ends = torch.tensor([0, 3, 3, 70, 73])
    state = chunk_ccq(**inputs_of(1, 73), cu_seqlens=ends, output_final_state=True).state
    assert torch.equal(state.n, ends.diff().double()[:, None].expand(4, H))


def test_in_half_precision_the_centred_form_keeps_the_gradient_of_lambda():
    """ccq.md: with SiLU-like keys the uncentred pass is wrong by 2.6e-2 to 1.1e-1 against Σq, the centred one by 3e-3."""
    g = torch.Generator().manual_seed(0)
    shape, bf16 = (2, 256, H, 64), torch.bfloat16
    k = unit(silu(normal(g, *shape) + 2)).to(bf16)
    assert 0.5 <= (k[:, 1:].double() * k[:, :-1].double()).sum(-1).mean() <= 0.78
    inputs = {"q": normal(g, *shape).to(bf16).float(), "k": k.float(), "eta": uniform(g, 0.1, 0.9, *shape[:3]).float()}

    def deta(form, dtype, **settings):
        return differentiate(lambda x: (form(**x, **settings).q,), {n: x.to(dtype) for n, x in inputs.items()})[1]["deta"]

    exact = deta(recurrent_ccq, torch.float64)
    assert relative(deta(recurrent_ccq, torch.float32, operand=operand(bf16)), exact) > 2e-2
    assert relative(deta(literal_ccq, torch.float32, operand=operand(bf16)), exact) < 2**-8  # one rounding to bfloat16


def test_in_half_precision_the_cleaned_query_needs_no_centred_form():
    """ccq.md: q̃ itself is off by less (5e-5) than rounding it costs (2e-3)."""
    g = torch.Generator().manual_seed(0)
    shape, bf16 = (2, 256, H, 64), torch.bfloat16
    k = unit(silu(normal(g, *shape) + 2)).to(bf16).float()
    inputs = {"q": normal(g, *shape).to(bf16).float(), "k": k, "eta": uniform(g, 0.1, 0.9, *shape[:3]).float()}
    exact = recurrent_ccq(**{name: x.double() for name, x in inputs.items()}).q
    assert relative(recurrent_ccq(**inputs, operand=operand(bf16)).q, exact) < relative(exact.to(bf16), exact)


# arguments


def test_products_stay_float32_under_autocast():
    x = {name: t.float() for name, t in inputs_of(2, 30, aligned=True).items()}
    plain = differentiate(lambda x: (chunk_ccq(**x).q,), x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = differentiate(lambda x: (chunk_ccq(**x).q,), x)
    for a, b in zip(plain, cast, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_each_tensor_and_each_gradient_has_its_dtype():
    x = inputs_of(2, 30, aligned=True)
    x = {name: t.to(torch.bfloat16 if name in ("q", "k") else torch.float32).requires_grad_() for name, t in x.items()}
    for impl in ("torch", "reference"):
        out = chunk_ccq(**x, output_final_state=True, impl=impl)
        assert out.q.dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in out.state)
        gradients = torch.autograd.grad(out.q.float().sum(), list(x.values()))
        assert [t.dtype for t in gradients] == [t.dtype for t in x.values()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": lambda x: x[:, :5]}, "k: axis 1"),
        ({"eta": lambda x: x[:, :, :1]}, "eta: axis 2 .* multiple of the 2 key heads"),
        ({"g": lambda x: x[..., None]}, "g: expected 3 axes"),
        ({"k": lambda x: x.float()}, "mixed dtypes"),
        ({"initial_state": lambda x: empty_state(3, H, K)}, "state.C: axis 0"),
        ({"cu_seqlens": lambda x: torch.tensor([0, 6])}, "cu_seqlens"),
        ({"chunk_size": lambda x: 0}, "chunk_size"),
        ({"impl": lambda x: "triton"}, "triton"),
        ({"impl": lambda x: "fast"}, "fast"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_named(change, words):
    x = inputs_of(2, 6, aligned=True)
    x |= {name: f(x.get(name)) for name, f in change.items()}
    if "cu_seqlens" in change:  # B = 2
        x["initial_state"] = empty_state(1, H, K)
    with pytest.raises(ValueError, match=words):
        chunk_ccq(**x)
