"""A model, batches and a config small enough to train in a blink; what the tests of a run share."""

import json
from types import SimpleNamespace

import torch
from torch import nn

from needlework.train import AdamW, Cosine, Muon, TrainConfig

VOCABULARY, WIDTH = 16, 8
OPTIMISERS = {
    "adamw": AdamW(lr=1e-2, weight_decay=0.1),
    "muon": Muon(lr=0.02, rest=AdamW(lr=1e-2, rates=(("embed*", 0.1),))),
}


class Tiny(nn.Module):
    """Dropout makes PyTorch's generator part of what a resumed run must restore."""

    def __init__(self, dropout=0.1):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.dropout(self.blocks[0](self.embed(input_ids)).relu()))


CONFIG = TrainConfig(
    steps=12, seed=3, optim=OPTIMISERS["adamw"], schedule=Cosine(warmup=3, floor=0.1), accumulate=2, checkpoint_every=3
)


def batch(index):
    """Every token has its successor; the last of each row is not counted."""
    tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(index))
    labels = (tokens + 1) % VOCABULARY
    labels[:, -1] = -100
    return SimpleNamespace(input_ids=tokens, labels=labels)


def stop_at(step):
    asked = iter(range(step + 1))
    return lambda: next(asked) == step


def lines(directory):
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
