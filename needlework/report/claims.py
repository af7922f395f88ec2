"""Papers' claims, tested on the runs of a sweep: the claim, the difference that was found, and the verdict.

Shares are taken above chance, (found − chance)/(1 − chance): 0 is a guess, 1 is all. A claim is judged in this order:

    void, ended early, not run    a side has no runs that count
    no range                      every run of both sides is within its δ of chance, or every one within it of all: nothing to tell apart
    one seed cannot say           a single pair
    negligible                    the 95 % interval of the difference (Student's t) lies inside ± δ
    holds, opposite               p < 0.05 after Holm's adjustment over the claims that are judged together
    undecided                     none of these
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from needlework.eval.retrieval import chance

from .student import holm, inside, quantile
from .sweep import Spread, Sweep

LEVEL = 0.05


class Claim(NamedTuple):
    """What a paper says: `better` finds more than `worse`, a mean over `tasks` and the `multiples` of the training length.

    paired: the two sides' runs of one seed belong together, and only they are compared; False: the sides' seeds have nothing in common.
    negligible: δ, the share above chance below which a difference would not matter.
    """

    says: str
    better: str
    worse: str
    tasks: tuple[str, ...]
    multiples: tuple[float, ...]
    paired: bool = True
    negligible: float = 0.03


class Difference(NamedTuple):
    """mean ± half: the 95 % interval; p: two-sided, of no difference. Both None for one pair.
    n: pairs, or the runs of the smaller side."""

    mean: float
    half: float | None
    p: float | None
    n: int


class Verdict(NamedTuple):
    """better, worse: shares above chance, a number a run. p: the difference's after Holm. cells: pairs of task and length, how many of
    them the two sides' means leave no range: `low` at chance, `high` at the ceiling."""

    claim: Claim
    word: str
    better: Spread | None = None
    worse: Spread | None = None
    difference: Difference | None = None
    p: float | None = None
    cells: int = 0
    low: int = 0
    high: int = 0


def above_chance(run: dict[str, Any], tasks: Iterable[str], lengths: Iterable[int]) -> float:
    """The share of what lies above chance that a run finds, a mean over tasks and lengths; negative below chance."""
    lengths = tuple(lengths)
    return statistics.fmean((run[t][str(T)]["accuracy"] - chance(t)) / (1 - chance(t)) for t in tasks for T in lengths)


def paired(better: dict[int, float], worse: dict[int, float]) -> Difference:
    """Of seed -> share on two sides: over the seeds that both have."""
    d = [better[seed] - worse[seed] for seed in sorted(better.keys() & worse.keys())]
    if len(d) == 1:
        return Difference(d[0], None, None, 1)
    return _difference(statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d)), len(d) - 1, len(d))


def apart(better: dict[int, float], worse: dict[int, float]) -> Difference:
    """The same between sides whose seeds have nothing in common (Welch's t; degrees of freedom rounded down)."""
    a, b = list(better.values()), list(worse.values())
    mean, n = statistics.fmean(a) - statistics.fmean(b), min(len(a), len(b))
    if n == 1:
        return Difference(mean, None, None, 1)
    errors = [statistics.variance(side) / len(side) for side in (a, b)]
    total = sum(errors)
    spent = sum(error**2 / (len(side) - 1) for error, side in zip(errors, (a, b), strict=True))
    return _difference(mean, math.sqrt(total), math.floor(total**2 / spent + 1e-9) if spent else n - 1, n)


def _difference(mean: float, error: float, freedom: int, n: int) -> Difference:
    if error == 0:
        return Difference(mean, 0.0, float(mean == 0), n)
    return Difference(mean, quantile(freedom) * error, 1 - inside(abs(mean) / error, freedom), n)


def judge(sweep: Sweep, claims: Iterable[Claim]) -> list[Verdict]:
    """A verdict a claim, in their order; Holm's adjustment is over those that have a p."""
    found = [_measured(sweep, claim) for claim in claims]
    tested = {i: v.difference.p for i, v in enumerate(found) if not v.word and v.difference and v.difference.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [v if v.word else v._replace(p=adjusted[i], word=_word(v, adjusted[i])) for i, v in enumerate(found)]


def _word(verdict: Verdict, p: float) -> str:
    difference = verdict.difference
    assert difference is not None and difference.half is not None  # of more than one pair
    if abs(difference.mean) + difference.half < verdict.claim.negligible:
        return "negligible"
    if p >= LEVEL:
        return "undecided"
    return "holds" if difference.mean > 0 else "opposite"


def _measured(sweep: Sweep, claim: Claim) -> Verdict:
    """The verdict of a claim that needs no test; of another all but p and the word, which is empty."""
    names = (claim.better, claim.worse)
    if sweep.void.keys() & set(names):
        return Verdict(claim, "void")
    at = [T for T in sweep.lengths if T / sweep.train_length in claim.multiples]
    tasks = [task for task in claim.tasks if task in sweep.tasks]
    sides = [{run["seed"]: above_chance(run, tasks, at) for run in sweep.runs.get(n, ()) if at and tasks} for n in names]
    if not all(sides) or (claim.paired and not sides[0].keys() & sides[1].keys()):
        absent = set(names) - sweep.runs.keys()
        ended = bool(absent) and absent <= {run["name"] for run in sweep.ended}
        return Verdict(claim, "ended early" if ended else "not run")
    if claim.paired:
        both = sorted(sides[0].keys() & sides[1].keys())
        sides = [{seed: side[seed] for seed in both} for side in sides]
    better, worse = (Spread(tuple(side.values())) for side in sides)
    difference = (paired if claim.paired else apart)(*sides)
    cells = [
        [sweep.spread(n, lambda run, t=t, T=T: above_chance(run, [t], [T])).mean for n in names] for t in tasks for T in at
    ]
    low, high = (sum(bool(_no_range(means, claim.negligible) == end) for means in cells) for end in ("chance", "the ceiling"))
    verdict = Verdict(claim, "", better, worse, difference, cells=len(cells), low=low, high=high)
    if end := _no_range([*better.values, *worse.values], claim.negligible):
        return verdict._replace(word=f"no range: at {end}")
    return verdict if difference.n > 1 else verdict._replace(word="one seed cannot say")


def _no_range(shares: list[float], negligible: float) -> str:
    """Where all shares above chance lie: at "chance", at "the ceiling", or elsewhere, ""."""
    return "chance" if max(shares) <= negligible else "the ceiling" if min(shares) >= 1 - negligible else ""
