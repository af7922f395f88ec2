"""The demo: seven mixers, two layers, bytes, one recipe and one seed schedule; each learns to find needles in CPU minutes.

What was tried on the way here, and what it gave, is in docs/log/. Four things make so small a model learn: every
retention gate starts near a half-life of four training lengths, key and value lie within a width-4 convolution's reach,
matrices start at a scale that keeps variance (D^-1/2), and the first phase is nearly all dense episodes of one to three pairs:
with half of the rows text from the first step, or up to five pairs, some recurrent mixers never find the needle in ten minutes.
"""

from functools import partial

from needlework.data import CorpusConfig, NeedleMix
from needlework.experiment.runner import Evaluation, Phase, Recipe
from needlework.layers import SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig
from needlework.models.presets import of_size
from needlework.train import AdamW, Cooldown, TrainConfig

DIM, LAYERS, VOCABULARY = 64, 2, 257
PARAMETERS = 118_000  # every mixer's model, within 2 %: the SwiGLU takes what its mixer leaves
PHASES = (
    Phase(steps=500, batch=16, length=128, task=NeedleMix(dense=0.9, sparse=0.1, dense_pairs=(1, 3))),
    Phase(steps=400, batch=8, length=256, task=NeedleMix(dense=0.4, sparse=0.3)),
)
SIZES = Sizes(heads=1, key_dim=64, value_dim=64, attention_heads=2, kv_heads=2, head_dim=32, half_life=1024.0)


def model(mixer: str) -> NeedleworkConfig:
    """Two layers of a mixer of the catalog, with the SwiGLU width that meets PARAMETERS."""
    config = partial(
        NeedleworkConfig,
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        layout="M" * LAYERS,
        mixers={"M": CATALOG[mixer].make(SIZES)},
        initializer_range=DIM**-0.5,
    )
    return of_size(lambda hidden: config(mlp=SwiGLU(hidden=hidden)), PARAMETERS, step=1)


def recipe(mixer: str, corpus: CorpusConfig | None = None) -> Recipe:
    """The demo's recipe for one mixer of the catalog."""
    return Recipe(
        name=mixer,
        title=CATALOG[mixer].title,
        equation=CATALOG[mixer].equation,
        model=model(mixer),
        corpus=corpus or CorpusConfig(),
        phases=PHASES,
        train=TrainConfig(
            steps=sum(phase.steps for phase in PHASES),
            seed=0,
            optim=AdamW(lr=4e-3, betas=(0.9, 0.98), weight_decay=0.05),
            schedule=Cooldown(warmup=40, flat=0.4, floor=0.02),
            checkpoint_every=100,
        ),
        evaluate=Evaluation(),
    )


softmax = partial(recipe, "softmax")
gated_deltanet = partial(recipe, "gated-deltanet")
qdelta = partial(recipe, "qdelta")
carve = partial(recipe, "carve")
ccq = partial(recipe, "ccq")
lucid = partial(recipe, "lucid")
atma = partial(recipe, "atma")

COMPARE = ("softmax", "gated-deltanet", "qdelta", "carve", "ccq", "lucid", "atma")


def compare(mixers: tuple[str, ...] = COMPARE, corpus: CorpusConfig | None = None) -> tuple[Recipe, ...]:
    """What `needlework compare` runs: one recipe a mixer, alike in everything but the mixer."""
    return tuple(recipe(mixer, corpus) for mixer in mixers)
