"""The attention mixer: project, normalise, convolve or rotate, attend, gate, and beside it, if the config says so, a memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from needlework.fields import Count
from needlework.layers.batch import Batch
from needlework.layers.config import Mixer, MixerConfig, Width
from needlework.layers.conv import ConvConfig, conv_held
from needlework.layers.distract import Distractor
from needlework.layers.memory import Memory
from needlework.layers.norm import Later, RMSNorm, now, published_rms, rms
from needlework.layers.projection import OutProjection, Projection, wide_maps
from needlework.layers.rope import PositionConfig
from needlework.layers.softmax import AttendConfig
from needlework.layers.state import Held, of, under
from needlework.ops.common.packing import token_positions


@dataclass(frozen=True, kw_only=True)
class Attention(MixerConfig):
    """A mixer that attends: x [B T D] -> y [B T D]. Its state grows with the tokens seen, up to the attend rule's window.

        y = W_o( o ⊙ σ(gate) ) (+ what the rule adds) (+ the memory's read),    o [B T Hq d] from the attend rule

    heads: Hq query heads of head_dim = d channels.
    kv_heads: Hkv heads of k and v; Hq is a multiple of it, None: Hq.
    attend: the attend rule, e.g. Softmax.
    position: Rope, HalfRope or None: no positions.
    qk_norm: RMS norm of q and k per head, without weight; "weighted": each with a weight [d] that the heads share, as Qwen3.
    conv: Canon, ShortConv or None, on q, k and v after the norm.
    output_gate: with the factor σ(gate), gate [B T Hq d] from the q projection, which makes 2 d a head.
    bias: in every projection.
    memory: a write rule beside attention, on the same q, k, v before positions (`Memory`).
    published_eps: qk_norm with the epsilon of the dtype of q and k, as ATMA's models were trained, not 1e-6.
    Raises ValueError for a field out of its range, and where the layer is built with heads that are no multiple of kv_heads, with a
    head_dim that the position cannot turn, with a position beside an attend rule that has its own, or with published_eps beside a
    weighted norm.

    >>> import torch
    >>> from needlework.layers import Attention, Rope, Softmax
    >>> mixer = Attention(heads=4, kv_heads=2, head_dim=16, attend=Softmax(window=32), position=Rope()).build(64)
    >>> mixer(torch.randn(2, 100, 64))[0].shape
    torch.Size([2, 100, 64])
    """

    kind = "attention"
    heads: Count
    head_dim: Count
    kv_heads: Count | None = None
    attend: AttendConfig
    position: PositionConfig | None = None
    qk_norm: bool | Literal["weighted"] = False
    conv: ConvConfig | None = None
    output_gate: bool = False
    bias: bool = False
    memory: Memory | None = None
    published_eps: bool = False

    def build(self, dim: int, layer: int = 0) -> Mixer:
        """The module for x [B T dim]; layer: its index in the model, from 0.

        `module(x, state=None, cu_seqlens=None, output_final_state=False)` returns y [B T dim] and the state, or None.
        """
        return _Attention(self, dim, layer)


class Pages(Protocol):
    """What an attend rule has seen: `length` [N] tokens."""

    @property
    def length(self) -> Tensor: ...


class AttentionState(NamedTuple):
    """The convolution's last inputs (fixed), the attend rule's pages (growing) and what it holds beside them, the memory's state
    (fixed)."""

    conv: Tensor | None
    attend: Pages | None
    memory: object


class _Attention(Mixer):
    late = True

    def __init__(self, config: Attention, dim: int, layer: int):
        super().__init__()
        self.config = config
        Hq, Hkv, d = config.heads, config.kv_heads or config.heads, config.head_dim
        if Hq % Hkv:
            raise ValueError(f"attention: heads is {Hq}, expected a multiple of kv_heads = {Hkv}")
        self.Hq, self.Hkv, self.d = Hq, Hkv, d
        if config.qk_norm == "weighted":
            if config.published_eps:
                raise ValueError("attention: published_eps is of a qk_norm without weight, got qk_norm='weighted'")
            self.q_norm, self.k_norm = RMSNorm(d), RMSNorm(d)
        else:
            self.q_norm = self.k_norm = published_rms if config.published_eps else rms
        self.q_proj = Projection(dim, Hq * d * (2 if config.output_gate else 1), bias=config.bias)
        self.k_proj, self.v_proj = (Projection(dim, Hkv * d, bias=config.bias) for _ in range(2))
        self.channels = (Hq + 2 * Hkv) * d
        self.conv = None if config.conv is None else config.conv.build(self.channels)
        width = Width(dim, Hkv, Hq, d, d, config.bias, layer=layer)
        self.attend = config.attend.build(width)
        vectors, position = self.attend.vectors_a_head, config.position
        if position is not None and self.attend.own_positions:
            raise ValueError(
                f"attention: position is {position.kind!r}, expected None with {config.attend.kind!r}, which has positions of its own"
            )
        if position is not None and d % (position.multiple * vectors):
            raise ValueError(
                f"attention: head_dim is {d}, expected a multiple of {position.multiple * vectors} with the position "
                f"{position.kind!r} of {config.attend.kind!r}"
            )
        self.o_proj = OutProjection(Hq * d, dim, bias=config.bias)
        self.memory = None if config.memory is None else config.memory.build(width)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, AttentionState | None]:
        """x [B T D] -> y [B T D] and, if asked for, the state after the last token (of every packed sequence)."""
        state = state or AttentionState(None, None, None)
        q, gate, k, v = self._project(x)
        q, k, v, conv = self._convolve(q, k, v, state.conv, cu_seqlens)
        carry = {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        remembered = memory = None
        if self.memory is not None:
            remembered, memory = self.memory(x, q, k, v, state.memory, **carry)
        if (position := self.config.position) is not None:
            at = token_positions(x, None if state.attend is None else state.attend.length, cu_seqlens)
            q, k = self._turned(position, q, at), self._turned(position, k, at)
        o, residual, attend = self.attend(x, q, k, v, initial_state=state.attend, **carry)
        y = self._out(x, o, gate, residual, remembered)
        return y, AttentionState(conv, attend, memory) if output_final_state else None

    def serve(self, x: Tensor | Later, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        q, gate, k, v = self._project(x)
        x = now(x)
        if self.conv is not None:
            line, sizes = torch.cat([z.flatten(-2) for z in (q, k, v)], -1), [z.shape[-2] * self.d for z in (q, k, v)]
            q, k, v = (z.unflatten(-1, (-1, self.d)) for z in self.conv.serve(line, sizes, tables.get("conv"), batch))
        remembered = None if self.memory is None else self.memory.serve(x, q, k, v, of("memory", tables), batch)
        if (position := self.config.position) is not None:
            q, k = self._turned(position, q, batch.positions), self._turned(position, k, batch.positions)
        o, residual = self.attend.serve(x, q, k, v, tables, batch)
        return self._out(x, o, gate, residual, remembered)

    def held(self, dtype: torch.dtype) -> Held:
        fixed, cut = conv_held(self.config.conv, self.channels, dtype), 1
        if self.memory is not None:
            fixed, cut = fixed | under("memory", self.memory.held(dtype)), self.memory.write.cut
        fixed = fixed | under("attend", self.attend.fixed(dtype))
        return Held(
            fixed,
            self.attend.rows(dtype),
            self.attend.reach,
            cut,
            rewritten=self.attend.rewrites,
            captured=self.attend.captured(dtype),
        )

    def distraction(self, x: Tensor, distractor: Distractor, cu_seqlens: Tensor | None = None) -> Tensor:
        """`distractor`'s loss on this layer's input x [B T D]: a number. Projects again, so that `forward` stays as it is."""
        q, _, k, v = self._project(x)
        q, k, v, _ = self._convolve(q, k, v, None, cu_seqlens)
        at = token_positions(x, None, cu_seqlens)
        if (position := self.config.position) is not None:
            q, k = self._turned(position, q, at), self._turned(position, k, at)
        with torch.no_grad():
            noise = torch.randn_like(x)
            k_r, v_r = (p(noise).unflatten(-1, (-1, self.d)) for p in (self.k_proj, self.v_proj))
            if self.config.qk_norm and not distractor.raw_keys:
                k_r = self.k_norm(k_r).to(k_r.dtype)
        return distractor(self.attend, q, k, v, k_r, v_r, at)

    def _project(self, x: Tensor | Later) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """q, gate, k, v by heads, normed."""
        q, k, v = wide_maps(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = q.unflatten(-1, (self.Hq, -1)), None
        if self.config.output_gate:
            q, gate = q.chunk(2, -1)
        k, v = (z.unflatten(-1, (self.Hkv, -1)) for z in (k, v))
        if self.config.qk_norm:
            # under autocast a weight is wider than what it scales
            q, k = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        return q, gate, k, v

    def _convolve(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None):
        """q, k, v after the convolution, before positions, and its state."""
        if self.conv is not None:
            qkv, state = self.conv(tuple(z.flatten(-2) for z in (q, k, v)), state, cu_seqlens)
            q, k, v = (z.unflatten(-1, (-1, self.d)) for z in qkv)
        return q, k, v, state

    def _out(self, x: Tensor, o: Tensor, gate: Tensor | None, residual: Tensor | None, remembered: Tensor | None) -> Tensor:
        """y [.. D] of what was read, o [.. Hq d], and of what the rule and the memory add."""
        if gate is not None:
            o = o * torch.sigmoid(gate)
        y = self.o_proj(o.to(x.dtype).flatten(-2))
        for more in (residual, remembered):
            if more is not None:
                y = y + more
        return y

    def _turned(self, position: PositionConfig, x: Tensor, at: Tensor) -> Tensor:
        """x [.. H d] at its positions [..]: each of a head's vectors turns by itself, or its scores would not be relative."""
        vectors = x.unflatten(-1, (self.attend.vectors_a_head, -1)).flatten(-3, -2)
        return position(vectors, at).reshape(x.shape)
