"""PaTH attention's public functions: arguments, dtypes, which implementation. The mathematics is in reference.py and chunk.py,
packing and the growth of the state in custom_op.py."""

from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check_count, check_tensor, width
from needlework.ops.path import reference
from needlework.ops.path.arguments import (
    PathInputs,
    check_call,
    check_gates,
    check_keys,
    check_queries,
    check_read,
    no_tokens_yet,
)
from needlework.ops.path.custom_op import path_fwd, path_grow
from needlework.ops.path.gates import sums
from needlework.ops.path.state import PathOutput, PathState
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.unit.reference import unit_rows


def chunk_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    g: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: PathState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> PathOutput:
    """PaTH attention: a softmax whose positions are the product of the reflections between a key and its query.

        H_t = I − β_t w_t w_tᵀ,    A_ij = scale · q_iᵀ H_i H_{i−1} … H_{j+1} k_j  (j <= i),    o_i = Σ_j softmax_j(A_i·) v_j
        with a forget gate (PaTH-FoX): A_ij + g_{j+1} + … + g_i

    q: [B T Hq K] queries.
    k, v: [B T Hkv K], [B T Hkv V] keys and values; query head h reads key-value head h // (Hq // Hkv).
    beta: [B T Hkv], in [0, 2]: β‖w‖² in that range keeps every |A_ij| <= scale ‖q_i‖ ‖k_j‖, beyond it scores grow with the distance.
    w: [B T Hkv K], of unit norm.
    g: [B T Hq] log forget gates, natural logarithms, <= 0 and finite: each lowers what its token and later ones see of the keys before
        it, behind the scale; None: no gate.
    window: W >= 1 shows each query its newest W keys, its own included; None shows all.
    scale: of the scores, above 0; None: K^-1/2.
    l2norm: w is divided by √(Σw² + 1e-6) first, in float32.
    initial_state: PathState; with a window its pages are a ring of at most W rows.
    output_final_state: whether to return the grown state: T rows more (at most W), or as many as the longest sequence with
        cu_seqlens.
    cu_seqlens: [N+1] integers from 0 to T: N sequences packed along T, B = 1.
    chunk_size: tokens of a block, >= 1; changes rounding alone.

    Dtypes: q, k, v, w share one; float64 computes in float64, all else in float32. o has their dtype; of the state v and w have it,
        k and beta are float32 (float64 for float64), and sums of gates float64: only their differences count.
    State: grows; every key, carried on where a block of 64 tokens ends, every value, with gates the sum of them so far, and β and w of the
        tokens since. Initial states take gradients and final ones give them. A state has sums if, and only if, calls have g.
    Error: within 2 × the larger of the definition's, the blocked form's and the output rounding's own.
    impl: "triton" the kernels (half inputs in half products, no initial_state), "torch" in blocks (largest tensor T × chunk_size per head)
        with a backward by hand; "reference" token by token, as defined; "auto" takes the kernels on a CUDA device where they support the
        call.
    Raises ValueError for shapes, dtypes or lengths that do not fit; it names tensor, axis and both sizes.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_path
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> beta, w = 2 * torch.rand(1, 100, 2), normalize(torch.randn(1, 100, 2, 32), dim=-1)
    >>> o, _ = chunk_path(q, k, v, beta, w)
    >>> o.shape
    torch.Size([1, 100, 4, 64])
    >>> start = chunk_path(*(x[:, :70] for x in (q, k, v, beta, w)), output_final_state=True)
    >>> rest = chunk_path(*(x[:, 70:] for x in (q, k, v, beta, w)), initial_state=start.state)
    >>> torch.allclose(torch.cat([start.o, rest.o], 1), o, atol=1e-5)
    True
    """
    check_tensor("q", q, "B T Hq K")
    check_keys(k, v, beta, w, "B T Hkv")
    check_queries(q, k, "B T Hq")
    check_gates(g, q, "B T Hq")
    check_read(window, scale)
    check_count("chunk_size", chunk_size)
    N = check_call(k, v, window, initial_state, cu_seqlens, g)
    path = resolve("path", impl, q.device, lambda: _unsupported(q, v, initial_state))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    decay = None if g is None else sums(g, initial_state, window, cu_seqlens)
    w = unit_rows(w) if l2norm else w
    if path == "triton":
        return _kernels(PathInputs(q, k, v, beta, w, decay), window, scale, output_final_state, cu_seqlens)
    initial_state = no_tokens_yet(N, k, v, beta, w, g) if initial_state is None else initial_state
    wide = width(q)
    inputs = PathInputs(*each(lambda x: x.to(wide), q, k, v, beta, w), decay)
    initial_state = PathState(*each(lambda x: x.to(wide), *initial_state[:4]), initial_state.length, initial_state.decay)
    if path == "reference":
        o, final = reference.recurrent_path(
            *inputs[:5], g=g, window=window, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    else:
        call = {"cu_seqlens": cu_seqlens, "window": window, "chunk_size": chunk_size}
        o, _ = path_fwd(*inputs, *initial_state, **call, scale=scale)
        grown = path_grow(*inputs[1:], *initial_state, **call) if output_final_state else None
        final = None if grown is None else _state(grown, g)
    if not output_final_state or final is None:
        return PathOutput(o.to(q.dtype), None)
    return PathOutput(o.to(q.dtype), final._replace(v=final.v.to(v.dtype), w=final.w.to(w.dtype)))


def _unsupported(q: Tensor, v: Tensor, initial_state: PathState | None) -> str | None:
    """Why the kernels cannot take a call, None if they can."""
    if initial_state is not None:
        return "it goes on from a state"
    return misfit("path/engine", q.device, q.dtype, q.shape[-1], v.shape[-1])


def _kernels(
    x: PathInputs, window: int | None, scale: float, output_final_state: bool, cu_seqlens: Tensor | None
) -> PathOutput:  # fmt: skip
    """The final state is torch's: keys alone are carried for it, which takes what one block of queries a head does."""
    from needlework.ops.path.engine.op import block, path

    computed = width(x.q)
    x = PathInputs(*each(Tensor.contiguous, *x._replace(beta=x.beta.to(computed))))
    o = path(x, cu_seqlens, window, scale)
    if not output_final_state:
        return PathOutput(o, None)
    wide = each(lambda x: x.to(computed), *x[1:5])
    past = no_tokens_yet(len(x.q) if cu_seqlens is None else len(cu_seqlens) - 1, *wide, x.decay)
    # in the kernels' blocks: larger ones have larger errors, and the budget is of the kernels'
    state = _state(path_grow(*wide, x.decay, *past, cu_seqlens, window, block(x.q, x.v)), x.decay)
    return PathOutput(o, state._replace(v=state.v.to(x.v.dtype), w=state.w.to(x.w.dtype)))


def _state(grown: tuple[Tensor, ...], decay: Tensor | None) -> PathState:
    """What `path_grow` returns, whose sums are an empty vector without a forget gate."""
    k, v, w, beta, length, total = grown
    return PathState(k, v, w, beta, length, None if decay is None else total)


recurrent_path = reference.recurrent_path
