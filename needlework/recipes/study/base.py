"""What the experiments of the second study share: steps, rates, the needle rows and their gate, seeds.

    training     32 rows of 2,048 tokens a step; AdamW, cosine to a tenth; bfloat16, blocks compiled
    needles      0.4 of the rows ask for pairs in text at any distance, answers counted 8 times; a dense warm-up comes first, until its
                 gate, for 360 of the pilot's 1,200 steps at most, for 1,080 of those of a fork's trunk. A run that passes it later
                 has not passed
    state        its norm is looked at every 50 steps; one over 1e4, some hundred times the usual, ends the run by name
    seeds        0 … of the tests; 100 … of what is chosen on the development side

PACE is what the minutes are counted by, tokens a second of four runs at a time on one GPU under NVIDIA's MPS: four times what one of them
made on an H100, as E4 and E5 began; the control's is the composition's, and of mixers that were not there then the pilot's two runs at a
time without MPS, or a guess.
"""

from dataclasses import replace

from needlework.data import RecallMix, Text
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.gate import Gate
from needlework.experiment.recipe import Phase, Recipe
from needlework.recipes.study import text
from needlework.recipes.study.mixers import MIXERS, model
from needlework.train import AdamW, Cooldown, Cosine, Guard, TrainConfig

ROWS, LENGTH = 32, 2048  # 65,536 tokens a step
CHOSEN_ON = 100  # the first seed of what is chosen on the development side

WARM = RecallMix(dense=0.5, sparse=0.2, dense_pairs=(1, 4))
AFTER = RecallMix(dense=0.1, sparse=0.4, weight=8.0)
GATE = Gate(excess=0.1, window=4)
STEPS = 1200  # of a run with needles, 79M tokens
BY = 360  # the gate has to be passed by this step, 30 % of them

# peak learning rates by family, as rates.py's runs choose them; 2e-3 is the first study's
RATES = dict.fromkeys(("gated-deltanet", "qdelta", "ccq", "carve", "softmax", "lucid", "composition", "control"), 2e-3)
RATES |= dict.fromkeys(("ccq", "qdelta", "lucid", "control"), 4e-3)
FAMILY = {
    "gated-deltanet-wide": "gated-deltanet", "gated-deltanet-published": "gated-deltanet", "kda": "gated-deltanet",
    "carve-blind": "carve", "softmax-plain": "softmax", "lucid-plain": "lucid", "softmax-memory": "softmax", "polar-memory": "softmax",
}  # fmt: skip

PACE = {
    "gated-deltanet": 1.85e6, "gated-deltanet-wide": 1.4e6, "gated-deltanet-published": 1.6e6, "kda": 1.4e6, "qdelta": 1.75e6, "ccq": 1.7e6,
    "carve": 0.78e6, "carve-blind": 1.25e6, "softmax": 2.2e6, "lucid": 2.2e6, "softmax-plain": 1.53e6, "lucid-plain": 1.6e6,
    "softmax-memory": 1.3e6, "polar-memory": 1.04e6, "composition": 1.9e6, "control": 1.9e6,
}  # fmt: skip
BESIDE = 8.0  # seconds a run: its start, compilation from the cache, measurement, with two runs at a time


def rate(mixer: str) -> float:
    """The peak learning rate of a mixer's family."""
    return RATES[FAMILY.get(mixer, mixer)]


def train(
    steps: int, seed: int, lr: float, schedule: Cosine | Cooldown | None = None, rates: tuple[tuple[str, float], ...] = ()
) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        seed=seed,
        optim=AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1, rates=rates),
        schedule=schedule or Cosine(warmup=min(50, steps // 4), floor=0.1),
        autocast="bf16",
        checkpoint_every=400,
        keep=1,
        compile=True,
        guard=Guard(state=1e4, state_every=50),
    )


def recipe(
    mixer: str, phases: tuple[Phase, ...], trained: TrainConfig, evaluate: Evaluation, name: str | None = None
) -> Recipe:
    """The recipe of one mixer on the study's text."""
    return Recipe(
        name=name or mixer,
        title=MIXERS[mixer].title,
        equation="",
        model=model(mixer),
        corpus=text.corpus(),
        phases=phases,
        train=trained,
        evaluate=evaluate,
    )


def gated(after: RecallMix = AFTER, by: int = BY, steps: int = STEPS) -> tuple[Phase, ...]:
    """The warm-up until its gate, for `by` steps at most, then the needle rows in text."""
    return (
        Phase(steps=by, batch=ROWS, length=LENGTH, task=WARM, until=GATE),
        Phase(steps=steps - by, batch=ROWS, length=LENGTH, task=after),
    )


def plain(steps: int) -> tuple[Phase, ...]:
    """Text alone, every token once an epoch."""
    return (Phase(steps=steps, batch=ROWS, length=LENGTH, task=Text()),)


def seconds(recipes: tuple[Recipe, ...]) -> float:
    """What the runs take of a GPU, by PACE; whatever a recipe is called, its pace is that of its mixer's title."""
    pace = {entry.title: PACE.get(name, 1.2e6) for name, entry in MIXERS.items()}
    return sum(BESIDE + r.tokens() / pace[r.title] for r in recipes)


def reseeded(found: Recipe, seed: int) -> Recipe:
    return replace(found, train=replace(found.train, seed=seed))
