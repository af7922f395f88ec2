"""Polar attention's public functions: arguments, dtypes, which implementation. The mathematics is in reference.py and chunk.py,
packing and the growth of pages in custom_op.py."""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check, check_count, check_slots, check_state
from needlework.ops.polar import chunk, reference
from needlework.ops.polar.arguments import Parameters, Tokens, check_arguments
from needlework.ops.polar.custom_op import polar_fwd, polar_grow
from needlework.ops.polar.state import PolarOutput, PolarState, no_tokens_yet
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live


def chunk_polar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    *,
    window: int | None = None,
    initial_state: PolarState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> PolarOutput:
    """Polar attention: a softmax with a null sink, read as the direction and the magnitude of what was found.

        w = softmax([temp q·k/√d, temp null]),  temp = 1 + softplus(alpha) ln n,  null = null_base + softplus(gamma) √ln(n + 1)
        s = Σ_j w_j v_j + w_N v_null,           direction = s / max(‖s‖, 1e-6)
        n_eff = (Σ_j w_j)² / Σ_j w_j²,          magnitude = tanh(softplus(beta) ln(1 + n_eff (1 − w_N)))

    where n counts the keys that the query sees, its own included.

    q: [B T Hq d] queries, usually RMS-normalised; the scores' scale 1/√d is part of the definition.
    k, v: [B T Hkv d], [B T Hkv V] keys and values; query head h reads key-value head h // (Hq // Hkv).
    alpha, beta, gamma, null_base: [Hq] raw (before softplus), any real number.
    v_null: [Hq V] the value of the null.
    window: W >= 1 shows each query its newest W keys, its own included; None shows all.
    initial_state: PolarState; with a window its pages are a ring of at most W rows.
    output_final_state: whether to return the grown pages: T rows more (at most W), or as many as the longest sequence with
        cu_seqlens.
    cu_seqlens: [N+1] integers from 0 to T: N sequences packed along T, B = 1.
    chunk_size: rows of a block of queries and keys, >= 1; changes rounding alone.

    Dtypes: q, k, v share one; float64 computes in float64, all else in float32. direction has their dtype, magnitude [B T Hq]
    is float32 (float64 for float64), the pages have k's dtype.
    State: grows; k and v of every token, or of the newest W. Initial pages take gradients and final pages give them.
    Error: within 2 × the larger of the definition's, its streaming form's and the output rounding's own.
    impl: "triton" the kernels (half inputs in half products), "torch" streams key blocks in float32 (largest tensor T × chunk_size
        per head), both with a backward by hand; "reference" is the definition token by token. "auto" takes the
        kernels on a CUDA device where they support the call.
    Raises ValueError for shapes, dtypes or lengths that do not fit; it names tensor, axis and both sizes.

    >>> import torch
    >>> from needlework.ops.polar import chunk_polar
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> (alpha, beta, gamma, null_base), v_null = torch.zeros(4, 4), torch.randn(4, 64)
    >>> direction, magnitude, _ = chunk_polar(q, k, v, alpha, beta, gamma, null_base, v_null)
    >>> direction.shape, magnitude.shape
    (torch.Size([1, 100, 4, 64]), torch.Size([1, 100, 4]))
    >>> torch.allclose(direction.norm(dim=-1), torch.ones(1)), bool((0 <= magnitude).all() and (magnitude <= 1).all())
    (True, True)
    """
    tokens, parameters = Tokens(q, k, v), Parameters(alpha, beta, gamma, null_base, v_null)
    N = check_arguments(tokens, parameters, window, initial_state, cu_seqlens)
    check_count("chunk_size", chunk_size)
    wide = torch.promote_types(q.dtype, torch.float32)
    parameters = parameters.map(lambda x: x.to(wide))
    fit = lambda: misfit("polar/attention", q.device, q.dtype, q.shape[-1], v.shape[-1])
    path = resolve("polar", impl, q.device, fit)
    if path == "triton":
        from needlework.ops.polar.attention.op import polar

        tokens = Tokens(*each(Tensor.contiguous, *tokens))
        direction, magnitude = polar(tokens, parameters, initial_state, cu_seqlens, window)
        if not output_final_state:
            return PolarOutput(direction, magnitude, None)
        initial_state = no_tokens_yet(N, k, v) if initial_state is None else initial_state
        return PolarOutput(direction, magnitude, PolarState(*polar_grow(*initial_state, k, v, cu_seqlens, window)))
    tensors = *(x.to(wide) for x in tokens), *parameters
    initial_state = no_tokens_yet(N, k, v) if initial_state is None else initial_state
    initial_state = initial_state._replace(k=initial_state.k.to(wide), v=initial_state.v.to(wide))
    if path == "reference":
        settings = {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        direction, magnitude, state = reference.recurrent_polar(*tensors, window=window, **settings)
    else:
        settings = {"cu_seqlens": cu_seqlens, "window": window, "chunk_size": chunk_size}
        direction, magnitude, _, *grown = polar_fwd(*tensors, *initial_state, **settings, keep_pages=output_final_state)
        state = PolarState(*grown) if output_final_state else None
    if state is not None:
        state = state._replace(k=state.k.to(k.dtype), v=state.v.to(v.dtype))
    return PolarOutput(direction.to(q.dtype), magnitude, state)


@torch.no_grad()
def step_polar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    null_base: Tensor,
    v_null: Tensor,
    *,
    state: PolarState,
    slots: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of `chunk_polar` for every row of a batch, on a table of slots that changes in place.

    q: [B Hq d]; k, v: [B Hkv d], [B Hkv V]; the parameters as in `chunk_polar`.
    state: PolarState with one row per slot, P rows of pages each: the capacity, or the ring of a window (P >= W: the first W).
    slots: [B] int64, the slot of each row; −1 is a padded row, which reads and writes no slot and returns zeros. None: row b is
        slot b.
    Returns direction [B Hq V] and magnitude [B Hq], dtypes as in `chunk_polar`; no gradient.
    State: the token's k and v are written at row length (mod W), and length grows by 1.
    Raises ValueError for shapes or dtypes that do not fit, and for a full table. While a CUDA graph is captured lengths cannot be
    read: a full slot then drops its oldest token.

    >>> import torch
    >>> from needlework.ops.polar import PolarState, chunk_polar, step_polar
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> (alpha, beta, gamma, null_base), v_null = torch.zeros(4, 4), torch.randn(4, 64)
    >>> parameters = (alpha, beta, gamma, null_base, v_null)
    >>> pages = torch.zeros_like(k), torch.zeros_like(v)  # one slot with room for 100 tokens
    >>> state = PolarState(*pages, torch.zeros(1, dtype=torch.int64))
    >>> steps = [step_polar(q[:, t], k[:, t], v[:, t], *parameters, state=state)[0] for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_polar(q, k, v, *parameters).direction, atol=1e-5)
    True
    """
    check("q", q, "B Hq d")
    check("k", k, "B Hkv d", B=len(q), d=q.shape[-1])
    check("v", v, "B Hkv V", B=len(q), Hkv=k.shape[1])
    tokens, parameters = Tokens(q, k, v), Parameters(alpha, beta, gamma, null_base, v_null)
    check_arguments(Tokens(*each(lambda x: x[:, None], *tokens)), parameters, window, None, None)
    check_state("state", state, PolarState)
    check("state.k", state.k, "N P Hkv d", Hkv=k.shape[1], d=k.shape[2])
    N, P = state.k.shape[:2]
    check("state.v", state.v, "N P Hkv V", N=N, P=P, Hkv=v.shape[1], V=v.shape[2])
    check("state.length", state.length, "N", N=N)
    check_slots(slots, len(q))
    if slots is None:
        slots = torch.arange(len(q), device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    parameters = parameters.map(lambda x: x.to(wide))
    if resolve("polar", "auto", q.device, lambda: _no_step(q, v, state)) == "triton":
        from needlework.ops.polar.step import step

        return step(tokens, parameters, state, slots, window)
    P = min(P, window or P)
    live = Live.of(slots, len(q), q.device)
    slot = live.slots
    length = state.length[slot]
    if len(slot) and P != window and int(length.max()) >= P:
        raise ValueError(f"state.k: axis 1 (P) has capacity {P}, but a sequence of length {int(length.max())} needs a row more")
    own = Tokens(*each(lambda x: x[live.rows], *tokens))
    pages = PolarState(state.k[slot, :P].to(wide), state.v[slot, :P].to(wide), length)
    one = Tokens(*each(lambda x: x[:, None].to(wide), *own))
    found = chunk.forward(one, parameters, pages, window=window, chunk_size=max(1, P))
    row = length % P
    state.k[slot, row] = own.k.to(state.k.dtype)
    state.v[slot, row] = own.v.to(state.v.dtype)
    state.length[slot] += 1
    return live.spread(found[0][:, 0].to(q.dtype)), live.spread(found[1][:, 0])


def _no_step(q: Tensor, v: Tensor, state: PolarState) -> str | None:
    """Why the kernels cannot take a call of step_polar."""
    if not (state.k.is_contiguous() and state.v.is_contiguous()):
        return "the table is not contiguous"
    return misfit("paged/paged", q.device, q.dtype, q.shape[-1], v.shape[-1])
