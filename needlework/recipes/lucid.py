"""LUCID's models: ~1B on 5.8B tokens of Dolma at T 2048, then 0.5B at T 65,536; and the one with a vocabulary of 256,000."""

from functools import partial

from needlework.data import DOLMA, StoreConfig, Text
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.runner import Phase, Recipe
from needlework.layers import Rope
from needlework.models import NeedleworkConfig
from needlework.models.presets import preset
from needlework.train import AdamW, Cosine, TrainConfig

EQUATION = "o = softmax(q Kᵀ/√d) P⁻¹V"
# "Dolma subset, ~6.5B tokens"; 32K, which one is not said: ours, Q-Delta's
CORPUS = StoreConfig(source=DOLMA, tokenizer="fla-hub/transformer-1.3B-100B")
NEEDLES = ("needles-2", "needles", "needles-8")  # the paper: 2, 4, 6, 8, 10 at T 2048


def _train(steps: int, lr: float, beta2: float, rows: int) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        seed=0,  # ours
        optim=AdamW(lr=lr, betas=(0.9, beta2), weight_decay=0.01),
        schedule=Cosine(warmup=steps // 50, floor=0.1),  # ours: the paper is silent
        clip=1.0,  # ours
        accumulate=rows,  # ours: what one GPU holds of a step at a time
        autocast="bf16",
        checkpoint_every=250,  # ours
        recompute=True,  # ours
        compile=True,  # ours
    )


def pretrain(name: str) -> Recipe:
    """lucid-1b, its variants, or standard-1b: 11,000 steps of 524,288 tokens at T 2048."""
    return Recipe(
        name=name, title=name, equation=EQUATION, model=preset(name), corpus=CORPUS,
        phases=(Phase(steps=11_000, batch=256, length=2048, task=Text()),),
        train=_train(11_000, 5e-4, 0.99, 32),
        evaluate=Evaluation(lengths=(2048,), rows=500, tasks=NEEDLES),
    )  # fmt: skip


def finetune(name: str) -> Recipe:
    """The same at T 65,536: 500 steps of 1,048,576 tokens, RoPE's base 64,000, from what `pretrain` left in runs/."""
    return Recipe(
        name=f"{name}-65k", title=f"{name} at 65K", equation=EQUATION, model=_base(preset(name), 64_000.0), corpus=CORPUS,
        start=f"runs/{name}/{name}/checkpoint",
        phases=(Phase(steps=500, batch=16, length=65_536, task=Text()),),
        train=_train(500, 5e-5, 0.99, 16),  # the learning rate is not said: ours, a tenth
        evaluate=Evaluation(lengths=(2048, 4096, 8192, 16_384, 32_768, 65_536), rows=500, tasks=("number", "needles")),
    )  # fmt: skip


def _base(config: NeedleworkConfig, base: float) -> NeedleworkConfig:
    """The config with another base of its rotary positions."""
    mixers = {letter: mixer | {"position": Rope(base=base).to_dict()} for letter, mixer in (config.mixers or {}).items()}
    return config.replaced(mixers=mixers)


def large_vocabulary(length: int, rows: int, steps: int) -> Recipe:
    """lucid-256k: T 4096 at 1M tokens × 80,000 steps, or T 32,768 at 2M × 25,000."""
    return Recipe(
        name=f"lucid-256k-{length}", title=f"LUCID, 256K vocabulary, T {length:,}", equation=EQUATION, model=preset("lucid-256k"),
        corpus=StoreConfig(source=DOLMA, vocabulary=256_000),  # which one is not said: ours
        phases=(Phase(steps=steps, batch=rows, length=length, task=Text()),),
        train=_train(steps, 5e-4, 0.95, rows),
        evaluate=Evaluation(lengths=(length,), rows=500, tasks=NEEDLES),
    )  # fmt: skip


standard_1b, lucid_1b = partial(pretrain, "standard-1b"), partial(pretrain, "lucid-1b")
lucid_1b_qk, lucid_1b_rowmax = partial(pretrain, "lucid-1b-qk"), partial(pretrain, "lucid-1b-rowmax")
lucid_1b_beta = partial(pretrain, "lucid-1b-beta")
standard_1b_65k, lucid_1b_65k = partial(finetune, "standard-1b"), partial(finetune, "lucid-1b")
lucid_256k_4k = partial(large_vocabulary, 4096, 256, 80_000)
lucid_256k_32k = partial(large_vocabulary, 32_768, 64, 25_000)
