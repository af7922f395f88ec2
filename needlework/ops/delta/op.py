"""The delta family's public op: three forms of one recurrence. Arguments, mathematics and the registered fast path lie beside it."""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.common.shapes import check, check_count, check_slots, now, width
from needlework.ops.delta.arguments import Prediction, check_rule, check_states, checked, checked_state, direction
from needlework.ops.delta.custom_op import delta_fwd
from needlework.ops.delta.inputs import DeltaInputs, SlotTable
from needlework.ops.delta.recurrent import DeltaOutput, recurrent_delta
from needlework.ops.delta.scaled import needs_scaling, scaled
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live, Sequences


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
    l2norm: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    fresh: Tensor | None = None,
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
    g [B T HV] or [B T HV K]: natural log decay a head or a channel, <= 0; −∞ wipes. None: no decay.
    beta [B T HV]: write strength, in [0, 1], or to 2 for negative eigenvalues.
    erase [B T HV K], write [B T HV V]: GDN-2's gates in [0, 1], both or none, instead of beta. Of any sign for "given".
    prediction: "decayed" erases what the decayed state holds; "previous" drops e^g from e (CARVE's Eq. 5, gates given); "given" takes
        erase for e itself, a direction of its own (RWKV-7's), and needs it.
    q_read [B T HV K] or [B T H K]: reads instead of q.
    scale: of o only; K ** -0.5 by default.
    l2norm: q and k, not q_read, are divided by √(Σx² + 1e-6) first, in float32.
    initial_state [N HV K V]: N = B, or one per packed sequence; zeros if None.
    state [slots HV K V]: a slot table instead of initial_state, read and written in place, float32 (or float64); its slots may
        lie apart. slots [N]: the slot of each sequence, None for sequence n in slot n; −1 reads and writes none and starts from
        zeros. fresh [N] bool: starts from zeros, whatever its slot holds. No two sequences share a slot. Without gradients.
    cu_seqlens [N+1]: packs sequences along T (B = 1). An empty one keeps its state.
    chunk_size: tokens of a chunk at most, >= 1; changes no result. The Triton kernels have their own.

    Dtypes: q, k, v (and q_read) share one. float64 computes in float64, all else in float32; o has q's dtype, the state is
    float32 (or float64), each gradient has its tensor's dtype. State: resume at any token. Error: twice the definition's
    own (the card). impl: "triton" the kernels, "torch" the chunk form with its hand-derived backward, "reference" the token
    loop; "auto" takes the kernels on a CUDA device where they support the call.
    Raises ValueError for sizes or dtypes that do not fit, gates that exclude each other, an unknown prediction or impl, impl="triton" where
    that cannot be. On a table the kernels do not read cu_seqlens on the host: it must be right.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.delta import chunk_delta
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, g, beta = torch.randn(1, 100, 4, 64), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> o, state = chunk_delta(q, k, v, g, beta, output_final_state=True)  # Gated DeltaNet
    >>> o.shape, state.shape
    (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 32, 64]))
    >>> start = chunk_delta(q[:, :40], k[:, :40], v[:, :40], g[:, :40], beta[:, :40], output_final_state=True)
    >>> rest = chunk_delta(q[:, 40:], k[:, 40:], v[:, 40:], g[:, 40:], beta[:, 40:], initial_state=start.state)
    >>> torch.allclose(torch.cat([start.o, rest.o], 1), o, atol=1e-5)
    True
    >>> table = torch.full((8, 4, 32, 64), torch.nan)  # eight slots
    >>> slot = {"state": table, "slots": torch.tensor([5])}
    >>> start = chunk_delta(q[:, :40], k[:, :40], v[:, :40], g[:, :40], beta[:, :40], **slot, fresh=torch.tensor([True]))
    >>> rest = chunk_delta(q[:, 40:], k[:, 40:], v[:, 40:], g[:, 40:], beta[:, 40:], **slot)
    >>> torch.allclose(torch.cat([start.o, rest.o], 1), o, atol=1e-5), torch.allclose(table[5:6], state, atol=1e-5)
    (True, True)
    """
    check_count("chunk_size", chunk_size)
    inputs = DeltaInputs(q, k, v, g, beta, erase=erase, write=write, q_read=q_read)
    check_rule(inputs, prediction)
    N = check_states(
        state, slots, fresh, k, v, cu_seqlens,
        initial_state=initial_state, output_final_state=output_final_state, inputs=inputs,
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    engine = "delta/channel" if _by_channel(g, erase, prediction) else "delta/scalar"
    path = resolve("delta", impl, q.device, lambda: misfit(engine, q.device, q.dtype, q.shape[-1], v.shape[-1]))
    if state is not None and path != "triton":
        found = Sequences.of(slots, fresh, N, q.shape[1], cu_seqlens, q.device)
        o, left = chunk_delta(
            q, k, v, g, beta, erase=erase, write=write, prediction=prediction, q_read=q_read, scale=scale, l2norm=l2norm,
            initial_state=found.read(state), output_final_state=True, cu_seqlens=cu_seqlens, chunk_size=chunk_size, impl=path,
        )  # fmt: skip
        assert left is not None  # asked for
        found.write(state, left)
        return DeltaOutput(o, None)
    if path == "reference":
        return recurrent_delta(
            q, k, v, g, beta, erase=erase, write=write, prediction=prediction, q_read=q_read, scale=scale, l2norm=l2norm,
            initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    if path == "triton":
        q, k = unit(q, k) if l2norm else (q, k)
        initial_state = None if initial_state is None else initial_state.to(width(q))
        inputs = inputs._replace(q=q if q_read is None else q_read, k=k, q_read=None, initial_state=initial_state)
        table = None if state is None else SlotTable(state, slots, fresh)
        o, final = _kernels(inputs, table, cu_seqlens, scale, prediction, output_final_state)
        return DeltaOutput(o, final if output_final_state else None)
    rule = checked(inputs, prediction, l2norm)
    initial_state = checked_state(initial_state, rule.k, rule.v, cu_seqlens)
    u = rule.v if rule.write is None else rule.write * rule.v
    e = None if rule.erase is None else direction(rule.erase, rule.k, prediction)[..., None, :]
    o, state = delta_fwd(
        rule.q, rule.k[..., None, :], u[..., None, :], e, rule.g, initial_state,
        cu_seqlens=cu_seqlens, scale=scale, prediction=prediction, chunk_size=chunk_size,
    )  # fmt: skip
    return DeltaOutput(o.to(q.dtype), state if output_final_state else None)


def _by_channel(g: Tensor | None, erase: Tensor | None, prediction: Prediction) -> bool:
    """Whether the rule is one for the engine with a gate per channel. Without decay both predictions are one."""
    return erase is not None or (g is not None and (g.dim() == 4 or prediction == "previous"))


def _kernels(
    inputs: DeltaInputs, table: SlotTable | None, cu_seqlens: Tensor | None, scale: float, prediction: Prediction, final: bool
) -> tuple[Tensor, Tensor | None]:
    """o and, where it is wanted, the final state, None where a table has it; q is what reads. It may have a head for each value head; k
    then gets as many."""
    HR, H = inputs.q.shape[2], inputs.k.shape[2]
    inputs = inputs if HR == H else inputs._replace(k=inputs.k.repeat_interleave(HR // H, 2))
    if table is None and _shares_keys(inputs):
        from needlework.ops.delta.additive.op import additive

        return additive(inputs.contiguous(), cu_seqlens, scale=scale)
    engine = lambda inputs, table: _engine(inputs, table, cu_seqlens, scale, prediction)
    if not needs_scaling(inputs):
        return engine(inputs, table)
    return scaled(engine, inputs, table, cu_seqlens, scale, final)


def _shares_keys(inputs: DeltaInputs) -> bool:
    """Whether the rule is one for the additive engine: it erases nothing, has one decay a head, and its value heads share keys. Of a key for
    each head the scalar engine's dg has half the error."""
    q, k, v, g = inputs.q, inputs.k, inputs.v, inputs.g
    if inputs.beta is not None or inputs.erase is not None or (g is not None and g.dim() == 4) or k.shape[2] == v.shape[2]:
        return False
    return misfit("delta/additive", q.device, q.dtype, q.shape[-1], v.shape[-1]) is None


