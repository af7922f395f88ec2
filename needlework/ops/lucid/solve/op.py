"""LUCID's solve of whole sequences as operators of Triton kernels, with its gradients. Those with pages are in pages.py.

`operands.py` prepares each block, `scan.py` solves, `intra_bwd.py` gives the gradient of the keys, `launches.py`
launches them; the constants are in solve.launch.json. In half precision k̂, A, the inverses and Y are float16 operands ("rowmax"'s
keys are as given), sums are float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.lucid.solve.launches import ENGINE, Saved, Task, backward, forward
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.each import each
from needlework.ops.runtime.precompile import kind, meta, precompile


class Given(NamedTuple):
    """What a call's backward wants of its arguments, as the caller has them."""

    k: Tensor
    v: Tensor
    beta: Tensor | None
    cu_seqlens: Tensor | None


def lucid(k: Tensor, v: Tensor, beta: Tensor | None, cu_seqlens: Tensor | None, rowmax: bool, window: int | None) -> Tensor:
    """y [B T H V] in k's dtype, of contiguous tensors; differentiable in k, v and beta."""
    given = k, v, beta, cu_seqlens, rowmax, window
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k, v, beta)):
        return lucid_triton_fwd(*given)[0]
    return lucid_triton(*given)


@operator
def lucid_triton(
    k: Tensor, v: Tensor, beta: Tensor | None, cu_seqlens: Tensor | None, rowmax: bool, window: int | None
) -> Tensor:  # fmt: skip
    """y. An operator of its own: results that are not there cost the host as much as a launch."""
    y, _ = _call(k, v, beta, cu_seqlens, rowmax, window, save=False)
    return y


@operator
def lucid_triton_fwd(
    k: Tensor, v: Tensor, beta: Tensor | None, cu_seqlens: Tensor | None, rowmax: bool, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, and `Saved` of aligned tokens."""
    y, saved = _call(k, v, beta, cu_seqlens, rowmax, window, save=True)
    return y, saved.x, saved.row, saved.inverse, saved.Y, saved.counters, saved.more


def _call(
    k: Tensor, v: Tensor, beta: Tensor | None, cu_seqlens: Tensor | None, rowmax: bool, window: int | None, *, save: bool
) -> tuple[Tensor, Saved]:
    """`solved` of tokens that lie as the caller has them."""
    task = _task(k, v, cu_seqlens, rowmax, window)
    y, saved = solved(each(task.align.align, k, v, beta), task, save)
    return task.align.restore(y), saved


def _task(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, rowmax: bool, window: int | None) -> Task:
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *k.shape[:2])
    return Task.of(k, v, cu_seqlens, rowmax, window)


def solved(tokens: tuple[Tensor, Tensor, Tensor | None], task: Task, save: bool) -> tuple[Tensor, Saved]:
    """`forward` of aligned k, v and beta, its kernels precompiled."""
    key = ENGINE, task.config.name, kind(*tokens), task.rowmax, bool(task.window), task.packed, task.given > 0, save
    precompile(tokens[0].device, key, lambda: _launches(meta(*tokens), task, save))
    return forward(*tokens, task, save=save)


def _launches(tokens: tuple[Tensor, Tensor, Tensor | None], task: Task, save: bool) -> None:
    """What a call and its backward launch."""
    k, v, beta = tokens
    y, saved = forward(k, v, beta, task, save=save)
    if save:
        backward(torch.empty_like(y), v, beta, saved, k.shape[-1], task)


@backward_operator
def lucid_triton_bwd(
    dy: Tensor, saved: list[Tensor],
    k: Tensor, v: Tensor, beta: Tensor | None, cu_seqlens: Tensor | None, rowmax: bool, window: int | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of k, v and, where it is there, beta."""
    task = _task(k, v, cu_seqlens, rowmax, window)
    check_blocks(saved, task)
    dy, v, aligned = each(task.align.align, dy, v, beta)
    found = backward(dy, v, aligned, Saved(*saved), k.shape[-1], task)
    dk, dv, dbeta = each(task.align.restore, *found)
    return [dk, dv] if beta is None or dbeta is None else [dk, dv, dbeta.to(beta.dtype)]


def check_blocks(saved: list[Tensor], task: Task) -> None:
    C, now = Saved(*saved).inverse.shape[-1], task.config.launch["shared"]["C"]
    if C != now:
        raise RuntimeError(f"{ENGINE}: the forward ran with blocks of {C}, the config for the backward has {now}")


@torch.library.register_fake(lucid_triton)
def _(k, v, beta, cu_seqlens, rowmax, window):
    return torch.empty_like(v)


@torch.library.register_fake(lucid_triton_fwd)
def _(k, v, beta, cu_seqlens, rowmax, window):
    task = Task.of(k, v, cu_seqlens, rowmax, window)
    T, N = task.align.T, task.align.N
    k_aligned, v_aligned = (x.new_empty(len(x), T, *x.shape[2:]) for x in (k, v))
    return torch.empty_like(v), *Saved.of(k_aligned, v_aligned, beta is not None, rowmax, True, task.config, N)


@torch.library.register_fake(lucid_triton_bwd)
def _(dy, saved, k, v, beta, cu_seqlens, rowmax, window):
    return [torch.empty_like(x) for x in (k, v, beta) if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.rowmax, ctx.window = inputs
    ctx.save_for_backward(*Given(*tensors), *Saved(*output[1:]))
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 6
    count = len(Given._fields)
    given, saved = Given(*ctx.saved_tensors[:count]), Saved(*ctx.saved_tensors[count:])
    dk, dv, *dbeta = lucid_triton_bwd(dy.contiguous(), list(saved), *given, ctx.rowmax, ctx.window)
    return dk, dv, dbeta[0] if dbeta else None, None, None, None


differentiable(lucid_triton_fwd, _backward, _save)
