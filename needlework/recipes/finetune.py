"""Train a checkpoint further: one of `train`, or one of `convert`, whose layers may have another rule than their weights were trained with.

# my.py, for `needlework train my.py:run --corpus my_texts`
from needlework.recipes.finetune import from_checkpoint

def run():
    return from_checkpoint("llama-lucid", length=4096)
"""

from pathlib import Path

from needlework.data import Packages, StoreConfig, Text
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase, Recipe
from needlework.models import NeedleworkConfig
from needlework.train import AdamW, Cosine, TrainConfig


def from_checkpoint(
    folder: str | Path, *, steps: int = 500, batch: int = 16, length: int = 2048, lr: float = 2e-5, corpus: StoreConfig | None = None
) -> Recipe:  # fmt: skip
    """`steps` steps of `batch` rows of `length` tokens, from the weights of a checkpoint's folder, in float32.

    corpus: its text, with the folder's tokenizer; None: the installed Python packages, which `--corpus` replaces.
    Optimiser and schedule are ours, for a model that exists: a tenth of a pretraining's rate, a short warm-up, a cosine to a tenth.
    """
    name = Path(folder).resolve().name
    return Recipe(
        name=f"{name}-finetuned",
        title=f"{name}, trained further",
        equation="",
        model=NeedleworkConfig.from_pretrained(folder),
        start=str(folder),
        corpus=corpus or StoreConfig(source=Packages(), tokenizer=str(folder)),
        phases=(Phase(steps=steps, batch=batch, length=length, task=Text()),),
        train=TrainConfig(
            steps=steps,
            seed=0,
            optim=AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.01),
            schedule=Cosine(warmup=max(1, steps // 20), floor=0.1),
            clip=1.0,
            accumulate=batch,  # a row at a time
            autocast="bf16",
            checkpoint_every=100,
            recompute=True,
        ),
        evaluate=Evaluation(lengths=(length,), tasks=("number", "multikey")),
    )
