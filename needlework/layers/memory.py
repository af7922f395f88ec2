"""ATMA's memory: a write rule beside attention, on the same queries, keys and values, added to the layer's output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from needlework.layers.batch import Batch
from needlework.layers.ccq import Plain, ReadConfig
from needlework.layers.config import Config, Width
from needlework.layers.delta import Delta
from needlework.layers.gates import RetentionGate
from needlework.layers.norm import EPS, l2, published_rms, rms
from needlework.layers.projection import Projection, ZeroProjection, of_one_row_of_heads
from needlework.layers.state import Part, of, under
from needlework.layers.write import WriteConfig
from needlework.ops.linear.arguments import NormedHeads


@dataclass(frozen=True, kw_only=True)
class Memory(Config):
    """ATMA's memory, a write rule beside attention: what it reads is added to the layer's output [B T D].

        y ← y + W_mem( rms(r) ⊙ σ(W_g x) ),    r_t = S_tᵀ q_t [B T Hq d]

    W_mem starts at zero, so that the branch adds nothing at first. Key and value heads are repeated to Hq. q and k are
    L2-normalised. Values are the raw ones, also beside LUCID.

    write: the rule that keeps S; Delta with RetentionGate by default.
    read: Plain or CCQ.
    published_eps: rms with the epsilon of r's own dtype.

    >>> import torch
    >>> from needlework.layers import Attention, Memory, Polar
    >>> mixer = Attention(heads=4, head_dim=16, attend=Polar(), memory=Memory()).build(64)
    >>> mixer(torch.randn(1, 100, 64))[0].shape
    torch.Size([1, 100, 64])
    """

    kind = "memory"
    write: WriteConfig = field(default_factory=lambda: Delta(gate=RetentionGate()))
    read: ReadConfig = field(default_factory=Plain)
    published_eps: bool = False

    def build(self, width: Width) -> "_Memory":
        if self.write.write_rank > 1 or self.write.features is not None:
            raise ValueError(
                f"memory: write is {self.write}, expected a rule of one row a token without features: a memory writes attention's own "
                "keys"
            )
        return _Memory(self, width)


class MemoryState(NamedTuple):
    """Fixed: the write rule's state, the read rule's."""

    write: object
    read: object


class _Memory(nn.Module):
    def __init__(self, config: Memory, width: Width):
        super().__init__()
        self.norm = published_rms if config.published_eps else rms
        heads = width.value_heads  # Hq
        self.repeats = heads // width.heads
        width = width._replace(heads=heads, scale=1.0)
        self.write = config.write.build(width)
        self.read = config.read.build(width, config.write)
        self.g_proj = Projection(width.dim, heads * width.value_dim, bias=width.bias)
        self.mem_proj = ZeroProjection(heads * width.value_dim, width.dim, bias=width.bias)

    def forward(self, x, q, k, v, state: MemoryState | None, **carry) -> tuple[Tensor, MemoryState]:
        state = state or MemoryState(None, None)
        q, k, v = self._heads(q, k, v)
        gates, logits = self.write.gates(x, *self.read.maps)
        clean = partial(self.read.chunk, initial_state=state.read, **carry)
        q_read, read = self.read(clean, *logits, q, k, g=gates["g"])
        chunk = partial(self.write.chunk, initial_state=state.write, **carry)
        r, write = self.write(chunk, q, k, v, q_read=q_read, **gates)
        return self._out(self.g_proj(x), r), MemoryState(write, read)

    def serve(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """What the memory adds, [T D], of tokens [T …]; the tables of `held` advance in place."""
        q, k, v = self._heads(q, k, v)
        gates, (gate, *logits) = self.write.gates(x, self.g_proj, *self.read.maps)
        q_read = self.read.serve(*logits, q=q, k=k, g=gates["g"], tables=of("read", tables), batch=batch)
        return self._out(gate, self.write.serve(q, k, v, of("write", tables), batch, l2norm=False, q_read=q_read, **gates))

    def held(self, dtype: torch.dtype) -> dict[str, Part]:
        """The tensors of one sequence's state, the model in `dtype`."""
        return under("write", self.write.held(dtype)) | under("read", self.read.held(dtype))

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit q and k, k and v with a head for each of q's."""
        return l2(q), l2(k).repeat_interleave(self.repeats, -2), v.repeat_interleave(self.repeats, -2)

    def _out(self, gate: Tensor, r: Tensor) -> Tensor:
        """What the memory adds, of what `g_proj` gives and of what was read."""
        heads = NormedHeads(r, None, gate, torch.finfo(r.dtype).eps if self.norm is published_rms else EPS)
        if (y := of_one_row_of_heads(self.mem_proj, heads, "sigmoid", gate.dtype)) is not None:
            return y
        open_ = torch.sigmoid(gate).unflatten(-1, r.shape[-2:])  # by heads, as the norm is: compiled they are one kernel
        return self.mem_proj((self.norm(r).to(gate.dtype) * open_).flatten(-2))
