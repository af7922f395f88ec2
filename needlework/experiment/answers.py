"""What the second study asks of a trained model: recall by distance, what its context gives it, and the objective on fresh rows.

Each is a dict of numbers for a result; the rows are a function of the corpus, the seed and the sizes, so every model gets the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from needlework.data import ASKED, Corpus, RecallMix, held_out_text
from needlework.data.bigrams import counts, repeated
from needlework.eval.nats import token_nats
from needlework.eval.retrieval import answered
from needlework.fields import AtLeastTwo, Count, Natural, fit

DISTANCES = (1, 64, 256, 1024)  # tokens from an answer to its telling: where each bucket begins


@dataclass(frozen=True, kw_only=True)
class Context:
    """The loss by position in `rows` windows of held-out text with `length` predicted tokens each.

    early, late: (from, to) of the positions whose losses the gain compares. rare: a bigram is rare if training has it at most so often.

    >>> from needlework.experiment.answers import Context
    >>> Context(length=4096, late=(2048, 4096)).early
    (0, 256)
    """

    rows: Count = 512
    length: AtLeastTwo = 2048
    early: tuple[Natural, Count] = (0, 256)
    late: tuple[Natural, Count] = (1024, 2048)
    rare: Natural = 16

    def __post_init__(self):
        fit("context", self)
        for name in ("early", "late"):
            start, end = getattr(self, name)
            if not start < end <= self.length:
                raise ValueError(f"context: {name} is ({start}, {end}), expected (from, to) within length = {self.length}")


def recall(read: Callable, corpus: Corpus, mix: RecallMix, seed: int, rows: int, T: int, batch_size: int) -> dict[str, Any]:
    """{"nll", "accuracy": means over the buckets of distance, "digits", "buckets": [one a bucket], "overwritten", "kept": the same of the
    answers whose key was overwritten, and of the others; None where there are none}."""
    scored = mix.scored(corpus, seed, rows, T)
    at = scored.targets != -100
    right, nats = answered(read, scored.input_ids, scored.targets, batch_size)
    distance, overwritten = scored.distance[at], scored.overwritten[at]
    found = _by_distance(right, nats, distance, torch.ones_like(overwritten))
    assert found is not None  # every row asks
    return found | {
        "overwritten": _by_distance(right, nats, distance, overwritten),
        "kept": _by_distance(right, nats, distance, ~overwritten),
    }


def _by_distance(right: Tensor, nats: Tensor, distance: Tensor, which: Tensor) -> dict[str, Any] | None:
    buckets = []
    for start, end in zip(DISTANCES, (*DISTANCES[1:], torch.iinfo(torch.int64).max), strict=True):
        inside = which & (distance >= start) & (distance < end)
        if inside.any():
            share, mean = right[inside].double().mean().item(), nats[inside].mean().item()
            buckets.append({"from": start, "nll": mean, "accuracy": share, "digits": int(inside.sum())})
    if not buckets:
        return None
    mean = lambda name: fmean(bucket[name] for bucket in buckets)
    return {"nll": mean("nll"), "accuracy": mean("accuracy"), "digits": sum(b["digits"] for b in buckets), "buckets": buckets}


def context(read: Callable, corpus: Corpus, c: Context, seed: int, batch_size: int) -> dict[str, Any]:
    """{"loss", "early", "late": nats a token of all positions and of these, "gain": late − early, below 0 where the context helps,
    "repeated": nats the last token of a rare bigram that occurred earlier in its row, "tokens": how many those are}."""
    rows = held_out_text(corpus, seed, c.rows, c.length + 1).input_ids
    nats = token_nats(read, rows, batch_size=batch_size)  # [n length]; the one at t is predicted from t + 1 tokens
    vocabulary = corpus.tokenizer.get_vocab_size()
    again = torch.from_numpy(repeated(rows.numpy(), counts(corpus.train, vocabulary), vocabulary, c.rare))
    mean = lambda x: x.double().mean().item() if x.numel() else None
    early, late = (mean(nats[:, start:end]) for start, end in (c.early, c.late))
    assert early is not None and late is not None  # neither is empty
    found = {"loss": mean(nats), "early": early, "late": late, "gain": late - early}
    return found | {"repeated": mean(nats[again]), "tokens": int(again.sum())}


def objective(
    read: Callable, corpus: Corpus, mix: RecallMix, seed: int, rows: int, T: int, batch_size: int
) -> dict[str, float]:
    """{"loss": what training minimises, on `rows` rows of the mix in held-out text; "text", "asked": nats a token of text, of an answer in
    it}."""
    here = Corpus(corpus.held_out, corpus.held_out, corpus.tokenizer, {})
    ids, labels, answers, emphasis = mix.batch(here, seed, 0, rows, T)
    nats = token_nats(read, torch.cat([ids, labels[:, -1:]], 1), batch_size=batch_size)
    mean = lambda x: x.double().mean().item()
    loss = ((emphasis * nats).double().sum() / emphasis.double().sum()).item()
    return {"loss": loss, "text": mean(nats[answers == 0]), "asked": mean(nats[answers == ASKED])}


def check(
    corpus: Corpus, mixes: Iterable[RecallMix | None], c: Context | None, seed: int, rows: int, lengths: Iterable[int]
) -> None:
    """Raises the ValueErrors that these would raise: makes the rows that they would read."""
    for mix in mixes:
        if mix is not None:
            for T in lengths:
                mix.scored(corpus, seed, rows, T)
    if c is not None:
        held_out_text(corpus, seed, c.rows, c.length + 1)
