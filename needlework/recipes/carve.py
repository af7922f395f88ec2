"""CARVE's models, trained as the paper says: 1.3B on 100B tokens of FineWeb-Edu at T 4096; 125M at T 1024."""

from functools import partial

from needlework.data import FINEWEB_EDU_100BT, StoreConfig, Text
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase, Recipe
from needlework.models.presets import preset
from needlework.train import AdamW, Cosine, TrainConfig


def recipe(name: str, *, steps: int, rows: int, length: int, lr: float, warmup: int, accumulate: int) -> Recipe:
    return Recipe(
        name=name,
        title=name,
        equation="S ← Diag(eᵍ(1 − b)) S + w k (v − Sᵀk)ᵀ, b = σ(bₓ + W₂ tanh W₁m)",
        model=preset(name),
        # "DeepSeek-V3, 32K": that one has 129K, so ours is a 32K BPE of the same text
        corpus=StoreConfig(source=FINEWEB_EDU_100BT, vocabulary=32_000),
        phases=(Phase(steps=steps, batch=rows, length=length, task=Text()),),
        train=TrainConfig(
            steps=steps,
            seed=0,  # the paper: three seeds with one order of data
            optim=AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
            schedule=Cosine(warmup=warmup, floor=0.1),  # the floor is not said: ours
            clip=1.0,
            accumulate=accumulate,  # ours
            autocast="bf16",
            checkpoint_every=500,  # ours
            recompute="1.3b" in name,  # ours
            compile=True,  # ours
        ),
        evaluate=Evaluation(lengths=(1024, 2048, 4096, 8192), rows=500, tasks=("passkey", "number", "uuid", "multikey")),
    )


# 4M tokens a step, 25,000 steps
_LARGE = {"steps": 25_000, "rows": 1024, "length": 4096, "lr": 1.5e-4, "warmup": 10_000, "accumulate": 128}
carve_1_3b = partial(recipe, "carve-1.3b", **_LARGE)
carve_1_3b_swa = partial(recipe, "carve-1.3b-swa", **_LARGE)
# tokens a step and steps are not said: ours, 0.5M and 5.2B in all
carve_125m = partial(recipe, "carve-125m", steps=10_000, rows=512, length=1024, lr=3e-4, warmup=1000, accumulate=8)
