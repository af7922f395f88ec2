"""Operators of the causal depthwise convolution, and the launches of their kernels: `chunk.py` and `slots.py`."""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.conv.depthwise.chunk import conv_backward_kernel, conv_forward_kernel, conv_past_backward_kernel
from needlework.ops.conv.depthwise.slots import conv_keep_kernel, conv_step_kernel
from needlework.ops.runtime.custom_op import differentiable, fake, step_operator
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, next_power_of_2

ENGINE = "conv/depthwise"


class Past(NamedTuple):
    """What is before a call's first tokens, and which of its tokens belong together."""

    state: Tensor | None  # [N W−1 C], or a table of slots
    ends: Tensor | None  # [N+1] of packed sequences, as the next two; this one and the next with a state alone
    document: Tensor | None  # [T] of each token
    position: Tensor | None  # [T] of each token in its document
    slots: Tensor | None = None  # [N]
    fresh: Tensor | None = None  # [N]


class Form(NamedTuple):
    """What a weight [C W], or [C W+1] with a bias, and what follows it make of a kernel."""

    W: int
    bias: bool
    after: str
    head: int = 0  # channels of a head whose norm is made 1; 0: none is

    @classmethod
    def of(cls, weight: Tensor, after: str, bias: bool) -> "Form":
        return cls(weight.shape[1] - bias, bias, after)

    def each(self, unit: list[int]) -> list["Form"]:
        """Of every part, with the heads that are made unit there."""
        return [self._replace(head=head) for head in unit]

    @property
    def lanes(self) -> int:
        """Numbers of a tile that a head takes."""
        return next_power_of_2(self.head)

    def tiles(self, channels: int, BC: int) -> int:
        """That cover so many channels; one of BC numbers has whole heads."""
        return cdiv(channels, BC // self.lanes * self.head if self.head else BC)


@recorded_operator
def conv_triton(
    x: Tensor, weight: Tensor, past: Past, after: str, parts: list[int], bias: bool, unit: list[int]
) -> list[Tensor]:  # fmt: skip
    """y of contiguous x [B T C], a tensor for each of `parts`, so many channels; the past is contiguous.

    weight [C W], or with `bias` [C W+1], the last of a channel its bias. unit: of each part, the channels of a head whose norm is made 1,
    or 0.
    """
    y = _apart(x, parts)
    _forward(x, weight, past, Form.of(weight, after, bias).each(unit), parts, y)
    return y


@step_operator("past.state")
def conv_slots_triton(x: Tensor, weight: Tensor, past: Past, after: str, parts: list[int], bias: bool) -> Tensor:
    """The same on a table [S W−1 C] of contiguous slots, which changes in place: y [B T ·] of each part, one after the other. Rows of x may
    lie apart, a batch's equally far."""
    (B, T, C), N = x.shape, len(x) if past.ends is None else len(past.ends) - 1
    y = x.new_empty(x.numel())
    each = y.split([B * T * channels for channels in parts])
    form = Form.of(weight, after, bias)
    _forward(x, weight, past, [form] * len(parts), parts, [one.view(B, T, c) for one, c in zip(each, parts, strict=True)])
    if N:
        kernel = conv_keep_kernel
        chosen = launch_config(ENGINE, x.device, x.dtype, C, C)
        known = _constants(chosen, kernel, x.dtype, form, C=C, APART=x.stride(1), STRIDE=_stride(past.state))
        run(kernel, (N, cdiv(C, known["BC"])), x, past.state, past.ends, past.slots, past.fresh, T, **known)
    return y


def _apart(x: Tensor, parts: list[int]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:2], channels) for channels in parts]


@fake(conv_triton)
def _(x, weight, past: Past, after, parts, bias, unit):
    return _apart(x, parts)


@fake(conv_slots_triton)
def _(x, *_):
    return x.new_empty(x.numel())


def _forward(x: Tensor, weight: Tensor, past: Past, forms: list[Form], parts: list[int], y: list[Tensor]) -> None:
    """`y` of every part, of its form."""
    if x.numel():
        chosen = launch_config(ENGINE, x.device, x.dtype, *x.shape[2:] * 2)
        each = forms, x.split(parts, -1), weight.contiguous().split(parts), _split(past, parts), y
        for form, one, w, own, made in zip(*each, strict=True):
            _launch(conv_forward_kernel, chosen, x, made, form, own, one, w, made)


