"""E3, capacity: how much does a state of so many bytes hold, before it forgets?

    model      two layers without MLP, D 128; recurrent heads 2 of [16 16], attention heads 8 of 16; canon for attention
    task       associative recall (MQAR), 16 to 128 pairs in rows of 512: loads on both sides of what the states hold; the first fifth of the
               steps has 4 and 8 pairs in rows of 64
    metric     accuracy, a mean over the loads
    claims     CCQ over Gated DeltaNet of as many bytes by more than 3 points, 8 seeds; one look at 4
    explored   LUCID over softmax, both with heads of 16; Q-Delta's rule against the released coupling, both in plain float32 PyTorch, with λ
               learned and with λ = 0, where they are one function; CARVE over blind; accuracy against bytes, at K = V = 16, 32 and 64
    runs       12 at a time on a GPU: batches are drawn on it, and a model this small leaves most of it idle

CCQ's statistics are K² + K + 1 numbers beside K V, so its partner has V = 2 K: bytes within 2 %.
"""

from dataclasses import replace
from typing import Any

from needlework.experiment.capacity import Capacity, WarmUp
from needlework.layers import (
    CCQ,
    Attention,
    Canon,
    Carve,
    Config,
    Delta,
    Lucid,
    QDelta,
    Recurrent,
    ScalarGate,
    Softmax,
)
from needlework.layers.softmax import AttendConfig
from needlework.layers.write import WriteConfig
from needlework.models import NeedleworkConfig
from needlework.recipes.study.base import CHOSEN_ON
from needlework.recipes.study.mixers import Pair
from needlework.report.answers import Asked, Measure, at
from needlework.train import AdamW, Cosine, Guard, TrainConfig

MINUTES = 60
DIM, LAYERS, VOCABULARY, LENGTH, ROWS = 128, 2, 1024, 512, 128
LOADS = (16, 32, 64, 128)
STEPS = 3000  # 197M tokens
# Without it one run in six of the rates' never learned to recall, and the others learned between steps 400 and 2,600
WARM_UP = WarmUp(steps=600, pairs=(4, 8), length=64)
SEEDS = tuple(range(8))
HEADS, HEAD, SIZES = 2, 16, (16, 32, 64)
RATE = 4e-3  # the largest mean of the two recurrent mixers of `rates`, 8 runs
GRID = (1e-3, 2e-3, 4e-3, 8e-3)
# half-lives around the row: no pair need be forgotten before its key is asked
SPREAD, TWICE = (64.0, 4096.0), (128.0, 8192.0)


def _recurrent(head: int, write: WriteConfig, **settings: Any) -> Recurrent:
    sizes: dict[str, Any] = {"heads": HEADS, "key_dim": head, "value_dim": head}
    return Recurrent(**sizes | settings, write=write)


