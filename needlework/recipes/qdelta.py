"""Q-Delta's models, trained as the authors' scripts do: 340M on 15B tokens of FineWeb-Edu, 1.3B on 30B, T 4096."""

from functools import partial

from needlework.data import FINEWEB_EDU_100BT, StoreConfig, Text
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase, Recipe
from needlework.models.presets import preset
from needlework.train import AdamW, Cosine, TrainConfig

LENGTH = 4096  # the 1.3B script cuts documents there; the 340M script lacks the switch: ours, the same
ROWS = 128  # 524,288 tokens a step


def recipe(name: str, steps: int, lr: float, warmup: int) -> Recipe:
    return Recipe(
        name=name,
        title=name,
        equation="S ← eᵍ (I − β k (k + λq)ᵀ) S + β k vᵀ",
        model=preset(name),
        corpus=StoreConfig(source=FINEWEB_EDU_100BT, tokenizer="fla-hub/transformer-1.3B-100B"),
        phases=(Phase(steps=steps, batch=ROWS, length=LENGTH, task=Text()),),
        train=TrainConfig(
            steps=steps,
            seed=42,
            optim=AdamW(lr=lr, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.1),
            schedule=Cosine(warmup=warmup, floor=0.1),
            clip=1.0,
            accumulate=16,  # ours: 8 rows at a time
            autocast="bf16",
            checkpoint_every=500,  # ours
            recompute="1.3b" in name,  # ours
            compile=True,  # ours
        ),
        # S-NIAH-1 … 3; lengths are not said: ours
        evaluate=Evaluation(lengths=(1024, 2048, 4096), rows=500, tasks=("passkey", "number", "uuid")),
    )


qdelta_340m = partial(recipe, "qdelta-340m", steps=28_600, lr=1e-3, warmup=1024)
qdelta_1_3b = partial(recipe, "qdelta-1.3b", steps=57_200, lr=4e-4, warmup=2048)