def _split(past: Past, parts: list[int]) -> list[Past]:
    """Of each part's channels."""
    if past.state is None:
        return [past] * len(parts)
    return [past._replace(state=state) for state in past.state.split(parts, -1)]


@step_operator("state")
def conv_step_triton(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor | None, after: str, parts: list[int], bias: bool
) -> Tensor:  # fmt: skip
    """y of one token, x [B C] of contiguous rows, and its slots in place: y [B ·] of each part, one after the other [B C]."""
    y = x.new_empty(x.numel())
    if x.numel():
        (B, C), kernel = x.shape, conv_step_kernel
        sizes = {"C": C, "APART": x.stride(0), "PARTS": tuple(parts), "STRIDE": _stride(state)}
        chosen = launch_config(ENGINE, x.device, x.dtype, C, C)
        known = _constants(chosen, kernel, x.dtype, Form.of(weight, after, bias), **sizes)
        blocks = sum(cdiv(channels, known["BC"]) for channels in parts)
        run(kernel, (B, blocks), x, weight.contiguous(), y, state, slots, **known)
    return y


@fake(conv_step_triton)
def _(x, *_):
    return x.new_empty(x.numel())


@recorded_backward_operator
def conv_triton_bwd(
    dy: list[Tensor], x: Tensor, weight: Tensor, past: Past, after: str, bias: bool, unit: list[int]
) -> list[Tensor]:  # fmt: skip
    """dx, dweight and, of a state, dstate; a token's part of dweight is summed with those of its run first: no atomics."""
    (B, T, C), form, state = x.shape, Form.of(weight, after, bias), past.state
    dx, dstate = torch.empty_like(x), None if state is None else torch.empty_like(state)
    if not x.numel():
        return [dx, torch.zeros_like(weight), *([] if dstate is None else [dstate.zero_()])]
    chosen = launch_config(ENGINE, x.device, x.dtype, C, C)
    runs, N = B * cdiv(T, chosen.launch[conv_backward_kernel.__name__]["BT"]), 0 if state is None else len(state)
    dw = x.new_empty(runs + N, 4 + bias, C, dtype=accumulator(x.dtype))
    parts = [one.shape[-1] for one in dy]
    wide = (tensor.split(parts, -1) for tensor in (x, dx, dw))
    each = form.each(unit), dy, weight.contiguous().split(parts), _split(past, parts), *wide
    for own_form, one_dy, w, own, one, one_dx, one_dw in zip(*each, strict=True):
        _launch(conv_backward_kernel, chosen, x, one_dy, own_form, own, one_dy, one, w, one_dx, one_dw)
    if state is not None and dstate is not None:
        wide = (tensor.split(parts, -1) for tensor in (state, dstate, dw[runs:]))
        each = form.each(unit), dy, x.split(parts, -1), weight.contiguous().split(parts), *wide
        for own_form, one_dy, one, w, *states in zip(*each, strict=True):
            sizes = {"C": len(w), "ROW": C, "STRIDE": _stride(state)}
            own = _constants(chosen, conv_past_backward_kernel, x.dtype, own_form, **sizes)
            grid = N, own_form.tiles(len(w), own["BC"])
            run(conv_past_backward_kernel, grid, one_dy, one, w, *states, past.ends, T, **own)
    dtaps = dw.sum(0)
    dweight = torch.cat([dtaps[: form.W].flip(0), dtaps[4:]]).T.to(weight.dtype).contiguous()
    return [dx, dweight, *([] if dstate is None else [dstate])]


@fake(conv_triton_bwd)
def _(dy, x, weight, past: Past, after, bias, unit):
    states = [] if past.state is None else [torch.empty_like(past.state)]
    return [torch.empty_like(x), weight.new_empty(weight.shape), *states]


def _save(ctx, inputs, output) -> None:
    x, weight, past, after, _, bias, unit = inputs
    ctx.settings = after, bias, unit
    ctx.save_for_backward(x, weight, *past)


def _backward(ctx, dy):
    dx, dweight, *dstate = conv_triton_bwd([one.contiguous() for one in dy], *ctx.saved_tensors, *ctx.settings)
    return dx, dweight, dstate[0] if dstate else None, *[None] * 9


