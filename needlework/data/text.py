"""Text to train on, read epoch by epoch: the training tokens in windows of T, each once an epoch, shuffled in the index.

    window w = tokens[w T : (w + 1) T], its labels one token on;   n = (tokens - 1) // T windows an epoch

Two forms of a row: documents run together (`Text`), or documents apart (`PackedText`). The batch of a step is a function of its
arguments, so a run resumes in the middle of an epoch to the exact token; `rows` is a rank's part of it, so on any number of ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from needlework.fields import Count, fit

from .batch import Batch, shifted
from .corpus import Corpus
from .order import epoch_windows
from .packing import Packed, pack


@dataclass(frozen=True, kw_only=True)
class Text:
    """Windows of running text: documents end to end, their ends of text among the tokens.

    >>> from needlework.data import CorpusConfig, Text, byte_tokenizer, load_corpus
    >>> corpus = load_corpus(CorpusConfig(max_bytes=1 << 16), byte_tokenizer())
    >>> Text().batch(corpus, seed=0, step=0, B=2, T=32).input_ids.shape
    torch.Size([2, 32])
    """

    kind: str = "text"

    def batch(self, corpus: Corpus, seed: int, step: int, B: int, T: int, rows: range | None = None) -> Batch:
        """Rows [B T] of the step, or only `rows` of them; ValueError if the text has no window of T tokens."""
        starts = _starts(corpus, seed, step, B, T, rows)
        return shifted([corpus.train.tokens[start : start + T + 1].astype(np.int64) for start in starts])


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """The same windows end to end in one row, each document in them a sequence of its own.

    cut: longer documents are cut into sequences of `cut` tokens, all of them kept (None: never).

    >>> from needlework.data import CorpusConfig, PackedText, byte_tokenizer, load_corpus
    >>> corpus = load_corpus(CorpusConfig(max_bytes=1 << 16), byte_tokenizer())
    >>> batch = PackedText(cut=16).batch(corpus, seed=0, step=0, B=2, T=32)
    >>> batch.input_ids.shape, int(batch.cu_seqlens[-1]), int(batch.cu_seqlens.diff().max())
    (torch.Size([1, 64]), 64, 16)
    """

    kind: str = "packed text"
    cut: Count | None = None

    def __post_init__(self):
        fit("packed text", self)

    def batch(self, corpus: Corpus, seed: int, step: int, B: int, T: int, rows: range | None = None) -> Packed:
        """B windows of T tokens as one row [1 B·T] with cu_seqlens, or only the windows of `rows`; ValueError as in Text."""
        parts = [pack(corpus.train, T, start, self.cut) for start in _starts(corpus, seed, step, B, T, rows)]
        ids, labels, bounds = zip(*parts, strict=True)
        cu_seqlens = torch.cat([bounds[0][:1]] + [T * i + bound[1:] for i, bound in enumerate(bounds)])
        return Packed(torch.cat(ids, 1), torch.cat(labels, 1), cu_seqlens)


def epoch_steps(corpus: Corpus, B: int, T: int) -> float:
    """How many steps of B rows of T tokens read the training text once."""
    return (len(corpus.train.tokens) - 1) // T / B


def _starts(corpus: Corpus, seed: int, step: int, B: int, T: int, rows: range | None) -> list[int]:
    n = (len(corpus.train.tokens) - 1) // T if T > 0 else 0
    if n < 1 or B < 1:
        raise ValueError(
            f"text: rows of T tokens and the next one, got B = {B}, T = {T} and {len(corpus.train.tokens)} training tokens"
        )
    return [int(w) * T for w in epoch_windows(step, B, range(B) if rows is None else rows, n, seed)]
