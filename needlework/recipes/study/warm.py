"""E1 again: under which warm-up does every mixer pass its gate by step 360?

The pilot's warm-up, half of its rows dense, ended at its gate by then in 6 of 12 runs. Here 0.8 and all of the rows are dense, and nothing
else differs; a run ends at step 480, at the peak rate, for only the gate's step is asked.

taken      the one with more passes by step 360, of equal ones that with fewer steps in all; `base.WARM` becomes it if 11 of 12 runs pass
result     6 with 0.8, 5 with all: neither
"""

from dataclasses import replace

from needlework.data import RecallMix
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.recipe import Phase, Recipe
from needlework.recipes.study import base, pilot
from needlework.train import Cooldown

MINUTES = 14
SEEDS = (10, 11)  # the pilot had 0 and 1
STEPS = 480
WARMS = {
    "most": replace(base.WARM, dense=0.8),
    "all": replace(base.WARM, dense=1.0, sparse=0.0),
}
EVALUATE = Evaluation(lengths=(base.LENGTH,), tokens=1 << 16, rows=128, tasks=(), sample=False)


def runs() -> tuple[Recipe, ...]:
    """A seed of all mixers under both before the next."""
    return tuple(_run(mixer, name, warm, seed) for seed in SEEDS for name, warm in WARMS.items() for mixer in pilot.MIXERS)


def _run(mixer: str, name: str, warm: RecallMix, seed: int) -> Recipe:
    phases = (
        Phase(steps=STEPS - 1, batch=base.ROWS, length=base.LENGTH, task=warm, until=base.GATE),
        Phase(steps=1, batch=base.ROWS, length=base.LENGTH, task=base.AFTER),
    )
    trained = base.train(STEPS, seed, base.rate(mixer), Cooldown(warmup=50, flat=1.0))
    return base.recipe(mixer, phases, trained, EVALUATE, f"{mixer}-{name}")