differentiable(conv_triton, _backward, _save)


def _launch(kernel, config: LaunchConfig, x: Tensor, part: Tensor, form: Form, past: Past, *given: Tensor) -> None:
    """`kernel` over the channels of `part`, which x has among others."""
    (B, T, C), packed = part.shape, past.position is not None
    sizes = {"C": C, "ROW": x.shape[-1], "APART": x.stride(1), "STRIDE": _stride(past.state), "PACKED": int(packed)}
    own = _constants(config, kernel, x.dtype, form, **sizes)
    around = past.position if packed else x, past.state, past.document, past.slots, past.fresh
    blocks = form.tiles(C, own["BC"])
    if kernel is conv_forward_kernel:
        own["BT"] = tokens_of_a_run(B * blocks, T, own["BT"], **config.launch["shared"])
    run(kernel, (blocks, cdiv(T, own["BT"]), B), *given, *around, T, **own)


def tokens_of_a_run(blocks: int, T: int, most: int, programs: int, least: int) -> int:
    """Of each of so many blocks of channels: `most`, halved down to `least` until the machine has its `programs`. A run's first and last
    tokens are read twice, so that long runs read less; a prompt alone would leave most of a GPU without one."""
    while most > least and blocks * cdiv(T, most) < programs:
        most //= 2
    return most


def _constants(config: LaunchConfig, kernel, dtype: torch.dtype, form: Form, **sizes: object) -> Constants:
    known = sizes | {"W": form.W, "BIAS": int(form.bias), "SILU": int(form.after == "silu"), "ADD": int(form.after == "add")}
    own = dict(config.launch[kernel.__name__])
    if "HEAD" in kernel.arg_names and form.lanes > own["BC"]:
        # a thread has as many channels of a wide head as it had of a tile
        own |= {"BC": form.lanes, "num_warps": own["num_warps"] * form.lanes // own["BC"]}
    known |= {"ACC": TYPES[accumulator(dtype)], "HEAD": form.head, "BH": form.lanes}
    return {**own, **{name: x for name, x in known.items() if name in kernel.arg_names}}


def _stride(state: Tensor | None) -> int:
    """Numbers from slot to slot."""
    return 0 if state is None else state.stride(0)


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """All kernels on K channels of twice as many, of four taps: with SiLU on packed documents, with a bias and without, and with the
    residual. The two over all tokens without a state too, the forward one on a table. Those that make heads unit do so too."""
    own, wide = NAMES[dtype], NAMES[accumulator(dtype)]
    types = dict.fromkeys(("p_x", "p_y", "p_dy", "p_dx", "p_state", "p_dstate"), f"*{own}")
    types |= dict.fromkeys(("p_w", "p_dw"), f"*{wide}") | dict.fromkeys(("p_slots", "p_document", "p_ends"), "*i64")
    types |= {"p_fresh": "*i1", "T": "i32"}
    walks = conv_forward_kernel, conv_backward_kernel
    of_heads = *walks, conv_past_backward_kernel
    on_states = *of_heads, conv_keep_kernel, conv_step_kernel
    ways = (True, Form(4, False, "silu")), (True, Form(4, True, "silu")), (False, Form(4, False, "add"))
    units = ((True, Form(4, True, "silu", min(K, 128))),)
    cases = []
    for state, kernels, forms in ((False, walks, (*ways, *units)), (True, on_states, ways), (True, of_heads, units)):
        for kernel, (packed, form) in product(kernels, forms):
            sizes = {
                "C": K,
                "ROW": 2 * K,
                "APART": 3 * K,
                "STRIDE": 6 * K if state else 0,
                "PACKED": int(packed),
                "PARTS": (K, K),
            }
            known, options = split(_constants(config, kernel, dtype, form, **sizes))
            none = () if state else ("p_state",)
            none += () if state and packed else ("p_document", "p_ends")
            none += () if state and kernel is not conv_backward_kernel else ("p_slots", "p_fresh")
            of = types | {"p_position": "*i64" if packed else f"*{own}"}
            signature = {name: of[name] for name in kernel.arg_names if name in of and name not in none}
            cases.append(Case(kernel, signature, known | dict.fromkeys(none), options))
    return cases
