"""Effects that the runs of a sweep show beside its claims: one group of mixers less another, with the seeds as blocks.

    y[m s] = a[m] + b[s] + r[m s]        effect = mean of a over `better` − mean of a over `worse`
                                         ± t(ν) √(Σ r²/ν · (1/|better| + 1/|worse|)/n)       ν = (M − 1)(n − 1), of M mixers and n seeds

t(ν) is Student's, for a 95 % interval. Of two mixers this is the interval over pairs of one seed; of the four of a 2 × 2 design, in which `better`
are the two that have a part and `worse` the two that lack it, the effect is that part's main effect.
"""

import math
from statistics import fmean
from typing import NamedTuple

from .asked import Measure
from .claims import Difference
from .markdown import table
from .student import inside, quantile
from .sweep import Sweep


class Effect(NamedTuple):
    """What is compared, in words; the mixers of either side; the number of a run."""

    says: str
    better: tuple[str, ...]
    worse: tuple[str, ...]
    measure: Measure


def effect(sweep: Sweep, of: Effect) -> Difference | None:
    """Over the seeds that all of its mixers have; None if a mixer is absent, or with fewer than two such seeds."""
    numbers = {name: {run["seed"]: of.measure.of(run) for run in sweep.runs.get(name, ())} for name in of.better + of.worse}
    seeds = sorted(set.intersection(*map(set, numbers.values())))
    M, n = len(numbers), len(seeds)
    if n < 2:
        return None
    a = {name: fmean(found[seed] for seed in seeds) for name, found in numbers.items()}
    mean = fmean(a.values())
    b = {seed: fmean(found[seed] for found in numbers.values()) - mean for seed in seeds}
    left = sum((found[seed] - a[name] - b[seed]) ** 2 for name, found in numbers.items() for seed in seeds)
    freedom = (M - 1) * (n - 1)
    error = math.sqrt(left / freedom * (1 / len(of.better) + 1 / len(of.worse)) / n)
    apart = fmean(a[name] for name in of.better) - fmean(a[name] for name in of.worse)
    p = 1 - inside(abs(apart) / error, freedom) if error else float(apart == 0)
    return Difference(apart, quantile(freedom) * error, p, n)


def effects_section(sweep: Sweep, effects: tuple[Effect, ...]) -> str:
    """A row an effect that the runs have; nothing where they have none."""
    rows = []
    for of in effects:
        if (found := effect(sweep, of)) is not None and found.half is not None:
            sides = ("; ".join(map(sweep.title, side)) for side in (of.better, of.worse))
            digits, times = (1, of.measure.times) if of.measure.times > 1 else (3, 1.0)
            shown = f"{times * found.mean:+.{digits}f} ± {times * found.half:.{digits}f} {of.measure.unit}"
            rows.append((of.says, *sides, shown, str(found.n)))
    return f"{_SHOWN}\n\n{table(('effect', 'of', 'less', 'difference, 95 %', 'seeds'), rows)}" if rows else ""


_SHOWN = (
    "These were not claims: they were looked for after the runs, and each interval is of one effect alone (Student's t, seeds as blocks). Of two mixers a side "
    "the difference is a main effect, a mean over both."
)
