"""Selective Key Overwrite (CARVE, arXiv 2606.27229, Definition 6): continuous vectors, no tokens.

Every token is a write (k_t, v_t) with a flag f_t. f = 0 writes: a key's first value, or the same value once more.
f = 1 overwrites: the key gets a new value and every other association stays. At the end every key is asked;

    error = mean over keys and channels of (answer - the key's last value)²        1 for an answer of zeros

Keys are unit vectors in random directions, values N(0, 1). The paper gives no sizes; ours: K = V = 64, 16 to 64 keys,
a quarter of the tokens overwrite, T = 512.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from needlework.fields import Count, Share, fit

from .rng import generator


class Overwrites(NamedTuple):
    """k [B T K], v [B T V], overwrite [B T] (0 or 1): the stream; keys [B n K], values [B n V]: asked, and expected."""

    k: Tensor
    v: Tensor
    overwrite: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class SelectiveKeyOverwrite:
    """K, V: sizes of key and value; keys: (least, most) keys, one number a batch; share of tokens that overwrite.

    >>> from needlework.data import SelectiveKeyOverwrite
    >>> stream = SelectiveKeyOverwrite(K=8, V=4, keys=(6, 6)).batch(seed=0, step=0, B=2, T=32)
    >>> stream.k.shape, stream.values.shape, stream.overwrite.sum(1).tolist()
    (torch.Size([2, 32, 8]), torch.Size([2, 6, 4]), [8.0, 8.0])
    """

    kind: str = "overwrite"
    K: Count = 64
    V: Count = 64
    keys: tuple[Count, Count] = (16, 64)
    share: Share = 0.25

    def __post_init__(self):
        fit("overwrite", self)
        least, most = self.keys
        if least > most:
            raise ValueError(f"overwrite: keys is {self.keys}, expected (least, most) with least <= most")

    def batch(self, seed: int, step: int, B: int, T: int = 512) -> Overwrites:
        """B streams of T tokens, float32; ValueError if first writes and overwrites need more than T tokens."""
        least, most = self.keys
        n = int(generator("overwrite, keys", seed, step).integers(least, most + 1))
        overwrites = round(self.share * T)
        if most + overwrites > T:
            raise ValueError(f"overwrite: {most} keys and {overwrites} overwrites need a longer stream than T = {T}")
        rows = [self._row(generator("overwrite", seed, step, row), n, overwrites, T) for row in range(B)]
        return Overwrites(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))

    def _row(self, rng: np.random.Generator, n: int, overwrites: int, T: int) -> tuple[np.ndarray, ...]:
        keys = rng.standard_normal((n, self.K), dtype=np.float32)
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        key = rng.permutation(np.concatenate([np.arange(n), rng.integers(n, size=T - n)]))  # [T], each at least once
        first = np.zeros(T, dtype=bool)
        first[np.unique(key, return_index=True)[1]] = True
        overwrite = np.zeros(T, dtype=bool)
        overwrite[rng.choice(np.flatnonzero(~first), overwrites, replace=False)] = True

        # Sorted by key, then time, every new value goes on until the next one: a key's first token has one.
        order = np.argsort(key, kind="stable")
        new = (first | overwrite)[order]
        values = rng.standard_normal((n + overwrites, self.V), dtype=np.float32)
        v = np.empty((T, self.V), dtype=np.float32)
        v[order] = values[np.cumsum(new) - 1]
        last = T - 1 - np.unique(key[::-1], return_index=True)[1]  # [n]
        return keys[key], v, overwrite.astype(np.float32), keys, v[last]


def squared_error(answers: Tensor, values: Tensor) -> Tensor:
    """Mean squared error of the answers [B n V] to the asked keys against the expected values [B n V]; one number."""
    if answers.shape != values.shape:
        raise ValueError(f"answers: expected shape {list(values.shape)} [B n V], got {list(answers.shape)}")
    return (answers - values).square().mean()
