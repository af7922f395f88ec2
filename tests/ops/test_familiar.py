"""flash-linear-attention's names: each call is `chunk_delta`'s, its arguments are theirs, and where their library is, so are its
numbers."""

import inspect
from importlib import import_module

import pytest
import torch
from torch.nn.functional import normalize, softplus

from needlework.ops import familiar
from needlework.ops.delta import chunk_delta
from needlework.ops.familiar import chunk_delta_rule, chunk_gated_delta_rule, chunk_gla, chunk_kda, chunk_retention

B, T, H, HV, K, V = 2, 21, 2, 4, 8, 16
CUTS = torch.tensor([0, 9, 9, 42])
MODULES = {
    "chunk_gla": "gla", "chunk_retention": "retention", "chunk_delta_rule": "delta_rule",
    "chunk_gated_delta_rule": "gated_delta_rule", "chunk_kda": "kda",
}  # fmt: skip


def tensors(dtype=torch.float64, HV=HV, seed=0):
    draw = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    q, k, v = normalize(rand(B, T, H, K), dim=-1), normalize(rand(B, T, H, K), dim=-1), rand(B, T, HV, V)
    scalar, channel, beta = -softplus(rand(B, T, HV)), -softplus(rand(B, T, HV, K)), rand(B, T, HV).sigmoid()
    half = [x.to(dtype) for x in (q, k, v)]
    return (*half, scalar, channel, beta, rand(B, HV, K, V))


def retention_gate(like):
    return torch.tensor([1 - 2.0 ** (-5 - h) for h in range(like.shape[2])], dtype=torch.float64).log().expand(like.shape[:3])


def calls():
    """name -> (the familiar call's leading arguments, chunk_delta's g and beta)."""
    q, k, v, g, gk, beta, _ = tensors()
    return {
        "chunk_gla": ((q, k, v, gk), gk, None),
        "chunk_retention": ((q, k, v), retention_gate(v), None),
        "chunk_delta_rule": ((q, k, v, beta), None, beta),
        "chunk_gated_delta_rule": ((q, k, v, g, beta), g, beta),
        "chunk_kda": ((q, k, v, gk, beta), gk, beta),
    }


