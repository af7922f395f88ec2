"""The named mixers: what people call them, their equation, their cost, and the config that composes them.

`needlework mixers` prints this list, recipes and `build` make modules from it. A new mixer adds its line to CATALOG.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from needlework.fields import Count, fitted
from needlework.layers.alibi import Alibi
from needlework.layers.attention import Attention
from needlework.layers.carve import Carve
from needlework.layers.ccq import CCQ
from needlework.layers.comba import Comba
from needlework.layers.config import Config, Mixer, MixerConfig, nearest
from needlework.layers.conv import Canon, ShortConv
from needlework.layers.delta import Delta
from needlework.layers.delta_product import DeltaProduct
from needlework.layers.differential import Differential
from needlework.layers.features import Hedgehog
from needlework.layers.fox import Fox
from needlework.layers.gates import ChannelGate, FixedGate, LowRankGate, RetentionGate, ScalarGate
from needlework.layers.gdn2 import Gdn2
from needlework.layers.linear import Linear
from needlework.layers.longhorn import Longhorn
from needlework.layers.lucid import Lucid
from needlework.layers.lucid_path import LucidPath
from needlework.layers.mamba import Mamba
from needlework.layers.mamba2 import Mamba2
from needlework.layers.mamba3 import Mamba3
from needlework.layers.memory import Memory
from needlework.layers.output import GatedNorm, HeadNorm, OutputGate
from needlework.layers.path import Path
from needlework.layers.polar import Polar
from needlework.layers.qdelta import QDelta
from needlework.layers.recurrent import Recurrent
from needlework.layers.rope import PairRope
from needlework.layers.rwkv7 import Rwkv7
from needlework.layers.softmax import AttendConfig, Softmax
from needlework.layers.ssmax import SSMax
from needlework.layers.write import WriteConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Head shapes for a family of mixers that are compared: recurrent heads of [key_dim value_dim], attention heads of head_dim.

    half_life: where every retention gate starts, in tokens; None keeps each paper's own start.
    """

    heads: int
    key_dim: int
    value_dim: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    half_life: float | None = None
    content_chunk: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """One row of the catalog. equation and state are for reading; `make(sizes)` is the mixer."""

    title: str
    equation: str
    state: str
    cost: str
    make: Callable[[Sizes], MixerConfig]


def _recurrent(s: Sizes, write: WriteConfig, **settings) -> Recurrent:
    shape: dict[str, Any] = {"heads": s.heads, "key_dim": s.key_dim, "value_dim": s.value_dim}
    return Recurrent(**shape | settings, write=write)


def _attention(s: Sizes, attend: AttendConfig, **settings) -> Attention:
    """No positions: canon's convolution on q, k and v distinguishes neighbours."""
    return Attention(
        heads=s.attention_heads, kv_heads=s.kv_heads, head_dim=s.head_dim, attend=attend, qk_norm=True, conv=Canon(), **settings
    )


def _scale(s: Sizes) -> float:
    """q and k have norm √d, so scores lie in ±√d; twice that lets a head of 32 single out one key in a thousand."""
    return 2 / math.sqrt(s.head_dim)


def _carve(s: Sizes) -> Recurrent:
    # two gates decay: each starts at twice the half-life that the other mixers' single gate has
    write = Carve(content_chunk=s.content_chunk)
    if s.half_life is not None:
        write = dataclasses.replace(write, half_life=(2 * s.half_life, 2 * s.half_life))
    return _recurrent(s, write)


def _mamba3(s: Sizes) -> Mamba3:
    return Mamba3(heads=s.heads, key_dim=s.key_dim, value_dim=s.value_dim, half_life=s.half_life)


def _retention(s: Sizes) -> RetentionGate:
    return RetentionGate() if s.half_life is None else RetentionGate(offset=-math.log(2 ** (1 / s.half_life) - 1))


_STATE, _PAGES = "H·K·V", "Hkv·(K+V)·T"
_LINEAR, _QUADRATIC = "O(T·K·V)", "O(T²·d)"

