"""The recurrent mixer: project, convolve, gate, write, read. Rules come as configs; this file knows none of them by name."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from needlework.fields import Count
from needlework.layers.ccq import Plain, ReadConfig
from needlework.layers.config import Config, Width
from needlework.layers.conv import ConvConfig, ShortConv, conv_state_size
from needlework.layers.norm import RMSNorm, l2
from needlework.layers.projection import OutProjection
from needlework.layers.write import WriteConfig
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class Recurrent(Config):
    """y = W_o( RMSNorm(o) ⊙ silu(W_g x) ), o the read of a state that `write` keeps, by `read`'s query.

    heads H of key_dim K; value_heads HV (None: H) of value_dim V. conv: ShortConv (convolution and SiLU), Silu, or None.
    output_gate: with W_g, as Gated DeltaNet has it, or without, as CARVE.
    """

    kind = "recurrent"
    heads: Count
    key_dim: Count
    value_dim: Count
    value_heads: Count | None = None
    write: WriteConfig
    read: ReadConfig = field(default_factory=Plain)
    conv: ConvConfig | None = field(default_factory=ShortConv)
    output_gate: bool = True

    def build(self, dim: int, layer: int = 0) -> nn.Module:
        return _Recurrent(self, dim, layer)


class RecurrentState(NamedTuple):
    """Fixed: the convolution's last inputs, the write rule's state, the read rule's."""

    conv: Tensor | None
    write: object
    read: object


class _Recurrent(nn.Module):
    def __init__(self, config: Recurrent, dim: int, layer: int):
        super().__init__()
        self.config = config
        rows = config.write.write_rank
        H, HV = config.heads, config.value_heads or config.heads
        if HV % H:
            raise ValueError(f"recurrent: value_heads is {HV}, expected a multiple of heads = {H}")
        width = Width(dim, H, HV, config.key_dim, config.value_dim, layer=layer)
        self.q_shape, self.k_shape, self.v_shape = (H, width.key_dim), (H, width.key_dim), (HV, width.value_dim)
        if rows > 1:
            self.k_shape, self.v_shape = (H, rows, width.key_dim), (HV, rows, width.value_dim)
        self.sizes = [torch.Size(s).numel() for s in (self.q_shape, self.k_shape, self.v_shape)]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, n, bias=False) for n in self.sizes)
        self.conv = None if config.conv is None else config.conv.build(sum(self.sizes))
        self.write = config.write.build(width)
        self.read = config.read.build(width, config.write)
        self.norm = RMSNorm(width.value_dim)
        self.g_proj = nn.Linear(dim, HV * width.value_dim, bias=False) if config.output_gate else None
        self.o_proj = OutProjection(HV * width.value_dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        state: RecurrentState | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, RecurrentState | None]:
        """x [B T D] -> y [B T D] and, if asked for, the state after the last token (of every packed sequence)."""
        state = state or RecurrentState(None, None, None)
        maps, conv = (self.q_proj, self.k_proj, self.v_proj), None
        if self.conv is None:
            q, k, v = (m(x) for m in maps)
        else:
            (q, k, v), conv = self.conv.of_maps(x, maps, self.sizes, state.conv, cu_seqlens)
        q, k, v = q.unflatten(-1, self.q_shape), k.unflatten(-1, self.k_shape), v.unflatten(-1, self.v_shape)
        if self.config.write.unit_keys:
            q, k = l2(q), l2(k)
        gates, logits = self.write.gates(x, *self.read.maps)
        unit = k if self.config.write.unit_keys else l2(k)
        carry = {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        q_read, read = self.read(*logits, q, unit, g=gates["g"], initial_state=state.read, **carry)
        o, write = self.write(q, k, v, q_read=q_read, initial_state=state.write, **gates, **carry)
        o = self.norm(probe("recurrent.o", o)).flatten(-2)
        if self.g_proj is not None:
            o = o * F.silu(self.g_proj(x))
        return self.o_proj(o.to(x.dtype)), RecurrentState(conv, write, read) if output_final_state else None

    def state_size(self, T: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's state after T tokens, the model in `dtype`: the same for every T."""
        conv = conv_state_size(self.config.conv, sum(self.sizes), dtype)
        return conv + self.write.state_size(dtype) + self.read.state_size(dtype)
