"""Calls of flash-linear-attention and PyTorch for our mathematics, each imported at its first use."""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Peer(NamedTuple):
    """`load` returns a function of the case's tensors that returns o. `ours`: it is a call of this library's."""

    name: str
    load: Callable[[], Callable[..., Tensor]]
    ours: bool = False


def _fla(path: str) -> Callable:
    module, name = path.rsplit(".", 1)
    # its guard refuses this backward on Hopper under Triton 3.4-3.7.0; at K = 128 and 256 the miscompiled tile is not used
    import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    return getattr(import_module(module), name)


def _first(path: str) -> Callable[[], Callable[..., Tensor]]:
    """A call by its own names of arguments, initial_state and cu_seqlens among them; the first of what it returns."""

    def load() -> Callable[..., Tensor]:
        call = _fla(path)
        return lambda **x: call(**x)[0]

    return load


def _comba() -> Callable[..., Tensor]:
    """Q-Delta is its comba with p = e^g (k + λq); p is formed outside, as a user of it must."""
    call = _fla("fla.ops.comba.chunk_comba")
    form = lambda q, k, g, lam: (g.exp()[..., None] * (k + lam[..., None] * q)).to(k.dtype)
    return lambda q, k, v, g, beta, lam, **more: call(q, k, v, form(q, k, g, lam), g, beta, **more)[0]


def _path() -> Callable[..., Tensor]:
    call = _fla("fla.ops.path_attn.parallel_path_attn")
    return lambda q, k, v, beta, w, **more: call(q, k, v, w, beta, **more)[0]


def _curvature() -> Callable[..., Tensor]:
    """Σq by its linear attention with v = k, and the rest of the formula in PyTorch."""
    call = _fla("fla.ops.linear_attn.chunk_linear_attn")

    def cleaned(q: Tensor, k: Tensor, eta: Tensor) -> Tensor:
        t = torch.arange(1, q.shape[1] + 1, device=q.device)[:, None, None]
        mean = k.float().cumsum(1) / t
        Mq = call(q, k, k, scale=1.0, normalize=False)[0]
        Sq = Mq.float() / t - mean * (mean * q.float()).sum(-1, keepdim=True)
        return (q.float() - eta[..., None] * Sq).to(q.dtype)

    return cleaned


def _solve() -> Callable[..., Tensor]:
    """deltaformer's first stage with q = k = √d k̂: the same solve of a matrix whose rows are normalised (its β, 1 here, scales them back:
    that costs nothing)."""
    module = import_module("fla.ops.deltaformer.parallel")
    solve = module.ParallelDeltaformerFunction.apply
    return lambda k, v, cu_seqlens=None: solve(k, k, v, None, module.BLOCK_SIZE_C, cu_seqlens)


def _attention(backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    return attend


def _documents() -> Callable[..., Tensor]:
    """Softmax attention in packed documents."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        ends = cu_seqlens.int()
        return varlen_attn(q[0], k[0], v[0], ends, ends, longest, longest, window_size=(-1, 0))[None]

    return attend


def _peer(name: str) -> Peer:
    path = f"fla.ops.{name}"
    return Peer(f"flash-linear-attention {name.rpartition('.')[2]}", _first(path))


GATED = _peer("gated_delta_rule.chunk_gated_delta_rule")
COMBA = Peer("flash-linear-attention chunk_comba", _comba)
KDA = _peer("kda.chunk_kda")
SIMPLE_GLA = _peer("simple_gla.chunk_simple_gla")
GLA = _peer("gla.chunk_gla")
GDN2 = _peer("gdn2.chunk_gdn2")
DPLR = _peer("generalized_delta_rule.chunk_dplr_delta_rule")
PATH = Peer("flash-linear-attention parallel_path_attn", _path)
CURVATURE = Peer("flash-linear-attention chunk_linear_attn with v = k, the rest in PyTorch", _curvature)
SOLVE = Peer("flash-linear-attention deltaformer, its u-solve", _solve)
CUDNN = Peer("SDPA, cuDNN, key-value heads expanded", lambda: _attention(SDPBackend.CUDNN_ATTENTION))
FLASH = Peer("SDPA, flash, key-value heads expanded", lambda: _attention(SDPBackend.FLASH_ATTENTION))
DOCUMENTS = Peer("varlen_attn, flash, key-value heads expanded", _documents)
