"""What the tasks return: token tensors, ready for a model. Labels and targets are aligned with the *output* at their
position: `labels[b, t]` is the token that the model should predict after reading `input_ids[b, : t + 1]`."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100


class Batch(NamedTuple):
    """Tokens to train on: input_ids and labels, [B T] int64; labels are already shifted, -100 where not counted."""

    input_ids: Tensor
    labels: Tensor


PAIRED, ASKED = 1, 2  # an answer's token: in a row of nothing but needles, in a row of text


class Answered(NamedTuple):
    """A Batch with its answers: input_ids and labels [B T] int64; answers [B T] int8, PAIRED or ASKED where the label is a token of an
    answer, else 0; emphasis [B T] float32, how many times a label is counted."""

    input_ids: Tensor
    labels: Tensor
    answers: Tensor
    emphasis: Tensor


class Episodes(NamedTuple):
    """Tokens to score: input_ids and targets, [n T] int64; targets are -100 except where an answer's token is predicted.

    The answer is in the input (teacher forcing), so one forward pass scores every token of it. A run of scored
    positions is one value of compact and RULER needles; a row of the induction needle is one value.
    """

    input_ids: Tensor
    targets: Tensor


def shifted(rows: list[np.ndarray]) -> Batch:
    """Rows of T + 1 tokens -> a batch of T positions, each with its next token."""
    tokens = torch.from_numpy(_stack(rows))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def scored(rows: list[np.ndarray], answers: list[np.ndarray]) -> Episodes:
    """Rows of T + 1 tokens and, of each, the indices of its answer's tokens -> episodes of T positions."""
    tokens = _stack(rows)
    targets = np.full_like(tokens, IGNORE)
    for row, answer in enumerate(answers):
        targets[row, answer] = tokens[row, answer]
    return Episodes(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets[:, 1:].copy()))


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    """[B T+1]"""
    if not rows or len(rows[0]) < 2:
        T = len(rows[0]) - 1 if rows else "any"
        raise ValueError(f"batch: expected at least one row of at least one token, got B = {len(rows)}, T = {T}")
    return np.stack(rows)
