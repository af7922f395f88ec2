"""The comparison: one recipe for every mixer of the five papers and their baselines, alike in everything but the mixer.

Twelve layers of one mixer (hybrids: of two), D 512, a SwiGLU whose width brings every model within 1 % of PARAMETERS; the
papers' head shapes at this width. Gates, memories and norms start as published. The text is the Python source that is on any
machine where this package is installed, the tokenizer is trained on it, a part of the rows are needle episodes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from needlework.data import NeedleMix, Packages, StoreConfig
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase, Recipe
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
from needlework.layers.ccq import ReadConfig
from needlework.layers.rope import PositionConfig
from needlework.layers.softmax import AttendConfig
from needlework.layers.write import WriteConfig
from needlework.models import NeedleworkConfig
from needlework.models.presets import of_size
from needlework.recipes.comparison_claims import CLAIMS as CLAIMS
from needlework.recipes.comparison_claims import EFFECTS as EFFECTS
from needlework.recipes.comparison_claims import FAMILIES as FAMILIES
from needlework.recipes.comparison_claims import GLANCE as GLANCE
from needlework.recipes.comparison_claims import HEADLINES, limits
from needlework.recipes.comparison_claims import PAPERS as PAPERS
from needlework.recipes.comparison_claims import VOID as VOID
from needlework.train import AdamW, Cosine, TrainConfig

VOCABULARY = 8192
LENGTH, ROWS = 2048, 64  # 131,072 tokens a step
STEPS = 1200  # 157M tokens
SEEDS = (0, 1, 2)
TASKS = ("needle", "needles-2", "needles", "needles-8", "passkey", "number", "uuid", "multikey", "induction")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A width: recurrent heads [128 256] of CCQ and Q-Delta (HK = 3D/4, HV = 3D/2), [128 128] of KDA and CARVE (HK = D); attention
    heads of 64, a key-value head for four of them; ATMA's of 128."""

    dim: int
    layers: int
    parameters: int

    @property
    def wide(self) -> dict[str, Any]:
        """CCQ 500M and Q-Delta 340M have 6 heads at D 1024 (K 256, V 512; K 128, V 256): 3 of [128 256] keep 3D/4 at 512."""
        return {"heads": 3 * self.dim // 512, "key_dim": 128, "value_dim": 256}

    @property
    def square(self) -> dict[str, Any]:
        """CARVE 1.3B has 16 heads of [128 128] at D 2048."""
        return {"heads": self.dim // 128, "key_dim": 128, "value_dim": 128}

    @property
    def softmax(self) -> dict[str, Any]:
        """LUCID ~1B has 32 query heads of 64 at D 2048, a key-value head for eight of them (ours four, the narrowest that divides)."""
        return {"heads": self.dim // 64, "kv_heads": self.dim // 256, "head_dim": 64}

    @property
    def atma(self) -> dict[str, Any]:
        """ATMA has 8 query and 2 key-value heads of 128 at D 1024."""
        return {
            "heads": self.dim // 128, "kv_heads": max(1, self.dim // 512), "head_dim": 128,
            "conv": Canon(), "qk_norm": True, "output_gate": True, "bias": True,
        }  # fmt: skip


SMALL = Size(dim=512, layers=12, parameters=60_000_000)
MEDIUM = Size(dim=768, layers=12, parameters=125_000_000)
LARGE = Size(dim=2048, layers=24, parameters=1_300_000_000)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the comparison: title for reading, layout over `mixers(size)`."""

    title: str
    mixers: Callable[[Size], dict[str, Config]]
    layout: str = "M"  # repeated to the number of layers


def _one(title: str, mixer: Callable[[Size], Config]) -> Entry:
    return Entry(title=title, mixers=lambda size: {"M": mixer(size)})


def _wide(size: Size, write: WriteConfig, read: ReadConfig | None = None, **settings) -> Recurrent:
    return Recurrent(**size.wide, write=write, read=read or Plain(), **settings)


def _gla(size: Size, read: ReadConfig | None = None) -> Recurrent:
    return _wide(size, Linear(gate=LowRankGate(rank=16)), read, conv=None)


def _carve(size: Size, rank: int = 16) -> Recurrent:
    return Recurrent(**size.square, conv=Silu(), output_gate=False, write=Carve(rank=rank, content_chunk=64))


def _kda(size: Size) -> Recurrent:
    return Recurrent(**size.square, write=Delta(gate=ChannelGate()))


def _softmax(size: Size, attend: AttendConfig, position: PositionConfig | None = None, **settings) -> Attention:
    return Attention(**size.softmax | settings, attend=attend, position=position)


def _atma(size: Size, attend: AttendConfig, memory: bool = False) -> Attention:
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


@cache
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

    return of_size(config, size.parameters)


def recipe(mixer: str, seed: int = 0, size: Size = SMALL) -> Recipe:
    """The recipe of one mixer; a seed fixes the start and the order of data, the same for every mixer."""
    return Recipe(
        name=mixer,
        title=MIXERS[mixer].title,
        equation="",
        model=model(mixer, size),
        corpus=StoreConfig(source=Packages(), vocabulary=VOCABULARY),
        # match and copy form together, and soonest where most of a row asks for few pairs: needlework/recipes/demo.py
        phases=(
            Phase(steps=200, batch=ROWS, length=LENGTH, task=NeedleMix(dense=0.5, sparse=0.2, dense_pairs=(1, 4))),
            Phase(steps=STEPS - 200, batch=ROWS, length=LENGTH, task=NeedleMix(dense=0.1, sparse=0.2)),
        ),
        train=TrainConfig(
            steps=STEPS,
            seed=seed,
            optim=AdamW(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
            schedule=Cosine(warmup=100, floor=0.1),
            accumulate=-(-size.dim // 512),  # 131,072 tokens at once at D 512
            autocast="bf16",
            checkpoint_every=400,
            compile=True,
        ),
        evaluate=Evaluation(
            lengths=tuple(LENGTH << n for n in range(6)),
            tokens=4 << 16,
            rows=32,
            tasks=TASKS,
            positions=16 * LENGTH,
            diagnose=1600,
        ),
    )


def small() -> tuple[Recipe, ...]:
    """Every mixer at 60M parameters with every seed; a seed of all mixers before the next."""
    return tuple(recipe(mixer, seed) for seed in SEEDS for mixer in MIXERS)


def medium() -> tuple[Recipe, ...]:
    """The pairs that carry a headline, at 125M parameters, one seed."""
    names = dict.fromkeys(name for claim in HEADLINES for name in (claim.better, claim.worse))
    return tuple(recipe(name, size=MEDIUM) for name in names)


def sweep() -> tuple[Recipe, ...]:
    """The learning rate on the two baselines, a quarter of the tokens: what `recipe` then uses for all."""
    found = []
    for mixer in ("softmax", "gated-deltanet"):
        for lr in (1e-3, 2e-3, 4e-3):
            base = recipe(mixer)
            train = replace(base.train, steps=300, optim=replace(base.train.optim, lr=lr))
            phases = (replace(base.phases[0], steps=50), replace(base.phases[1], steps=250))
            evaluate = Evaluation(lengths=(LENGTH,), tokens=1 << 20, tasks=("needle",))
            found.append(replace(base, name=f"{mixer}-{lr:g}", train=train, phases=phases, evaluate=evaluate))
    return tuple(found)


LIMITS = limits(SMALL.parameters * STEPS * ROWS * LENGTH)

softmax, gated_deltanet = partial(recipe, "softmax"), partial(recipe, "gated-deltanet")
