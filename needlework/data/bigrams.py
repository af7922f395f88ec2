"""Bigrams that occurred earlier in their row and hardly ever in training: what a model says of their last token it has from the row.

After Zoology (arXiv 2312.04927), which slices a loss by whether a bigram is repeated in the context and by how often training had it.
"""

import numpy as np

from .corpus import Documents

CHUNK = 1 << 26  # tokens counted at once: half a gigabyte


def counts(documents: Documents, vocabulary: int) -> np.ndarray:
    """How often each pair of neighbouring tokens is in the documents, [vocabulary²] uint32, pair (a, b) at a · vocabulary + b."""
    found = np.zeros(vocabulary * vocabulary, dtype=np.uint32)
    n = len(documents.tokens)
    for start in range(0, n - 1, CHUNK):
        tokens = documents.tokens[start : start + CHUNK + 1].astype(np.int64)
        found += np.bincount(_pairs(tokens, vocabulary), minlength=len(found)).astype(np.uint32)
    return found


def repeated(rows: np.ndarray, training: np.ndarray, vocabulary: int, most: int) -> np.ndarray:
    """Of rows [n T]: whether the pair that ends at each token but the first was in its row before, and is in `training`, of `counts`, at
    most `most` times; [n T-1]."""
    pairs = _pairs(rows.astype(np.int64), vocabulary)  # [n T-1]
    again = np.ones(pairs.shape, dtype=bool)
    for row, seen in zip(pairs, again, strict=True):
        seen[np.unique(row, return_index=True)[1]] = False
    return again & (training[pairs] <= most)


def _pairs(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    return tokens[..., :-1] * vocabulary + tokens[..., 1:]
