"""CCQ's models and their baselines, trained as the paper says: 500M on 15B tokens of FineWeb-Edu, 1.3B on 40B, T 4096."""

from functools import partial

from needlework.data import FINEWEB_EDU_100BT, StoreConfig, Text
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase, Recipe
from needlework.models.presets import preset
from needlework.train import AdamW, Cosine, TrainConfig

LENGTH = 4096  # Section 5.1
ROWS = 128  # 0.5M tokens a step: ours, the paper's number is lost
TOKENS = {"500m": 15_000_000_000, "1.3b": 40_000_000_000}  # Section 5.1


def recipe(name: str) -> Recipe:
    """The recipe of a preset whose name ends in its size, e.g. ccq-gdn-500m, gla-1.3b, transformer-500m."""
    steps = TOKENS[name.rsplit("-", 1)[1]] // (ROWS * LENGTH)
    return Recipe(
        name=name,
        title=name,
        equation="q̃ = (I − λΣ) q" if name.startswith("ccq") else "a baseline of CCQ's",
        model=preset(name),
        corpus=StoreConfig(
            source=FINEWEB_EDU_100BT,  # "FineWeb-Edu subset"
            tokenizer="fla-hub/transformer-1.3B-100B",  # 32K; which one is not said: ours, Q-Delta's
        ),
        phases=(Phase(steps=steps, batch=ROWS, length=LENGTH, task=Text()),),
        train=TrainConfig(
            steps=steps,
            seed=0,  # ours
            optim=AdamW(
                lr=4e-4,  # ours: lost; "remaining settings of Gated DeltaNet"
                betas=(0.9, 0.95),  # ours: lost
                weight_decay=0.1,
            ),
            schedule=Cosine(warmup=1024, floor=0.0),
            clip=1.0,  # ours
            accumulate=16,  # ours: 8 rows at a time
            autocast="bf16",
            checkpoint_every=500,  # ours
            recompute="1.3b" in name,  # ours
            compile=True,  # ours
        ),
        # RULER's defaults: 500 samples
        evaluate=Evaluation(lengths=(1024, 2048, 4096, 8192), rows=500, tasks=("passkey", "number", "uuid")),
    )


ccq_gdn_500m, ccq_gdn_1_3b = partial(recipe, "ccq-gdn-500m"), partial(recipe, "ccq-gdn-1.3b")
ccq_gla_500m, ccq_gla_1_3b = partial(recipe, "ccq-gla-500m"), partial(recipe, "ccq-gla-1.3b")
gdn_500m, gdn_1_3b = partial(recipe, "gdn-500m"), partial(recipe, "gdn-1.3b")
gla_500m, gla_1_3b = partial(recipe, "gla-500m"), partial(recipe, "gla-1.3b")
transformer_500m, transformer_1_3b = partial(recipe, "transformer-500m"), partial(recipe, "transformer-1.3b")
