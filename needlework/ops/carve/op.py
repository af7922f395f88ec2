"""CARVE's public op: three forms of one layer. Arguments, mathematics and the registered fast path lie beside it."""

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.carve import reference
from needlework.ops.carve.arguments import CarveInputs, Prediction, begun, biased, check_position, checked
from needlework.ops.carve.custom_op import carve_fwd
from needlework.ops.carve.state import CarveOutput, CarveState
from needlework.ops.common.operands import Operand, identity
from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.common.shapes import check_count, check_slots, check_state, check_tensor, now, width
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live, Sequences, check_table


def chunk_carve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    b_bias: Tensor | None = None,
    content_chunk: int = 64,
    prediction: Prediction = "previous",
    scale: float | None = None,
    initial_state: CarveState | None = None,
    output_final_state: bool = False,
    state: CarveState | None = None,
    slots: Tensor | None = None,
    fresh: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> CarveOutput:
    """CARVE: a delta rule whose erase gate sees what the memory has answered.

        S_t = Diag(e^{l_t}) S_{t-1} + σ(w_t) Σ_r k_tr (v_tr − S_{t-1}ᵀ k_tr)ᵀ,    o_t = scale · S_tᵀ q_t
        l_t = −exp(A_log) softplus(f_t + dt_bias) + log(1 − σ(b_t + b_bias + w2 tanh(w1 m)))
        m   = mean of o over the content chunk before token t's, 0 in the first

    q [B T H K]: the read; with CCQ the cleaned query, which m then follows. It takes no part in the write.
    k [B T H K] or [B T H R K], v [B T H V] or [B T H R V]: R in {1, 2, 4} rows written a token, which do not see each
        other. Unit keys. R > 1 is stable for σ(w) < 2/R or orthogonal keys only.
    f, b [B T H K]: pre-activations of the decay and the erase gate, any finite number. w [B T H]: logit of the write gate.
    A_log, dt_bias, b_bias [H K], the last zero by default; w1 [r V], w2 [K r], shared by the heads: with w2 = 0 the op is bit-equal
        to the memory-blind one.
    content_chunk: tokens of a content chunk, >= 1: a property of the model. chunk_size: the kernel's, invisible.
    prediction: "previous" reads S_{t-1} (Eq. 5), "decayed" Diag(e^{l_t}) S_{t-1} (Appendix E: KDA's order).
    scale: of o and so of m; K ** -0.5 by default.
    initial_state: CarveState of N = B rows, or one per packed sequence; rows may have different positions. Zeros if None.
    state: a CarveState of slots, a slot table instead of initial_state, read and written in place, float32 (or float64); its slots
        may lie apart. slots [N]: the slot of each sequence, None for sequence n in slot n; −1 reads and writes none and starts
        from zeros. fresh [N] bool: starts from zeros, whatever its slot holds. No two sequences share a slot. Without gradients.
    cu_seqlens [N+1]: packs sequences along T (B = 1); content chunks restart at each. An empty one keeps its state.

    Dtypes: q, k, v share one; f, b and w may be in half precision too and are widened before their biases are added. float64 computes in
    float64, all else in float32; o has q's dtype, the state is float32 (or float64), each gradient has its tensor's dtype. State: resume
    at any token; bit-equal when cut where content chunks end and chunk_size divides content_chunk. Error: twice the definition's own (the
    card).
    impl: "torch" is the content-chunked path, "reference" the token loop, "triton" the kernels, which "auto" takes on CUDA.
    Raises ValueError for sizes or dtypes that do not fit, an unknown prediction or impl, and a state whose position is not
    inside a content chunk of this length. On a table the kernels do not read cu_seqlens and positions on the host: they must be right.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.carve import chunk_carve, empty_state
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, w = torch.randn(1, 100, 4, 64), torch.randn(1, 100, 4)
    >>> f, b = torch.randn(2, 1, 100, 4, 32)
    >>> A_log, dt_bias, w1, w2 = torch.zeros(4, 32), torch.zeros(4, 32), torch.randn(8, 64), torch.randn(32, 8)
    >>> o, state = chunk_carve(q, k, v, f, b, w, A_log, dt_bias, w1, w2, content_chunk=32, output_final_state=True)
    >>> o.shape, state.S.shape, state.position  # 100 tokens are three content chunks and four tokens
    (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 32, 64]), tensor([4]))

    On a table of eight slots, the prompt in two calls:

    >>> table, slots = empty_state(8, 4, 32, 64), torch.tensor([5])
    >>> first, rest = ([x[:, part] for x in (q, k, v, f, b, w)] for part in (slice(70), slice(70, None)))
    >>> layer = {"A_log": A_log, "dt_bias": dt_bias, "w1": w1, "w2": w2, "content_chunk": 32, "state": table, "slots": slots}
    >>> begun = chunk_carve(*first, **layer, fresh=torch.tensor([True])).o
    >>> torch.allclose(torch.cat([begun, chunk_carve(*rest, **layer).o], 1), o, atol=1e-5), table.position
    (True, tensor([0, 0, 0, 0, 0, 4, 0, 0]))
    """
    tensors = CarveInputs(q, k, v, f, b, w, A_log, dt_bias, w1, w2)
    check_count("chunk_size", chunk_size)
    whole, settings = checked(tensors, b_bias, content_chunk, prediction, scale, initial_state, cu_seqlens, state)
    N = sequences(cu_seqlens, len(q))
    given = {"initial_state": initial_state, "output_final_state": output_final_state, "inputs": (*tensors, b_bias)}
    check_table(state, slots, fresh, N, dtype=width(q), **given)
    path = resolve("carve", impl, q.device, lambda: misfit("delta/channel", q.device, q.dtype, q.shape[-1], v.shape[-1]))
    if state is not None and path != "triton":
        own = Sequences.of(slots, fresh, N, q.shape[1], cu_seqlens, q.device)
        o, new = chunk_carve(
            *tensors, b_bias=b_bias, content_chunk=content_chunk, prediction=prediction, scale=scale,
            initial_state=own.read(state), output_final_state=True, cu_seqlens=cu_seqlens, chunk_size=chunk_size, impl=path,
        )  # fmt: skip
        assert new is not None  # it was asked for
        own.write(state, new)
        return CarveOutput(o, None)
    if path == "reference":
        return recurrent_carve(
            *tensors, b_bias=b_bias, **settings._asdict(), initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    if path == "triton":
        from needlework.ops.carve.feedback.op import carve

        b_bias = torch.zeros_like(dt_bias) if b_bias is None else b_bias
        o, final = carve(whole, b_bias, initial_state, cu_seqlens, settings, table=state, slots=slots, fresh=fresh)
        return CarveOutput(o, final if output_final_state else None)
    o, S, m, total, position, _, _ = carve_fwd(
        *biased(whole, b_bias),
        *begun(initial_state, whole, cu_seqlens),
        cu_seqlens=cu_seqlens,
        **settings._asdict(),
        chunk_size=chunk_size,
    )
    # autocast widens what the operator is given
    return CarveOutput(o.to(q.dtype), CarveState(S, m, total, position) if output_final_state else None)


def recurrent_carve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    b_bias: Tensor | None = None,
    content_chunk: int = 64,
    prediction: Prediction = "previous",
    scale: float | None = None,
    initial_state: CarveState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    operand: Operand = identity,
) -> CarveOutput:
    """The definition, token by token, under autograd: `chunk_carve`'s equation, arguments, contract and errors.

    operand: applied to every operand of a matrix or outer product, to emulate a narrower precision.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.carve import chunk_carve, recurrent_carve
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, w = torch.randn(1, 100, 4, 64), torch.randn(1, 100, 4)
    >>> f, b = torch.randn(2, 1, 100, 4, 32)
    >>> A_log, dt_bias, w1, w2 = torch.zeros(4, 32), torch.zeros(4, 32), torch.randn(8, 64), torch.randn(32, 8)
    >>> tensors = (q, k, v, f, b, w, A_log, dt_bias, w1, w2)
    >>> torch.allclose(recurrent_carve(*tensors).o, chunk_carve(*tensors).o, atol=1e-5)
    True
    """
    tensors = CarveInputs(q, k, v, f, b, w, A_log, dt_bias, w1, w2)
    tensors, settings = checked(tensors, b_bias, content_chunk, prediction, scale, initial_state, cu_seqlens)
    state = begun(initial_state, tensors, cu_seqlens)
    check_position(state.position, content_chunk)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    wide = (x.to(width(q)) for x in biased(tensors, b_bias))
    o, state = reference.recurrent(*wide, state=state, cu_seqlens=cu_seqlens, operand=operand, **settings._asdict())
    return CarveOutput(o.to(q.dtype), state if output_final_state else None)