def _engine(
    inputs: DeltaInputs, table: SlotTable | None, cu_seqlens: Tensor | None, scale: float, prediction: Prediction
) -> tuple[Tensor, Tensor | None]:
    if _by_channel(inputs.g, inputs.erase, prediction):
        from needlework.ops.delta.channel.op import channel, channel_on_table

        inputs = inputs._replace(g=_every_channel(inputs.g, inputs.k, inputs.v)).contiguous()
        if table is not None:
            return channel_on_table(inputs, table, cu_seqlens, scale=scale, prediction=prediction), None
        return channel(inputs, cu_seqlens, scale=scale, prediction=prediction)
    from needlework.ops.delta.scalar.op import scalar, scalar_on_table

    if table is not None:
        return scalar_on_table(inputs.contiguous(), table, cu_seqlens, scale=scale), None
    return scalar(inputs.contiguous(), cu_seqlens, scale=scale)


def _every_channel(g: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """g as [B T HV K]."""
    if g is not None and g.dim() == 4:
        return g
    sizes = (*v.shape[:3], k.shape[-1])
    return v.new_zeros(sizes, dtype=width(v)) if g is None else g[..., None].expand(sizes)


def unit(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows of unit norm, by a kernel."""
    from needlework.ops.unit.rows import l2_rows

    return tuple(map(l2_rows, tensors))


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
    l2norm: bool = False,
) -> Tensor:
    """One token a row, without gradients: o [B HV V]; the state advances in place (`chunk_delta`'s equation).

    q, k [B H K], v [B HV V] and the gates: `chunk_delta`'s tensors without T.
    state [slots HV K V]: a slot table, whose slots may lie apart. slots [B] int64: the slot of each row, None for row b in slot b; −1 is a
        padded row, which reads and changes no slot and returns zeros. A live slot belongs to one row only.
    Dtypes, settings and errors as in `chunk_delta`.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.delta import chunk_delta, step_delta
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, g, beta = torch.randn(1, 100, 4, 64), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> state = torch.zeros(1, 4, 32, 64)  # one slot
    >>> steps = [step_delta(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state=state) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_delta(q, k, v, g, beta).o, atol=1e-5)
    True
    """
    inputs = DeltaInputs(q, k, v, g, beta, erase=erase, write=write, q_read=q_read)
    check_rule(DeltaInputs(*now(" ".join(DeltaInputs._fields), *inputs)), prediction)
    check_slots(slots, len(q))
    check("state", state, "slots HV K V", HV=v.shape[1], K=q.shape[-1], V=v.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if (
        resolve("delta", "auto", q.device, lambda: misfit("delta/step", q.device, q.dtype, q.shape[-1], v.shape[-1]))
        == "triton"
    ):
        from needlework.ops.delta.step import step

        return step(inputs, state, slots, scale=scale, prediction=prediction, l2norm=l2norm)
    live = Live.of(slots, len(q), q.device)
    own = DeltaInputs(*each(lambda x: x[live.rows].unsqueeze(1), *inputs))
    with torch.no_grad():
        o_live, new = recurrent_delta(
            own.q, own.k, own.v, own.g, own.beta, erase=own.erase, write=own.write, prediction=prediction, q_read=own.q_read,
            scale=scale, l2norm=l2norm, initial_state=state[live.slots], output_final_state=True,
        )  # fmt: skip
        assert new is not None  # asked for
        live.write((state,), (new,))
        return live.spread(o_live[:, 0])
