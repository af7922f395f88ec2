"""E1, the pilot: does the recipe teach recall to every mixer, how soon, and how far do seeds lie apart?

claim      at least 90 % of the runs pass the gate by 30 % of the steps; else another recipe is piloted before anything else is run
metric     the step of the gate; the sd over seeds of the recall's nats
runs       6 mixers and 2 seeds; and one mixer with answers counted once, beside 8 times
"""

from dataclasses import replace

from needlework.experiment.evaluate import Evaluation
from needlework.experiment.recipe import Recipe
from needlework.recipes.study import base

MINUTES = 20
SEEDS = (0, 1)
MIXERS = ("gated-deltanet", "gated-deltanet-published", "carve-blind", "softmax-plain", "lucid-plain", "polar-memory")
PASS = 0.9  # the share of runs that are to pass
EVALUATE = Evaluation(
    lengths=(base.LENGTH, 2 * base.LENGTH),
    tokens=1 << 18,
    rows=128,
    tasks=("needle", "needles"),
    recall=base.AFTER,
    sample=False,
)


def runs() -> tuple[Recipe, ...]:
    """A seed of all mixers before the next."""
    return tuple(_run(mixer, seed) for seed in SEEDS for mixer in MIXERS) + tuple(_once(seed) for seed in SEEDS)


def _run(mixer: str, seed: int) -> Recipe:
    return base.recipe(mixer, base.gated(), base.train(base.STEPS, seed, base.rate(mixer)), EVALUATE)


def _once(seed: int) -> Recipe:
    """Answers counted once: what the weight does."""
    found = _run("gated-deltanet", seed)
    return replace(found, name="gated-deltanet-once", phases=base.gated(replace(base.AFTER, weight=1.0)))
