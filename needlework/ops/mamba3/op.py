"""Mamba-3's public op: three forms of one recurrence. Arguments, mathematics and the registered fast paths lie beside it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.common.shapes import check_count, check_slots, now, width
from needlework.ops.delta import chunk_delta
from needlework.ops.mamba3 import reference
from needlework.ops.mamba3.arguments import Mamba3Inputs, Pairs, Rule, check_rule, check_state, checked, checked_state
from needlework.ops.mamba3.chunk import RowInputs
from needlework.ops.mamba3.custom_op import mamba3_rows_fwd
from needlework.ops.mamba3.edges import Edges, row_ends
from needlework.ops.mamba3.state import Mamba3Output, Mamba3State
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live, Sequences, check_table

if TYPE_CHECKING:
    from needlework.ops.mamba3.siso.launches import Inputs


def chunk_mamba3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    lam: Tensor,
    angle: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    mimo_x: Tensor | None = None,
    *,
    pairs: Pairs = "even",
    initial_state: Mamba3State | None = None,
    output_final_state: bool = False,
    state: Mamba3State | None = None,
    slots: Tensor | None = None,
    fresh: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> Mamba3Output:
    """Mamba-3: an additive memory, discretised by the exponential-trapezoidal rule, whose keys and queries turn by data-dependent angles.

        Θ_t = Θ_{t-1} + π tanh(a_t) Δ_t,    B̄ = R(Θ)(B + b_B),    C̄ = R(Θ)(C + b_C),    α = e^g
        S_t = α_t S_{t-1} + (1 − λ_t) Δ_t α_t B̄_{t-1} x_{t-1}ᵀ + λ_t Δ_t B̄_t x_tᵀ,    o_t = S_tᵀ C̄_t

    with R rows a token (MIMO) both products are sums over rows, x_r = x ⊙ X_r, and o_{t,r} = S_tᵀ C̄_{t,r}. The first token is
    written with λΔ alone. D x and the gate are the layer's.

    q, k [B T H K]: C and B, K even; or [B T H R K], R rows a token, R >= 1.
    v [B T HV V]: x; HV a multiple of H, value head j has key head j // (HV // H).
    g [B T HV]: log decay ΔA, natural log, <= 0, −∞ included. dt [B T HV]: Δ, >= 0. lam [B T HV]: λ in [0, 1].
    angle [B T m]: a, any number; the first m <= K / 2 pairs of channels turn, in every head by its own Δ.
    q_bias, k_bias [HV K] or [HV R K]: b_C and b_B, added before the turn; None: 0.
    mimo_x [HV R V]: X, beside q [B T H R K] alone; None: 1.
    pairs: channels (2i, 2i + 1) are a pair ("even"), or (i, i + K / 2) ("halves").
    initial_state: Mamba3State of N = B rows, or one per packed sequence; zeros if None.
    state: a Mamba3State of slots: a slot table instead of initial_state, read and written in place, float32 (or float64); its slots
        may lie apart. slots [N]: the slot of each sequence, None for sequence n in slot n; −1 reads and writes none and starts
        from zeros. fresh [N] bool: starts from zeros, whatever its slot holds. No two sequences share a slot. Without gradients.
    cu_seqlens [N+1]: packs sequences along T (B = 1). An empty one keeps its state.
    chunk_size: rows of a chunk at most, >= 1; changes no result. The Triton kernels have their own.

    Returns o [B T HV V], with R rows [B T HV R V].
    Dtypes: q, k, v share one. float64 computes in float64, all else in float32; o has q's dtype, the state is float32 (or
    float64), each gradient has its tensor's dtype. State: S, the last token's B̄ and x, and Θ mod 2π; resume at any token. Error:
    twice the definition's own (the card). impl: "triton" the kernels, "torch" the chunk form with its hand-derived backward,
    "reference" the token loop; "auto" takes the kernels on a CUDA device where they support the call.
    Raises ValueError for sizes or dtypes that do not fit, an odd K, m above K / 2, an unknown pairs or impl, impl="triton" where that
    cannot be. On a table the kernels do not read cu_seqlens on the host: it must be right.

    >>> import torch
    >>> from needlework.ops.mamba3 import chunk_mamba3, empty_state
    >>> q, k = torch.randn(2, 1, 100, 1, 32)  # [B T H K] = [1 100 1 32]
    >>> v, dt, lam = torch.randn(1, 100, 4, 16), 0.1 * torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> given = {"q": q, "k": k, "v": v, "g": -dt, "dt": dt, "lam": lam, "angle": torch.randn(1, 100, 8)}
    >>> o, state = chunk_mamba3(**given, output_final_state=True)
    >>> o.shape, state.S.shape, state.k.shape
    (torch.Size([1, 100, 4, 16]), torch.Size([1, 4, 32, 16]), torch.Size([1, 4, 1, 32]))
    >>> first, rest = ({name: x[:, a:b] for name, x in given.items()} for a, b in ((0, 40), (40, 100)))
    >>> start = chunk_mamba3(**first, output_final_state=True)
    >>> torch.allclose(torch.cat([start.o, chunk_mamba3(**rest, initial_state=start.state).o], 1), o, atol=1e-4)
    True
    >>> rows = torch.randn(2, 1, 100, 1, 3, 32)  # three rows a token
    >>> chunk_mamba3(**given | {"q": rows[0], "k": rows[1]}).o.shape
    torch.Size([1, 100, 4, 3, 16])
    >>> table, slot = empty_state(8, 4, 32, 16, 8), {"slots": torch.tensor([5])}  # eight slots
    >>> begun = chunk_mamba3(**first, state=table, **slot, fresh=torch.tensor([True])).o
    >>> torch.allclose(torch.cat([begun, chunk_mamba3(**rest, state=table, **slot).o], 1), o, atol=1e-4)
    True
    """
    check_count("chunk_size", chunk_size)
    inputs = Mamba3Inputs(q, k, v, g, dt, lam, angle, q_bias, k_bias, mimo_x)
    check_rule(inputs, pairs)
    N = sequences(cu_seqlens, len(q))
    if initial_state is not None:
        check_state("initial_state", initial_state, q, v, angle, N=N)
    if state is not None:
        check_state("state", state, q, v, angle)
    check_table(
        state, slots, fresh, N, dtype=width(q), initial_state=initial_state, output_final_state=output_final_state,
        inputs=inputs,
    )  # fmt: skip
    path = resolve("mamba3", impl, q.device, lambda: _unsupported(q, v))
    kernels = path == "triton" and q.dim() == 4 and bool(v.numel())
    if kernels and state is not None:
        from needlework.ops.mamba3.siso.op import siso_on_table

        given = _of_kernels(inputs)
        return Mamba3Output(siso_on_table(given, state, slots, fresh, cu_seqlens, halves=pairs == "halves"), None)
    if state is not None:
        own = Sequences.of(slots, fresh, N, q.shape[1], cu_seqlens, q.device)
        o, left = chunk_mamba3(
            *inputs, pairs=pairs, initial_state=own.read(state), output_final_state=True,
            cu_seqlens=cu_seqlens, chunk_size=chunk_size, impl=path,
        )  # fmt: skip
        assert left is not None  # asked for
        own.write(state, left)
        return Mamba3Output(o, None)
    if path == "reference":
        return recurrent_mamba3(
            *inputs, pairs=pairs, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    if kernels:
        from needlework.ops.mamba3.siso.op import siso

        settings = {"halves": pairs == "halves", "final": output_final_state}
        return Mamba3Output(*siso(_of_kernels(inputs), initial_state, cu_seqlens, **settings))
    rule = checked(inputs, pairs)
    initial_state = checked_state(initial_state, q, v, angle, cu_seqlens)
    o, final = _by_rows(rule, initial_state, cu_seqlens, pairs, chunk_size, path, q.dtype)
    return Mamba3Output(_as_given(o, q), final if output_final_state else None)


def _unsupported(q: Tensor, v: Tensor) -> str | None:
    """R rows a token are made in torch, and the engine's kernels read them."""
    engines = ("delta/scalar", "mamba3/siso") if q.dim() == 4 else ("delta/scalar",)
    return next(filter(None, (misfit(engine, q.device, q.dtype, q.shape[-1], v.shape[-1]) for engine in engines)), None)


