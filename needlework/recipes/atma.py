"""ATMA's models, trained as the authors' code does: 370M on 1B tokens of FineWeb-Edu at T 2048, Muon; and their grid as a sweep.

A cell is one point of kind × memory × window × regulariser × distractor, 120 in all (the paper reports 100 of them). Numbers
without a remark are the authors' code's. What they trained is not what they meant to: here convolutions live and every term of
the loss weighs what it says; `published=True` is the model and the loss as they were.
"""

import dataclasses
from functools import partial
from itertools import product

from needlework.data import FINEWEB_EDU_10BT, StoreConfig, Text
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase, Recipe
from needlework.layers import Discrete, Distractor, Objective, Strong, Weak, Zipfian
from needlework.layers.regularise import Regulariser
from needlework.models.presets import atma
from needlework.train import AdamW, Cooldown, Muon, TrainConfig

STEPS, ROWS, LENGTH = 1_900, 256, 2_048  # 524,288 tokens a step: 190 steps in each of ten shards
MICRO = 4  # rows that the code runs at a time: the tokens of a published sum, and what a regulariser sees
WINDOW = 1_024
KINDS = ("rope", "nope", "polar")
REGULARISERS: dict[str, Regulariser | None] = {
    "baseline": None, "weak": Weak(), "strong": Strong(), "discrete": Discrete(), "zipfian": Zipfian(),
}  # fmt: skip

# ten shards of 100M GPT-2 tokens; ours: a sample of the same data set, a window of 2,048 tokens at a time in random order
CORPUS = StoreConfig(source=dataclasses.replace(FINEWEB_EDU_10BT, max_tokens=1_000_000_000), tokenizer="openai-community/gpt2")
OPTIM = Muon(
    lr=0.02, weight_decay=0.01, momentum=0.95, coefficients=(2.0, -1.5, 0.5), ns_steps=12,
    # ours: convolution kernels and v_null are here too (published: Muon)
    rest=AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, rates=(("*embed*", 0.3), ("lm_head.weight", 1 / 320))),
)  # fmt: skip


def cell(
    kind: str,
    *,
    memory: bool = False,
    window: bool = False,
    regulariser: str = "baseline",
    distractor: bool = False,
    published: bool = False,
    seed: int = 0,
) -> Recipe:
    """One model of the grid. window: of 1,024 in training; measured with it and, as the paper does, without."""
    switches = {
        "memory": memory, "window": window, regulariser: regulariser != "baseline",
        "distractor": distractor, "published": published,
    }  # fmt: skip
    name = "-".join(["atma", kind, *(switch for switch, on in switches.items() if on)])
    return Recipe(
        name=name,
        title=name,
        equation="o = s/‖s‖ and a bounded count of the keys attended to" if kind == "polar" else "o = softmax(q Kᵀ) V",
        model=atma(kind, memory, window=WINDOW if window else None, published=published),
        corpus=CORPUS,
        phases=(Phase(steps=STEPS, batch=ROWS, length=LENGTH, task=Text()),),  # documents run together, without a mask
        train=TrainConfig(
            steps=STEPS,
            seed=seed,  # ours: the paper has one run a cell
            optim=OPTIM,
            schedule=Cooldown(flat=0.3),  # no warm-up, linear to 0
            clip=1.0,
            accumulate=ROWS // MICRO,  # on one GPU; on n, ROWS // (MICRO n) leaves each as many tokens
            autocast="bf16",  # ours: the authors' products are in half and quarter precision
            checkpoint_every=100,  # ours
            compile=True,
        ),
        # 2K … 64K, 16 trials a cell
        evaluate=Evaluation(lengths=tuple(LENGTH << n for n in range(6)), rows=16, tasks=("induction",), full_context=window),
        objective=objective(kind, REGULARISERS[regulariser], distractor, published),
    )


def objective(kind: str, regulariser: Regulariser | None, distractor: bool, published: bool) -> Objective:
    """a = 0.01 with a regulariser, b = 0.01 with the distractor. published: beside the sum of a micro-batch's cross entropies."""
    if published and isinstance(regulariser, Strong):
        regulariser = Strong(summed=True)
    return Objective(
        regulariser=regulariser,
        distractor=Distractor(raw_keys=published and kind == "nope") if distractor else None,
        regulariser_weight=0.01,
        distractor_weight=0.01,
        summed_over=MICRO * LENGTH if published else None,
    )


def grid(published: bool = False, seed: int = 0) -> tuple[Recipe, ...]:
    """All 120 cells: kind × regulariser × distractor × memory × window."""
    off_on = (False, True)
    return tuple(
        cell(kind, memory=memory, window=window, regulariser=name, distractor=distractor, published=published, seed=seed)
        for kind, name, distractor, memory, window in product(KINDS, REGULARISERS, off_on, off_on, off_on)
    )


# Table 1: attention alone; Table 2: with memory; Table 3: Polar + memory with the window, with the distractor
rope, nope, polar = (partial(cell, kind) for kind in KINDS)
rope_memory, nope_memory, polar_memory = (partial(cell, kind, memory=True) for kind in KINDS)
polar_memory_window = partial(polar_memory, window=True)
polar_memory_distractor = partial(polar_memory, distractor=True)
polar_memory_published = partial(polar_memory, published=True)