CATALOG: dict[str, Named] = {
    "linear": Named(
        title="Linear attention", equation="S ← S + k vᵀ", state=_STATE, cost=_LINEAR, make=lambda s: _recurrent(s, Linear())
    ),
    "gla": Named(
        title="GLA", equation="S ← Diag(eᵍ) S + k vᵀ", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Linear(gate=LowRankGate()), conv=None),
    ),
    "retnet": Named(
        title="RetNet", equation="S ← γ S + k vᵀ,  q and k turned by their positions", state=_STATE + " + a count", cost=_LINEAR,
        make=lambda s: _recurrent(
            s, Linear(gate=FixedGate()), position=PairRope(), conv=None, norm=HeadNorm(weight=False)
        ),
    ),
    "hedgehog": Named(
        title="Hedgehog", equation="o = Sᵀφ(q) / Σφ(q)·φ(k),  S ← S + φ(k) vᵀ,  φ(y) = [softmax(y), softmax(−y)]",
        state="H·2K·(V+1)", cost=_LINEAR, make=lambda s: _recurrent(s, Linear(features=Hedgehog(), normalise=True), conv=None),
    ),
    "gla-hedgehog": Named(
        title="GLA-Hedgehog", equation="S ← Diag(eᵍ) S + φ(k) vᵀ,  φ(y) = softmax([2y, −2y])", state="H·2K·V", cost=_LINEAR,
        make=lambda s: _recurrent(s, Linear(gate=LowRankGate(), features=Hedgehog(map="joint", heads="shared")), conv=None),
    ),
    "mamba": Named(
        title="Mamba", equation="S ← e^(ΔA) ⊙ S + (Δ⊙x) Bᵀ,  y = S C + D⊙x", state="I·N", cost="O(T·I·N)",
        make=lambda s: Mamba(channels=s.heads * s.value_dim),
    ),
    "mamba2": Named(
        title="Mamba-2", equation="S ← e^ΔA S + B (Δx)ᵀ,  y = SᵀC + D x", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Mamba2(), heads=1, value_heads=s.heads, conv=ShortConv(bias=True), norm=GatedNorm()),
    ),
    "deltanet": Named(
        title="DeltaNet", equation="S ← (I − β k kᵀ) S + β k vᵀ", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Delta(), output_gate=False),
    ),
    "gated-deltanet": Named(
        title="Gated DeltaNet", equation="S ← eᵍ (I − β k kᵀ) S + β k vᵀ", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Delta(gate=ScalarGate(half_life=s.half_life))),
    ),
    "kda": Named(
        title="KDA", equation="S ← (I − β k kᵀ) Diag(eᵍ) S + β k vᵀ", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Delta(gate=ChannelGate(half_life=s.half_life)), output_gate=OutputGate()),
    ),
    "gdn2": Named(
        title="GDN-2", equation="S ← (I − k (b⊙k)ᵀ) Diag(eᵍ) S + k (w⊙v)ᵀ", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(
            s, Gdn2(gate=ChannelGate(half_life=s.half_life)), output_gate=OutputGate(activation="silu")
        ),
    ),
    "deltaproduct": Named(
        title="Gated DeltaProduct", equation="S ← Π(I − βᵢ kᵢkᵢᵀ) eᵍ S + …,  two of them a token", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, DeltaProduct(gate=ScalarGate(half_life=s.half_life))),
    ),
    "comba": Named(
        title="Comba", equation="S ← (eᵍ I − β b k kᵀ) S + β k vᵀ,  o = Sᵀ(q − d k)", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Comba(gate=ScalarGate(half_life=s.half_life))),
    ),
    "longhorn": Named(
        title="Longhorn", equation="S ← (I − ε k kᵀ) S + ε k vᵀ,  ε = β/(1 + β‖k‖²)", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Longhorn()),
    ),
    "rwkv7": Named(
        title="RWKV-7's rule", equation="S ← Diag(eᵍ) S − (a⊙κ̂)(Sᵀκ̂)ᵀ + k̃ vᵀ", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, Rwkv7(), conv=None),
    ),
    "qdelta": Named(
        title="Q-Delta", equation="S ← eᵍ (I − β k (k + λq)ᵀ) S + β k vᵀ", state=_STATE, cost=_LINEAR,
        make=lambda s: _recurrent(s, QDelta(gate=ScalarGate(half_life=s.half_life))),
    ),
    "carve": Named(
        title="CARVE", equation="S ← Diag(eᵍ(1−b)) S + w k (v − Sᵀk)ᵀ,  b = σ(bₓ + W₂ tanh W₁m)",
        state=_STATE + " + 2H·V", cost=_LINEAR, make=_carve,
    ),
    "ccq": Named(
        title="CCQ on Gated DeltaNet", equation="o = Sᵀ (I − λΣ) q,  Σ the covariance of the keys so far",
        state=_STATE + " + H(K²+K+1)", cost="O(T·K·(K+V))",
        make=lambda s: _recurrent(s, Delta(gate=ScalarGate(half_life=s.half_life)), read=CCQ()),
    ),
    "mamba3": Named(
        title="Mamba-3", equation="S ← eᵍ (S + (1−λ)Δ k₋v₋ᵀ) + λΔ k vᵀ,  q and k turned by Θ = Σ π tanh(a) Δ",
        state=_STATE + " + H(K+V+m)", cost=_LINEAR, make=_mamba3,
    ),
    "mamba3-mimo": Named(
        title="Mamba-3, MIMO", equation="S ← eᵍ (S + (1−λ)Δ Σᵣ kᵣ₋vᵣ₋ᵀ) + λΔ Σᵣ kᵣvᵣᵀ,  R rows a token",
        state=_STATE + " + H(RK+V+m)", cost="O(T·R·K·V)", make=lambda s: dataclasses.replace(_mamba3(s), rank=4, pairs="halves"),
    ),
    "softmax": Named(
        title="Softmax attention", equation="o = softmax(q Kᵀ) V", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, Softmax(scale=_scale(s))),
    ),
    "ssmax": Named(
        title="Scalable-softmax", equation="o = softmax(s ln n · q Kᵀ) V,  n the keys seen", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, SSMax()),
    ),
    "alibi": Named(
        title="ALiBi", equation="o = softmax(q Kᵀ − m (i − j)) V", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, Alibi(scale=_scale(s))),
    ),
    "fox": Named(
        title="Forgetting attention (FoX)", equation="o = softmax(q Kᵀ + Gᵢ − Gⱼ) V,  G = Σ ln f", state=_PAGES + " + Hq·T",
        cost=_QUADRATIC, make=lambda s: _attention(s, Fox(scale=_scale(s))),
    ),
    "differential": Named(
        title="Diff Transformer", equation="o = (softmax(q₁K₁ᵀ) − λ softmax(q₂K₂ᵀ)) V", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, Differential()),
    ),
    "lucid": Named(
        title="LUCID", equation="o = softmax(q Kᵀ) P⁻¹V,  Pᵢⱼ = exp(√d(k̂ᵢ·k̂ⱼ − 1))", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, Lucid(scale=_scale(s))),
    ),
    "path": Named(
        title="PaTH attention", equation="o = softmax(q Hᵢ…Hⱼ₊₁ kⱼ) V,  H = I − β w wᵀ", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, Path(scale=_scale(s))),
    ),
    "path-fox": Named(
        title="PaTH-FoX", equation="o = softmax(q Hᵢ…Hⱼ₊₁ kⱼ + Gᵢ − Gⱼ) V,  G = Σ ln f", state=_PAGES + " + Hq·T", cost=_QUADRATIC,
        make=lambda s: _attention(s, Path(scale=_scale(s), forget=True)),
    ),
    "lucid-path": Named(
        title="LUCID-PaTH", equation="PaTH's softmax of P⁻¹V,  Pᵢⱼ = exp(√d(k̂ᵢHᵢ…Hⱼ₊₁k̂ⱼ − 1))", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, LucidPath(scale=_scale(s))),
    ),
    "polar": Named(
        title="Polar", equation="o = s/‖s‖ and a bounded count of the keys attended to", state=_PAGES, cost=_QUADRATIC,
        make=lambda s: _attention(s, Polar(), output_gate=True),
    ),
    "atma": Named(
        title="Polar + memory (ATMA)", equation="Polar's o, plus Sᵀq of a gated delta memory", state=_PAGES + " + Hq·d²",
        cost=_QUADRATIC,
        make=lambda s: _attention(s, Polar(), output_gate=True, memory=Memory(write=Delta(gate=_retention(s)))),
    ),
}  # fmt: skip


