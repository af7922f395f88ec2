"""Causal depthwise convolution of tokens; `depthwise/` has it in one pass.

c_t = b + Σ_j w_j ⊙ x_{t−past+j},  j = 0 … past        zeros before a sequence, or the inputs that its state kept
y = c, silu(c) or x + c                             sums in the wider of x's and the weight's dtype, y in x's
n = y / √(Σ y² + 1e-6)                              in y's place where asked for: a head's sum, in float32 or wider

`causal_conv` takes states and returns the new ones, with gradients. To serve, states lie in a table of slots that changes in place:
`causal_conv_slots` convolves many tokens of each sequence, `step_conv` one.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.ops.api import Impl, resolve
from needlework.ops.common.packing import document_positions, lengths, sequences
from needlework.ops.common.shapes import check
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Sequences, check_table
from needlework.ops.unit.reference import unit_heads

After = Literal["none", "silu", "add"]
TAPS = 4  # that the kernels hold at most
HEAD = 1024  # channels, of one whose norm they make 1 at most


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, bias: Tensor | None = None, parts: Sequence[int] | None = None, unit: Sequence[int] | None = None, after: After = "none",
    impl: Impl = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """y [B T C] and the new state, the last `past` inputs of each sequence.

    x [B T C]; weight [C past+1], two taps or more, the newest last; state [N past C], the inputs before, read in x's dtype; T may be
        below `past`. bias [C], None: none. Each of them has a gradient, the state too.
    parts: y comes in tensors of so many channels each (q, k and v, say, of one product); None for one of all C. ValueError unless
        they sum to C.
    unit: of each part the channels of a head, K: its y come by heads of unit norm, as a delta rule takes q and k; 0: as they are. None:
        every part's are. ValueError unless K divides the part's channels.
    cu_seqlens: [N+1] integers from 0 to T that never fall. Their values are not checked: reading them back would wait for the GPU.
    impl: "triton" takes at most 4 taps, and unit heads of at most 1024 channels.

    >>> import torch
    >>> from needlework.ops.conv import causal_conv
    >>> x, weight = torch.randn(1, 100, 12), torch.randn(12, 4)  # [B T C] and four taps
    >>> (q, k, v), state = causal_conv(x, weight, parts=[4, 4, 4], after="silu")
    >>> q.shape, state.shape  # the state is the last three inputs
    (torch.Size([1, 100, 4]), torch.Size([1, 3, 12]))
    >>> (q, k, v), _ = causal_conv(x, weight, parts=[4, 4, 4], unit=[2, 2, 0], after="silu")
    >>> q.unflatten(-1, (2, 2)).norm(dim=-1).max() <= 1  # two heads
    tensor(True)
    """
    check("x", x, "B T C")
    parts = _parts(x, weight, bias, parts)
    unit = _unit(parts, unit)
    (_, T, C), past, N = x.shape, weight.shape[1] - 1, sequences(cu_seqlens, len(x))
    if state is None:
        before = x.new_zeros(N, past, C)
    else:
        check("state", state, "N past C", N=N, past=past, C=C)
        before = state.to(x.dtype)
    last = _last(x, before, cu_seqlens)
    if _path("causal_conv", impl, x, weight, max(unit, default=0)) == "triton":
        from needlework.ops.conv.depthwise.op import Past, conv_triton

        ends, document, position = _documents(cu_seqlens, T)
        own = Past(None, None, None, position) if state is None else Past(before.contiguous(), ends, document, position)
        y = conv_triton(x.contiguous(), _taps(weight, bias), *own, after=after, parts=parts, bias=bias is not None, unit=unit)
        return tuple(y), last
    y = _convolved(x, weight, bias, before, cu_seqlens, after).split(parts, -1)
    return tuple(map(unit_heads, y, unit)), last


def causal_conv_slots(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None = None,
    *, state: Tensor, slots: Tensor | None = None, fresh: Tensor | None = None, bias: Tensor | None = None,
    parts: Sequence[int] | None = None, after: After = "none", impl: Impl = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """`causal_conv` of sequences whose states lie in a table, which changes in place: y [B T C], in `parts`.

    x, weight, cu_seqlens, bias, parts, after, impl: as there; N sequences, of any number of tokens each.
    state: the table [S past C] of any dtype: a slot's past inputs, the newest last. Slots may lie apart, each is contiguous.
    slots: [N] integers, a slot for each sequence, no slot twice; None: sequence n has slot n. Slot −1 is none: the sequence begins with
        zeros and nothing of it is kept. Their values are not checked, as those of cu_seqlens.
    fresh: [N] bool, the sequences that begin with zeros whatever lies in their slot; None: no sequence is. An empty sequence leaves
        its slot as it is, or, if it is fresh, zeros there.
    ValueError where a gradient is asked for: a table has none.

    >>> import torch
    >>> from needlework.ops.conv import causal_conv_slots
    >>> table, weight = torch.zeros(8, 3, 12), torch.randn(12, 4)  # eight slots
    >>> ends, slots = torch.tensor([0, 5, 7]), torch.tensor([6, 2])  # five tokens of one sequence and two of another
    >>> new = torch.tensor([False, True])  # the second has just come
    >>> (y,) = causal_conv_slots(torch.randn(1, 7, 12), weight, ends, state=table, slots=slots, fresh=new)
    >>> y.shape, table.any(-1).any(-1).nonzero().flatten()
    (torch.Size([1, 7, 12]), tensor([2, 6]))
    """
    check("x", x, "B T C")
    parts = _parts(x, weight, bias, parts)
    _check_table(x, weight, bias, state, slots, fresh, sequences(cu_seqlens, len(x)))
    if _path("causal_conv_slots", impl, x, weight) == "triton":
        from needlework.ops.conv.depthwise.op import Past, conv_slots_triton

        past = Past(state, *_documents(cu_seqlens, x.shape[1]), *each(Tensor.contiguous, slots, fresh))
        (B, T, _), apart = x.shape, x.stride()
        if apart[2] != 1 or (B > 1 and apart[0] != T * apart[1]):
            x = x.contiguous()
        y = conv_slots_triton(x, _taps(weight, bias), *past, after=after, parts=parts, bias=bias is not None)
        return _apart(y, x, parts)
    return _on_slots(x, weight, bias, state, slots, fresh, cu_seqlens, after).split(parts, -1)


def step_conv(
    x: Tensor, weight: Tensor, *, state: Tensor, slots: Tensor | None = None, bias: Tensor | None = None,
    parts: Sequence[int] | None = None, after: After = "none",
) -> tuple[Tensor, ...]:  # fmt: skip
    """One token of `causal_conv` for every row of a batch, on a table of slots that changes in place: y [B C], in `parts`.

    x [B C]; weight, bias, parts, after: as there. state, slots: as `causal_conv_slots` has them, a slot for each row; row −1 is zero.
    ValueError where a gradient is asked for.

    >>> import torch
    >>> from needlework.ops.conv import causal_conv, step_conv
    >>> x, weight, table = torch.randn(2, 9, 12), torch.randn(12, 4), torch.zeros(8, 3, 12)
    >>> slots = torch.tensor([5, 0])
    >>> y = torch.stack([step_conv(x[:, t], weight, state=table, slots=slots)[0] for t in range(9)], 1)
    >>> (want,), last = causal_conv(x, weight)
    >>> torch.allclose(y, want, atol=1e-6), torch.equal(table[slots], last)
    (True, True)
    """
    check("x", x, "B C")
    parts = _parts(x, weight, bias, parts)
    _check_table(x, weight, bias, state, slots, None, len(x))
    if _path("step_conv", "auto", x, weight) == "triton":
        from needlework.ops.conv.depthwise.op import conv_step_triton

        x, slots = x if x.stride(1) == 1 else x.contiguous(), None if slots is None else slots.contiguous()
        y = conv_step_triton(x, _taps(weight, bias), state, slots, after=after, parts=parts, bias=bias is not None)
        return _apart(y, x, parts)
    y = _on_slots(x[:, None], weight, bias, state, slots, None, None, after)[:, 0]
    y = y if slots is None else torch.where(slots[:, None] >= 0, y, 0)
    return y.split(parts, -1)


def _parts(x: Tensor, weight: Tensor, bias: Tensor | None, parts: Sequence[int] | None) -> list[int]:
    C = x.shape[-1]
    check("weight", weight, "C past+1", C=C)
    if bias is not None:
        check("bias", bias, "C", C=C)
    parts = [C] if parts is None else list(parts)
    if sum(parts) != C:
        raise ValueError(f"parts: got {parts}, expected channels that sum to x's {C}")
    return parts


def _unit(parts: list[int], unit: Sequence[int] | None) -> list[int]:
    unit = [0] * len(parts) if unit is None else list(unit)
    if len(unit) != len(parts) or any(K < 0 or channels % (K or 1) for K, channels in zip(unit, parts, strict=True)):
        raise ValueError(f"unit: got {unit}, expected 0 or channels of a head for each of the parts {parts}, which divide them")
    return unit


def _taps(weight: Tensor, bias: Tensor | None) -> Tensor:
    """As the kernels take them: a channel's bias after its taps."""
    return weight if bias is None else torch.cat([weight, bias[:, None]], 1)


