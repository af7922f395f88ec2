"""A byte-pair vocabulary of one's own text: ByteLevel, with all 256 bytes, every digit and the end of text as tokens.

No merge holds a digit, so that a number has as many tokens as digits in every context.
The training is `tokenizers`' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .tokenizer import EOT

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int = 16_384) -> Tokenizer:
    """The ByteLevel BPE tokenizer of the texts, with at most `vocabulary` tokens; the same texts give the same file.

    "<|eot|>" has id 0. ValueError if the vocabulary does not hold the 256 bytes and the end of text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary < 257:
        raise ValueError(f"tokenizer: 256 bytes and the end of text need a vocabulary of at least 257, got {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    # Only 0 … 9: the library's Digits() would split off ², ½ and other scripts' digits too.
    digits = pre_tokenizers.Split(Regex("[0-9]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
