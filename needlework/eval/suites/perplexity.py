"""Perplexity by length (CCQ, Appendix E): each corpus as one stream of tokens, in non-overlapping windows of a length.

perplexity = exp( sum over windows of nats / sum of predicted tokens ),    T − 1 predicted tokens in a window of T
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.data.tokenizer import encode_documents, eot_id

from .number import Unavailable, number
from .sources import reachable
from .subject import Subject
from .suite import Cell, Item, Suite

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 2048
MOST = 1 << 21  # tokens of a stream; the paper does not say how many it reads
LONGBENCH = "Xnhyacinth/LongBench"


@dataclass(frozen=True, kw_only=True)
class Stream(Item):
    """A corpus: the field `text` of a data set's rows, each text once, in their order, an end of text after each."""

    path: str
    config: str | None
    split: str
    text: str
    metrics: tuple[str, ...] = ("perplexity",)

    def measure(self, subject: Subject, length: int) -> Cell:
        with reachable(subject.data):
            windows = torch.tensor(self.tokens_of(subject.words), dtype=torch.long)
        if len(windows) < length:
            raise Unavailable(f"its stream has {len(windows):,} tokens, and a window has {length:,}")
        windows = windows[: len(windows) // length * length].view(-1, length)[: subject.limit]
        nats = [of for rows in windows.split(subject.at_once(length)) for of in window_nats(subject, rows)]
        return Cell(metrics={"perplexity": number(nats, [length - 1] * len(nats), exp=True)})

    def tokens_of(self, tokenizer: "Tokenizer") -> list[int]:
        """The first MOST tokens of the stream."""
        from datasets import load_dataset

        end, stream = eot_id(tokenizer), []
        texts = dict.fromkeys(load_dataset(self.path, self.config, split=self.split)[self.text])
        for text in texts:
            stream += [*encode_documents(tokenizer, [text])[0].tolist(), end]
            if len(stream) >= MOST:
                break
        return stream[:MOST]


def window_nats(subject: Subject, rows: Tensor) -> list[float]:
    """The nats of each window of rows [b T], summed over its T − 1 predicted tokens: in float32, summed in float64."""
    scores, wanted = subject.read(rows, rows.shape[1])[:, :-1], rows[:, 1:]
    total = torch.zeros(len(rows), dtype=torch.float64)
    for logits, ids in zip(scores.split(PIECE, 1), wanted.split(PIECE, 1), strict=True):  # float32 of a piece at a time
        nats = F.cross_entropy(logits.float().transpose(1, 2), ids.to(logits.device), reduction="none")
        total += nats.double().sum(1).cpu()
    return total.tolist()


def streams() -> tuple[Item, ...]:
    """The paper's six corpora. It does not say which copies: the four of LongBench are its contexts, which the longbench suite reads."""
    long = (
        Stream(task=name, path=LONGBENCH, config=name, split="test", text="context")
        for name in ("gov_report", "qmsum", "narrativeqa", "qasper")
    )
    return (
        *long,
        Stream(task="pg19", path="emozilla/pg19-test", config=None, split="test", text="text"),
        Stream(task="codeparrot", path="codeparrot/codeparrot-clean-valid", config=None, split="train", text="content"),
    )


PERPLEXITY = Suite(
    name="perplexity", title="perplexity by length", source="CCQ, Figures 3 and 4 and Appendix E", items=streams(),
    lengths=tuple(range(4096, 20_481, 2048)), needs=(),
)  # fmt: skip
