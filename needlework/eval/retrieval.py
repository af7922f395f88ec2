"""Retrieval: how many tokens of the asked values a model predicts, teacher-forced, and how many values are all right.

The episodes (text, needles, which positions count) are made elsewhere; here they are two integer tensors.

lm-eval's RULER matches generated strings, needs a Hugging Face tokenizer and downloads its texts. This scores tokens of any tokenizer,
without a network, so the smallest models are measured too.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .forward import check_token_ids, evaluating, logits

UNSCORED = -100
GUESS = 0.1  # one digit in ten


def chance(task: str) -> float:
    """The share that a guess finds of a task's values: one digit in ten, of a uuid one hexadecimal digit in sixteen."""
    return 1 / 16 if task == "uuid" else GUESS


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` independent trials (Wilson): not a point, even where all or none were right."""
    z = 1.96
    middle, spread = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)


class Episodes(Protocol):
    """Anything with `input_ids` and `targets`, both [n T]."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...


class Retrieval(NamedTuple):
    """Shares in 0..1 and what they were taken over; `_asdict()` is the entry of results.json. nll: nats a scored token."""

    accuracy: float
    exact: float
    digits: int
    values: int
    nll: float


def retrieval(model: Callable, episodes: Episodes, *, batch_size: int = 16) -> Retrieval:
    """Teacher-forced argmax accuracy over the scored tokens, and the share of values with every token right.

        accuracy = mean over scored (i, t) of [argmax_w logits[i, t, w] = targets[i, t]]
        nll = −mean over scored (i, t) of log softmax(logits[i, t])[targets[i, t]]

    model: called with input_ids [b T], returns logits [b T vocabulary] or an object that has them as `.logits`.
    episodes: `.input_ids` [n T] and `.targets` [n T], integers. targets[i, t] is the token that position t must predict
        (already shifted), -100 where nothing is scored. A value is a maximal run of scored positions within a row.
    batch_size: rows per forward pass, >= 1.
    Logits are compared in the dtype in which the model gives them, the nats are computed in float32 or wider; the model is in evaluation
    mode meanwhile.
    Raises ValueError for shapes that differ and for episodes in which nothing is scored.
    """
    input_ids, targets = episodes.input_ids, episodes.targets
    check_token_ids("input_ids", input_ids)
    if targets.shape != input_ids.shape:
        raise ValueError(f"targets {list(targets.shape)} must have the shape of input_ids {list(input_ids.shape)}")
    targets = targets.cpu()
    scored = targets != UNSCORED  # [n T]
    if not scored.any():
        raise ValueError(f"targets {list(targets.shape)} score no position: every entry is {UNSCORED}")
    right, nats = answered(model, input_ids, targets, batch_size)
    starts = scored.clone()
    starts[:, 1:] &= ~scored[:, :-1]
    value = starts.flatten().cumsum(0)[scored.flatten()] - 1  # which value each scored token belongs to
    wrong_in_value = torch.bincount(value, weights=(~right).double())
    return Retrieval(
        accuracy=right.double().mean().item(),
        exact=(wrong_in_value == 0).double().mean().item(),
        digits=len(right),
        values=len(wrong_in_value),
        nll=nats.mean().item(),
    )


def answered(model: Callable, input_ids: Tensor, targets: Tensor, batch_size: int = 16) -> tuple[Tensor, Tensor]:
    """Of every scored position, row by row: whether the argmax is its target [m] bool, and its nats [m] float64, both on the CPU."""
    right, nats = [], []
    with evaluating(model):
        for ids, wanted in zip(input_ids.split(batch_size), targets.split(batch_size), strict=True):
            scores = logits(model, ids)
            at = (wanted != UNSCORED).to(scores.device)
            scores, target = scores[at], wanted.to(scores.device)[at]  # [m vocabulary], [m]
            right.append((scores.argmax(-1) == target).cpu())
            wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
            nats.append(F.cross_entropy(wide, target, reduction="none").double().cpu())
    return torch.cat(right), torch.cat(nats)
