"""Documents to rows: packed, with their boundaries, or as windows of running text. A row is a function of its arguments.

With `datasets` one packs in map(batched=True): a row then depends on the batch size and on the rows before. Here it does not.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import IGNORE, Batch, shifted
from .corpus import Corpus, Documents
from .rng import generator


class Packed(NamedTuple):
    """Documents end to end in one row: input_ids and labels [1 T] int64 (labels shifted), cu_seqlens [N+1] int32.

    labels is -100 where the next token belongs to another document, or where there is none.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor


def pack(documents: Documents, T: int, start: int = 0, cut: int | None = None) -> Packed:
    """The T tokens from `start` on, each document (or the part of one that the row has) a sequence of its own.

    Rows at 0, T, 2T, … hold every token once. A document cut at a row's end goes on as the next row's first sequence,
    and the cut's label is its next token, so no token's loss is missed. The last row has what is left, T or fewer.
    cut: a document is cut in the same way after every `cut` of its tokens.
    ValueError if T < 1 or start is not the place of a token.
    """
    n = len(documents.tokens)
    if T < 1:
        raise ValueError(f"pack: a row has at least one token, got T = {T}")
    if not 0 <= start < n:
        raise ValueError(f"pack: start is a token's place, 0 to {n - 1}, got {start}")
    end = min(start + T, n)
    tokens = documents.tokens[start : end + 1].astype(np.int64)
    labels = np.append(tokens[1:], IGNORE)[: end - start]
    first, last = np.searchsorted(documents.offsets, [start, end], side="right")
    ends = documents.offsets[first:last]  # of the documents that end in the row
    labels[ends - start - 1] = IGNORE
    bounds = ends[ends < end]
    if cut is not None:
        starts = documents.offsets[first - 1 : last]
        places = [np.arange(s, e, cut) for s, e in zip(starts, [*starts[1:], end], strict=True)]
        bounds = np.concatenate(places)
        bounds = bounds[(bounds > start) & (bounds < end)]
    cu_seqlens = np.concatenate([[start], bounds, [end]]) - start
    return Packed(
        torch.from_numpy(tokens[None, : end - start]),
        torch.from_numpy(labels[None]),
        torch.from_numpy(cu_seqlens.astype(np.int32)),
    )


def windows(corpus: Corpus, seed: int, step: int, B: int, T: int) -> Batch:
    """Random contiguous windows of the training text, [B T]; they may span documents, whose ends are tokens."""
    return shifted([corpus.train.sample(generator("windows", seed, step, row), T + 1) for row in range(B)])


def held_out_text(corpus: Corpus, seed: int, count: int, T: int) -> Batch:
    """Random contiguous windows of the held-out text, [count T]."""
    return shifted([corpus.held_out.sample(generator("held-out text", seed, 0, row), T + 1) for row in range(count)])


def long_documents(corpus: Corpus, count: int, T: int) -> Batch:
    """`count` stretches of T tokens, [count T], each inside one held-out document, none overlapping.

    First the start of every long enough document, then the next stretch of each, and so on, so that no document counts more
    than it must. ValueError if there are fewer, with how many there are.
    """
    offsets = np.asarray(corpus.held_out.offsets)
    # A stretch needs T tokens and the next, of the same document; its last token is the end of text.
    stretches = (np.diff(offsets) - 1) // T
    if stretches.sum() < count:
        raise ValueError(
            f"long documents: {count} stretches of {T} tokens are needed; the held-out documents have "
            f"{stretches.sum()} (the longest has {np.diff(offsets).max(initial=0)} tokens)"
        )
    starts = [offsets[i] + k * T for k in range(stretches.max()) for i in np.flatnonzero(stretches > k)]
    return shifted([corpus.held_out.tokens[start : start + T + 1].astype(np.int64) for start in starts[:count]])
