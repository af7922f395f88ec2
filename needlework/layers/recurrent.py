"""The recurrent mixer: project, convolve, gate, write, read. The rules come as configs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.fields import Count
from needlework.layers.batch import Batch
from needlework.layers.ccq import Plain, ReadConfig
from needlework.layers.config import Mixer, MixerConfig, Width
from needlework.layers.conv import ConvConfig, ShortConv, conv_held
from needlework.layers.norm import Later, l2
from needlework.layers.output import HeadNorm, NormConfig, OutputGate
from needlework.layers.projection import OutProjection, Projection
from needlework.layers.rope import PositionConfig
from needlework.layers.state import Held, of, under
from needlework.layers.write import WriteConfig
from needlework.ops.common.packing import lengths, token_positions
from needlework.ops.linear.arguments import GateActivation
from needlework.probe import probe


@dataclass(frozen=True, kw_only=True)
class Recurrent(MixerConfig):
    """A mixer with a state of fixed size: x [B T D] -> y [B T D].

        q, k, v = conv(W x),    S_t by `write`,    o_t = scale · S_tᵀ (`read`'s query),    y = W_o norm(o, gate)

    with norm(o, gate) = RMSNorm(o) ⊙ silu(W_g x) unless `norm` or `output_gate` say otherwise.

    heads: H, the heads of q and k, of key_dim = K channels each.
    value_heads: HV, the heads of v and of the state, of value_dim = V channels each; a multiple of H, None: H.
    write: the write rule, e.g. Delta.
    read: the read rule: Plain or CCQ.
    conv: of q, k and v: ShortConv, Canon, Silu (no convolution), or None.
    position: q and k turn by their position before they write and read, as in RetNet: Rope, PairRope, HalfRope; None: not.
    norm: of what was read: HeadNorm, or GatedNorm as Mamba-2 has it.
    output_gate: True: the factor silu(W_g x), as Gated DeltaNet has it; False: none, as DeltaNet and CARVE; OutputGate: KDA's.
    Raises ValueError for a field out of its range, and where the layer is built with value_heads that heads do not divide.

    >>> import torch
    >>> from needlework.layers import QDelta, Recurrent
    >>> mixer = Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta()).build(64)
    >>> y, state = mixer(torch.randn(2, 100, 64), output_final_state=True)  # [2 100 64] and the state after token 99
    >>> mixer(torch.randn(2, 1, 64), state)[0].shape  # the next token
    torch.Size([2, 1, 64])
    """

    kind = "recurrent"
    heads: Count
    key_dim: Count
    value_dim: Count
    value_heads: Count | None = None
    write: WriteConfig
    read: ReadConfig = field(default_factory=Plain)
    conv: ConvConfig | None = field(default_factory=ShortConv)
    position: PositionConfig | None = None
    norm: NormConfig = field(default_factory=HeadNorm)
    output_gate: bool | OutputGate = True

    def build(self, dim: int, layer: int = 0) -> Mixer:
        """The module for x [B T dim]; layer: its index in the model, from 0.

        `module(x, state=None, cu_seqlens=None, output_final_state=False)` returns y [B T dim] and the state, or None.
        """
        return _Recurrent(self, dim, layer)


class RecurrentState(NamedTuple):
    """Fixed: the convolution's last inputs, the write rule's state, the read rule's; tokens seen [N], where positions count."""

    conv: Tensor | None
    write: object
    read: object
    length: Tensor | None = None