def _check_table(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    fresh: Tensor | None,
    N: int,
) -> None:
    check("state", state, "slots past C", past=weight.shape[1] - 1, C=x.shape[-1])
    kept = {"initial_state": None, "output_final_state": False}
    check_table(state, slots, fresh, N, dtype=state.dtype, inputs=(x, weight, bias), **kept)


def _path(op: str, impl: Impl, x: Tensor, weight: Tensor, head: int = 0) -> str:
    C, taps = weight.shape

    def unfit() -> str | None:
        if taps > TAPS:
            return f"{taps} taps, at most {TAPS}"
        if head > HEAD:
            return f"unit heads of {head} channels, at most {HEAD}"
        return misfit("conv/depthwise", x.device, x.dtype, C, C)

    return resolve(op, impl, x.device, unfit)


def _apart(y: Tensor, x: Tensor, parts: list[int]) -> tuple[Tensor, ...]:
    """[B … ·] of each part, of all numbers of one after those of the other: an operator that changes a table may return no list."""
    shape, rows = x.shape[:-1], x.shape[:-1].numel()
    found = y.split([rows * channels for channels in parts])
    return tuple(one.view(*shape, channels) for one, channels in zip(found, parts, strict=True))


def _documents(cu_seqlens: Tensor | None, T: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """[N+1] where packed sequences end, [T] the sequence of each token, [T] its position there."""
    return (None,) * 3 if cu_seqlens is None else (cu_seqlens.contiguous(), *document_positions(cu_seqlens, T))


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, cu_seqlens: Tensor | None, after: After
) -> Tensor:
    """y [B T C] in plain torch; before [N past C], in x's dtype."""
    T, past = x.shape[1], before.shape[1]
    if cu_seqlens is None:
        line = torch.cat([before, x], 1)
        seen = (line[:, j : j + T] for j in range(past + 1))
    else:
        document, position = document_positions(cu_seqlens, T)
        earlier = _earlier(x, before, cu_seqlens)
        seen = (earlier(document, position, past - j)[None] for j in range(past + 1))
    c = sum(tap * inputs for tap, inputs in zip(weight.unbind(-1), seen, strict=True))
    assert isinstance(c, Tensor)  # of two taps or more
    c = (c if bias is None else c + bias).to(x.dtype)
    return {"none": lambda: c, "silu": lambda: F.silu(c), "add": lambda: x + c}[after]()


