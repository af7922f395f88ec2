"""What is measured: any causal language model of transformers with its tokenizer, and how it is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from needlework.data import Corpus

SEED = 1  # of the needles of our own tasks


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, in evaluation mode on its device, and the conditions that every suite shares.

    model, tokenizer: transformers' objects. tokenizer_at: the folder or Hub name that AutoTokenizer reads the same tokenizer from.
    words: the same of the `tokenizers` library; transformers' own keeps the padding of the last caller that padded a batch.
    read: ids [B T], keep -> logits [B keep V] of the last `keep` positions, without a cache, in the precision of the measurement.
    at_once: T -> rows of T tokens that fit in one forward pass. autocast: the dtype of products, where it is not the weights'.
    positions: how many tokens its table of absolute positions has; None for a model that takes any length.
    corpus: the text of tasks that are made of the user's own. data: a folder of data sets that is read before the Hub.
    limit: only the first so many documents of a task; None for all.
    """

    model: Any
    tokenizer: Any
    tokenizer_at: str
    words: "Tokenizer"
    read: Callable[[Tensor, int], Tensor]
    at_once: Callable[[int], int]
    corpus: Callable[[], "Corpus"]
    autocast: str | None = None
    positions: int | None = None
    data: Path | None = None
    limit: int | None = None
