"""Each diagnosis against its formula, on a small model whose rule it looks at."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity

from needlework.diagnostics import carve, ccq, heard, lucid, polar, qdelta, state_norms, state_peaks
from needlework.diagnostics.ccq import energy
from needlework.diagnostics.listen import together
from needlework.diagnostics.rules import calls
from needlework.layers import SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.ops.path import recurrent_lucid_path

SIZES = Sizes(heads=2, key_dim=24, value_dim=12, attention_heads=4, kv_heads=2, head_dim=8, half_life=32.0, content_chunk=8)
VOCABULARY, T = 97, 40


def model(mixer, layers=2, window=None):
    torch.manual_seed(0)
    made = CATALOG[mixer].make(SIZES)
    if window is not None:
        made = replace(made, attend=replace(made.attend, window=window))
    config = NeedleworkConfig(
        vocab_size=VOCABULARY, hidden_size=16, layout="M" * layers, mixers={"M": made}, mlp=SwiGLU(hidden=24),
        initializer_range=0.3,
    )  # fmt: skip
    built = NeedleworkForCausalLM(config).double()
    with torch.no_grad():
        for p in built.parameters():  # away from starts at zero
            p.add_(0.1 * torch.randn_like(p))
    return built


def tokens(rows=2, T=T):
    return torch.randint(VOCABULARY, (rows, T), generator=torch.Generator().manual_seed(1))


def test_a_model_without_the_rule_has_nothing_to_tell():
    assert heard(model("softmax"), tokens(), "qdelta") == {}
    assert qdelta(model("softmax"), tokens()) == lucid(model("softmax"), tokens()) == polar(model("softmax"), tokens()) == []


def test_listening_leaves_the_model_as_it_was():
    m = model("qdelta").train()
    qdelta(m, tokens())
    assert m.training and all(p.grad is None for p in m.parameters())


def test_qdelta_reports_the_stability_of_each_layers_writes():
    m = model("qdelta")
    found = qdelta(m, tokens())
    values = heard(m, tokens(), "qdelta")
    assert len(found) == 2
    for i, layer in enumerate(found):
        q, k, beta, lam = (values[name][i] for name in ("q", "k", "beta", "lam"))
        a = 1 + lam * (q * k).sum(-1)
        assert layer.beta_a == pytest.approx((beta * a).mean().item(), rel=1e-6)
        assert layer.beta_a_most == pytest.approx((beta * a).max().item(), rel=1e-6)
        assert 0 <= layer.unstable <= 1 and -1 <= layer.cosine <= 1 and layer.drift > 0


def test_qdeltas_cosine_is_of_the_state_before_the_token():
    from needlework.ops.qdelta import recurrent_qdelta

    m, ids = model("qdelta", layers=1), tokens(1, 3)
    q, k, v, g, beta, lam = (heard(m, ids, "qdelta")[name][0] for name in ("q", "k", "v", "g", "beta", "lam"))
    S = [
        recurrent_qdelta(q[:, :t], k[:, :t], v[:, :t], g[:, :t], beta[:, :t], lam[:, :t], output_final_state=True)[1]
        for t in (1, 2)
    ]
    at = [cosine_similarity(*(torch.einsum("bhkv,bhk->bhv", S[t - 1], x[:, t]) for x in (q, k)), dim=-1) for t in (1, 2)]
    assert qdelta(m, ids)[0].cosine == pytest.approx(torch.stack(at).mean().item(), rel=1e-6)


def test_layers_of_one_shape_are_walked_together_and_stay_in_order():
    walks = []

    def walk(x):
        walks.append(x.shape)
        return x.sum(), x.square().sum()

    xs = [torch.full(shape, float(n)) for n, shape in enumerate(((2, 3), (2, 3), (4,), (2, 3)), 1)]
    assert together(walk, {"x": xs}) == [[6, 6], [12, 24], [12, 36], [24, 96]]
    assert len(walks) == 3


def test_ccqs_gap_is_below_zero_for_a_needle_outside_what_keys_share():
    rng = torch.Generator().manual_seed(0)
    shared = torch.randn(1, 200, 1, 24, generator=rng, dtype=torch.float64)
    shared[..., 16:] *= 0.01  # sixteen directions hold nearly all
    shared[0, 50, 0] = 0.0
    shared[0, 50, 0, 20] = 1.0
    share = energy(shared / shared.norm(dim=-1, keepdim=True))
    assert share[0, 50, 0] < 0.2 < 0.9 < share[0, :50].mean()


def test_ccq_asks_for_a_needle_and_reports_a_gap_a_layer():
    ids = tokens()
    needle = torch.zeros_like(ids, dtype=torch.bool)
    ids[:, 10] = VOCABULARY - 1
    needle[:, 10] = True
    found = ccq(model("ccq"), ids, needle)
    assert len(found) == 2 and all(layer.gap == pytest.approx(layer.needle - layer.distractor, abs=1e-9) for layer in found)
    with pytest.raises(ValueError, match="no needle token"):
        ccq(model("ccq"), ids, torch.zeros_like(needle))
    with pytest.raises(ValueError, match="expected bool"):
        ccq(model("ccq"), ids, needle[:, :5])


def test_carves_content_share_is_zero_where_the_gate_is_blind_and_so_is_its_staleness():
    m = model("carve")
    sighted = carve(m, tokens(), 8)
    with torch.no_grad():
        for block in m.model.blocks:
            block.mixer.write.w2.zero_()
    blind = carve(m, tokens(), 8)
    assert all(0 < layer.content < 1 and layer.staleness > 1e-6 for layer in sighted)
    assert all(layer.content == 0 and layer.staleness < 1e-5 for layer in blind)


def test_lucids_condition_and_off_diagonal_are_those_of_its_matrix():
    m = model("lucid", layers=1)
    k = heard(m, tokens(), "lucid")["k"][0].double()
    k = k / k.norm(dim=-1, keepdim=True)
    conditions, shares = [], []
    for row in range(2):
        for head in range(2):
            P = torch.exp(math.sqrt(8) * (k[row, :, head] @ k[row, :, head].T - 1)).tril()
            conditions.append(torch.linalg.cond(P).item())
            shares.append((P.tril(-1).sum() / P.sum()).item())
    (found,) = lucid(m, tokens())
    assert found.condition == pytest.approx(sum(conditions) / 4, rel=1e-6)
    assert found.off_diagonal == pytest.approx(sum(shares) / 4, rel=1e-6)


@pytest.mark.parametrize("window", (None, 24))
def test_lucid_paths_condition_is_of_the_keys_as_its_reflections_move_them(window):
    """P from its solve: with one-hot values Y = P⁻¹."""
    m = model("lucid-path", layers=1, window=window)
    (call,) = calls(m, tokens())
    x, _, k, _ = call.arguments
    with torch.no_grad():
        beta, w, _ = call.rule.reflect(x, None, None)
        one = torch.eye(T, dtype=k.dtype)[None, :, None].expand(2, T, 2, T)
        P = torch.linalg.inv(recurrent_lucid_path(k, one, beta, w, window=window).y.transpose(1, 2))
    (found,) = lucid(m, tokens())
    assert found.condition == pytest.approx(torch.linalg.cond(P).mean().item(), rel=1e-6)
    assert found.off_diagonal == pytest.approx((P.tril(-1).sum((-2, -1)) / P.sum((-2, -1))).mean().item(), rel=1e-6)


def test_lucids_in_their_windows_have_the_matrix_that_is_solved():
    conditions = [lucid(model("lucid", layers=1, window=window), tokens())[0].condition for window in (1, 24, T, None)]
    assert conditions[0] == 1.0 and conditions[1] != conditions[2] == conditions[3]


def test_polars_count_agrees_with_the_magnitude_that_the_op_returns():
    from needlework.ops.polar import chunk_polar

    m = model("polar", layers=1)
    values = {name: x[0] for name, x in heard(m, tokens(), "polar").items()}
    v = torch.zeros_like(values["k"])
    beta = torch.zeros(4, dtype=torch.float64)
    null = torch.zeros(4, 8, dtype=torch.float64)
    _, magnitude, _ = chunk_polar(
        values["q"], values["k"], v, values["alpha"], beta, values["gamma"], values["null_base"], null
    )
    m_eff = torch.expm1(torch.atanh(magnitude) / math.log(2))  # softplus(0) = ln 2
    n_eff, null_mass = written_out(values)
    assert torch.allclose(n_eff * (1 - null_mass), m_eff, atol=1e-6)
    (found,) = polar(m, tokens())
    assert found == pytest.approx((n_eff.mean().item(), null_mass.mean().item()), rel=1e-6)


def written_out(values):
    """n_eff and the null's weight of each query, one query at a time."""
    q, k = values["q"], values["k"].repeat_interleave(2, 2)
    n_eff, null_mass = torch.empty(2, *q.shape[:3], dtype=torch.float64)
    for i in range(q.shape[1]):
        n = torch.tensor(float(i + 1), dtype=torch.float64)
        temp = 1 + torch.nn.functional.softplus(values["alpha"]) * n.log()
        null = values["null_base"] + torch.nn.functional.softplus(values["gamma"]) * (n + 1).log().sqrt()
        score = torch.einsum("bhd,bjhd->bhj", q[:, i], k[:, : i + 1]) / math.sqrt(8) * temp[:, None]
        w = torch.cat([score, (temp * null).expand(len(q), -1)[..., None]], -1).softmax(-1)
        real = w[..., :-1] / w[..., :-1].sum(-1, keepdim=True)
        n_eff[:, i], null_mass[:, i] = 1 / real.square().sum(-1), w[..., -1]
    return n_eff, null_mass


