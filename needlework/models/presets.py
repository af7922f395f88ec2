"""The papers' models at their exact sizes. A preset is a function that returns a NeedleworkConfig; `PRESETS` lists them.

Parameter counts are checked in tests/models/test_presets.py; sources in each function.
"""

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
    GatedConv,
    HalfRope,
    Linear,
    LowRankGate,
    Lucid,
    LucidPath,
    Memory,
    Path,
    Plain,
    Polar,
    QDelta,
    Recurrent,
    Rope,
    ScalarGate,
    Silu,
    Softmax,
    SquaredReLU,
    SwiGLU,
)
from needlework.layers.ccq import ReadConfig
from needlework.layers.config import nearest
from needlework.layers.softmax import AttendConfig
from needlework.models.config import NeedleworkConfig
from needlework.models.modeling import NeedleworkForCausalLM
from needlework.ops.lucid.arguments import Precondition


def _stack(layers: int, dim: int, hidden: int, mixer: Config, **settings) -> NeedleworkConfig:
    """One mixer in every layer, SwiGLU, vocabulary 32,000 unless said."""
    fields: dict[str, Any] = {"vocab_size": 32_000, "tie_word_embeddings": True} | settings
    return NeedleworkConfig(hidden_size=dim, layout="M" * layers, mixers={"M": mixer}, mlp=SwiGLU(hidden=hidden), **fields)


_SIZES = {"500m": (21, 1024, 2816), "1.3b": (21, 2048, 5632)}


def gated_deltanet(size: str, read: ReadConfig) -> NeedleworkConfig:
    """CCQ's Gated DeltaNet (its Section 5.1): 6 heads, K 256, V 512; tied."""
    return _stack(*_SIZES[size], Recurrent(heads=6, key_dim=256, value_dim=512, write=Delta(gate=ScalarGate()), read=read))


def gla(size: str, read: ReadConfig) -> NeedleworkConfig:
    """CCQ's GLA: 6 heads (what meets its size), K 256, V 512, decay rank 16, no convolution; tied."""
    write = Linear(gate=LowRankGate(rank=16))
    return _stack(*_SIZES[size], Recurrent(heads=6, key_dim=256, value_dim=512, conv=None, write=write, read=read))


def transformer(layers: int, dim: int, hidden: int, heads: int) -> NeedleworkConfig:
    """CCQ's softmax baseline: heads of 64 with RoPE; tied."""
    return _stack(layers, dim, hidden, Attention(heads=heads, head_dim=64, attend=Softmax(), position=Rope()))


def lucid(precondition: Precondition | None) -> NeedleworkConfig:
    """LUCID ~1B: 22 layers, D 2048, 32 query and 4 key-value heads of 64, RoPE base 10,000; untied. None: standard."""
    attend = Softmax() if precondition is None else Lucid(precondition=precondition)
    mixer = Attention(heads=32, kv_heads=4, head_dim=64, attend=attend, position=Rope())
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
    "transformer-500m": partial(transformer, 35, 1024, 2816, 16),
    "transformer-1.3b": partial(transformer, 24, 2048, 5632, 32),
    "standard-1b": partial(lucid, None),
    "lucid-1b": partial(lucid, "key"),
    **{f"lucid-1b-{p}": partial(lucid, p) for p in ("qk", "rowmax", "beta")},
    "lucid-256k": lucid_256k,
    "path-1b": partial(path, Path(rank=None, conv=None)),
    "path-1b-rank32": partial(path, Path(rank=32, conv=3)),
    "lucid-path-1b": partial(path, LucidPath()),
    "carve-125m": partial(carve, 12, 768, 2048, 12, 64, 16, 64),
    "carve-1.3b": partial(carve, 24, 2048, 5632, 16, 128, 32, 128),
    "carve-1.3b-swa": carve_swa,
}


def preset(name: str) -> NeedleworkConfig:
    """The config of a preset. ValueError for an unknown name, with the nearest known one."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest(name, list(PRESETS))}; known: {', '.join(PRESETS)}")
    return PRESETS[name]()


def count_parameters(config: NeedleworkConfig) -> int:
    """The exact number of parameters, from the meta device: nothing is allocated. Tied weights count once."""
    with torch.device("meta"):
        return sum(p.numel() for p in NeedleworkForCausalLM(config).parameters())
