"""The papers' models at their exact sizes. A preset is a function that returns a NeedleworkConfig; `PRESETS` lists them.

Parameter counts are checked in tests/models/test_presets.py; sources in each function.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from needlework.layers import (
    CCQ,
    Attention,
    Canon,
    Carve,
    Config,
    Delta,
    FixedGate,
    GatedConv,
    GatedNorm,
    Gdn2,
    HalfRope,
    Hedgehog,
    Linear,
    LowRankGate,
    Lucid,
    LucidPath,
    Mamba,
    Mamba2,
    Mamba3,
    Memory,
    OutputGate,
    Path,
    Plain,
    Polar,
    QDelta,
    Recurrent,
    Rope,
    ScalarGate,
    ShortConv,
    Silu,
    Softmax,
    SquaredReLU,
    SwiGLU,
)
from needlework.layers.ccq import ReadConfig
from needlework.layers.config import nearest
from needlework.layers.features import FeatureConfig
from needlework.layers.softmax import AttendConfig
from needlework.models.config import NeedleworkConfig
from needlework.models.modeling import NeedleworkForCausalLM
from needlework.ops.lucid.arguments import Precondition


def _stack(layers: int, dim: int, hidden: int | None, mixer: Config, **settings) -> NeedleworkConfig:
    """One mixer in every layer, SwiGLU or no MLP, vocabulary 32,000, tied unless said."""
    fields: dict[str, Any] = {"vocab_size": 32_000, "tie_word_embeddings": True} | settings
    mlp = None if hidden is None else SwiGLU(hidden=hidden)
    return NeedleworkConfig(hidden_size=dim, layout="M" * layers, mixers={"M": mixer}, mlp=mlp, **fields)


_LUCID_HEADS = {"": 68, "-64": 64}
_SIZES = {"500m": (21, 1024, 2816), "1.3b": (21, 2048, 5632)}


def gated_deltanet(size: str, read: ReadConfig) -> NeedleworkConfig:
    """CCQ's Gated DeltaNet (its Section 5.1): 6 heads, K 256, V 512; tied."""
    return _stack(*_SIZES[size], Recurrent(heads=6, key_dim=256, value_dim=512, write=Delta(gate=ScalarGate()), read=read))


def gla(size: str, read: ReadConfig, features: FeatureConfig | None = None) -> NeedleworkConfig:
    """CCQ's GLA: 6 heads (what meets its size), K 256, V 512, decay rank 16, no convolution; tied.

    features: of its GLA-Hedgehog, of which it says no more: a joint map that heads share (ours).
    """
    write = Linear(gate=LowRankGate(rank=16), features=features)
    return _stack(*_SIZES[size], Recurrent(heads=6, key_dim=256, value_dim=512, conv=None, write=write, read=read))


def mamba2(layers: int, dim: int, tied: bool = True) -> NeedleworkConfig:
    """Mamba-2 as its authors' code has it: I = 2D, heads of 64, N 128, one group, no MLP. Tied in CCQ's tables (its 65 and 48 layers)."""
    mixer = Recurrent(
        heads=1, value_heads=dim // 32, key_dim=128, value_dim=64, write=Mamba2(), conv=ShortConv(bias=True), norm=GatedNorm()
    )
    return _stack(layers, dim, None, mixer, tie_word_embeddings=tied, scaled_output=True)


def mamba(dim: int) -> NeedleworkConfig:
    """Mamba, the first, in Q-Delta's tables: 48 layers, I = 2D, N 16, rank D/16, no MLP; untied."""
    return _stack(48, dim, None, Mamba(), tie_word_embeddings=False, scaled_output=True)