class _Recurrent(Mixer):
    late = True

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
        self.q_proj, self.k_proj, self.v_proj = (Projection(dim, n, bias=False) for n in self.sizes)
        self.conv = None if config.conv is None else config.conv.build(sum(self.sizes))
        self.write = config.write.build(width)
        self.read = config.read.build(width._replace(key_dim=self.write.key_dim), config.write)
        # while serving the op makes q and k of unit norm, where nothing else reads them
        self.l2norm = self.write.norms and config.write.unit_keys and isinstance(config.read, Plain)
        # of q, k and v: the channels of a head that leaves the convolution of a chunk with unit norm; None: a norm comes later
        self.conv_unit: tuple[int, int, int] | None = None
        if config.position is not None:
            config.position.check(width.key_dim)
        elif config.conv is not None and config.write.unit_keys:
            self.conv_unit = (width.key_dim, width.key_dim, 0)
        self.norm = config.norm.build(width)
        gate = config.output_gate
        self.activation: GateActivation = gate.activation if isinstance(gate, OutputGate) else "silu"
        self.g_proj = None
        if gate:
            full = gate is True
            self.g_proj = Projection(dim, HV * width.value_dim, bias=False) if full else gate.build(width)
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
            (q, k, v), conv = self.conv.of_maps(x, maps, self.sizes, state.conv, cu_seqlens, unit=self.conv_unit)
        at = None if self.config.position is None else token_positions(x, state.length, cu_seqlens)
        q, k, v = self._turned(q, k, v, at)
        if self.conv_unit is None:
            q, k, v = self._unit(q, k, v)
        q, k, v, unit = self._mapped(q, k, v)
        gates, logits = self.write.gates(x, *self.read.maps)
        carry = {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        clean = partial(self.read.chunk, initial_state=state.read, **carry)
        q_read, read = self.read(clean, *logits, q, unit, g=gates["g"])
        chunk = partial(self.write.chunk, initial_state=state.write, **carry)
        o, write = self.write(chunk, q, k, v, q_read=q_read, **gates)
        y = self._out(x, o, None if self.g_proj is None else self.g_proj(x))
        return y, RecurrentState(conv, write, read, self._length(x, state, cu_seqlens)) if output_final_state else None

    def serve(self, x: Tensor | Later, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        maps, out = (self.q_proj, self.k_proj, self.v_proj), () if self.g_proj is None else (self.g_proj,)
        gates, (line, *made) = self.write.gates(x, maps, *out, *self.read.maps)
        gate, logits = made[0] if out else None, made[len(out) :]
        q, k, v = (
            line.split(self.sizes, -1) if self.conv is None else self.conv.serve(line, self.sizes, tables.get("conv"), batch)
        )
        if self.l2norm:
            q, k, v = self._turned(q, k, v, batch.positions)
            o = self.write.serve(q, k, v, of("write", tables), batch, q_read=None, l2norm=True, **gates)
            return self._out(x, o, gate)
        q, k, v, unit = self._mapped(*self._unit(*self._turned(q, k, v, batch.positions)))
        q_read = self.read.serve(*logits, q=q, k=unit, g=gates["g"], tables=of("read", tables), batch=batch)
        return self._out(x, self.write.serve(q, k, v, of("write", tables), batch, l2norm=False, q_read=q_read, **gates), gate)

    def held(self, dtype: torch.dtype) -> Held:
        conv = conv_held(self.config.conv, sum(self.sizes), dtype)
        fixed = conv | under("write", self.write.held(dtype)) | under("read", self.read.held(dtype))
        return Held(fixed, {}, cut=self.write.cut, counted=self.config.position is not None)

    def _unit(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k of unit norm, where the write rule has them so."""
        return (l2(q), l2(k), v) if self.config.write.unit_keys else (q, k, v)

    def _mapped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k after `_unit`, as features where the write rule has those; and unit keys, for the read rule."""
        q, k = self.write.mapped(q, k)
        return q, k, v, k if self.config.write.unit_keys else l2(k)

    def _turned(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v by heads, q and k turned by their positions `at`."""
        q, k, v = q.unflatten(-1, self.q_shape), k.unflatten(-1, self.k_shape), v.unflatten(-1, self.v_shape)
        if (position := self.config.position) is not None and at is not None:
            q, k = position(q, at), position(k.flatten(at.dim(), -2), at).view_as(k)
        return q, k, v

    def _length(self, x: Tensor, state: RecurrentState, cu_seqlens: Tensor | None) -> Tensor | None:
        """Tokens of each sequence after x, where positions count."""
        if self.config.position is None:
            return None
        new = torch.full((len(x),), x.shape[1], device=x.device) if cu_seqlens is None else lengths(cu_seqlens).long()
        return new if state.length is None else state.length + new

    def _out(self, x: Tensor | Later, o: Tensor, gate: Tensor | None) -> Tensor:
        """y [.. D] in the dtype of x, of what was read, o [.. HV V], and of what `g_proj` gives."""
        return self.norm.mapped(self.o_proj, probe("recurrent.o", o), gate, self.activation, x.dtype)
