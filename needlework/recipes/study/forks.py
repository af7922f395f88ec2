"""E4, forks: does an addition help recall, from one trunk that recalls already, on the same data?

    trunks     Gated DeltaNet, and CARVE blind, 1,200 steps at a constant rate; one of each for each seed. One that has not passed the gate
               by step 1,080 has no branches
    branches   of Gated DeltaNet: itself, Q-Delta with λ times a factor that starts at 0, CCQ with such a factor
               of CARVE blind: itself, CARVE with W₂ = 0
    data       0.4 of the rows ask for pairs in text; 37.5 % of the keys get another value before they are asked
    metric     nats a digit of recall in held-out text at T 2,048, a mean over buckets of distance; beside it overwritten keys alone. ln 10 = 2.303
               for a guess among the digits; 0 is the best there is, for the row has each digit that is asked (an overwrite has a mark of its own)
    claims     Q-Delta, and CARVE, have fewer nats than the trunk's own branch by more than 0.02; CCQ is exploration here, where its
               statistics make the state twice as large
    pairs      the branches of one trunk; 8 trunks each; one look at 4
    again      a first try gave trunks 480 steps and the gate 360: six of eight Gated DeltaNet trunks had not passed, and no branch was
               measured. They recalled 44 to 68 % by step 480. Its seeds, 0 to 7, are not used again

A factor's learning rate is ten times the rest's: it is one number a head and starts at 0.
"""

import math
from dataclasses import replace

from needlework.data import RecallMix
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.fork import Fork
from needlework.experiment.recipe import Phase, Recipe
from needlework.layers import CCQ, Carve, Delta, QDelta, ScalarGate
from needlework.layers.config import Config
from needlework.layers.write import WriteConfig
from needlework.recipes.study import base
from needlework.recipes.study.mixers import SPREAD, TWICE, recurrent
from needlework.report.answers import Asked, Measure, at
from needlework.train import Cooldown

MINUTES = 32
SEEDS = tuple(range(20, 28))
BY = 1080  # the gate has to be passed by this step of the trunk
TRUNK, BRANCH = 1200, 320  # steps: 79M tokens, 21M
MIX = RecallMix(dense=0.1, sparse=0.4, weight=8.0, overwritten=0.375)
EVALUATE = Evaluation(
    lengths=(base.LENGTH,),
    tokens=1 << 18,
    rows=512,
    tasks=("needles",),
    recall=replace(MIX, dense=0.0, sparse=1.0),
    sample=False,
)
OF_TRUNK = Evaluation(lengths=(base.LENGTH,), tokens=1 << 17, rows=128, tasks=("needles",), sample=False)
BRANCHES: dict[str, dict[str, tuple[str, WriteConfig, Config | None]]] = {
    "gated-deltanet": {
        "itself": ("Gated DeltaNet", Delta(gate=ScalarGate(half_life=SPREAD)), None),
        "qdelta": ("Q-Delta from Gated DeltaNet", QDelta(gate=ScalarGate(half_life=SPREAD), factor=0.0), None),
        "ccq": ("CCQ from Gated DeltaNet", Delta(gate=ScalarGate(half_life=SPREAD)), CCQ(start=0.5, factor=0.0)),
    },
    "carve-blind": {
        "itself": ("CARVE, blind", Carve(rank=0, half_life=TWICE), None),
        "carve": ("CARVE from blind", Carve(half_life=TWICE), None),
    },
}

_RANGE = {"floor": math.log(10), "ceiling": 0.0}
NLL = Measure(at("recall", str(base.LENGTH), "nll"), "nats a digit", lower=True, **_RANGE)
OVERWRITTEN = Measure(at("recall", str(base.LENGTH), "overwritten", "nll"), "nats a digit", lower=True, **_RANGE)
CLAIMS = (
    Asked(
        "Q-Delta",
        "Q-Delta recalls with fewer nats than Gated DeltaNet, from one trunk",
        "forks",
        "gated-deltanet",
        "qdelta",
        "itself",
        NLL,
        0.02,
        8,
        first=SEEDS[0],
    ),
    Asked(
        "CARVE",
        "CARVE recalls with fewer nats than itself blind, from one trunk",
        "forks",
        "carve-blind",
        "carve",
        "itself",
        NLL,
        0.02,
        8,
        first=SEEDS[0],
    ),
)
EXPLORED = (
    Asked("CCQ", "CCQ against Gated DeltaNet, from one trunk", "forks", "gated-deltanet", "ccq", "itself", NLL, 0.02, 8,
          first=SEEDS[0]),
    *(
        Asked(paper, f"{paper} on keys that were overwritten", "forks", trunk, branch, "itself",
              OVERWRITTEN, 0.02, 8, first=SEEDS[0])
        for paper, trunk, branch in (("Q-Delta", "gated-deltanet", "qdelta"), ("CARVE", "carve-blind", "carve"))
    ),
)  # fmt: skip


def runs() -> tuple[Fork, ...]:
    """A seed of both trunks before the next."""
    return tuple(fork(trunk, seed) for seed in SEEDS for trunk in BRANCHES)


def fork(trunk: str, seed: int) -> Fork:
    lr = base.rate(trunk)
    flat = base.train(TRUNK, seed, lr, Cooldown(warmup=50, flat=1.0))
    return Fork(
        trunk=base.recipe(trunk, base.gated(MIX, BY, TRUNK), flat, OF_TRUNK),
        branches=tuple(_branch(trunk, name, seed, lr) for name in BRANCHES[trunk]),
    )


def _branch(trunk: str, name: str, seed: int, lr: float) -> Recipe:
    """The same data for every branch of a trunk: other rows than the trunk's."""
    title, write, read = BRANCHES[trunk][name]
    rates = (("*factor.value", 10 * lr),) if name in ("qdelta", "ccq") else ()
    found = base.recipe(
        trunk,
        (Phase(steps=BRANCH, batch=base.ROWS, length=base.LENGTH, task=MIX),),
        base.train(BRANCH, 1000 + seed, lr, Cooldown(warmup=20, flat=0.5, floor=0.1), rates),
        EVALUATE,
        name,
    )
    mixer = recurrent(write) if read is None else recurrent(write, read=read)
    return replace(found, title=title, model=found.model.replaced(mixers={"M": mixer.to_dict()}))


def seconds(jobs: tuple[Fork, ...]) -> float:
    """What the runs take of a GPU, by base.PACE."""
    return sum(base.BESIDE + part.tokens() / base.PACE[job.name] for job in jobs for part in job.recipes)