def retnet(dim: int, hidden: int) -> NeedleworkConfig:
    """RetNet in Q-Delta's tables: flash-linear-attention's defaults, whose rotation turns halves and whose norm has a weight; untied."""
    mixer = Recurrent(heads=8, key_dim=dim // 8, value_dim=dim // 4, write=Linear(gate=FixedGate()), position=Rope(), conv=None)
    return _stack(24, dim, hidden, mixer, tie_word_embeddings=False)


def deltanet(dim: int, hidden: int) -> NeedleworkConfig:
    """DeltaNet in Q-Delta's tables: flash-linear-attention's defaults, no output gate; untied."""
    mixer = Recurrent(heads=8, key_dim=dim // 8, value_dim=dim // 8, write=Delta(), output_gate=False)
    return _stack(24, dim, hidden, mixer, tie_word_embeddings=False)


def gdn2(layout: str, heads: int, hidden: int) -> NeedleworkConfig:
    """GDN-2 1.3B as its authors' code has it: 18 layers, D 2304, heads of 128, silu in the output gate; untied.

    layout: of G, GDN-2, and S, a sliding window of 2,048 with 18 heads and RoPE.
    """
    G = Recurrent(heads=heads, key_dim=128, value_dim=128, write=Gdn2(), output_gate=OutputGate(activation="silu"))
    S = Attention(heads=18, head_dim=128, attend=Softmax(window=2048), position=Rope())
    mixers = {letter: mixer for letter, mixer in {"G": G, "S": S}.items() if letter in layout}
    return NeedleworkConfig(
        vocab_size=32_000, hidden_size=2304, layout=layout, mixers=mixers, mlp=SwiGLU(hidden=hidden), tie_word_embeddings=False
    )


def transformer(layers: int, dim: int, hidden: int, heads: int) -> NeedleworkConfig:
    """CCQ's softmax baseline: heads of 64 with RoPE; tied."""
    return _stack(layers, dim, hidden, Attention(heads=heads, head_dim=64, attend=Softmax(), position=Rope()))


def lucid(precondition: Precondition | None, head_dim: int) -> NeedleworkConfig:
    """LUCID ~1B: 22 layers, D 2048, 32 query and 4 key-value heads, RoPE base 10,000; untied. None: standard.

    head_dim: 68 in the published config, which is what brings it to PaTH's size; 64 in the paper's Section 4.4.
    """
    attend = Softmax() if precondition is None else Lucid(precondition=precondition)
    mixer = Attention(heads=32, kv_heads=4, head_dim=head_dim, attend=attend, position=Rope())
    return _stack(22, 2048, 5632, mixer, tie_word_embeddings=False)


def path(attend: AttendConfig) -> NeedleworkConfig:
    """PaTH and LUCID-PaTH as LUCID's authors trained them: `lucid`'s sizes without RoPE, untied."""
    mixer = Attention(heads=32, kv_heads=4, head_dim=64, attend=attend)
    return _stack(22, 2048, 5632, mixer, tie_word_embeddings=False)


def lucid_256k() -> NeedleworkConfig:
    """LUCID with a vocabulary of 256,000: 16 layers, 32 heads of 64; tied (ours: the paper does not say)."""
    mixer = Attention(heads=32, head_dim=64, attend=Lucid(), position=Rope())
    return _stack(16, 2048, 4096, mixer, vocab_size=256_000)


def carve(layers: int, dim: int, hidden: int, heads: int, head_dim: int, rank: int, content_chunk: int) -> NeedleworkConfig:
    """CARVE: SiLU without convolution, no output gate; tied."""
    return _stack(layers, dim, hidden, carve_mixer(heads, head_dim, rank, content_chunk))


def carve_mixer(heads: int, head_dim: int, rank: int, content_chunk: int) -> Recurrent:
    write = Carve(rank=rank, content_chunk=content_chunk)
    return Recurrent(heads=heads, key_dim=head_dim, value_dim=head_dim, conv=Silu(), output_gate=False, write=write)


def carve_swa() -> NeedleworkConfig:
    """CARVE 1.3B hybrid: three CARVE layers, then a sliding window of 1,024."""
    window = Attention(heads=16, head_dim=128, attend=Softmax(window=1024), position=Rope())
    mixers = {"C": carve_mixer(16, 128, 32, 128), "S": window}
    return NeedleworkConfig(
        vocab_size=32_000, hidden_size=2048, layout="CCCS" * 6, mixers=mixers, mlp=SwiGLU(hidden=5632), tie_word_embeddings=True
    )


def mamba3_mixer(dim: int, rank: int) -> Mamba3:
    """Mamba-3's layer (the authors' code): twice the width in heads of 64, N 128; pairs as each of the two has them."""
    return Mamba3(heads=2 * dim // 64, key_dim=128, value_dim=64, rank=rank, pairs="even" if rank == 1 else "halves")


def mamba3(rank: int, hidden: int) -> NeedleworkConfig:
    """Mamba-3 at the size of GDN-2's published models, 18 × 2304, untied, the MLP of the width that meets it (ours: the paper does not
    say). With a sliding window in turn it is layout="MS" * 9."""
    return _stack(18, 2304, hidden, mamba3_mixer(2304, rank), tie_word_embeddings=False)


def qdelta(layers: int, dim: int, hidden: int, key_dim: int) -> NeedleworkConfig:
    """Q-Delta (the authors' code): 6 heads, V = 2K; untied."""
    mixer = Recurrent(heads=6, key_dim=key_dim, value_dim=2 * key_dim, write=QDelta())
    return _stack(layers, dim, hidden, mixer, tie_word_embeddings=False)


def atma(kind: str, memory: bool, *, window: int | None = None, published: bool = False) -> NeedleworkConfig:
    """ATMA (the authors' code): 16 layers, attention at i % 4 == 2, gated convolutions elsewhere; untied, softcap 15.

    kind: "polar", or its softmax siblings "nope" and "rope". published: as its models really were, their convolutions dead from
    the start, norms of q, k and the memory's read with the epsilon of the dtype.
    """
    attend, position, conv = {
        "nope": (Softmax(window=window), None, Canon()),
        "rope": (Softmax(window=window, scale=0.12), HalfRope(), None),
        "polar": (Polar(window=window), None, Canon()),
    }[kind]
    attention = Attention(
        heads=8, kv_heads=2, head_dim=128, attend=attend, position=position, conv=conv,
        qk_norm=True, output_gate=True, bias=True, published_eps=published,
        memory=Memory(published_eps=published) if memory else None,
    )  # fmt: skip
    return NeedleworkConfig(
        vocab_size=50_304, hidden_size=1024, layout="ccac" * 4, mixers={"c": GatedConv(published_init=published), "a": attention},
        mlp=SquaredReLU(hidden=4096), tie_word_embeddings=False, head_bias=True, softcap=15.0,
        initializer_range=None, zero_output=True,
    )  # fmt: skip


PRESETS: dict[str, Callable[[], NeedleworkConfig]] = {
    **{f"atma-{k}{'-memory' * m}": partial(atma, k, bool(m)) for k in ("nope", "rope", "polar") for m in (0, 1)},
    "qdelta-340m": partial(qdelta, 21, 1024, 2816, 128),
    "qdelta-1.3b": partial(qdelta, 21, 2048, 5632, 256),
    **{f"gdn-{s}": partial(gated_deltanet, s, Plain()) for s in _SIZES},
    **{f"ccq-gdn-{s}": partial(gated_deltanet, s, CCQ()) for s in _SIZES},
    **{f"gla-{s}": partial(gla, s, Plain()) for s in _SIZES},
    **{f"ccq-gla-{s}": partial(gla, s, CCQ()) for s in _SIZES},
    **{f"gla-hedgehog-{s}": partial(gla, s, Plain(), Hedgehog(map="joint", heads="shared")) for s in _SIZES},
    "mamba2-500m": partial(mamba2, 65, 1024),
    "mamba2-1.3b": partial(mamba2, 48, 2048),
    "mamba2-340m-untied": partial(mamba2, 48, 1024, tied=False),
    "mamba2-1.3b-untied": partial(mamba2, 48, 2048, tied=False),
    "mamba-340m": partial(mamba, 1024),
    "mamba-1.3b": partial(mamba, 2048),
    "retnet-340m": partial(retnet, 1024, 1536),
    "retnet-1.3b": partial(retnet, 2048, 2816),
    "deltanet-340m": partial(deltanet, 1024, 2816),
    "deltanet-1.3b": partial(deltanet, 2048, 5632),
    "gdn2-1.3b": partial(gdn2, "G" * 18, 16, 6208),
    "gdn2-1.3b-swa": partial(gdn2, "GS" * 9, 16, 6784),
    "transformer-500m": partial(transformer, 35, 1024, 2816, 16),
    "transformer-1.3b": partial(transformer, 24, 2048, 5632, 32),
    **{f"standard-1b{of}": partial(lucid, None, d) for of, d in _LUCID_HEADS.items()},
    **{f"lucid-1b{of}": partial(lucid, "key", d) for of, d in _LUCID_HEADS.items()},
    **{f"lucid-1b{of}-{p}": partial(lucid, p, d) for of, d in _LUCID_HEADS.items() for p in ("qk", "rowmax", "beta")},
    "lucid-256k": lucid_256k,
    "path-1b": partial(path, Path(rank=None, conv=None)),
    "path-1b-rank32": partial(path, Path(rank=32, conv=3)),
    "lucid-path-1b": partial(path, LucidPath()),
    "carve-125m": partial(carve, 12, 768, 2048, 12, 64, 16, 64),
    "carve-1.3b": partial(carve, 24, 2048, 5632, 16, 128, 32, 128),
    "carve-1.3b-swa": carve_swa,
    "mamba3-1.3b": partial(mamba3, 1, 5696),
    "mamba3-mimo-1.3b": partial(mamba3, 4, 5440),
}


def preset(name: str) -> NeedleworkConfig:
    """The config of a preset. ValueError for an unknown name, with the nearest known one."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest(name, list(PRESETS))}; known: {', '.join(PRESETS)}")
    return PRESETS[name]()


def count_parameters(config: NeedleworkConfig) -> int:
    """The exact number of parameters, from the meta device: nothing is allocated. Tied weights count once.

    Layers of one letter are alike: one of each is made.
    """
    times = Counter(config.layout)
    with torch.device("meta"):
        model = NeedleworkForCausalLM(config.replaced(layout="".join(times)))
    count = lambda module: sum(p.numel() for p in module.parameters())
    return count(model) + sum((n - 1) * count(block) for n, block in zip(times.values(), model.model.blocks, strict=True))


def of_size(config: Callable[[int], NeedleworkConfig], parameters: int, step: int = 32) -> NeedleworkConfig:
    """config(hidden) for the multiple of `step` that brings it nearest to `parameters`: the MLP takes what a mixer leaves."""
    least = count_parameters(config(step))
    each = count_parameters(config(2 * step)) - least
    return config(step * (1 + round((parameters - least) / each)))