def _on_slots(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    fresh: Tensor | None,
    cu_seqlens: Tensor | None,
    after: After,
) -> Tensor:
    """The same from a table, and the table after it: what a slot keeps does not pass through x's dtype."""
    own = Sequences.of(slots, fresh, sequences(cu_seqlens, len(x)), x.shape[1], cu_seqlens, x.device)
    before = own.read(state)
    y = _convolved(x, weight, bias, before.to(x.dtype), cu_seqlens, after)
    own.write(state, _last(x.to(state.dtype), before, cu_seqlens))
    return y


def _last(x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[N past C] the last inputs of every sequence; before: those of its past."""
    N, past = before.shape[:2]
    if cu_seqlens is None:
        return torch.cat([before, x[:, max(0, x.shape[1] - past) :]], 1)[:, -past:]
    earlier, every, length = _earlier(x, before, cu_seqlens), torch.arange(N, device=x.device), lengths(cu_seqlens)
    return torch.stack([earlier(every, length, past - j) for j in range(past)], 1)


def _earlier(x: Tensor, before: Tensor, cu_seqlens: Tensor) -> Callable[[Tensor, Tensor, int], Tensor]:
    """What gives the inputs `lag` tokens before `position` of `document`, of its past too."""
    N, past = before.shape[:2]
    line = torch.cat([before.flatten(0, 1), x[0]])  # every document's past, then the tokens

    def earlier(document: Tensor, position: Tensor, lag: int) -> Tensor:
        at = position - lag
        return line[torch.where(at >= 0, N * past + cu_seqlens[document] + at, document * past + past + at)]

    return earlier
