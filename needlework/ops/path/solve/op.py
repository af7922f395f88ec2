"""LUCID-PaTH's public solve: arguments, dtypes and defaults. The mathematics is in reference.py and chunk.py."""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check_count, check_slots, check_tensor, width
from needlework.ops.path.arguments import PathKeys, check_keys, check_read
from needlework.ops.path.chunk import History
from needlework.ops.path.custom_op import path_grow
from needlework.ops.path.kept import after
from needlework.ops.path.solve import chunk, reference
from needlework.ops.path.solve.arguments import as_they_came, check_call, check_state, directions, no_tokens_yet, unit, wide
from needlework.ops.path.solve.custom_op import lucid_path_fwd
from needlework.ops.path.solve.state import LucidPathOutput, LucidPathState
from needlework.ops.path.state import BLOCK, PathState
from needlework.ops.path.step import Rows
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.unit.reference import unit_rows


def chunk_lucid_path(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    window: int | None = None,
    l2norm: bool = False,
    initial_state: LucidPathState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> LucidPathOutput:
    """LUCID-PaTH's causal solve: LUCID's, with keys that overlap as PaTH attention scores them.

        P Y = V,    P_ij = e^{√d (k̂_iᵀ H_i H_{i−1} … H_{j+1} k̂_j − 1)} for j < i, P_ii = 1,    H_t = I − β_t w_t w_tᵀ

    `chunk_path` of q, k, beta and w then reads Y instead of V.

    k: [B T Hkv K] keys, any norm; k̂ = k / max(‖k‖, 1e-6), d = K. v: [B T Hkv V] raw values.
    beta: [B T Hkv], in [0, 2]. w: [B T Hkv K], of unit norm. l2norm, chunk_size: as in `chunk_path`.
    window: W >= 1: row i sees rows j with 0 <= i − j < W; None shows all.
    initial_state: LucidPathState; with a window its pages are a ring of at most W rows.
    output_final_state: whether to return the grown state: T rows more (at most W), or as many as the longest sequence with
        cu_seqlens.
    cu_seqlens: [N+1] integers from 0 to T: N sequences packed along T, B = 1.

    Dtypes: k, v, w share one; float64 computes in float64, all else in float32. y has their dtype; of the state y and w have it, k, norm
        and beta are float32 (float64 for float64). Within a call a row is solved against rows before their rounding.
    State: grows; every key, carried on where a block of 64 tokens ends, the norm that it came with, every solved value, and β and w of
        the tokens since. Initial states take gradients and final ones give them.
    Error: within 2 × the larger of the definition's, the blocked form's and the output rounding's own.
    impl: "triton" the kernels (half inputs in half products, no initial_state), "torch" by blocks (largest tensor T × chunk_size per head)
        with a backward by hand; "reference" row by row, as defined; "auto" takes the kernels on a CUDA device where they support the call.
    Raises ValueError for shapes, dtypes or lengths that do not fit; it names tensor, axis and both sizes.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_lucid_path, chunk_path
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> beta, w = 2 * torch.rand(1, 100, 2), normalize(torch.randn(1, 100, 2, 32), dim=-1)
    >>> y, _ = chunk_lucid_path(k, v, beta, w)
    >>> chunk_path(q, k, y, beta, w).o.shape
    torch.Size([1, 100, 4, 64])
    """
    check_keys(k, v, beta, w, "B T Hkv")
    check_read(window, None)
    check_count("chunk_size", chunk_size)
    N = check_call(k, v, window, initial_state, cu_seqlens)
    path = resolve("lucid-path", impl, k.device, lambda: _unsupported(k, v, initial_state))
    w = unit_rows(w) if l2norm else w
    dtype = width(k)
    initial_state = wide(no_tokens_yet(N, k, v, beta, w) if initial_state is None else initial_state, dtype)
    k_, v_, beta_, w_ = each(lambda x: x.to(dtype), k, v, beta, w)
    if path == "reference":
        y, final = reference.recurrent_lucid_path(
            k_, v_, beta_, w_, window=window, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    else:
        direction, norm = unit(k_)
        page_k, call = directions(initial_state), {"cu_seqlens": cu_seqlens, "window": window, "chunk_size": chunk_size}
        if path == "triton":
            from needlework.ops.path.engine.op import block
            from needlework.ops.path.solve.engine.op import lucid_path

            y = lucid_path(PathKeys(*each(Tensor.contiguous, k, v, beta_, w)), cu_seqlens, window)
            # in the kernels' blocks: larger ones have larger errors, and the budget is of the kernels'
            call["chunk_size"] = block(k, v)
        else:
            past = PathState(page_k, initial_state.y, *initial_state[3:], decay=None)
            y = lucid_path_fwd(*PathKeys(direction, v_, beta_, w_), *past, **call)
        final = None
        if output_final_state:  # the norms go with the values
            beside = torch.cat([initial_state.y, initial_state.norm[..., None]], -1)
            keys = PathKeys(direction, torch.cat([y.to(dtype), norm[..., None]], -1), beta_, w_)
            past = PathState(page_k, beside, *initial_state[3:], decay=None)
            page_k, beside, *rest, _ = path_grow(*keys, None, *past, **call)
            page_y, norms = beside[..., :-1], beside[..., -1]
            final = LucidPathState(as_they_came(page_k, norms), norms, page_y, *rest)
    if final is None or not output_final_state:
        return LucidPathOutput(y.to(v.dtype), None)
    return LucidPathOutput(y.to(v.dtype), final._replace(y=final.y.to(v.dtype), w=final.w.to(w.dtype)))


def _unsupported(k: Tensor, v: Tensor, initial_state: LucidPathState | None) -> str | None:
    """Why the kernels cannot take a call, None if they can."""
    if initial_state is not None:
        return "it goes on from a state"
    return misfit("path/engine", k.device, k.dtype, k.shape[-1], v.shape[-1])


@torch.no_grad()
def step_lucid_path(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    state: LucidPathState,
    slots: Tensor | None = None,
    window: int | None = None,
    l2norm: bool = False,
) -> Tensor:
    """One token of `chunk_lucid_path` for every row of a batch, on a table of slots that changes in place.

        y = v − Σ_j e^{√d (x·k̃_j / ‖k_j‖ − 1)} y_j,    x = k̂ carried to the open block's start, ‖k_j‖ the norm that k_j came with

    k, v: [B Hkv K], [B Hkv V]; beta: [B Hkv]; w: [B Hkv K]; window, l2norm as in `chunk_lucid_path`.
    state: LucidPathState with one row per slot, P rows of pages each: the capacity, or the ring of a window (P >= W: the first W).
    slots: [B] int64, the slot of each row; −1 is a padded row, which reads and writes no slot and returns zeros. None: row b is
        slot b.
    Returns y [B Hkv V] in v's dtype; no gradient. State: as `step_path` leaves it, with y for v.
    Raises ValueError for shapes or dtypes that do not fit, and for a full table.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import LucidPathState, chunk_lucid_path, step_lucid_path
    >>> k, v, beta = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64), 2 * torch.rand(1, 100, 2)  # [B T Hkv ·]
    >>> w = normalize(torch.randn(1, 100, 2, 32), dim=-1)
    >>> pages = torch.zeros_like(k), torch.zeros_like(beta), torch.zeros_like(v)
    >>> block = torch.zeros(1, 64, 2, 32), torch.zeros(1, 64, 2)
    >>> state = LucidPathState(*pages, *block, torch.zeros(1, dtype=torch.int64))  # one slot with room for 100 tokens
    >>> steps = [step_lucid_path(k[:, t], v[:, t], beta[:, t], w[:, t], state=state) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_lucid_path(k, v, beta, w).y, atol=1e-5)
    True
    """
    check_tensor("k", k, "B Hkv K")
    check_keys(k, v, beta, w, "B Hkv")
    check_read(window, None)
    check_state("state", state, k, v)
    check_slots(slots, len(k))
    live = Rows.of(state.k, state.length, slots, len(k), window)
    P, slot, length = live.P, live.slots, live.length
    w = unit_rows(w) if l2norm else w
    dtype = width(k)
    k_, v_, beta_, w_ = each(lambda x: x[live.real, None].to(dtype), k, v, beta, w)
    direction, norm = unit(k_)
    page_k, page_norm, page_y = live.pages(state.k, state.norm, state.y, dtype=dtype)
    own = wide(LucidPathState(page_k, page_norm, page_y, state.w[slot], state.beta[slot], length), dtype)
    past = History(directions(own), own.y, own.w, own.beta, length, window)
    with torch.autocast(k.device.type, enabled=False):
        y = chunk.forward(direction, v_, beta_, w_, past, chunk_size=1)
        kept = after(past, torch.ones_like(length), direction, beta_, w_, chunk_size=1)
    row, closed = length % P, (length + 1) % BLOCK == 0
    state.k[slot[closed], :P] = as_they_came(kept.page_k, page_norm)[closed].to(state.k.dtype)
    state.k[slot, row] = as_they_came(kept.k, norm)[:, 0].to(state.k.dtype)
    state.norm[slot, row] = norm[:, 0].to(state.norm.dtype)
    state.y[slot, row] = y[:, 0].to(state.y.dtype)
    state.w[slot], state.beta[slot] = kept.w.to(state.w.dtype), kept.beta.to(state.beta.dtype)
    state.length[slot] += 1
    return live.spread(y[:, 0].to(v.dtype))


recurrent_lucid_path = reference.recurrent_lucid_path
