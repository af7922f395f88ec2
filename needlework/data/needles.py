"""Compact needles, "\\n#@xy=7391\\n", in real text: a two-letter key, a four-digit value.

A needle that repeats an earlier key is a query: its value can be read off the earlier one. Between key and value is
one byte, so a width-4 convolution reaches from the first digit to the key; that is what makes small models learn
within minutes. The literal cue of the papers is in induction.py.
"""

from dataclasses import dataclass

import numpy as np

from needlework.fields import Count, Portion, fit

from .batch import Answered, Batch, Episodes, scored, shifted
from .corpus import Corpus
from .rng import generator

TEMPLATE = np.frombuffer(b"\n#@xy=7391\n", dtype=np.uint8)
WIDTH = len(TEMPLATE)
KEY, VALUE = slice(3, 5), slice(6, 10)
KEYS, VALUES = 26**2, 10**4


def _needles(corpus: Corpus, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Keys 0 … 675 and values 0 … 9999, [m] each -> their tokens [m WIDTH]."""
    needles = np.tile(TEMPLATE, (len(keys), 1))
    needles[:, KEY] = ord("a") + np.stack([keys // 26, keys % 26], axis=1)
    needles[:, VALUE] = ord("0") + values[:, None] // [1000, 100, 10, 1] % 10
    return corpus.byte_ids[needles]


def _insert(text: np.ndarray, needles: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Needle i goes in after the first cuts[i] tokens of text; cuts do not fall."""
    return np.insert(text, np.repeat(cuts, WIDTH), needles.ravel())


@dataclass(frozen=True, kw_only=True)
class NeedleMix:
    """Training text: shares of dense and sparse episodes, one row each; the rest of the rows is plain text.

    dense: `dense_pairs` (least, most) pairs of key and value, then queries in shuffled rounds to the row's end.
    sparse: `sparse_pairs` pairs spread over text, each asked `asks` times anywhere after it.
    A row that is too short for the most takes as many as fit.

    >>> from needlework.data import CorpusConfig, NeedleMix, byte_tokenizer, load_corpus
    >>> corpus = load_corpus(CorpusConfig(max_bytes=1 << 16), byte_tokenizer())
    >>> NeedleMix(dense=1.0, sparse=0.0).batch(corpus, seed=0, step=0, B=2, T=128).labels.shape
    torch.Size([2, 128])
    """

    kind: str = "needles"
    dense: Portion = 0.5
    sparse: Portion = 0.3
    dense_pairs: tuple[int, int] = (2, 10)
    sparse_pairs: tuple[int, int] = (1, 6)
    asks: Count = 2

    def __post_init__(self):
        fit("needles", self)
        for name in ("dense_pairs", "sparse_pairs"):
            least, most = getattr(self, name)
            if not 1 <= least <= most <= KEYS:
                raise ValueError(f"needles: {name} is (least, most) with 1 <= least <= most <= {KEYS}, got {least, most}")
        if self.dense + self.sparse > 1:
            raise ValueError(f"needles: dense + sparse is {self.dense} + {self.sparse}, expected at most 1")

    def batch(self, corpus: Corpus, seed: int, step: int, B: int, T: int, rows: range | None = None) -> Batch | Answered:
        """Rows of training text [B T], or only `rows` of them, loss on every token.

        ValueError if an episode does not fit T, or the training text is too short for whatever row may come.
        """
        self.check(corpus, T)
        return shifted(
            [self._row(corpus, generator("needles", seed, step, row), T + 1) for row in (range(B) if rows is None else rows)]
        )

    def check(self, corpus: Corpus, T: int) -> None:
        """ValueError if an episode does not fit T, or the training text is too short for whatever row may come."""
        least = WIDTH * max(2 * self.dense_pairs[0], (1 + self.asks) * self.sparse_pairs[0])
        if T + 1 < least:
            raise ValueError(f"needles: T = {T} is too short for the smallest episode, which needs {least - 1}")
        if (most := self._text(T + 1)) > len(corpus.train.tokens):
            raise ValueError(
                f"needles: a row of T = {T} may take {most} tokens of text, the training text has {len(corpus.train.tokens)}"
            )

    def _text(self, n: int) -> int:
        """The most tokens of text that a row of n may take: all of them where rows are plain text."""
        if self.dense + self.sparse < 1:
            return n
        return n - WIDTH * (1 + self.asks) * self.sparse_pairs[0] if self.sparse else n % WIDTH

    def _row(self, corpus: Corpus, rng: np.random.Generator, n: int) -> np.ndarray:
        share = rng.random()
        if share < self.dense:
            order, cuts = self._dense(rng, n)
        elif share < self.dense + self.sparse:
            order, cuts = self._sparse(rng, n)
        else:
            return corpus.train.sample(rng, n)
        text = corpus.train.sample(rng, n - WIDTH * len(order))
        keys = rng.choice(KEYS, order.max() + 1, replace=False)
        values = rng.integers(VALUES, size=len(keys))
        return _insert(text, _needles(corpus, keys[order], values[order]), cuts)

    def _dense(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The pair at each of the row's places, [m], and the cuts, [m]: one block, the rest around it."""
        least, most = self.dense_pairs
        places = n // WIDTH
        pairs = int(rng.integers(least, min(most, places // 2) + 1))
        rounds = np.tile(np.arange(pairs), (places // pairs + 1, 1))
        rounds[1:] = rng.permuted(rounds[1:], axis=1)
        return rounds.ravel()[:places], np.full(places, rng.integers(n - places * WIDTH + 1))

    def _sparse(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for pairs anywhere in text: whichever of a pair's needles comes first is the pair."""
        least, most = self.sparse_pairs
        pairs = rng.integers(least, min(most, n // (WIDTH * (1 + self.asks))) + 1)
        order = rng.permutation(np.repeat(np.arange(pairs), 1 + self.asks))
        return order, np.sort(rng.integers(n - len(order) * WIDTH + 1, size=len(order)))


def single_needle(corpus: Corpus, seed: int, count: int, T: int, depth: float | None = None) -> Episodes:
    """One pair in held-out text of T tokens, asked at its end; the four digits are scored.

    depth: the share of the text before the pair, in [0, 1]; None draws it uniformly in every episode.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"needles: depth is a share in [0, 1], got {depth}")
    return _asked_at_the_end(corpus, f"single needle {depth}", seed, count, T, 1, depth)


def many_needles(corpus: Corpus, seed: int, count: int, T: int, n: int = 4) -> Episodes:
    """n pairs at random places of held-out text, all asked at its end in shuffled order; 4n digits are scored."""
    return _asked_at_the_end(corpus, f"{n} needles", seed, count, T, n, None)


def _asked_at_the_end(corpus: Corpus, name: str, seed: int, count: int, T: int, pairs: int, depth: float | None) -> Episodes:
    length = T + 1 - 2 * pairs * WIDTH
    if length < 0:
        raise ValueError(f"needles: {pairs} pairs and their queries need T >= {2 * pairs * WIDTH - 1}, got T = {T}")
    rows, answers = [], []
    for row in range(count):
        rng = generator(name, seed, 0, row)
        places = np.sort(rng.integers(length + 1, size=pairs)) if depth is None else [round(depth * length)]
        order = np.concatenate([np.arange(pairs), rng.permutation(pairs)])
        cuts = np.concatenate([places, np.full(pairs, length)])
        keys = rng.choice(KEYS, pairs, replace=False)
        values = rng.integers(VALUES, size=pairs)
        text = corpus.held_out.sample(rng, length)
        rows.append(_insert(text, _needles(corpus, keys[order], values[order]), cuts))
        queries = T + 1 - WIDTH * np.arange(pairs, 0, -1)
        answers.append((queries[:, None] + np.arange(WIDTH)[VALUE]).ravel())
    return scored(rows, answers)
