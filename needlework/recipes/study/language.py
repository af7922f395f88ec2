"""E5, text: what does a mixer give a language model that reads, at one size and on one text?

text       18M parameters, 79M tokens of running text in rows of 2,048, 1.15 epochs; not the 100M that were planned, whose 48 runs take more
           than the 53 minutes that there are
metrics    held-out loss; the gain of a context, loss at 1,024 to 2,048 less loss at 0 to 256; the loss on the last token of bigrams
           that occur earlier in the row and at most 16 times in the training text
ends       a loss is ln 8,192 = 9.01 nats for a guess among the tokens, a gain 0 for a model that makes
           nothing of its context; the best there is has no number, for the entropy of text is not known
claims     LUCID's held-out loss is below softmax's by more than 0.02 nats; the composition's gain is below its equal-layout control's by
           more than 0.01
seeds      6; one look at 3; every model is measured on the same rows
explored   the other mixers and metrics, and the side of packages of which nothing is trained on
"""

import math

from needlework.experiment.answers import Context
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.recipe import Recipe
from needlework.recipes.study import base
from needlework.recipes.study.mixers import VOCABULARY
from needlework.report.answers import Asked, Measure, at

MINUTES = 53
STEPS = 1200
SEEDS = tuple(range(6))
MIXERS = ("softmax", "lucid", "gated-deltanet", "qdelta", "ccq", "carve", "composition", "control")
EVALUATE = Evaluation(lengths=(base.LENGTH,), tokens=1 << 18, rows=1, tasks=(), context=Context(rows=768), sample=False)

GUESS = math.log(VOCABULARY)
LOSS = Measure(at("context", "loss"), "nats a token", lower=True, floor=GUESS)
GAIN = Measure(at("context", "gain"), "nats a token", lower=True, floor=0.0)
REPEATED = Measure(at("context", "repeated"), "nats a token", lower=True, floor=GUESS)
CLAIMS = (
    Asked("LUCID", "LUCID has a lower held-out loss than softmax", "language", "", "lucid", "softmax", LOSS, 0.02, 6),
    Asked(
        "The composition", "Q-Delta·CCQ with LUCID gains more from its context than Gated DeltaNet with softmax in its layout",
        "language", "", "composition", "control", GAIN, 0.01, 6,
    ),
)  # fmt: skip
EXPLORED = (
    Asked("LUCID", "LUCID against softmax: repeated rare bigrams", "language", "", "lucid", "softmax", REPEATED, 0.02, 6),
    Asked(
        "The composition",
        "The composition against its control: held-out loss",
        "language",
        "",
        "composition",
        "control",
        LOSS,
        0.02,
        6,
    ),
    Asked(
        "Q-Delta", "Q-Delta against Gated DeltaNet: held-out loss", "language", "", "qdelta", "gated-deltanet", LOSS, 0.02, 6
    ),
)


def runs() -> tuple[Recipe, ...]:
    """A seed of all mixers before the next."""
    return tuple(run(mixer, seed) for seed in SEEDS for mixer in MIXERS)


def run(mixer: str, seed: int) -> Recipe:
    return base.recipe(mixer, base.plain(STEPS), base.train(STEPS, seed, base.rate(mixer)), EVALUATE)
