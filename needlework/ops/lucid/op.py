"""LUCID's public functions: arguments, dtypes and defaults. The mathematics is in reference.py and chunk.py."""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check_count, check_slots, check_tensor
from needlework.ops.lucid import chunk, reference
from needlework.ops.lucid.arguments import (
    LucidInputs,
    Precondition,
    Solve,
    check_call,
    check_state,
    check_tokens,
    no_tokens_yet,
    solve_window,
)
from needlework.ops.lucid.custom_op import lucid_fwd
from needlework.ops.lucid.state import LucidOutput, LucidState
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live


def chunk_lucid(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    precondition: Precondition = "key",
    window: int | None = None,
    solve: Solve = "window",
    initial_state: LucidState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> LucidOutput:
    """LUCID's causal solve: the values that a softmax over correlated keys must read to get each key's own value back.

        "key", "qk"   P Y = V,   P_ij = e^{√d (k̂_i·k̂_j − 1)} for j < i, P_ii = 1,   k̂ = k / max(‖k‖, 1e-6)
        "beta"        y_i = β_i (v_i − Σ_{j<i} P_ij y_j)
        "rowmax"      A Y = V,   A_ij = e^{s_ij − μ_i} for j <= i,   s_ij = k_i·k_j / √d,   μ_i = max_{j<=i} s_ij

    k: [B T Hkv K] keys as attention scores with them (after RoPE), any norm; d = K.
    v: [B T Hkv V] raw values.
    beta: [B T Hkv], 0 < beta < 2, given with precondition="beta" and only then.
    precondition: "qk" solves as "key" does; only the scores of the attention that reads y differ.
    window: W >= 1: row i sees rows j with 0 <= i − j < W; None shows all.
    solve: "global" solves against every row although the attention reads in a window.
    initial_state: LucidState; with a window its pages are a ring of at most W rows.
    output_final_state: whether to return the grown pages: T rows more (at most W), or as many as the longest sequence with
        cu_seqlens.
    cu_seqlens: [N+1] integers from 0 to T: N sequences packed along T, B = 1.
    chunk_size: rows of a block, >= 1; changes rounding alone.

    Dtypes: k and v share one; float64 computes in float64, all else in float32. y and the pages have k's dtype. Within a call
        a row is solved against rows before their rounding, across calls against the stored ones.
    State: grows; k as given and the solved y of every token, or of the newest W. Initial pages take gradients, final pages
        give them.
    Error: within 2 × the larger of the definition's, the blocked form's and the output rounding's own.
    impl: "triton" solves by kernels, with blocks of their own (O(T) memory), "torch" by block rows (largest tensor T × chunk_size
        per head, backward by hand), "reference" row by row, as defined; "auto" takes the kernels on a CUDA device where they
        support the call.
    Raises ValueError for shapes, dtypes, settings or lengths that do not fit; it names tensor, axis and both sizes.

    >>> import torch
    >>> from needlework.ops.lucid import chunk_lucid
    >>> k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32)  # [B T Hkv K]
    >>> y, state = chunk_lucid(k, v, output_final_state=True)
    >>> q = torch.randn(1, 100, 4, 32)  # softmax attention reads y instead of v
    >>> heads = (x.transpose(1, 2) for x in (q, k, y))
    >>> torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).shape
    torch.Size([1, 4, 100, 32])
    """
    N, window = check_call(k, v, beta, precondition, window, solve, initial_state, cu_seqlens)
    check_count("chunk_size", chunk_size)
    fit = lambda: misfit("lucid/solve", k.device, k.dtype, k.shape[-1], v.shape[-1])
    path = resolve("lucid", impl, k.device, fit)
    rowmax = precondition == "rowmax"
    if path == "triton" and initial_state is None and not output_final_state:
        from needlework.ops.lucid.solve.op import lucid

        tokens = LucidInputs(*each(Tensor.contiguous, k, v, beta))
        return LucidOutput(lucid(tokens, cu_seqlens, rowmax, window), None)
    initial_state = no_tokens_yet(N, k, v) if initial_state is None else initial_state
    page_k, page_y, length = initial_state
    if path == "triton":
        from needlework.ops.lucid.solve.pages import lucid_after

        tokens = LucidInputs(*each(Tensor.contiguous, k, v, beta))
        initial_state = LucidState(*each(Tensor.contiguous, page_k.to(k.dtype), page_y.to(k.dtype)), length)
        y, state = lucid_after(initial_state, tokens, cu_seqlens, rowmax, window, output_final_state)
        return LucidOutput(y, state if output_final_state else None)
    wide = torch.promote_types(k.dtype, torch.float32)
    initial_state = LucidState(page_k.to(wide), page_y.to(wide), length)
    tokens = LucidInputs(*each(lambda x: x.to(wide), k, v, beta))
    if path == "reference":
        y, state = reference.recurrent_lucid(
            *tokens, precondition=precondition, window=window,
            initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    else:
        y, *state = lucid_fwd(
            *tokens,
            *initial_state,
            cu_seqlens=cu_seqlens,
            rowmax=rowmax,
            window=window,
            chunk_size=chunk_size,
            keep_pages=output_final_state,
        )
    if state is None or not output_final_state:
        return LucidOutput(y.to(k.dtype), None)
    final_k, final_y, length = state
    return LucidOutput(y.to(k.dtype), LucidState(final_k.to(k.dtype), final_y.to(k.dtype), length))


recurrent_lucid = reference.recurrent_lucid


@torch.no_grad()
def step_lucid(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    state: LucidState,
    slots: Tensor | None = None,
    precondition: Precondition = "key",
    window: int | None = None,
    solve: Solve = "window",
) -> Tensor:
    """One token of `chunk_lucid`, or a few, for every row of a batch, on a table of slots that changes in place.

        y = β (v − Σ_j P_j y_j),  j over the pages' rows;   "rowmax": y = (v − Σ_j e^{s_j − μ} y_j) / e^{s − μ}

    k: [B Hkv K], or [B R Hkv K] for R tokens in order; v: [B (R) Hkv V]; beta: [B (R) Hkv], with precondition="beta" only (β = 1
        elsewhere).
    state: LucidState with one row per slot, P rows of pages each: the capacity, or the ring of a window (P >= W: the first W).
    slots: [B] int64, the slot of each row; −1 is a padded row, which reads and writes no slot and returns zeros. None: row b is
        slot b.
    precondition, window, solve: as in `chunk_lucid`.
    Returns y [B (R) Hkv V] in k's dtype; no gradient. Kernels take up to 16 tokens of pages of k's dtype.
    State: a token's k and y are written at row length (mod W), and length grows by 1.
    Raises ValueError for shapes or dtypes that do not fit, for more tokens than rows, and for a full table; kernels on a GPU, from
        which nothing is read back, return NaN for a token without a row.

    >>> import torch
    >>> from needlework.ops.lucid import LucidState, chunk_lucid, step_lucid
    >>> k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32)  # [B T Hkv K]
    >>> pages = torch.zeros(1, 100, 2, 32)  # one slot with room for 100 tokens
    >>> state = LucidState(pages, pages.clone(), torch.zeros(1, dtype=torch.int64))
    >>> steps = [step_lucid(k[:, t], v[:, t], state=state) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_lucid(k, v).y, atol=1e-5)
    True
    """
    check_tensor("k", k, "B Hkv K")
    several = k.dim() == 4
    check_tokens(k, v, beta, "B R Hkv" if several else "B Hkv", precondition)
    window = solve_window(window, solve)
    check_state("state", state, k, v)
    check_slots(slots, len(k))
    if slots is None:
        slots = torch.arange(len(k), device=k.device)
    if not several:
        k, v, beta = each(lambda x: x.unsqueeze(1), k, v, beta)
    R, P = k.shape[1], state.k.shape[1] if window is None else min(state.k.shape[1], window)
    if R > P:
        raise ValueError(f"k: axis 1 (R) has size {R}, but the pages hold {P} rows")
    rowmax = precondition == "rowmax"
    path = resolve("lucid", "auto", k.device, lambda: _no_step(k, v, state))
    if path != "triton" or k.device.type == "cpu":
        _check_room(state.length[slots[slots >= 0]], R, P, window)
    if path == "triton":
        from needlework.ops.lucid.step import lucid_step

        tokens = each(Tensor.contiguous, k, v, beta)
        y = lucid_step(*tokens, *state, slots, rowmax, window)
        return y if several else y[:, 0]
    live = Live.of(slots, len(k), k.device)
    slot = live.slots
    length = state.length[slot]
    wide = torch.promote_types(k.dtype, torch.float32)
    tokens = LucidInputs(*each(lambda x: x[live.rows].to(wide), k, v, beta))
    pages = LucidState(*each(lambda page: page[slot, :P].to(wide), state.k, state.y), length)
    solved = chunk.forward(tokens, pages, rowmax=rowmax, window=window, chunk_size=R)
    y_live = solved.to(v.dtype)
    row = (length[:, None] + torch.arange(R, device=k.device)) % P
    state.k[slot[:, None], row] = k[live.rows].to(state.k.dtype)
    state.y[slot[:, None], row] = y_live.to(state.y.dtype)
    state.length[slot] += R
    y = live.spread(y_live)
    return y if several else y[:, 0]


def _no_step(k: Tensor, v: Tensor, state: LucidState) -> str | None:
    """Why the kernel cannot take a step, None if it can."""
    if k.shape[1] > 16:
        return f"{k.shape[1]} new tokens, at most 16"
    if not state.k.dtype == state.y.dtype == k.dtype:
        return f"the pages are {state.k.dtype} and {state.y.dtype}, k is {k.dtype}"
    if not all(page[:1].is_contiguous() for page in (state.k, state.y)):
        return "a slot's pages are not contiguous"
    return misfit("lucid/step", k.device, k.dtype, k.shape[-1], v.shape[-1])


def _check_room(length: Tensor, R: int, P: int, window: int | None) -> None:
    if len(length) and P != window and int(length.max()) + R > P:
        raise ValueError(f"state.k: axis 1 (P) has capacity {P}, but a sequence of length {int(length.max())} needs a row more")
