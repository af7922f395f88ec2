"""Documents to rows: packed, with their boundaries, or as windows of running text. No state: a row is its arguments."""

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


def pack(documents: Documents, T: int, start: int = 0) -> Packed:
    """The T tokens from `start` on, each document (or the part of one that the row has) a sequence of its own.

    Rows at 0, T, 2T, … hold every token once. A document cut at a row's end goes on as the next row's first sequence,
    and the cut's label is its next token, so no token's loss is missed. The last row has what is left, T or fewer.
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
    inside = documents.offsets[(documents.offsets > start) & (documents.offsets < end)]
    labels[inside - start - 1] = IGNORE
    if end in documents.offsets:
        labels[-1] = IGNORE
    cu_seqlens = np.concatenate([[start], inside, [end]]) - start
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
