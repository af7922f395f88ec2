"""The comparison: one recipe for every mixer of the five papers and their baselines, alike in everything but the mixer.

Twelve layers of one mixer (hybrids: of two), D 512, a SwiGLU whose width brings every model within 1 % of PARAMETERS; the
papers' head shapes at this width. Gates, memories and norms start as published. The text is the Python source that is on any
machine where this package is installed, the tokenizer is trained on it, a part of the rows are needle episodes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from needlework.layers import (
    CCQ,
    Attention,
    Canon,
    Carve,
    ChannelGate,
    Config,
    Delta,
    Differential,
    Linear,
    LowRankGate,
    Lucid,
    Memory,
    Plain,
    Polar,
    QDelta,
    Recurrent,
    Rope,
    ScalarGate,
    Silu,
    Softmax,
    SwiGLU,
)
from needlework.models import NeedleworkConfig
from needlework.models.presets import count_parameters

VOCABULARY = 8192


@dataclass(frozen=True, kw_only=True)
class Size:
    """A width: recurrent heads [128 256] of CCQ and Q-Delta (HK = 3D/4, HV = 3D/2), [128 128] of KDA and CARVE (HK = D); attention
    heads of 64, a key-value head for four of them; ATMA's of 128."""

    dim: int
    layers: int
    parameters: int

    @property
    def wide(self) -> dict[str, int]:
        """CCQ 500M and Q-Delta 340M have 6 heads at D 1024 (K 256, V 512; K 128, V 256): 3 of [128 256] keep 3D/4 at 512."""
        return {"heads": 3 * self.dim // 512, "key_dim": 128, "value_dim": 256}

    @property
    def square(self) -> dict[str, int]:
        """CARVE 1.3B has 16 heads of [128 128] at D 2048."""
        return {"heads": self.dim // 128, "key_dim": 128, "value_dim": 128}

    @property
    def softmax(self) -> dict[str, int]:
        """LUCID ~1B has 32 query heads of 64 at D 2048, a key-value head for eight of them (ours four, the narrowest that divides)."""
        return {"heads": self.dim // 64, "kv_heads": self.dim // 256, "head_dim": 64}

    @property
    def atma(self) -> dict:
        """ATMA has 8 query and 2 key-value heads of 128 at D 1024."""
        return {
            "heads": self.dim // 128, "kv_heads": max(1, self.dim // 512), "head_dim": 128,
            "conv": Canon(), "qk_norm": True, "output_gate": True, "bias": True,
        }  # fmt: skip


SMALL = Size(dim=512, layers=12, parameters=60_000_000)
MEDIUM = Size(dim=768, layers=12, parameters=125_000_000)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the comparison: title for reading, layout over `mixers(size)`."""

    title: str
    mixers: Callable[[Size], dict[str, Config]]
    layout: str = "M"  # repeated to the number of layers


def _one(title: str, mixer: Callable[[Size], Config]) -> Entry:
    return Entry(title=title, mixers=lambda size: {"M": mixer(size)})


def _wide(size: Size, write: Config, read: Config | None = None, **settings) -> Recurrent:
    return Recurrent(**size.wide, write=write, read=read or Plain(), **settings)


def _gla(size: Size, read: Config | None = None) -> Recurrent:
    return _wide(size, Linear(gate=LowRankGate(rank=16)), read, conv=None)


def _carve(size: Size, rank: int = 16) -> Recurrent:
    return Recurrent(**size.square, conv=Silu(), output_gate=False, write=Carve(rank=rank, content_chunk=64))


def _kda(size: Size) -> Recurrent:
    return Recurrent(**size.square, write=Delta(gate=ChannelGate()))


def _softmax(size: Size, attend: Config, position: Config | None = None, **settings) -> Attention:
    return Attention(**size.softmax | settings, attend=attend, position=position)


def _atma(size: Size, attend: Config, memory: bool = False) -> Attention:
    return Attention(**size.atma, attend=attend, memory=Memory() if memory else None)


MIXERS: dict[str, Entry] = {
    "softmax": _one("Softmax, RoPE", lambda s: _softmax(s, Softmax(), Rope())),
    "nope": _one("Softmax, no positions", lambda s: _atma(s, Softmax())),
    "window": Entry(
        title="Window, every 4th full",
        layout="WWWF",
        mixers=lambda s: {"W": _softmax(s, Softmax(window=512), Rope()), "F": _softmax(s, Softmax())},
    ),
    "differential": _one(
        "Diff Transformer",
        lambda s: _softmax(s, Differential(), Rope(), heads=s.dim // 128, kv_heads=max(1, s.dim // 512), head_dim=128),
    ),
    "gla": _one("GLA", _gla),
    "gated-deltanet": _one("Gated DeltaNet", lambda s: _wide(s, Delta(gate=ScalarGate()))),
    "kda": _one("KDA", _kda),
    "qdelta": _one("Q-Delta", lambda s: _wide(s, QDelta())),
    "qdelta-transposed": _one("Q-Delta as released", lambda s: _wide(s, QDelta(coupling="transposed"))),
    "carve": _one("CARVE", _carve),
    "carve-blind": _one("CARVE, blind", lambda s: _carve(s, rank=0)),
    "ccq-gla": _one("CCQ on GLA", lambda s: _gla(s, CCQ())),
    "ccq-gated-deltanet": _one("CCQ on Gated DeltaNet", lambda s: _wide(s, Delta(gate=ScalarGate()), CCQ())),
    "ccq-qdelta": _one("CCQ on Q-Delta", lambda s: _wide(s, QDelta(), CCQ())),
    "lucid": _one("LUCID, RoPE", lambda s: _softmax(s, Lucid(), Rope())),
    "lucid-nope": _one("LUCID, no positions", lambda s: _softmax(s, Lucid())),
    "nope-memory": _one("Softmax + memory", lambda s: _atma(s, Softmax(), memory=True)),
    "polar": _one("Polar", lambda s: _atma(s, Polar())),
    "polar-memory": _one("Polar + memory (ATMA)", lambda s: _atma(s, Polar(), memory=True)),
    # ours: what each paper mends, in one model. Nine states that write with the query and read with a cleaned one, three layers
    # that read exact values without positions; and channel-gated states beside Polar with its memory.
    "qdelta-ccq-lucid": Entry(
        title="Q-Delta·CCQ, every 4th LUCID",
        layout="RRRL",
        mixers=lambda s: {"R": _wide(s, QDelta(), CCQ()), "L": _softmax(s, Lucid(), conv=Canon(), qk_norm=True)},
    ),
    "kda-polar": Entry(
        title="KDA, every 4th Polar + memory",
        layout="KKKP",
        mixers=lambda s: {"K": _kda(s), "P": _atma(s, Polar(), memory=True)},
    ),
}


def model(mixer: str, size: Size = SMALL) -> NeedleworkConfig:
    """The model of a mixer, with the SwiGLU width, in steps of 32, that comes nearest to the size's parameters."""
    entry = MIXERS[mixer]

    def config(hidden: int) -> NeedleworkConfig:
        return NeedleworkConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.dim,
            layout=entry.layout * (size.layers // len(entry.layout)),
            mixers=entry.mixers(size),
            mlp=SwiGLU(hidden=hidden),
            tie_word_embeddings=True,
        )

    least = count_parameters(config(32))
    each = count_parameters(config(64)) - least
    return config(32 * (1 + round((size.parameters - least) / each)))
