"""E6, reach: does Polar attention find the needle 32 times past its training length, where softmax with the same memory does not?

    recipe     the first study's, with its models of 60M parameters, its 157M tokens, its needles; fresh seeds, and this study's text
    metric     shares above chance (0 a guess, 1 all) of one needle and of the induction needle at 65,536 tokens, a mean of both, 128 episodes each
    claim      Polar + memory finds more than softmax + memory by more than 10 points
    seeds      5 fresh ones; one look at 2

The first study's text is not read: it is the Python source that its machine had installed, and a later commit installs other packages. This
study's text is one file with a digest. Both sides of the claim read it.

The induction needle's filler is one document: the held-out side has one of more than 65,536 tokens.
"""

from dataclasses import replace
from typing import Any

from needlework.experiment.evaluate import Evaluation
from needlework.experiment.recipe import Recipe
from needlework.recipes import comparison
from needlework.recipes.study import text
from needlework.report.answers import Asked, Entry, Measure
from needlework.report.claims import above_chance

MINUTES = 55
SEEDS = tuple(range(10, 15))  # the first study's are 0, 1, 2
MIXERS = ("nope-memory", "polar-memory")
TASKS = ("needle", "induction")
FAR = 32 * comparison.LENGTH
EVALUATE = Evaluation(lengths=(comparison.LENGTH, FAR), tokens=1 << 18, rows=128, tasks=TASKS, sample=False)
PACE = {"nope-memory": 666_000, "polar-memory": 605_000}  # tokens a second of the first study's runs
MEASURED = 70.0  # seconds a run: 128 rows of 65,536 tokens of two tasks, and its start


def found(entry: Entry) -> float:
    """The share above chance at 32 times the training length."""
    run: Any = entry
    return above_chance(run, TASKS, [FAR])


POINTS = Measure(found, "points", times=100, floor=0.0, ceiling=1.0)
CLAIMS = (
    Asked(
        "Polar + memory", "Polar + memory finds more at 32 times the training length than softmax + memory",
        "reach", "", "polar-memory", "nope-memory", POINTS, 0.1, 5, first=SEEDS[0],
    ),
)  # fmt: skip
EXPLORED: tuple[Asked, ...] = ()


def runs() -> tuple[Recipe, ...]:
    """A seed of both before the next."""
    return tuple(
        replace(comparison.recipe(mixer, seed), corpus=text.corpus(), evaluate=EVALUATE) for seed in SEEDS for mixer in MIXERS
    )


def seconds(recipes: tuple[Recipe, ...]) -> float:
    """What the runs take of a GPU."""
    return sum(MEASURED + r.tokens() / PACE[r.name] for r in recipes)