def _of_kernels(inputs: Mamba3Inputs) -> "Inputs":
    """As the kernels of one row a token take them."""
    from needlework.ops.mamba3.siso.launches import Inputs

    q, k, v, *others = inputs.tokens
    g, dt, lam, angle = (x.to(width(q)) for x in others)
    return Inputs(q, k, v, g, dt, lam, angle.tanh(), inputs.q_bias, inputs.k_bias)


def _by_rows(
    rule: Rule,
    initial_state: Mamba3State,
    cu_seqlens: Tensor | None,
    pairs: Pairs,
    chunk_size: int,
    impl: Impl,
    dtype: torch.dtype,
) -> tuple[Tensor, Mamba3State]:
    """o [B T HV R V] and the final state: one call of the additive engine; its kernels have operands of `dtype`."""
    R, X = rule.q.shape[3], rule.mimo_x
    x, x0 = rule.v[..., None, :] * X, initial_state.v[..., None, :] * X
    inputs = RowInputs(
        q=rule.q, k=rule.k, v=x, g=rule.g, dt=rule.dt, lam=rule.lam, rate=rule.angle.tanh(),
        k0=initial_state.k, v0=x0, angle0=initial_state.angle,
    )  # fmt: skip
    rows, k_rows, u, own, later, k_end, angle_end = mamba3_rows_fwd(*inputs, cu_seqlens=cu_seqlens, halves=pairs == "halves")
    ends = None if cu_seqlens is None else row_ends(cu_seqlens)
    edges, g = Edges.of(cu_seqlens, x.shape[1]), rule.g
    gates = torch.cat([edges.ended(g)[..., None], g.new_zeros(*rows.shape[:3], R - 1)], -1)
    flat = lambda y: y.transpose(2, 3).flatten(1, 2)  # [B T H R ·] -> [B T·R H ·]
    given = each(lambda y: flat(y).to(dtype if impl == "triton" else y.dtype), rows, k_rows, u)
    read, S = chunk_delta(
        *given, gates.transpose(2, 3).flatten(1, 2), scale=1.0, initial_state=initial_state.S, output_final_state=True,
        cu_seqlens=None if ends is None else R * ends, chunk_size=chunk_size, impl=impl,
    )  # fmt: skip
    assert S is not None  # asked for
    with torch.autocast(x.device.type, enabled=False):
        o = edges.tokens(read.to(x.dtype).unflatten(1, (-1, R)).transpose(2, 3)) + own @ x
        if R > 1:
            o = o + later @ edges.tokens(u)
    return o, Mamba3State(S, k_end, edges.newest(initial_state.v, rule.v), angle_end)


