"""Q-Delta's public op: three forms of one rule. Arguments and the forms lie beside it."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import check, check_count, check_slots, now, width
from needlework.ops.delta.arguments import check_states, checked_state
from needlework.ops.delta.inputs import DeltaInputs, SlotTable
from needlework.ops.delta.op import unit
from needlework.ops.qdelta import chunk, reference, transposed
from needlework.ops.qdelta.arguments import Coupling, check_rule, checked
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live, Sequences


class QDeltaOutput(NamedTuple):
    """o [B T HV V] in q's dtype; state [N HV K V], float32 or wider, or None unless asked for."""

    o: Tensor
    state: Tensor | None


def chunk_qdelta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    *,
    coupling: Coupling = "recurrent",
    q_read: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    fresh: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> QDeltaOutput:
    """Q-Delta: a gated delta rule whose write also erases what the query would read.

        x_t = k_t + λ_t q_t,    S_t = α_t (I − β_t k_t x_tᵀ) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · S_tᵀ q_t,    α_t = e^{g_t}

    q, k [B T H K]: query and key, both of unit norm. v [B T HV V]: value; HV a multiple of H, value head j has key head
        j // (HV // H).
    g [B T HV]: natural log decay, <= 0, −∞ included; None: no decay. A gate per channel [B T HV K] decays by channel.
    beta, lam [B T HV]: write strength β and λ, in [0, 1] (the card says what they bound).
    coupling: "transposed" is what the authors' kernels compute, in chunks of 64 from each sequence's start: split and step
        do not agree with prefill there, and the gate is one per head. For their checkpoints only.
    q_read [B T HV K] or [B T H K]: reads instead of q, which alone enters x.
    scale: of o only, never of x; K ** -0.5 by default.
    l2norm: q and k, not q_read, are divided by √(Σx² + 1e-6) first, in float32.
    initial_state [N HV K V]: N = B, or one per packed sequence; zeros if None.
    state [slots HV K V]: a slot table instead of initial_state, read and written in place, float32 (or float64); its slots may
        lie apart. slots [N]: the slot of each sequence, None for sequence n in slot n; −1 reads and writes none and starts from
        zeros. fresh [N] bool: starts from zeros, whatever its slot holds. No two sequences share a slot. Without gradients.
    cu_seqlens [N+1]: packs sequences along T (B = 1). An empty one keeps its state.
    chunk_size: tokens of a chunk at most, >= 1; changes no result. The Triton kernels have their own. 64 with coupling="transposed".

    Dtypes: q, k, v (and q_read) share one. float64 computes in float64, all else in float32; o has q's dtype, the state is
    float32 (or float64), each gradient has its tensor's dtype. State: resume at any token. Error: twice the definition's
    own (the card). impl: "triton" the kernels (coupling "recurrent", a gate per head), "torch" the chunk form, "reference"
    the token loop; "auto" takes the kernels on a CUDA device where they support the call.
    Raises ValueError for sizes or dtypes that do not fit, an unknown coupling or impl, another chunk_size where 64 defines,
    impl="triton" where that cannot be. On a table the kernels do not read cu_seqlens on the host: it must be right.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.qdelta import chunk_qdelta
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, g = torch.randn(1, 100, 4, 64), -torch.rand(1, 100, 4)
    >>> beta, lam = torch.rand(2, 1, 100, 4)
    >>> o, state = chunk_qdelta(q, k, v, g, beta, lam, output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 32, 64]))
    >>> packed = chunk_qdelta(q, k, v, g, beta, lam, cu_seqlens=torch.tensor([0, 40, 100]), output_final_state=True)
    >>> packed.state.shape  # one state a sequence
    torch.Size([2, 4, 32, 64])
    >>> table = torch.full((8, 4, 32, 64), torch.nan)  # eight slots
    >>> slot = {"state": table, "slots": torch.tensor([5])}
    >>> start, rest = ([x[:, a:b] for x in (q, k, v, g, beta, lam)] for a, b in ((0, 40), (40, 100)))
    >>> parts = chunk_qdelta(*start, **slot, fresh=torch.tensor([True])).o, chunk_qdelta(*rest, **slot).o
    >>> torch.allclose(torch.cat(parts, 1), o, atol=1e-5), torch.allclose(table[5:6], state, atol=1e-5)
    (True, True)
    """
    check_count("chunk_size", chunk_size)
    if coupling == "transposed" and chunk_size != transposed.CHUNK:
        raise ValueError(
            f"chunk_size: got {chunk_size}; with coupling='transposed' chunks of {transposed.CHUNK} are the definition"
        )
    check_rule(q, k, v, g, beta, lam, coupling, q_read)
    N = check_states(
        state, slots, fresh, k, v, cu_seqlens, initial_state=initial_state, output_final_state=output_final_state,
        inputs=(q, k, v, g, beta, lam, q_read),
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    path = resolve("qdelta", impl, q.device, lambda: _unsupported(q, v, g, coupling))
    if state is not None and path != "triton":
        found = Sequences.of(slots, fresh, N, q.shape[1], cu_seqlens, q.device)
        o, left = chunk_qdelta(
            q, k, v, g, beta, lam, coupling=coupling, q_read=q_read, scale=scale, l2norm=l2norm,
            initial_state=found.read(state), output_final_state=True, cu_seqlens=cu_seqlens, chunk_size=chunk_size, impl=path,
        )  # fmt: skip
        assert left is not None  # asked for
        found.write(state, left)
        return QDeltaOutput(o, None)
    if path == "reference":
        return recurrent_qdelta(
            q, k, v, g, beta, lam, coupling=coupling, q_read=q_read, scale=scale, l2norm=l2norm,
            initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    if path == "triton":
        from needlework.ops.delta.scalar.op import scalar, scalar_on_table

        q, k = unit(q, k) if l2norm else (q, k)
        initial_state = None if initial_state is None else initial_state.to(width(q))
        inputs = DeltaInputs(q, k, v, g, beta, lam, q_read=q_read, initial_state=initial_state)
        if state is not None:
            return QDeltaOutput(
                scalar_on_table(inputs.contiguous(), SlotTable(state, slots, fresh), cu_seqlens, scale=scale), None
            )
        o, final = scalar(inputs.contiguous(), cu_seqlens, scale=scale)
        return QDeltaOutput(o, final if output_final_state else None)
    rule = checked(q, k, v, g, beta, lam, coupling, q_read, l2norm)
    initial_state = checked_state(initial_state, rule.k, rule.v, cu_seqlens)
    if coupling == "transposed":
        with torch.autocast(q.device.type, enabled=False):
            o, state = transposed.forward(rule, initial_state, cu_seqlens, scale)
    else:
        o, state = chunk.forward(rule, initial_state, cu_seqlens, scale, chunk_size)
    return QDeltaOutput(o.to(q.dtype), state if output_final_state else None)


def _unsupported(q: Tensor, v: Tensor, g: Tensor | None, coupling: Coupling) -> str | None:
    if coupling == "transposed":
        return "coupling='transposed' is for published checkpoints"
    if g is not None and g.dim() == 4:
        return "a gate per channel together with λ"
    return misfit("delta/scalar", q.device, q.dtype, q.shape[-1], v.shape[-1])


def recurrent_qdelta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    *,
    coupling: Coupling = "recurrent",
    q_read: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
) -> QDeltaOutput:
    """The definition, token by token, under autograd: `chunk_qdelta`'s equation, arguments, contract and errors.

    operand: applied to every operand of a matrix or outer product, to emulate a narrower precision.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.qdelta import chunk_qdelta, recurrent_qdelta
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, g = torch.randn(1, 100, 4, 64), -torch.rand(1, 100, 4)
    >>> beta, lam = torch.rand(2, 1, 100, 4)
    >>> torch.allclose(recurrent_qdelta(q, k, v, g, beta, lam).o, chunk_qdelta(q, k, v, g, beta, lam).o, atol=1e-5)
    True
    """
    rule = checked(q, k, v, g, beta, lam, coupling, q_read, l2norm)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    form = reference.recurrent if coupling == "recurrent" else reference.recurrent_transposed
    initial_state = checked_state(initial_state, rule.k, rule.v, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        o, state = form(*rule, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, operand=operand)
    return QDeltaOutput(o.to(q.dtype), state if output_final_state else None)


def step_qdelta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    coupling: Coupling = "recurrent",
    q_read: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
) -> Tensor:
    """One token a row, without gradients: o [B HV V]; the state advances in place (`chunk_qdelta`'s equation).

    q, k [B H K], v [B HV V], g, beta, lam [B HV]: `chunk_qdelta`'s tensors without T. One token has no coupling: the rule is
        the true one under either name.
    state [slots HV K V]: a slot table, whose slots may lie apart. slots [B] int64: the slot of each row, None for row b in slot b; −1 is a
        padded row, which reads and changes no slot and returns zeros. A live slot belongs to one row only.
    Dtypes, settings and errors as in `chunk_qdelta`.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.qdelta import chunk_qdelta, step_qdelta
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, g = torch.randn(1, 100, 4, 64), -torch.rand(1, 100, 4)
    >>> beta, lam = torch.rand(2, 1, 100, 4)
    >>> state = torch.zeros(1, 4, 32, 64)  # one slot
    >>> steps = [step_qdelta(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], lam[:, t], state=state) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_qdelta(q, k, v, g, beta, lam).o, atol=1e-5)
    True
    """
    token = now("q k v g beta lam q_read", q, k, v, g, beta, lam, q_read)
    check_rule(*token[:-1], coupling, token[-1])
    check_slots(slots, len(q))
    check("state", state, "slots HV K V", HV=v.shape[1], K=q.shape[-1], V=v.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if (
        resolve("qdelta", "auto", q.device, lambda: misfit("delta/step", q.device, q.dtype, q.shape[-1], v.shape[-1]))
        == "triton"
    ):
        from needlework.ops.delta.step import step

        return step(DeltaInputs(q, k, v, g, beta, lam, q_read=q_read), state, slots, scale=scale, l2norm=l2norm)
    live = Live.of(slots, len(q), q.device)
    tokens = (q, k, v, g, beta, lam, q_read)
    q, k, v, g, beta, lam, q_read = each(lambda x: x[live.rows].unsqueeze(1), *tokens)
    with torch.no_grad():
        o_live, new = recurrent_qdelta(
            q, k, v, g, beta, lam, coupling=coupling, q_read=q_read, scale=scale, l2norm=l2norm,
            initial_state=state[live.slots], output_final_state=True,
        )  # fmt: skip
        assert new is not None  # asked for
        live.write((state,), (new,))
        return live.spread(o_live[:, 0])