@pytest.mark.parametrize(
    "mixer, layers", [("gated-deltanet", 2), ("carve", 2), ("atma", 2), ("mamba", 2), ("mamba3", 2), ("softmax", 0)]
)
def test_state_norms_are_of_every_layer_that_recurs(mixer, layers):
    norms = state_norms(model(mixer), tokens(), (10, 30))
    assert set(norms) == {10, 30} and all(len(by_layer) == layers for by_layer in norms.values())
    assert all(x > 0 for by_layer in norms.values() for x in by_layer)


@pytest.mark.parametrize(
    "mixer, layers", [("qdelta", 2), ("carve", 2), ("atma", 2), ("mamba", 2), ("mamba3", 2), ("softmax", 0)]
)
def test_state_peaks_are_the_largest_norms_at_the_cuts_of_the_rows(mixer, layers):
    """A pass that ends at a cut has the state of that cut."""
    m, ids = model(mixer), tokens()
    peaks = state_peaks(m, ids, cuts=4)
    assert [peak.layer for peak in peaks] == [f"model.blocks.{i}.mixer" for i in range(layers)]
    for i, peak in enumerate(peaks):
        states = {t: m(ids[:, :t], use_cache=True).past_key_values.layers[i].state for t in (10, 20, 30, 40)}
        inner = {t: getattr(s, "memory", None) or s for t, s in states.items()}
        own = {"carve": lambda s: s.write.S, "mamba": lambda s: s.S, "mamba3": lambda s: s.S}.get(mixer, lambda s: s.write)
        norms = {t: own(s).float().norm(dim=(-2, -1)).amax(1) for t, s in inner.items()}
        (t, row), norm = max((((t, row), norm[row].item()) for t, norm in norms.items() for row in (0, 1)), key=lambda x: x[1])
        assert (peak.token, peak.row) == (t, row) and peak.norm == pytest.approx(norm, rel=1e-6)


def test_a_state_that_is_cut_over_calls_has_the_norm_of_the_whole(monkeypatch):
    whole = state_peaks(model("hedgehog"), tokens())
    monkeypatch.setattr("needlework.layers.linear.WIDEST", 20)  # 48 features are 20, 20 and 8
    cut = state_peaks(model("hedgehog"), tokens())
    assert [peak.norm for peak in cut] == pytest.approx([peak.norm for peak in whole], rel=1e-6)


def test_a_state_that_is_not_finite_is_the_largest_and_the_first_cut_that_has_it_is_named():
    m, ids = model("qdelta"), tokens()
    ids[:, 15:] = ids[:, 15:] % 50
    ids[1, 15] = 96
    ids[:, :15] = ids[:, :15] % 50
    with torch.no_grad():
        m.model.embed.weight[96] = math.nan
    found = state_peaks(m, ids, cuts=4)
    assert [(peak.row, peak.token, peak.norm) for peak in found] == [(1, 20, math.inf)] * 2