def build(name: str, dim: int, *, heads: int, layer: int = 0, **fields: Any) -> Mixer:
    """The mixer of CATALOG called `name`, as a module: `y, state = mixer(x)` with x and y [B T dim].

    >>> import torch
    >>> from needlework.layers import build
    >>> mixer, x = build("qdelta", dim=64, heads=4), torch.randn(1, 100, 64)
    >>> y, _ = mixer(x)  # [1 100 64]; a state is returned only if asked for
    >>> start, state = mixer(x[:, :40], output_final_state=True)
    >>> rest, state = mixer(x[:, 40:], state, output_final_state=True)
    >>> torch.allclose(y, torch.cat([start, rest], 1), atol=1e-5)
    True
    >>> packed, _ = mixer(x, cu_seqlens=torch.tensor([0, 40, 100]))  # two documents in one row
    >>> torch.allclose(packed[:, 40:], mixer(x[:, 40:])[0], atol=1e-5)
    True

    dim: the width D of x and y. heads: heads of dim / heads channels each, unless `fields` says key_dim and value_dim
    (recurrent mixers) or head_dim (those that attend). layer: the layer's index from 0; Diff Transformer's λ starts by it.
    fields: any field of the mixer's config (`Recurrent` or `Attention`), of its write or attend rule, or of its read rule,
    looked up in this order: `build("lucid", 256, heads=4, window=64, position=Rope())`. The module keeps the whole config as
    `mixer.config`, which `NeedleworkConfig(mixers=…)` takes. Mixers that attend have no positions unless `position` is given.
    Raises ValueError for a name or a field that is not there, with all that are, and for values out of a field's range.
    """
    if name not in CATALOG:
        raise ValueError(f"unknown mixer {name!r}{nearest(name, list(CATALOG))}; known: {', '.join(CATALOG)}")
    dim, heads = fitted(name, "dim", dim, Count), fitted(name, "heads", heads, Count)
    shapes = {
        key: fitted(name, key, fields.get(key, max(dim // heads, 1)), Count) for key in ("key_dim", "value_dim", "head_dim")
    }
    config = CATALOG[name].make(Sizes(heads=heads, attention_heads=heads, kv_heads=fields.get("kv_heads", heads), **shapes))
    if dim % heads and not fields.keys() >= shapes.keys() & _fields(config):
        raise ValueError(f"{name}: dim is {dim}, expected a multiple of heads = {heads}, or the size of each head as a field")
    return _replace(name, config, fields).build(dim, layer)


def _fields(config: Config) -> set[str]:
    return {f.name for f in dataclasses.fields(config)}


def _replace(name: str, config: MixerConfig, fields: dict[str, Any]) -> MixerConfig:
    """The mixer's config with each of `fields` in the first of its components that has it."""
    left, known = dict(fields), sorted(_fields(config))
    config = dataclasses.replace(config, **{key: left.pop(key) for key in known if key in left})
    for at in [at for at in ("write", "attend", "read") if at in known]:
        rule = getattr(config, at)
        own = {key: left.pop(key) for key in _fields(rule) if key in left}
        config = dataclasses.replace(config, **{at: dataclasses.replace(rule, **own)})
        known += sorted(_fields(rule) - {*known})
    for key in left:
        raise ValueError(f"{name}: unknown field {key!r}{nearest(key, known)}; known: {', '.join(known)}")
    return config
