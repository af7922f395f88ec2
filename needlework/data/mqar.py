"""Multi-query associative recall (Zoology, arXiv 2312.04927): pairs first, then their keys again at power-law gaps.

    k1 v1 k2 v2 … | · · k2 · · · k1 ·          at a repeated key the label is its value; every other label is -100

Keys are 1 … vocab/2 - 1, values vocab/2 … vocab - 1. The other places hold random tokens (Zoology's
`random_non_queries`), here never a key of the row, so that only a query asks.

`batch` draws rows one by one on the host; `drawn` draws a whole batch on a device, of the same distribution and other numbers.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from needlework.fields import Count, fit

from .batch import IGNORE, Batch
from .rng import generator


@dataclass(frozen=True, kw_only=True)
class MQAR:
    """vocab: tokens in all; pairs: keys a row; power: a in p(gap) ∝ gap^(a-1), small a asks soon.

    >>> from needlework.data import MQAR
    >>> batch = MQAR(vocab=64, pairs=4).batch(seed=0, step=0, B=2, T=32)
    >>> (batch.labels >= 0).sum(1).tolist()
    [4, 4]
    """

    kind: str = "mqar"
    vocab: Count = 8192
    pairs: Count = 8
    power: float = 0.01

    def __post_init__(self):
        fit("mqar", self)
        if self.vocab // 2 - 1 < self.pairs:
            raise ValueError(f"mqar: {self.pairs} pairs of distinct keys need 1 <= pairs < vocab / 2, vocab {self.vocab}")

    def batch(self, seed: int, step: int, B: int, T: int) -> Batch:
        """Rows [B T]; ValueError unless T is at least four times the pairs."""
        self._check(T)
        rows = [self._row(generator("mqar", seed, step, row), T) for row in range(B)]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return Batch(inputs, labels)

    def drawn(self, device: torch.device, seed: int, step: int, B: int, T: int) -> Batch:
        """Rows [B T] on `device`, a function of the arguments there; ValueError as in `batch`. Nothing waits for the device."""
        self._check(T)
        n, half, head = self.pairs, self.vocab // 2, 2 * self.pairs
        digest = hashlib.sha256(f"mqar {seed} {step}".encode()).digest()
        rng = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        uniform = lambda *shape: torch.rand(shape, generator=rng, device=device, dtype=torch.float64)
        keys = 1 + uniform(B, half - 1).topk(n).indices
        values = half + uniform(B, self.vocab - half).topk(n).indices
        # the i-th of the tokens that are no key, i uniform
        others = torch.randint(self.vocab - n, (B, T), generator=rng, device=device)
        others += torch.searchsorted(keys.sort().values - torch.arange(n, device=device), others, right=True)
        others[:, 0:head:2], others[:, 1:head:2] = keys, values
        gaps = torch.arange(1, (T - head) // 2 + 1, device=device, dtype=torch.float64)
        # the n largest of log p + Gumbel noise are n draws without replacement, in their order
        places = ((self.power - 1) * gaps.log() - (-uniform(B, len(gaps)).log()).log()).topk(n).indices
        queries = head + 2 * places
        others.scatter_(1, queries, keys)
        return Batch(others, torch.full_like(others, IGNORE).scatter_(1, queries, values))

    def _check(self, T: int) -> None:
        if T < 4 * self.pairs:
            raise ValueError(f"mqar: {self.pairs} pairs and their queries need T >= {4 * self.pairs}, got T = {T}")

    def _row(self, rng: np.random.Generator, T: int) -> tuple[np.ndarray, np.ndarray]:
        half, head = self.vocab // 2, 2 * self.pairs
        keys = 1 + rng.choice(half - 1, self.pairs, replace=False)
        values = half + rng.choice(self.vocab - half, self.pairs, replace=False)
        # The other places: the i-th of the tokens that are no key, i uniform.
        row = rng.integers(self.vocab - self.pairs, size=T)
        row += np.searchsorted(np.sort(keys) - np.arange(self.pairs), row, side="right")
        row[0:head:2], row[1:head:2] = keys, values
        gaps = np.arange(1, (T - head) // 2 + 1)
        chance = gaps ** (self.power - 1)
        queries = head + 2 * rng.choice(len(gaps), self.pairs, replace=False, p=chance / chance.sum())
        row[queries] = keys
        labels = np.full(T, IGNORE)
        labels[queries] = values
        return row, labels
