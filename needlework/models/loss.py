"""Cross entropy of a linear head without its logits in memory: [N D] hidden states, [N] targets -> one number.

    loss = Σ_n e_n (logsumexp_v z_nv − z_n,target(n))      z = softcap(W x + b), over the n whose target is not −100; e_n is 1 unless said
    dz = e (softmax(z) − onehot(target));   dx = W^T dz,  dW = Σ_n dz_n x_n^T,  db = Σ_n dz_n

`LOGITS` logits exist at a time. The loss is a number, so its gradients are known but for a factor as soon as it is: they are made
beside it, rows by rows, and the backward pass only scales them. No logit is made twice.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE = -100
LOGITS = 1 << 27  # 512 MiB in float32; rows enough to fill a GPU at a vocabulary of 256,000


def softcap(z: Tensor, c: float | None) -> Tensor:
    """c·z/√(z² + c²), between −c and c; None leaves z as it is."""
    return z if c is None else c * z * torch.rsqrt(z.square() + c * c)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None, *, impl: str = "torch"
) -> Tensor:
    """The sum over counted targets; x [N D], weight [V D], bias [V], targets [N] int64 with −100 where nothing is counted.

    Products run in weight's dtype, or in autocast's where it is on; softcap, softmax and sums in float32 (float64 in float64).
    impl: "torch" anywhere, in one graph under torch.compile, on CUDA with a softmax compiled by itself outside of it; "liger", the
        kernels of liger-kernel, on CUDA and without softcap.
    Raises ValueError for another impl, or one that cannot do this; ImportError where liger-kernel is missing.
    """
    if impl == "liger":
        return _liger(x, weight, bias, targets, cap, _product_dtype(x, weight))
    if impl != "torch":
        raise ValueError(f'loss_impl: got {impl!r}, expected "torch" or "liger"')
    return _Summed.apply(x, weight, bias, targets, None, cap, _product_dtype(x, weight), torch.is_grad_enabled())[0]


def emphasised_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, emphasis: Tensor, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The sum with target n counted emphasis[n] times, emphasis [N]; and each target's nats [N] without it, 0 where nothing is counted,
    which have no gradient. Arguments and dtypes as in `linear_cross_entropy`, whose impl is "torch"."""
    return _Summed.apply(x, weight, bias, targets, emphasis, cap, _product_dtype(x, weight), torch.is_grad_enabled())


def _product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, targets, emphasis, cap, dtype, training):
        need = [training and needed for needed in ctx.needs_input_grad[:3]]  # these do not know of no_grad
        wide = torch.promote_types(dtype, torch.float32)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        loss = torch.zeros((), dtype=wide, device=x.device)
        dx, nats = torch.empty_like(x) if need[0] else None, []
        dw = torch.zeros(weight.shape, dtype=wide, device=x.device) if need[1] else None
        db = torch.zeros(len(weight), dtype=wide, device=x.device) if need[2] else None
        rows = max(1, LOGITS // len(weight))
        rows -= rows % 128 if rows > 128 else 0  # whole tiles of a matrix product
        entropy = _compiled() if x.is_cuda and not torch.compiler.is_compiling() else _cross_entropy
        with torch.autocast(x.device.type, enabled=False):
            times = [None] * len(targets.split(rows)) if emphasis is None else emphasis.to(wide).split(rows)
            into = [None] * len(times) if dx is None else dx.split(rows)
            for some, own, wanted, e in zip(x.split(rows), into, targets.split(rows), times, strict=True):
                some = some.to(dtype)
                part, dz = entropy(F.linear(some, w, b), wanted, e, cap, wide, any(need))
                nats.append(part)
                loss = loss + (part if e is None else e * part).sum()
                if dz is None:
                    continue
                if own is not None:
                    own.copy_(dz @ w)
                if dw is not None:
                    dw += dz.mT @ some
                if db is not None:
                    db += dz.sum(0, dtype=wide)
        ctx.save_for_backward(dx, dw, db)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        each = torch.cat(nats)
        ctx.mark_non_differentiable(each)
        return loss, each

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor, _: Tensor):  # pyrefly: ignore[bad-override] (torch passes as many as outputs)
        gradients = (None if g is None else (upstream * g).to(t) for g, t in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *gradients, None, None, None, None, None


def _cross_entropy(
    z: Tensor, targets: Tensor, emphasis: Tensor | None, cap: float | None, wide: torch.dtype, training: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Of logits z [n V] before the softcap: the nats of each counted target [n], and the gradient of their emphasised sum in z's dtype."""
    dtype, counted = z.dtype, targets != IGNORE
    z = z.to(wide)
    slope = None if cap is None else torch.rsqrt(z.square() + cap * cap).mul_(cap)
    if slope is not None:
        z = z * slope
    normaliser = z.logsumexp(-1)
    target = targets.where(counted, 0)[:, None]
    nats = (normaliser - z.gather(-1, target)[:, 0]).where(counted, 0)
    if not training:
        return nats, None
    dz = (z - normaliser[:, None]).exp_()
    # not a scatter, which a compiler would leave a pass of its own
    dz.add_(torch.arange(z.shape[1], device=z.device) == target, alpha=-1)
    if slope is not None:
        dz.mul_(slope.pow_(3))  # the softcap's derivative
    times = counted if emphasis is None else counted * emphasis
    return nats, dz.mul_(times[:, None]).to(dtype)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Two passes over the logits on a GPU, whose kernels all are compiled, where operators one by one make a dozen."""
    return torch.compile(_cross_entropy)


def liger(cap: float | None, device: str) -> Callable[..., Tensor]:
    """liger-kernel's function; ValueError for a softcap or a device that is none of its, ImportError where it is missing."""
    if cap is not None:
        raise ValueError(f'loss_impl="liger": its softcap is c·tanh(z/c), this model\'s {cap}·z/√(z² + {cap}²); use "torch"')
    if device != "cuda":
        raise ValueError(f'loss_impl="liger": its kernels run on CUDA, the hidden states are on {device}; use "torch"')
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise ImportError(f'loss_impl="liger" needs liger-kernel: pip install liger-kernel ({error})') from error
    return liger_fused_linear_cross_entropy


def _liger(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None, dtype: torch.dtype) -> Tensor:
    entropy = liger(cap, x.device.type)
    b = None if bias is None else bias.to(dtype)
    return entropy(x.to(dtype), weight.to(dtype), targets, b, ignore_index=IGNORE, reduction="sum", accum_dtype=torch.float32)
