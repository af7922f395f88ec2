"""CCQ's public functions: arguments, dtypes, the slot table. The mathematics is in reference.py and chunk.py."""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.ccq.arguments import CcqInputs, check_state, check_tokens
from needlework.ops.ccq.custom_op import ccq_fwd
from needlework.ops.ccq.reference import recurrent_ccq
from needlework.ops.ccq.state import CcqOutput, CurvatureState, empty_state, symmetric
from needlework.ops.common.packing import sequences
from needlework.ops.common.shapes import check_count, check_slots, now, width
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live, Sequences, check_table


def chunk_ccq(
    q: Tensor,
    k: Tensor,
    eta: Tensor,
    g: Tensor | None = None,
    *,
    initial_state: CurvatureState | None = None,
    output_final_state: bool = False,
    state: CurvatureState | None = None,
    slots: Tensor | None = None,
    fresh: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> CcqOutput:
    """CCQ: the query, contracted along the directions in which the keys seen so far vary.

        q̃_t = (I − λ_t Σ_t) q_t,   Σ_t = n_t⁻¹ Σ_{s≤t} ω_ts (k_s − μ_t)(k_s − μ_t)ᵀ,   n_t = Σ_{s≤t} ω_ts,   μ_t = n_t⁻¹ Σ_{s≤t} ω_ts k_s
        ω_ts = 1 and n_t = t, or with g (decay-aligned) ω_ts = e^{g_{s+1} + … + g_t}

    q [B T H K]: raw query of any norm. k [B T H K]: unit keys (the spectrum of I − λΣ is then in (0, 1]), also where the
        backbone writes others.
    eta [B T HV]: λ, 0 <= λ <= 1. HV is a multiple of H: statistics are per key head, λ per value head.
    g [B T H]: log decay, natural log, <= 0, −∞ included; of a channel gate its mean over K. None: plain CCQ.
    initial_state: CurvatureState of N = B rows, or one per packed sequence; n 0 or at least 1. Of C the op reads
        (C + Cᵀ)/2, and C's gradient is symmetric. Zeros if None.
    output_final_state: whether to return the state after the last token.
    state: a CurvatureState of slots, C symmetric as every call leaves it: a slot table instead of initial_state, read and written in
        place, float32 (or float64); its slots may lie apart. slots [N]: the slot of each sequence, None for sequence n in slot n; −1
        reads and writes none and starts from zeros. fresh [N] bool: starts from zeros, whatever its slot holds. No two sequences
        share a slot. Without gradients.
    cu_seqlens [N+1]: packs N sequences along T, B = 1. An empty one keeps its state.
    chunk_size: >= 1; changes rounding alone. The Triton kernels have their own.

    Returns q̃ [B T HV K], to be read as any query; the write, and `scale`, stay the backbone's.
    Dtypes: q and k share one. float64 computes in float64, all else in float32; q̃ has q's dtype, the state is float32 (or
    float64), each gradient has its tensor's dtype. State: K² + K + 1 numbers a key head; resumes at any token, gives and takes
    gradients. Error: twice the definition's own (the card).
    impl: "triton" the kernels, "torch" the chunked path with its backward by hand, "reference" the token loop; "auto" takes the
    kernels on a CUDA device where they support the call.
    Raises ValueError for shapes, dtypes or cu_seqlens that do not fit, naming tensor, axis and both sizes, and for impl="triton"
    where that cannot be. On a table the kernels do not read cu_seqlens on the host: it must be right.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.ccq import chunk_ccq, empty_state
    >>> q, k = torch.randn(1, 100, 4, 32), normalize(torch.randn(1, 100, 4, 32), dim=-1)  # [B T H K]
    >>> eta = torch.rand(1, 100, 4)
    >>> cleaned, state = chunk_ccq(q, k, eta, output_final_state=True)
    >>> cleaned.shape, state.C.shape, state.n[0]
    (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 32, 32]), tensor([100., 100., 100., 100.]))
    >>> torch.equal(chunk_ccq(q, k, torch.zeros_like(eta)).q, q)  # λ = 0 leaves the query
    True

    On a table of eight slots, the prompt in two calls:

    >>> table, slots = empty_state(8, 4, 32), torch.tensor([5])
    >>> begun = chunk_ccq(q[:, :70], k[:, :70], eta[:, :70], state=table, slots=slots, fresh=torch.tensor([True])).q
    >>> rest = chunk_ccq(q[:, 70:], k[:, 70:], eta[:, 70:], state=table, slots=slots).q
    >>> torch.allclose(torch.cat([begun, rest], 1), cleaned, atol=1e-5), table.n[5]
    (True, tensor([100., 100., 100., 100.]))
    """
    check_tokens(q, k, eta, g)
    N = sequences(cu_seqlens, len(q))
    if initial_state is not None:
        check_state("initial_state", initial_state, k, N=N)
    if state is not None:
        check_state("state", state, k)
    given = {"initial_state": initial_state, "output_final_state": output_final_state, "inputs": (q, k, eta, g)}
    check_table(state, slots, fresh, N, dtype=width(q), **given)
    check_count("chunk_size", chunk_size)
    path = resolve("ccq", impl, q.device, lambda: misfit("ccq/curvature", q.device, q.dtype, q.shape[-1], q.shape[-1]))
    if state is not None and path != "triton":
        own = Sequences.of(slots, fresh, N, q.shape[1], cu_seqlens, q.device)
        settings = {"output_final_state": True, "cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "impl": path}
        cleaned, final = chunk_ccq(q, k, eta, g, initial_state=own.read(state), **settings)
        assert final is not None  # it was asked for
        own.write(state, final)
        return CcqOutput(cleaned, None)
    if path == "reference":
        settings = {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        return recurrent_ccq(q, k, eta, g, **settings)
    initial_state = None if initial_state is None else symmetric(initial_state)
    wide = torch.promote_types(q.dtype, torch.float32)
    g = None if g is None else g.to(wide)
    if path == "triton":
        from needlework.ops.ccq.curvature.op import ccq_triton_slots, clean

        inputs = CcqInputs(*each(Tensor.contiguous, q, k, eta, g))
        if state is not None:
            return CcqOutput(ccq_triton_slots(*inputs, *state, slots=slots, fresh=fresh, cu_seqlens=cu_seqlens), None)
        initial_state = None if initial_state is None else CurvatureState(*(x.to(wide) for x in initial_state))
        cleaned, final = clean(inputs, initial_state, cu_seqlens)
        return CcqOutput(cleaned, final if output_final_state else None)
    initial_state = empty_state(N, *k.shape[2:], device=k.device) if initial_state is None else initial_state
    initial_state = CurvatureState(*(x.to(wide) for x in initial_state))
    inputs = CcqInputs(q.to(wide), k.to(wide), eta.to(wide), g)
    cleaned, *final = ccq_fwd(*inputs, *initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    return CcqOutput(cleaned.to(q.dtype), CurvatureState(*final) if output_final_state else None)


@torch.no_grad()
def step_ccq(
    q: Tensor, k: Tensor, eta: Tensor, g: Tensor | None = None, *, state: CurvatureState, slots: Tensor | None = None
) -> Tensor:
    """One token of `chunk_ccq` for every row of a batch, on a table of slots that changes in place: q̃ [B HV K].

        δ = k − μ,   n ← e^g n + 1,   C ← e^g C + (1 − 1/n) δ δᵀ,   μ ← μ + δ/n,   q̃ = q − λ C q / n

    q, k [B H K], eta [B HV], g [B H] or None: `chunk_ccq`'s tensors without T.
    state: CurvatureState with one row per slot, C symmetric, as every call leaves it; slots may lie apart. slots [B] integers: the
        slot of each row; −1 is a padded row, which reads and changes no slot and returns zeros. None: row b is slot b. A slot belongs to
        one row at most.
    Computes in the wider of q's dtype and float32; q̃ has q's dtype; no gradient. Raises ValueError as `chunk_ccq` does.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.ccq import chunk_ccq, empty_state, step_ccq
    >>> q, k = torch.randn(1, 100, 4, 32), normalize(torch.randn(1, 100, 4, 32), dim=-1)  # [B T H K]
    >>> eta = torch.rand(1, 100, 4)
    >>> state = empty_state(1, 4, 32)  # one slot
    >>> steps = [step_ccq(q[:, t], k[:, t], eta[:, t], state=state) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_ccq(q, k, eta).q, atol=1e-5)
    True
    """
    check_tokens(*now("q k eta g", q, k, eta, g))
    check_state("state", state, k)
    check_slots(slots, len(q))
    if resolve("ccq", "auto", q.device, lambda: misfit("ccq/step", q.device, q.dtype, q.shape[-1], q.shape[-1])) == "triton":
        from needlework.ops.ccq.step import step

        return step(CcqInputs(q, k, eta, g), state, slots)
    live = Live.of(slots, len(q), q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_, k_, eta_, decay = (x[live.rows].to(wide) for x in (q, k, eta, torch.ones_like(k[..., 0]) if g is None else g.exp()))
    C, mean, n = (x[live.slots].to(wide) for x in state)
    d = k_ - mean
    n = decay * n + 1
    C = decay[..., None, None] * C + torch.einsum("bh,bhk,bhl->bhkl", 1 - 1 / n, d, d)
    mean = mean + d / n[..., None]
    Sq = torch.einsum("bhkl,bhl->bhk", C, q_) / n[..., None]
    q_, Sq = (x.repeat_interleave(eta.shape[1] // q.shape[1], 1) for x in (q_, Sq))
    live.write(state, (C, mean, n))
    return live.spread((q_ - eta_[..., None] * Sq).to(q.dtype))