def step_carve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    state: CarveState,
    b_bias: Tensor | None = None,
    slots: Tensor | None = None,
    content_chunk: int = 64,
    prediction: Prediction = "previous",
    scale: float | None = None,
) -> Tensor:
    """One token a row, without gradients: o [B H V]; S, m, total and position advance in place (`chunk_carve`'s equation).

    q, f, b [B H K], k, v [B H K], [B H V] or with R before the last axis, w [B H]: `chunk_carve`'s tensors without T.
    state: a slot table, its leading axis slots, which may lie apart. slots [B] int64: the slot of each row, None for row b in slot b; −1 is
        a padded row, which reads and changes no slot and returns zeros. A live slot belongs to one row only.
    Dtypes, settings and errors as in `chunk_carve`.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.carve import chunk_carve, empty_state, step_carve
    >>> q, k = normalize(torch.randn(2, 1, 100, 4, 32), dim=-1)  # [B T H K] = [1 100 4 32]
    >>> v, w = torch.randn(1, 100, 4, 64), torch.randn(1, 100, 4)
    >>> f, b = torch.randn(2, 1, 100, 4, 32)
    >>> A_log, dt_bias, w1, w2 = torch.zeros(4, 32), torch.zeros(4, 32), torch.randn(8, 64), torch.randn(32, 8)
    >>> state, layer = empty_state(1, 4, 32, 64), (A_log, dt_bias, w1, w2)  # one slot
    >>> steps = [step_carve(*(x[:, t] for x in (q, k, v, f, b, w)), *layer, state=state) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_carve(q, k, v, f, b, w, *layer).o, atol=1e-5)
    True
    """
    inputs = CarveInputs(q, k, v, f, b, w, A_log, dt_bias, w1, w2)
    token = CarveInputs(*now("q k v f b w", *inputs.tokens), *inputs.parameters)
    check_tensor("q", q, "B H K")
    check_slots(slots, len(q))
    check_state("state", state, CarveState)
    *_, settings = checked(token, b_bias, content_chunk, prediction, scale, None, None, state)
    if (
        resolve("carve", "auto", q.device, lambda: misfit("carve/step", q.device, q.dtype, q.shape[-1], v.shape[-1]))
        == "triton"
    ):
        from needlework.ops.carve.step import step

        return step(inputs, b_bias, state, slots, settings)
    inputs = biased(inputs, b_bias)
    live = Live.of(slots, len(q), q.device)
    held = CarveState(*(x[live.slots] for x in state))
    tensors = *(x[live.rows].unsqueeze(1) for x in inputs.tokens), *inputs.parameters
    with torch.no_grad():
        o_live, new = recurrent_carve(*tensors, **settings._asdict(), initial_state=held, output_final_state=True)
        assert new is not None  # asked for
        live.write(state, new)
        return live.spread(o_live[:, 0])