def _as_given(o: Tensor, q: Tensor) -> Tensor:
    """o [B T HV R V] in q's dtype; without the axis of rows where q has none."""
    return (o if q.dim() == 5 else o.squeeze(3)).to(q.dtype)


def recurrent_mamba3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    lam: Tensor,
    angle: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    mimo_x: Tensor | None = None,
    *,
    pairs: Pairs = "even",
    initial_state: Mamba3State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
) -> Mamba3Output:
    """The definition, token by token, under autograd: `chunk_mamba3`'s equation, arguments, contract and errors.

    operand: applied to every operand of a matrix or outer product, to emulate a narrower precision.

    >>> import torch
    >>> from needlework.ops.mamba3 import chunk_mamba3, recurrent_mamba3
    >>> q, k = torch.randn(2, 1, 100, 1, 32)  # [B T H K] = [1 100 1 32]
    >>> v, dt, lam = torch.randn(1, 100, 4, 16), 0.1 * torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> given = q, k, v, -dt, dt, lam, torch.randn(1, 100, 8)
    >>> torch.allclose(recurrent_mamba3(*given).o, chunk_mamba3(*given).o, atol=1e-4)
    True
    """
    rule = checked(Mamba3Inputs(q, k, v, g, dt, lam, angle, q_bias, k_bias, mimo_x), pairs)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    start = checked_state(initial_state, q, v, angle, cu_seqlens)
    with torch.autocast(q.device.type, enabled=False):
        o, final = reference.recurrent(rule, start, cu_seqlens, pairs=pairs, operand=operand)
    return Mamba3Output(_as_given(o, q), final if output_final_state else None)


def step_mamba3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    lam: Tensor,
    angle: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    mimo_x: Tensor | None = None,
    *,
    pairs: Pairs = "even",
    state: Mamba3State,
    slots: Tensor | None = None,
) -> Tensor:
    """One token a row, without gradients: o [B HV V] or [B HV R V]; the state advances in place (`chunk_mamba3`'s equation).

    q, k [B H K] or [B H R K], v [B HV V], g, dt, lam [B HV], angle [B m]: `chunk_mamba3`'s tensors without T; biases and X as there.
    state: Mamba3State with one row per slot; slots may lie apart. slots [B] int64: the slot of each row, None for row b in slot b; −1
        is a padded row, which reads and changes no slot and returns zeros. A live slot belongs to one row only.
    Dtypes, settings and errors as in `chunk_mamba3`.

    >>> import torch
    >>> from needlework.ops.mamba3 import chunk_mamba3, empty_state, step_mamba3
    >>> q, k = torch.randn(2, 1, 100, 1, 32)  # [B T H K] = [1 100 1 32]
    >>> v, dt, lam = torch.randn(1, 100, 4, 16), 0.1 * torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> given = q, k, v, -dt, dt, lam, torch.randn(1, 100, 8)
    >>> table = empty_state(1, 4, 32, 16, 8)  # one slot
    >>> steps = [step_mamba3(*(x[:, t] for x in given), state=table) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_mamba3(*given).o, atol=1e-4)
    True
    """
    inputs = Mamba3Inputs(q, k, v, g, dt, lam, angle, q_bias, k_bias, mimo_x)
    token = Mamba3Inputs(*now("q k v g dt lam angle", *inputs.tokens), *inputs.parameters)
    check_rule(token, pairs)
    check_state("state", state, token.q, token.v, token.angle)
    check_slots(slots, len(q))
    if (
        resolve("mamba3", "auto", q.device, lambda: misfit("mamba3/step", q.device, q.dtype, q.shape[-1], v.shape[-1]))
        == "triton"
    ):
        from needlework.ops.mamba3.step import step

        return step(inputs, state, slots, halves=pairs == "halves")
    live = Live.of(slots, len(q), q.device)
    with torch.no_grad():
        o, new = recurrent_mamba3(
            *each(lambda x: x[live.rows], *token.tokens), *token.parameters, pairs=pairs,
            initial_state=Mamba3State(*each(lambda x: x[live.slots], *state)), output_final_state=True,
        )  # fmt: skip
        assert new is not None  # asked for
        live.write(state, new)
        return live.spread(o[:, 0])
