"""The models of the second study: 18M parameters, one house for every mixer, and the pairs that are compared.

A pair differs in what its claim is about and in nothing else (`PAIRS`, which a test reads field by field):

    start          every gate that decays starts at half-lives spread in log over SPREAD. CARVE decays twice a token, by its gate and by its erase:
                   each starts at twice the half-life. Of the papers' own starts one is a row, Gated DeltaNet's, which pilot.py and warm.py run
    layer          every recurrent mixer has the short convolution and the output gate; attention without positions has canon, and q and k norms
    state          heads are [128 128]; CCQ's statistics, K² + K + 1 numbers a head, are another state of that size, and so the
                   mixer that it is compared with has values of 256
    layout         a hybrid is compared with a hybrid of its layout
    parameters     18M: the SwiGLU takes what the mixer leaves
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from needlework.layers import (
    CCQ,
    Attention,
    Canon,
    Carve,
    ChannelGate,
    Config,
    Delta,
    Lucid,
    Memory,
    Polar,
    QDelta,
    Recurrent,
    RetentionGate,
    Rope,
    ScalarGate,
    Softmax,
    SwiGLU,
)
from needlework.layers.softmax import AttendConfig
from needlework.layers.write import WriteConfig
from needlework.models import NeedleworkConfig
from needlework.models.presets import of_size
from needlework.recipes.comparison import Size

VOCABULARY = 8192
SMALL = Size(dim=384, layers=8, parameters=18_000_000)
SPREAD = (32.0, 8192.0)  # tokens: CARVE's published range, the widest of the papers'
TWICE = (64.0, 16384.0)
WIDE = 256  # V of a head [128 V] with as many numbers as [128 128] and CCQ's statistics of 128 channels


class Entry(NamedTuple):
    """One model: its title, its layers' configs by letter, and the layout, repeated to the number of layers."""

    title: str
    mixers: dict[str, Config]
    layout: str = "M"


class Pair(NamedTuple):
    """Two models that are compared, and the fields of their configs that differ, all of them.

    A name that ends in * is all fields that begin so. mlp.hidden may differ in every pair: models have one size.
    """

    better: str
    worse: str
    differ: tuple[str, ...]


def recurrent(write: WriteConfig, **settings: Any) -> Recurrent:
    return Recurrent(**SMALL.square | settings, write=write)


def _attention(attend: AttendConfig, **settings: Any) -> Attention:
    return Attention(**SMALL.softmax, attend=attend, **settings)


def _atma(attend: AttendConfig, memory: Memory) -> Attention:
    return Attention(**SMALL.atma, attend=attend, memory=memory)


_gated, _published = Delta(gate=ScalarGate(half_life=SPREAD)), Delta(gate=ScalarGate())
_qdelta = QDelta(gate=ScalarGate(half_life=SPREAD))
_memory = Memory(write=Delta(gate=RetentionGate(half_life=SPREAD)))
_plain: dict[str, Any] = {"conv": Canon(), "qk_norm": True}  # attention without positions

MIXERS = {
    "gated-deltanet": Entry("Gated DeltaNet", {"M": recurrent(_gated)}),
    "gated-deltanet-wide": Entry("Gated DeltaNet, V 256", {"M": recurrent(_gated, value_dim=WIDE)}),
    "kda": Entry("KDA", {"M": recurrent(Delta(gate=ChannelGate(half_life=SPREAD)))}),
    "qdelta": Entry("Q-Delta", {"M": recurrent(_qdelta)}),
    "ccq": Entry("CCQ on Gated DeltaNet", {"M": recurrent(_gated, read=CCQ())}),
    "carve": Entry("CARVE", {"M": recurrent(Carve(half_life=TWICE))}),
    "carve-blind": Entry("CARVE, blind", {"M": recurrent(Carve(rank=0, half_life=TWICE))}),
    "softmax": Entry("Softmax, RoPE", {"M": _attention(Softmax(), position=Rope())}),
    "lucid": Entry("LUCID, RoPE", {"M": _attention(Lucid(), position=Rope())}),
    "softmax-plain": Entry("Softmax, no positions", {"M": _attention(Softmax(), **_plain)}),
    "lucid-plain": Entry("LUCID, no positions", {"M": _attention(Lucid(), **_plain)}),
    "softmax-memory": Entry("Softmax + memory", {"M": _atma(Softmax(), _memory)}),
    "polar-memory": Entry("Polar + memory (ATMA)", {"M": _atma(Polar(), _memory)}),
    "composition": Entry(
        "Q-Delta·CCQ, every 4th LUCID", {"R": recurrent(_qdelta, read=CCQ()), "L": _attention(Lucid(), **_plain)}, "RRRL"
    ),
    "control": Entry(
        "Gated DeltaNet, every 4th softmax",
        {"R": recurrent(_gated, value_dim=WIDE), "L": _attention(Softmax(), **_plain)},
        "RRRL",
    ),
    # its paper's own start, in the pilot
    "gated-deltanet-published": Entry("Gated DeltaNet, published start", {"M": recurrent(_published)}),
}

_WRITE = ("write.kind", "write.coupling")  # and λ, which is computed: None in both
_LUCID = ("attend.kind", "attend.precondition", "attend.solve")
PAIRS = (
    Pair("qdelta", "gated-deltanet", _WRITE),
    Pair("ccq", "gated-deltanet-wide", ("read.*", "value_dim")),
    Pair("carve", "carve-blind", ("write.rank",)),
    Pair("lucid", "softmax", _LUCID),
    Pair("lucid-plain", "softmax-plain", _LUCID),
    Pair("polar-memory", "softmax-memory", ("attend.kind",)),
    Pair("composition", "control", (*_WRITE, "read.*", "value_dim", *_LUCID)),
    # exploration
    Pair("kda", "gated-deltanet", ("write.gate.kind",)),
    Pair("carve", "kda", ("write.*",)),
    Pair("gated-deltanet", "gated-deltanet-published", ("write.gate.half_life",)),
)


@cache
def model(mixer: str, size: Size = SMALL) -> NeedleworkConfig:
    """The model of a mixer."""
    entry = MIXERS[mixer]
    config: Callable[[int], NeedleworkConfig] = lambda hidden: NeedleworkConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.dim,
        layout=entry.layout * (size.layers // len(entry.layout)),
        mixers=entry.mixers,
        mlp=SwiGLU(hidden=hidden),
        tie_word_embeddings=True,
    )
    return of_size(config, size.parameters)