def _attention(attend: AttendConfig) -> Attention:
    return Attention(heads=DIM // 16, head_dim=16, attend=attend, conv=Canon(), qk_norm=True)


def _gated() -> ScalarGate:
    return ScalarGate(half_life=SPREAD)


def mixers(head: int = HEAD) -> dict[str, tuple[str, Config]]:
    """name -> title, mixer, of recurrent heads [head head]."""
    plain = {"gate": _gated()}
    return {
        "gated-deltanet-wide": ("Gated DeltaNet, V = 2 K", _recurrent(head, Delta(gate=_gated()), value_dim=2 * head)),
        "ccq": ("CCQ on Gated DeltaNet", _recurrent(head, Delta(gate=_gated()), read=CCQ())),
        "carve": ("CARVE", _recurrent(head, Carve(half_life=TWICE))),
        "carve-blind": ("CARVE, blind", _recurrent(head, Carve(rank=0, half_life=TWICE))),
        "softmax": ("Softmax, heads of 16", _attention(Softmax())),
        "lucid": ("LUCID, heads of 16", _attention(Lucid())),
        "rule": ("Q-Delta", _recurrent(head, QDelta(**plain))),
        "released": ("Q-Delta as released", _recurrent(head, QDelta(**plain, coupling="transposed"))),
        "rule-0": ("Q-Delta, λ = 0", _recurrent(head, QDelta(**plain, lam=0.0))),
        "released-0": ("Q-Delta as released, λ = 0", _recurrent(head, QDelta(**plain, lam=0.0, coupling="transposed"))),
    }


PLAIN = ("rule", "released", "rule-0", "released-0")  # in float32 PyTorch, all four alike
CURVE = ("ccq", "gated-deltanet-wide", "carve", "carve-blind")
PAIRS = (
    Pair("ccq", "gated-deltanet-wide", ("read.*", "value_dim")),
    Pair("carve", "carve-blind", ("write.rank",)),
    Pair("lucid", "softmax", ("attend.kind", "attend.precondition", "attend.solve")),
    Pair("rule", "released", ("write.coupling",)),
    Pair("rule-0", "released-0", ("write.coupling",)),
)

POINTS = Measure(at("capacity", "accuracy"), "points", times=100, floor=2 / VOCABULARY, ceiling=1.0)
CLAIMS = (
    Asked(
        "CCQ",
        "CCQ recalls more than Gated DeltaNet with a state of as many bytes",
        "capacity",
        "",
        "ccq",
        "gated-deltanet-wide",
        POINTS,
        0.03,
        8,
    ),
)
EXPLORED = (
    Asked("LUCID", "LUCID against softmax, heads of 16", "capacity", "", "lucid", "softmax", POINTS, 0.03, 8),
    Asked("Q-Delta", "The rule against what was released", "capacity", "", "rule", "released", POINTS, 0.03, 8),
    Asked(
        "Q-Delta", "The same with λ = 0, where they are one function", "capacity", "", "rule-0", "released-0", POINTS, 0.03, 8
    ),
    Asked("Q-Delta", "Q-Delta against λ = 0, which is Gated DeltaNet", "capacity", "", "rule", "rule-0", POINTS, 0.03, 8),
    Asked("CARVE", "CARVE against itself blind", "capacity", "", "carve", "carve-blind", POINTS, 0.03, 8),
)


def runs() -> tuple[Capacity, ...]:
    """A seed of all mixers before the next; then the curve of accuracy against bytes, with two seeds."""
    found = [run(name, seed) for seed in SEEDS for name in mixers()]
    found += [run(name, seed, head) for head in SIZES if head != HEAD for seed in SEEDS[:2] for name in CURVE]
    return tuple(found)


def rates() -> tuple[Capacity, ...]:
    """What RATE is checked by: two of the recurrent mixers and softmax, on a seed of their own."""
    made = []
    for lr in GRID:
        for name in ("gated-deltanet-wide", "carve-blind", "softmax"):
            found = run(name, CHOSEN_ON)
            train = replace(found.train, optim=replace(found.train.optim, lr=lr))
            made.append(replace(found, name=f"{name}-{lr * 1e6:g}", train=train))
    return tuple(made)


def model(mixer: Config) -> NeedleworkConfig:
    return NeedleworkConfig(vocab_size=VOCABULARY, hidden_size=DIM, layout="M" * LAYERS, mixers={"M": mixer})


def run(name: str, seed: int, head: int = HEAD) -> Capacity:
    title, mixer = mixers(head)[name]
    plain = name in PLAIN
    return Capacity(
        name=name if head == HEAD else f"{name}-{head}",
        title=title,
        model=model(mixer),
        pairs=LOADS,
        length=LENGTH,
        batch=ROWS,
        warm_up=WARM_UP,
        train=TrainConfig(
            steps=STEPS,
            seed=seed,
            optim=AdamW(lr=RATE, betas=(0.9, 0.95), weight_decay=0.1),
            schedule=Cosine(warmup=200, floor=0.05),
            autocast=None if plain else "bf16",
            compile=True,
            checkpoint_every=STEPS,
            keep=1,
            log_every=50,
            guard=Guard(skip=3),
        ),
        impl="torch" if plain else "auto",
    )
