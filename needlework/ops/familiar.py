"""flash-linear-attention's calls under their names, with its argument names, order and defaults (0.6.0): `chunk_delta` computes each.

    from needlework.ops.familiar import chunk_gated_delta_rule, chunk_kda      # instead of fla.ops.gated_delta_rule, fla.ops.kda

Alike: q, k [B T H K], v [B T HV V], g the natural log of the decay, scale K^-1/2 by default, initial_state and the final state
[N HV K V] (as [N HV V K] if `state_v_first`), cu_seqlens [N+1] with B = 1, (o, final_state) returned with final_state None unless
`output_final_state`.
Different: every call runs on CPUs and in float32 and float64, under torch.compile(fullgraph=True), with HV a multiple of H, and takes
`impl` of `chunk_delta`. Arguments that only steer their kernels (cu_seqlens_cpu, chunk_indices, chunk_size, safe_gate outside the
gate, disable_recompute, use_graph, max_num_seqs) are taken and change no result. Context parallelism (cp_context), intermediate
states and head-first tensors raise a ValueError; an unknown keyword, which theirs drops, is a TypeError.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.ops.api import Impl
from needlework.ops.common.decay import retention
from needlework.ops.common.shapes import check, width
from needlework.ops.delta import DeltaOutput, chunk_delta


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> DeltaOutput:
    """GLA: S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t; `chunk_delta(q, k, v, g)` with g [B T HV K].

    The module's docstring has shapes and what differs.

    >>> import torch
    >>> from needlework.ops.familiar import chunk_gla
    >>> q, k, v = torch.randn(3, 1, 100, 4, 32)
    >>> o, final_state = chunk_gla(q, k, v, -torch.rand(1, 100, 4, 32), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 32, 32]))
    """
    check("g", g, "B T HV K")
    return _delta(q, k, v, g, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, impl=impl)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool = False,
    impl: Impl = "auto",
) -> DeltaOutput:
    """RetNet: S_t = γ_h S_{t-1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t, γ_h = 1 − 2^{−5−h} in value head h = 0, 1, …

    `chunk_delta(q, k, v, g)` with g = log γ. The module's docstring has shapes and what differs.

    >>> import torch
    >>> from needlework.ops.familiar import chunk_retention
    >>> q, k, v = torch.randn(3, 1, 100, 4, 32)
    >>> o, final_state = chunk_retention(q, k, v)
    >>> o.shape, final_state
    (torch.Size([1, 100, 4, 32]), None)
    """
    _refuse("chunk_retention", head_first=head_first)
    check("v", v, "B T HV V")
    g = retention(v.shape[2], q).expand(v.shape[:3])
    settings = {"chunk_size": 64 if chunk_size is None else chunk_size, "impl": impl}
    return _delta(q, k, v, g, None, scale, initial_state, output_final_state, False, cu_seqlens, **settings)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
    head_first: bool = False,
    impl: Impl = "auto",
) -> DeltaOutput:
    """DeltaNet: S_t = (I − β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, o_t = scale · S_tᵀ q_t; `chunk_delta(q, k, v, None, beta)`.

    beta [B T HV]. use_qk_l2norm_in_kernel: `l2norm=True`, of the same epsilon, 1e-6. The module's docstring has the rest.

    >>> import torch
    >>> from needlework.ops.familiar import chunk_delta_rule
    >>> q, k, v = torch.randn(3, 1, 100, 4, 32)
    >>> o, _ = chunk_delta_rule(q, k, v, torch.rand(1, 100, 4), use_qk_l2norm_in_kernel=True)
    >>> o.shape
    torch.Size([1, 100, 4, 32])
    """
    _refuse("chunk_delta_rule", head_first=head_first)
    settings = {"l2norm": use_qk_l2norm_in_kernel, "chunk_size": chunk_size, "impl": impl}
    return _delta(q, k, v, None, beta, scale, initial_state, output_final_state, False, cu_seqlens, **settings)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
    transpose_state_layout: bool = False,
    impl: Impl = "auto",
) -> DeltaOutput:
    """Gated DeltaNet: S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ; `chunk_delta(q, k, v, g, beta)`, g [B T HV].

    use_qk_l2norm_in_kernel: `l2norm=True`, of the same epsilon, 1e-6. use_gate_in_kernel: g becomes
    −e^{A_log} softplus(g + dt_bias), A_log and dt_bias [HV]. use_beta_sigmoid_in_kernel: β becomes σ(β), or 2σ(β) with
    allow_neg_eigval. transpose_state_layout: the older name of state_v_first. The module's docstring has the rest.

    >>> import torch
    >>> from needlework.ops.familiar import chunk_gated_delta_rule
    >>> q, k, v = torch.randn(3, 1, 100, 4, 32)
    >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    >>> o.shape
    torch.Size([1, 100, 4, 32])
    """
    _refuse("chunk_gated_delta_rule", cp_context=cp_context, head_first=head_first)
    check("g", g, "B T HV")
    if use_gate_in_kernel:
        g = _softplus_gate("chunk_gated_delta_rule", g, A_log, dt_bias)
    beta = _strength("chunk_gated_delta_rule", beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    settings = {"l2norm": use_qk_l2norm_in_kernel, "chunk_size": chunk_size, "impl": impl}
    v_first = state_v_first or transpose_state_layout
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state, v_first, cu_seqlens, **settings)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
    transpose_state_layout: bool = False,
    impl: Impl = "auto",
) -> DeltaOutput:
    """KDA: S_t = (I − β_t k_t k_tᵀ) Diag(e^{g_t}) S_{t-1} + β_t k_t v_tᵀ; `chunk_delta(q, k, v, g, beta)`, g [B T HV K].

    use_gate_in_kernel: g becomes −e^{A_log} softplus(g + dt_bias), A_log [HV] and dt_bias [HV·K]; with lower_bound it becomes
    lower_bound · σ(e^{A_log} (g + dt_bias)), A_log optional. lower_bound without use_gate_in_kernel does nothing, in theirs as here.
    What else there is: `chunk_gated_delta_rule` and the module's docstring.

    >>> import torch
    >>> from needlework.ops.familiar import chunk_kda
    >>> q, k, v = torch.randn(3, 1, 100, 4, 32)
    >>> g, beta = -torch.rand(1, 100, 4, 32), torch.rand(1, 100, 4)
    >>> o, _ = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    >>> o.shape
    torch.Size([1, 100, 4, 32])
    """
    refused = {"cp_context": cp_context, "return_intermediate_states": return_intermediate_states, "head_first": head_first}
    _refuse("chunk_kda", **refused)
    check("g", g, "B T HV K")
    if use_gate_in_kernel:
        dt_bias = None if dt_bias is None else dt_bias.view(g.shape[-2:])
        A_log = None if A_log is None else A_log.view(-1, 1)
        if lower_bound is None:
            g = _softplus_gate("chunk_kda", g, A_log, dt_bias)
        else:
            rate = 1.0 if A_log is None else A_log.to(width(g)).exp()
            g = lower_bound * torch.sigmoid(rate * _biased(g, dt_bias))
    beta = _strength("chunk_kda", beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    settings = {"l2norm": use_qk_l2norm_in_kernel, "chunk_size": chunk_size, "impl": impl}
    v_first = state_v_first or transpose_state_layout
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state, v_first, cu_seqlens, **settings)


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    **settings: Any,
) -> DeltaOutput:
    """`chunk_delta`, with states as [N HV V K] if `state_v_first`."""
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    o, state = chunk_delta(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, **settings,
    )  # fmt: skip
    return DeltaOutput(o, state.mT if state_v_first and state is not None else state)


def _softplus_gate(op: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    if A_log is None:
        raise ValueError(f"{op}: A_log is None, which use_gate_in_kernel=True needs")
    return -A_log.to(width(g)).exp() * F.softplus(_biased(g, dt_bias))


def _biased(g: Tensor, dt_bias: Tensor | None) -> Tensor:
    return g.to(width(g)) if dt_bias is None else g.to(width(g)) + dt_bias


def _strength(op: str, beta: Tensor, sigmoid: bool, doubled: bool) -> Tensor:
    if doubled and not sigmoid:
        raise ValueError(f"{op}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    return (2 if doubled else 1) * torch.sigmoid(beta.to(width(beta))) if sigmoid else beta


def _refuse(op: str, **given: Any) -> None:
    """ValueError for an argument of theirs that is not at its default and has no counterpart."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{op}: {name} is not supported (got {type(value).__name__}); leave it at its default")
