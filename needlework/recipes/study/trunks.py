"""E4's warm-up: under which one does a trunk pass its gate by step 1,080?

E4's first try gave the gate 360 steps. Six of eight Gated DeltaNet trunks had not passed it, where the pilot's two, on the text before
this one, passed by 295. Here the trunks have 1,200 steps and the warm-up half or 0.8 of its rows dense; nothing else differs.

taken      the one with more passes by step 1,080, of equal ones that with fewer steps in all; E4 begins if 5 of its 6 pass
runs       two trunks, three seeds of the development side, under both
"""

from dataclasses import replace

from needlework.experiment.evaluate import Evaluation
from needlework.experiment.recipe import Recipe
from needlework.recipes.study import base, forks
from needlework.train import Cooldown

MINUTES = 14
SEEDS = tuple(range(base.CHOSEN_ON, base.CHOSEN_ON + 3))
WARMS = {"half": base.WARM, "most": replace(base.WARM, dense=0.8)}
EVALUATE = Evaluation(lengths=(base.LENGTH,), tokens=1 << 16, rows=128, tasks=(), side="development", sample=False)


def runs() -> tuple[Recipe, ...]:
    """A seed of both trunks under both before the next."""
    return tuple(_run(trunk, name, seed) for seed in SEEDS for name in WARMS for trunk in forks.BRANCHES)


def _run(trunk: str, name: str, seed: int) -> Recipe:
    phases = base.gated(WARMS[name], forks.MIX, forks.BY, forks.TRUNK)
    trained = base.train(forks.TRUNK, seed, base.rate(trunk), Cooldown(warmup=50, flat=1.0))
    return base.recipe(trunk, phases, trained, EVALUATE, f"{trunk}-{name}")
