"""The induction needle of ATMA (arXiv 2606.25156), in any tokenizer's tokens.

    [end of text]  cue value  filler  cue value         cue    " The access code for record 4821907 is"
                                                        value  " 7 3 9 1 5"
                                                        filler `distance` tokens of one real document

The second value is scored, teacher-forced, one token a digit: the last one of " 7", which is " 7" itself in most
tokenizers and "7" in bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .batch import Episodes, scored
from .corpus import Corpus
from .rng import generator
from .tokenizer import encode, eot_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DIGITS = 5


def induction_needle(corpus: Corpus, seed: int, trials: int, distance: int, *, present: bool = True) -> Episodes:
    """`trials` rows with the needle `distance` held-out tokens before its cue comes again; five targets a row.

    present=False replaces the needle by more of the same document, at the same length: what is left is guessing.
    ValueError if no held-out document is long enough (it names the longest), or if a digit is no token of its own.
    """
    digits = _digit_tokens(corpus.tokenizer)
    start = np.array([eot_id(corpus.tokenizer)])
    rows, answers = [], []
    cue_length = None
    for trial in range(trials):
        rng = generator("induction needle", seed, 0, trial)
        cue = _cue(corpus.tokenizer, rng, cue_length)
        cue_length = len(cue)  # rows of one batch have one length
        value = digits[rng.integers(10, size=DIGITS)]  # [5 tokens of a digit]
        needle = np.concatenate([cue, value.ravel()])
        filler = _filler(corpus, rng, distance + len(needle))
        head = needle if present else filler[distance:]
        rows.append(np.concatenate([start, head, filler[:distance], needle]))
        last_tokens = np.arange(1, DIGITS + 1) * value.shape[1] - 1
        answers.append(len(rows[-1]) - value.size + last_tokens)
    return scored(rows, answers)


def _digit_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of " 0" … " 9", [10 n]: different in the last one and only there."""
    digits = [encode(tokenizer, f" {digit}") for digit in range(10)]
    if len({len(d) for d in digits}) > 1 or len({tuple(d[:-1]) for d in digits}) > 1 or len({d[-1] for d in digits}) < 10:
        raise ValueError('induction needle: the tokenizer must write " 0" … " 9" alike, with a last token for each digit')
    return np.stack(digits)


def _cue(tokenizer: Tokenizer, rng: np.random.Generator, length: int | None) -> np.ndarray:
    """A cue with a random 7-digit key; keys are drawn until the cue has `length` tokens."""
    while True:
        cue = encode(tokenizer, f" The access code for record {rng.integers(10**6, 10**7)} is")
        if length is None or len(cue) == length:
            return cue


def _filler(corpus: Corpus, rng: np.random.Generator, n: int) -> np.ndarray:
    """n tokens from a random place of a random held-out document, without its end of text."""
    lengths = np.diff(corpus.held_out.offsets) - 1
    long_enough = np.flatnonzero(lengths >= n)
    if not len(long_enough):
        raise ValueError(
            f"induction needle: the filler is {n} tokens of one held-out document, but the longest has {lengths.max()}"
        )
    document = corpus.held_out[rng.choice(long_enough)]
    start = rng.integers(len(document) - n)
    return document[start : start + n].astype(np.int64)
