"""The delta family's public op: three forms of one recurrence. Arguments, mathematics and the registered fast path lie beside it."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.delta import reference
from needlework.ops.delta.arguments import Prediction, checked, checked_state
from needlework.ops.delta.custom_op import delta_fwd


class DeltaOutput(NamedTuple):
    """o [B T HV V] in q's dtype; state [N HV K V], float32 or wider, or None unless asked for."""

    o: Tensor
    state: Tensor | None


def chunk_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    prediction: Prediction = "decayed",
    q_read: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> DeltaOutput:
    """A linear-attention memory that decays, erases what it holds under a key, and writes.

        S_t = Diag(e^{g_t}) S_{t-1} + k_t (u_t − S_{t-1}ᵀ e_t)ᵀ,    o_t = scale · S_tᵀ q_t

    beta and erase None: u = v, e = 0 (linear attention; RetNet, Mamba-2, GLA by g). beta: u = βv, e = e^g ⊙ βk (DeltaNet,
    Gated DeltaNet, KDA by g). erase b and write w: u = w ⊙ v, e = e^g ⊙ b ⊙ k (GDN-2).

    q, k [B T H K]: query and key, of unit norm for the rules that erase. v [B T HV V]: value; HV a multiple of H, value head
        j has key head j // (HV // H).
    g [B T HV] or [B T HV K]: natural log decay a head or a channel, finite, <= 0. None: no decay.
    beta [B T HV]: write strength, in [0, 1], or to 2 for negative eigenvalues.
    erase [B T HV K], write [B T HV V]: GDN-2's gates in [0, 1], both or none, instead of beta.
    prediction: "decayed" erases what the decayed state holds; "previous" drops e^g from e (CARVE's Eq. 5, gates given).
    q_read [B T HV K] or [B T H K]: reads instead of q.
    scale: of o only; K ** -0.5 by default.
    initial_state [N HV K V]: N = B, or one per packed sequence; zeros if None.
    cu_seqlens [N+1]: packs sequences along T (B = 1). An empty one keeps its state.
    chunk_size: tokens of a kernel's chunk at most, >= 1; changes no result.

    Dtypes: q, k, v (and q_read) share one. float64 computes in float64, all else in float32; o has q's dtype, the state is
    float32 (or float64), each gradient has its tensor's dtype. State: resume at any token. Error: twice the definition's
    own (the card). impl: "torch" is the chunk form with its hand-derived backward, "reference" the token loop.
    Raises ValueError for sizes or dtypes that do not fit, gates that exclude each other, an unknown prediction or impl.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected at least 1")
    if resolve("delta", impl) == "reference":
        return recurrent_delta(
            q,
            k,
            v,
            g,
            beta,
            erase=erase,
            write=write,
            prediction=prediction,
            q_read=q_read,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )
    rule = checked(q, k, v, g, beta, erase, write, prediction, q_read)
    state = checked_state(initial_state, rule.k, rule.v, cu_seqlens)
    u = rule.v if rule.write is None else rule.write * rule.v
    e = None if rule.erase is None else (rule.erase * rule.k)[..., None, :]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = delta_fwd(
        rule.q, rule.k[..., None, :], u[..., None, :], e, rule.g, state, cu_seqlens, scale, prediction, chunk_size
    )
    return DeltaOutput(o.to(q.dtype), state if output_final_state else None)


def recurrent_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    prediction: Prediction = "decayed",
    q_read: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand=reference.identity,
) -> DeltaOutput:
    """The definition, token by token, under autograd: `chunk_delta`'s equation, arguments, contract and errors.

    operand: applied to every operand of a matrix or outer product, to emulate a narrower precision.
    """
    rule = checked(q, k, v, g, beta, erase, write, prediction, q_read)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    state = checked_state(initial_state, rule.k, rule.v, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        o, state = reference.recurrent(
            *rule, prediction=prediction, scale=scale, state=state, cu_seqlens=cu_seqlens, operand=operand
        )
    return DeltaOutput(o.to(q.dtype), state if output_final_state else None)


def step_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    prediction: Prediction = "decayed",
    q_read: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """One token a row, without gradients: o [B HV V]; the state advances in place (`chunk_delta`'s equation).

    q, k [B H K], v [B HV V] and the gates: `chunk_delta`'s tensors without T.
    state [slots HV K V]: a slot table. slots [B] int64: the slot of each row, None for row b in slot b; −1 is a padded row,
        which reads and changes no slot and returns zeros. A live slot belongs to one row only.
    Dtypes, settings and errors as in `chunk_delta`.
    """
    slots = torch.arange(len(q), device=q.device) if slots is None else slots
    live = slots >= 0
    token = lambda x: None if x is None else x[live].unsqueeze(1)
    with torch.no_grad():
        now, new = recurrent_delta(
            *map(token, (q, k, v, g, beta)),
            erase=token(erase),
            write=token(write),
            prediction=prediction,
            q_read=token(q_read),
            scale=scale,
            initial_state=state[slots[live]],
            output_final_state=True,
        )
        state[slots[live]] = new.to(state.dtype)
        o = now.new_zeros(v.shape)
        o[live] = now[:, 0]
    return o