@pytest.mark.parametrize("name", MODULES)
def test_each_is_chunk_delta(name):
    arguments, g, beta = calls()[name]
    q, k, v = arguments[:3]
    start, call = tensors()[-1], getattr(familiar, name)
    o, state = call(*arguments)
    torch.testing.assert_close(o, chunk_delta(q, k, v, g, beta).o, rtol=1e-12, atol=1e-12)
    assert state is None
    o, state = call(*arguments, 0.3, start, True)  # scale, initial_state, output_final_state: their fifth to seventh
    expected = chunk_delta(q, k, v, g, beta, scale=0.3, initial_state=start, output_final_state=True)
    torch.testing.assert_close((o, state), tuple(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODULES)
def test_packed_sequences_have_a_state_each(name):
    arguments, g, beta = calls()[name]
    packed = lambda x: x if x is None else x.flatten(0, 1)[None]
    o, state = getattr(familiar, name)(*map(packed, arguments), cu_seqlens=CUTS, output_final_state=True)
    gates = retention_gate(packed(arguments[2])) if name == "chunk_retention" else packed(g)
    expected = chunk_delta(*map(packed, arguments[:3]), gates, packed(beta), cu_seqlens=CUTS, output_final_state=True)
    torch.testing.assert_close((o, state), tuple(expected), rtol=1e-12, atol=1e-12)
    assert len(state) == 3


@pytest.mark.parametrize("name", ["chunk_gla", "chunk_gated_delta_rule", "chunk_kda"])
def test_the_state_can_have_the_values_first(name):
    arguments, start, call = calls()[name][0], tensors()[-1], getattr(familiar, name)
    o, state = call(*arguments, initial_state=start, output_final_state=True)
    turned, other = call(*arguments, initial_state=start.mT, output_final_state=True, state_v_first=True)
    assert torch.equal(o, turned) and torch.equal(state.mT, other)
    if name != "chunk_gla":
        older = call(*arguments, initial_state=start.mT, output_final_state=True, transpose_state_layout=True)
        assert torch.equal(older.state, other)


@pytest.mark.parametrize("name", ["chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda"])
def test_q_and_k_are_normalised_on_request(name):
    (q, k, *rest), _, _ = calls()[name]
    call = getattr(familiar, name)
    unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    left, right = call(3 * q, 2 * k, *rest, use_qk_l2norm_in_kernel=True).o, call(unit(3 * q), unit(2 * k), *rest).o
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_gates_and_strengths_are_activated_on_request(name):
    (q, k, v, g, beta), _, _ = calls()[name]
    call, raw = getattr(familiar, name), torch.randn_like(g)
    A_log, bias = torch.randn(HV).double(), torch.randn(g.shape[2:]).double()
    A = A_log.view(-1, *[1] * (g.dim() - 3))
    gates = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": bias.flatten()}
    close = lambda left, right: torch.testing.assert_close(left.o, right.o, rtol=1e-12, atol=1e-12)
    close(call(q, k, v, raw, beta, **gates), call(q, k, v, -A.exp() * softplus(raw + bias), beta))
    close(call(q, k, v, g, beta, use_beta_sigmoid_in_kernel=True), call(q, k, v, g, beta.sigmoid()))
    close(call(q, k, v, g, beta, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True), call(q, k, v, g, 2 * beta.sigmoid()))
    if name == "chunk_kda":
        bounded = call(q, k, v, raw, beta, safe_gate=True, lower_bound=-5.0, **gates)
        close(bounded, call(q, k, v, -5 * (A.exp() * (raw + bias)).sigmoid(), beta))
        alone = call(q, k, v, raw, beta, use_gate_in_kernel=True, lower_bound=-5.0)
        close(alone, call(q, k, v, -5 * raw.sigmoid(), beta))


@pytest.mark.parametrize("name", MODULES)
def test_what_only_steers_their_kernels_changes_nothing(name):
    arguments, call = calls()[name][0], getattr(familiar, name)
    known = {
        "cu_seqlens_cpu": CUTS, "chunk_indices": CUTS, "chunk_size": 32, "disable_recompute": True, "use_graph": True,
        "max_num_seqs": 3, "safe_gate": True,
    }  # fmt: skip
    given = {key: value for key, value in known.items() if key in inspect.signature(call).parameters}
    torch.testing.assert_close(call(*arguments, **given).o, call(*arguments).o, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [
        (chunk_kda, {"cp_context": object()}, "chunk_kda: cp_context is not supported"),
        (chunk_kda, {"return_intermediate_states": True}, "chunk_kda: return_intermediate_states is not supported"),
        (chunk_gated_delta_rule, {"cp_context": object()}, "chunk_gated_delta_rule: cp_context is not supported"),
        (chunk_delta_rule, {"head_first": True}, "chunk_delta_rule: head_first is not supported"),
        (chunk_retention, {"head_first": True}, "chunk_retention: head_first is not supported"),
        (chunk_kda, {"use_gate_in_kernel": True}, "chunk_kda: A_log is None"),
        (chunk_gated_delta_rule, {"use_gate_in_kernel": True}, "chunk_gated_delta_rule: A_log is None"),
        (chunk_kda, {"allow_neg_eigval": True}, "chunk_kda: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel"),
    ],
)
def test_what_has_no_counterpart_is_refused(call, settings, message):
    with pytest.raises(ValueError, match=message):
        call(*calls()[call.__name__][0], **settings)


@pytest.mark.parametrize(
    ("call", "axes"), [(chunk_gla, "B T HV K"), (chunk_kda, "B T HV K"), (chunk_gated_delta_rule, "B T HV")]
)
def test_a_gate_of_another_rule_is_refused(call, axes):
    (q, k, v, _, *rest), _, _ = calls()[call.__name__]
    wrong = tensors()[4] if call is chunk_gated_delta_rule else tensors()[3]
    with pytest.raises(ValueError, match=rf"g: expected . axes \[{axes}\]"):
        call(q, k, v, wrong, *rest)


def test_a_call_is_one_graph():
    arguments = calls()["chunk_kda"][0]
    compiled = torch.compile(lambda *x: chunk_kda(*x, use_qk_l2norm_in_kernel=True).o, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), chunk_kda(*arguments, use_qk_l2norm_in_kernel=True).o)


def theirs(name):
    pytest.importorskip("fla")
    return getattr(import_module(f"fla.ops.{MODULES[name]}"), name)


@pytest.mark.parametrize("name", MODULES)
def test_names_order_and_defaults_are_theirs(name):
    listed = lambda call: [
        (p.name, p.default) for p in inspect.signature(call).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    assert listed(getattr(familiar, name)) == listed(inspect.unwrap(theirs(name)))


@pytest.mark.parametrize("name", MODULES)
def test_numbers_are_their_definitions(name):
    theirs(name)
    q, k, v, g, gk, beta, start = (x.float() for x in tensors(HV=H))
    naive = import_module(f"fla.ops.{'gated_delta_rule' if name == 'chunk_delta_rule' else MODULES[name]}.naive")
    if name == "chunk_retention":
        first = [x.transpose(1, 2) for x in (q, k, v)]
        torch.testing.assert_close(chunk_retention(q, k, v).o, naive.naive_retention(*first).transpose(1, 2))
        return
    mine, call, arguments = {
        "chunk_gla": ((gk,), "naive_recurrent_gla", (gk,)),
        "chunk_delta_rule": ((beta,), "naive_recurrent_gated_delta_rule", (beta, torch.zeros_like(g))),
        "chunk_gated_delta_rule": ((g, beta), "naive_recurrent_gated_delta_rule", (beta, g)),
        "chunk_kda": ((gk, beta), "naive_recurrent_kda", (gk, beta)),
    }[name]
    carry = {"initial_state": start, "output_final_state": True}
    expected = getattr(naive, call)(q, k, v, *arguments, **carry)
    torch.testing.assert_close(tuple(getattr(familiar, name)(q, k, v, *mine, **carry)), expected, rtol=1e-4, atol=1e-5)
