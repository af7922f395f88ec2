"""Needles whose answers are marked, weighted and asked at any distance; a key may get another value before it is asked.

    "\\n#@xy=7391\\n"   gives a pair; after it, asks for it       "\\n#!xy=0264\\n"   gives another value to a key

The distance of an answer is that from its telling, in tokens. In training text, lags are log-uniform: as many answers are 64 to 128 tokens
from their pair as are 1,024 to 2,048.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from needlework.fields import Portion, Positive

from .batch import ASKED, IGNORE, PAIRED, Answered, shifted
from .corpus import Corpus
from .needles import KEYS, VALUE, VALUES, WIDTH, NeedleMix, _insert, _needles
from .rng import generator

MARK = 2  # the place of "@" and "!" in a needle


class Plan(NamedTuple):
    """The needles of a row, [m] each: key, its value's version (0, or 1 after an overwrite), tokens of text before it."""

    key: np.ndarray
    version: np.ndarray
    cut: np.ndarray


class Row(NamedTuple):
    """A row's tokens, and of each [n]: PAIRED, ASKED or 0; its distance from its telling; whether its key was overwritten."""

    tokens: np.ndarray
    answer: np.ndarray
    distance: np.ndarray
    overwritten: np.ndarray


class Recall(NamedTuple):
    """Rows to score: input_ids [n T], targets [n T] (−100 but where an answer's token is predicted); of each target its distance from its
    telling, and whether its key has had another value, [n T]."""

    input_ids: Tensor
    targets: Tensor
    distance: Tensor
    overwritten: Tensor


@dataclass(frozen=True, kw_only=True)
class RecallMix(NeedleMix):
    """NeedleMix with marked answers: shares of dense and of sparse episodes, one row each; the rest of the rows is plain text.

    sparse: each pair is asked `asks` times at lags log-uniform between one token of text and all of the row's; where they leave room
    the telling is anywhere. overwritten: the share of a sparse episode's keys that get another value between telling and asking.
    weight: how many times a token of an answer in a sparse episode is counted; every other token is counted once.

    >>> from needlework.data import CorpusConfig, RecallMix, byte_tokenizer, load_corpus
    >>> corpus = load_corpus(CorpusConfig(max_bytes=1 << 16), byte_tokenizer())
    >>> batch = RecallMix(sparse=1.0, weight=8.0).batch(corpus, seed=0, step=0, B=2, T=128)
    >>> sorted({*batch.emphasis.flatten().tolist()})
    [1.0, 8.0]
    """

    kind: str = "recall"
    dense: Portion = 0.0
    sparse: Portion = 0.4
    weight: Positive = 8.0
    overwritten: Portion = 0.0

    def batch(self, corpus: Corpus, seed: int, step: int, B: int, T: int, rows: range | None = None) -> Answered:
        """Rows of training text [B T], or only `rows` of them, with their answers and emphasis. Raises what NeedleMix raises."""
        self.check(corpus, T)
        made = [self.row(corpus, generator("recall", seed, step, row), T + 1) for row in (range(B) if rows is None else rows)]
        answers = torch.from_numpy(np.stack([row.answer for row in made])[:, 1:].astype(np.int8))
        emphasis = torch.where(answers == ASKED, self.weight, 1.0).float()
        return Answered(*shifted([row.tokens for row in made]), answers, emphasis)

    def scored(self, corpus: Corpus, seed: int, count: int, T: int) -> Recall:
        """`count` sparse episodes in held-out text, [count T], to be scored. Raises what NeedleMix raises."""
        here = Corpus(corpus.held_out, corpus.held_out, corpus.tokenizer, {})
        self.check(here, T)
        made = [self.row(here, generator("recall, scored", seed, 0, row), T + 1, sparse=True) for row in range(count)]
        tokens, answer, distance, overwritten = (torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
        targets = tokens.where(answer == ASKED, IGNORE)[:, 1:]
        return Recall(tokens[:, :-1].contiguous(), targets, distance[:, 1:], overwritten[:, 1:])

    def row(self, corpus: Corpus, rng: np.random.Generator, n: int, sparse: bool = False) -> Row:
        """n tokens of one row. sparse: of a sparse episode in any case."""
        share = self.dense if sparse else rng.random()
        nothing = np.zeros(n, dtype=np.int64)
        if share < self.dense:
            key, cut = self._dense(rng, n)
            plan, kind = Plan(key, np.zeros_like(key), cut), PAIRED
        elif sparse or share < self.dense + self.sparse:
            plan, kind = self._plan(rng, n), ASKED
        else:
            return Row(corpus.train.sample(rng, n), nothing, nothing, nothing.astype(bool))
        text = corpus.train.sample(rng, n - WIDTH * len(plan.key))
        keys = rng.choice(KEYS, plan.key.max() + 1, replace=False)
        values = rng.integers(VALUES, size=(len(keys), 2))
        needles = _needles(corpus, keys[plan.key], values[plan.key, plan.version])
        told, first, of = np.unique(2 * plan.key + plan.version, return_index=True, return_inverse=True)
        needles[first[told % 2 == 1], MARK] = corpus.byte_ids[ord("!")]
        telling = first[of]  # [m]: the needle that first gave what this one says
        places = plan.cut + WIDTH * np.arange(len(plan.key))
        digits = places[:, None] + np.arange(WIDTH)[VALUE]  # [m 4]
        asks = telling != np.arange(len(telling))
        answer, distance, overwritten = nothing.copy(), nothing.copy(), nothing.astype(bool)
        answer[digits[asks]] = kind
        distance[digits[asks]] = (places - places[telling])[asks, None]
        overwritten[digits[asks]] = plan.version[asks, None] == 1
        return Row(_insert(text, needles, plan.cut), answer, distance, overwritten)

    def _plan(self, rng: np.random.Generator, n: int) -> Plan:
        """A sparse episode: of each key a telling, perhaps an overwrite, then its asks."""
        least, most = self.sparse_pairs
        pairs = int(rng.integers(least, max(least, min(most, n // (WIDTH * (1 + self.asks)))) + 1))
        again = rng.random(pairs) < self.overwritten
        if (over := WIDTH * (pairs * (1 + self.asks) + again.sum()) - n + 1) > 0:
            again[np.flatnonzero(again)[: -(-over // WIDTH)]] = False  # a short row
        L = n - WIDTH * (pairs * (1 + self.asks) + int(again.sum()))
        events = []  # (cut, order, key, version)
        for key in range(pairs):
            lags = _log_uniform(rng, L, self.asks)
            gap = int(_log_uniform(rng, max(1, L - lags.max()), 1)[0]) if again[key] else 0
            start = int(rng.integers(max(0, L - gap - lags.max()) + 1))
            version = int(again[key])
            events.append((start, key, 0))
            if version:
                events.append((min(start + gap, L), key, 1))
            events += [(min(start + gap + int(lag), L), key, version) for lag in sorted(lags)]
        cut, key, version = (np.array(part) for part in zip(*sorted(events, key=lambda event: event[0]), strict=True))
        return Plan(key, version, cut)


def _log_uniform(rng: np.random.Generator, most: int, size: int) -> np.ndarray:
    """Whole numbers [size] in 1 … most, log-uniform: n with the chance ln(1 + 1/n) / ln(1 + most)."""
    return np.minimum(np.floor((1 + most) ** rng.random(size)), most).astype(np.int64)
