"""LUCID's solve of whole sequences as operators of Triton kernels, with its gradients. Those with pages are in pages.py.

`operands.py` prepares each block, `scan.py` solves, `panels.py` too, without waiting, `intra_bwd.py` gives the gradient of the keys,
`launches.py` launches them; the constants are in solve.launch.json. In half precision k̂, A, the inverses and Y are float16 operands
("rowmax"'s keys are as given), sums are float32.
"""

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.common.shapes import behind
from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.lucid.solve.launches import ENGINE, Saved, Task, backward, forward
from needlework.ops.runtime.custom_op import differentiable, fake
from needlework.ops.runtime.each import each
from needlework.ops.runtime.launch_configs import launch_config, widths
from needlework.ops.runtime.precompile import kind, meta, precompile
from needlework.ops.runtime.recorded import recorded_backward_operator, recorded_operator


def lucid(tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, window: int | None) -> Tensor:
    """y [B T H V] in k's dtype, of contiguous tensors; differentiable in them."""
    k, K, V = tokens.k, tokens.k.shape[-1], tokens.v.shape[-1]
    wide, wide_v = widths(ENGINE, k.device, k.dtype, K, V)
    tokens = tokens._replace(k=behind(k, wide), v=behind(tokens.v, wide_v))
    y = lucid_triton(*tokens, cu_seqlens, rowmax, window, K)
    return y if wide_v == V else y[..., :V]


@recorded_operator
def lucid_triton(
    tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, numbers: int
) -> Tensor:  # fmt: skip
    """y, of keys that were so many numbers wide before zeros came behind."""
    y, _ = _call(tokens, cu_seqlens, rowmax, window, numbers, save=False)
    return y


@recorded_operator
def lucid_triton_fwd(
    tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, numbers: int
) -> tuple[Tensor, Saved]:
    """y, and what the backward takes, of aligned tokens."""
    return _call(tokens, cu_seqlens, rowmax, window, numbers, save=True)


def _call(
    tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, numbers: int, *, save: bool
) -> tuple[Tensor, Saved]:
    """`solved` of tokens that lie as the caller has them."""
    task = _task(tokens, cu_seqlens, rowmax, window, numbers)
    y, saved = solved(LucidInputs(*task.align.align(*tokens)), task, save)
    return *task.align.restore(y), saved


def _task(tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, numbers: int) -> Task:
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *tokens.k.shape[:2])
    return Task.of(tokens.k, tokens.v, cu_seqlens, rowmax, window, numbers)


def solved(tokens: LucidInputs, task: Task, save: bool) -> tuple[Tensor, Saved]:
    """`forward` of aligned tokens, its kernels precompiled."""
    facts = task.numbers, task.rowmax, bool(task.window), task.packed, task.given > 0, save
    key = ENGINE, task.config.name, kind(*tokens), *facts
    precompile(tokens.k.device, key, lambda: _launches(LucidInputs(*meta(*tokens)), task, save))
    return forward(tokens, task, save=save)


def _launches(tokens: LucidInputs, task: Task, save: bool) -> None:
    """What a call and its backward launch."""
    y, saved = forward(tokens, task, save=save)
    if save:
        backward(torch.empty_like(y), tokens.v, tokens.beta, saved, tokens.k.shape[-1], task)


@recorded_backward_operator
def lucid_triton_bwd(
    dy: Tensor, saved: Saved, tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, numbers: int
) -> LucidInputs:
    """Gradients of `tokens`."""
    task, beta = _task(tokens, cu_seqlens, rowmax, window, numbers), tokens.beta
    check_blocks(saved, task)
    found = backward(*task.align.align(dy, tokens.v, beta), saved, tokens.k.shape[-1], task)
    dk, dv, dbeta = task.align.restore(*found)
    return LucidInputs(dk, dv, None if beta is None or dbeta is None else dbeta.to(beta.dtype))


def check_blocks(saved: Saved, task: Task) -> None:
    C, now = saved.inverse.shape[-1], task.config.launch["shared"]["C"]
    if C != now:
        raise RuntimeError(f"{ENGINE}: the forward ran with blocks of {C}, the config for the backward has {now}")


@fake(lucid_triton)
def _(tokens: LucidInputs, *_):
    return torch.empty_like(tokens.v)


@fake(lucid_triton_fwd)
def _(tokens: LucidInputs, cu_seqlens: Tensor | None, rowmax: bool, *_):
    k, v = tokens.k, tokens.v
    config = launch_config(ENGINE, k.device, k.dtype, k.shape[-1], v.shape[-1])
    N, T = Alignment.sizes(cu_seqlens, k.shape[0], k.shape[1], config.launch["shared"]["C"])
    aligned = LucidInputs(*each(lambda x: x.new_empty(len(x), T, *x.shape[2:]), *tokens))
    return torch.empty_like(v), Saved.of(aligned, rowmax, True, config, N)


@fake(lucid_triton_bwd)
def _(dy: Tensor, saved: Saved, tokens: LucidInputs, *_):
    return LucidInputs(*each(torch.empty_like, *tokens))


def _save(ctx, inputs, output) -> None:
    tokens, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(*output[1], *tokens, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 7
    found = lucid_triton_bwd(dy.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return *(dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 4


differentiable(lucid_triton, _backward, _save, lucid_triton_fwd)
