"""Nats of every token of some rows, to be grouped: by position, by what precedes them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .forward import check_token_ids, evaluating, logits


def token_nats(model: Callable, input_ids: Tensor, *, batch_size: int = 16) -> Tensor:
    """−log softmax(logits[i, t])[input_ids[i, t+1]] of each next token, [n T-1] float32 on the CPU.

    model: called with input_ids [b T], returns logits [b T vocabulary] or an object that has them as `.logits`.
    input_ids: [n T] integers, T >= 2, no padding. batch_size: rows per forward pass, >= 1.
    The model is in evaluation mode meanwhile. Raises ValueError for a shape that is not [n T >= 2].
    """
    check_token_ids("input_ids", input_ids, shortest=2)
    parts = []
    with evaluating(model):
        for ids in input_ids.split(batch_size):
            scores = logits(model, ids)[:, :-1].float()  # [b T-1 vocabulary]
            parts.append(F.cross_entropy(scores.transpose(1, 2), ids[:, 1:].to(scores.device), reduction="none").cpu())
    return torch.cat(parts)
