"""A comparison that never ran: plausible numbers for the report's tests, the same on every call."""

import random

import pytest

LENGTHS = [256, 512, 1024, 2048]

# name, title, equation, fixed state bytes (None: grows), retrieval of one needle and of several at 1x..8x, tokens per second
MIXERS = [
    ("softmax", "Softmax attention", "o = softmax(q Kᵀ/√d) V", None, (1.0, 1.0, 0.97, 0.84), (0.96, 0.9, 0.72, 0.41), 50_120),
    ("gdn", "Gated DeltaNet", "S ← eᵍ(I − βkkᵀ)S + βkvᵀ", 36_864, (1.0, 1.0, 0.94, 0.59), (0.9, 0.71, 0.38, 0.18), 34_400),
    ("qdelta", "Q-Delta", "S ← eᵍS + βk(v − eᵍSᵀ(k + λq))ᵀ", 36_864, (1.0, 1.0, 0.96, 0.66), (0.93, 0.76, 0.43, 0.2), 33_050),
    ("carve", "CARVE", "S ← D(S − k(Sᵀe)ᵀ) + Σᵣ kᵣuᵣᵀ", 45_312, (1.0, 0.99, 0.95, 0.71), (0.94, 0.79, 0.47, 0.22), 14_700),
    ("ccq", "CCQ on Gated DeltaNet", "q̃ = (C/t + λI)⁻¹ q", 70_152, (1.0, 1.0, 0.97, 0.7), (0.92, 0.77, 0.45, 0.21), 24_810),
    ("lucid", "LUCID", "(I + tril P) Y = V, o = A Y", None, (1.0, 1.0, 0.99, 0.93), (0.98, 0.95, 0.84, 0.58), 36_300),
    (
        "polar",
        "Polar + memory",
        "direction Σ aⱼvⱼ/‖·‖, magnitude log Σ e^s",
        0,
        (1.0, 1.0, 1.0, 0.98),
        (0.97, 0.93, 0.81, 0.62),
        15_240,
    ),
]


def build(mixers: int = len(MIXERS)) -> dict:
    """Results of the first `mixers` mixers."""
    return {
        "name": "example",
        "date": "2027-01-15",
        "train_length": 256,
        "lengths": LENGTHS,
        "seed": 0,
        "config": {"recipe": "compare", "optim": {"lr": 0.004, "betas": [0.9, 0.98]}, "steps": 1100},
        "corpus": {"files": 512, "bytes": 9_437_184, "sha256": "0123456789abcdef" * 4},
        "versions": {"needlework": "0.1.0", "torch": "2.13.0"},
        "machine": "2 cores, 8 GiB",
        "mixers": [_mixer(i, *row) for i, row in enumerate(MIXERS[:mixers])],
    }


def _mixer(index, name, title, equation, fixed, one, several, speed) -> dict:
    noise = random.Random(index)
    curve = [1.3 + 0.02 * index + 4.2 * 2.718 ** (-step / (60 + 8 * index)) + noise.gauss(0, 0.09) for step in range(1, 1101)]
    grows = {str(n): n * 1024 for n in LENGTHS}
    state = grows if fixed is None else {str(n): fixed or 36_864 + n * 1024 for n in LENGTHS}
    return {
        "name": name,
        "title": title,
        "equation": equation,
        "parameters": 117_000 + noise.randrange(2_000),
        "state_bytes": state,
        "train": {
            "steps": list(range(1, 1101)),
            "loss": curve,
            "tokens": 1100 * 2048,
            "seconds": 1100 * 2048 / speed,
            "tokens_per_second": speed,
            "log": {
                "steps": [275, 550, 825, 1100],
                "lr": [4e-3, 4e-3, 2e-3, 1e-4],
                "grad_norm": [0.9 + 0.01 * index, 0.7, 0.5, 0.45],
                "memory": [(400 + index) << 20] * 4,
            },
        },
        "samples": [{"prompt": "def spam(", "continuation": f"self, {name}):", "text": "eggs):"}],
        "loss": {
            str(n): 1.62 + 0.015 * index + 0.03 * (index % 3 - 1) * i + noise.gauss(0, 0.004) for i, n in enumerate(LENGTHS)
        },
        "needle": dict(zip(map(str, LENGTHS), [_score(share, 1280) for share in one], strict=True)),
        "needles": dict(zip(map(str, LENGTHS), [_score(share, 2560) for share in several], strict=True)),
    }


def _score(share: float, digits: int) -> dict:
    return {"accuracy": round(share * digits) / digits, "exact": round(share**3, 3), "digits": digits, "values": digits // 4}


@pytest.fixture(scope="session")
def example():
    """A function: example(mixers=7) -> results, new on every call."""
    return build
