"""E2, the learning rates: each family's on text alone, by the loss on the development side, which no test reads.

    metric     nats a token of the development side
    grid       {0.5, 1, 2, 4}e-3 with one seed; where the best is at an edge, the next rate beyond it; then the two best with two more seeds
    chosen     the rate with the least mean over its seeds
    text       one for all runs of a family: LUCID's and the control's are of text.py's, the others' of the one before it

`runs` returns the runs that the pack still lacks, so that one command, repeated, does all of them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from needlework.experiment.evaluate import Evaluation
from needlework.experiment.pack import read_pack
from needlework.experiment.recipe import Recipe
from needlework.recipes.study import base

MINUTES = 40
STEPS = 500  # 33M tokens
MILLIONTHS = 1e6  # a run's name has its rate in them: gated-deltanet-2000
GRID = (0.5e-3, 1e-3, 2e-3, 4e-3)
FAMILIES = tuple(base.RATES)
SEEDS = (base.CHOSEN_ON, base.CHOSEN_ON + 1, base.CHOSEN_ON + 2)
PACK = Path("docs/results/second/rates.jsonl.xz")
EVALUATE = Evaluation(
    lengths=(base.LENGTH,), tokens=1 << 20, rows=1, tasks=(), side="development", sample=False, seed=base.CHOSEN_ON
)


def runs() -> tuple[Recipe, ...]:
    """What PACK lacks of the grid, and of what follows of the results in it."""
    found = losses(read_pack(PACK))
    return tuple(run(family, lr, seed) for family, lr, seed in wanted(found) if seed not in found.get(family, {}).get(lr, {}))


def run(family: str, lr: float, seed: int) -> Recipe:
    return base.recipe(family, base.plain(STEPS), base.train(STEPS, seed, lr), EVALUATE, f"{family}-{lr * MILLIONTHS:g}")


Losses = Mapping[str, Mapping[float, Mapping[int, float]]]  # family -> rate -> seed -> development loss


def losses(pack: Mapping[str, dict[str, Any]]) -> Losses:
    found: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for entry in pack.values():
        family, _, lr = entry["name"].rpartition("-")
        # an aborted run is worse than every other
        loss = entry["loss"][str(base.LENGTH)] if "loss" in entry else math.inf
        found[family][float(lr) / MILLIONTHS][entry["seed"]] = loss
    return found


def wanted(found: Losses) -> list[tuple[str, float, int]]:
    """(family, rate, seed) of every run, given the losses so far."""
    runs = [(family, lr, SEEDS[0]) for family in FAMILIES for lr in GRID]
    for family in FAMILIES:
        first = {lr: of[SEEDS[0]] for lr, of in found.get(family, {}).items() if SEEDS[0] in of}
        if not set(GRID) <= first.keys():
            continue
        beyond = _beyond(first)
        if beyond:
            runs += [(family, lr, SEEDS[0]) for lr in beyond]
        if not beyond or set(beyond) <= first.keys():
            runs += [(family, lr, seed) for lr in sorted(first, key=first.__getitem__)[:2] for seed in SEEDS[1:]]
    return runs


def _beyond(first: Mapping[float, float]) -> list[float]:
    """The rates beyond the grid tried, and still to try: halved or doubled while the best is at the edge."""
    rates, tried = sorted(first), []
    tried += [lr for lr in rates if lr not in GRID]
    best = min(rates, key=first.__getitem__)
    if best == rates[0]:
        tried.append(best / 2)
    elif best == rates[-1]:
        tried.append(best * 2)
    return tried


def chosen(found: Losses) -> dict[str, float]:
    """The rate of each family that has all of its seeds at two rates at least."""
    whole = {family: {lr: of for lr, of in rates.items() if len(of) == len(SEEDS)} for family, rates in found.items()}
    return {
        family: min(rates, key=lambda lr, r=rates: fmean(r[lr].values())) for family, rates in whole.items() if len(rates) > 1
    }
