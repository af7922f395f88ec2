"""Language-model loss: nats per token, over everything and by position. By position it shows from which length on a model is worse."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .forward import check_token_ids, evaluating, logits


class Loss(NamedTuple):
    """Mean cross entropy in nats per predicted token, and the same in stretches of positions, first to last."""

    mean: float
    by_position: tuple[float, ...]


def loss(model: Callable, input_ids: Tensor, *, batch_size: int = 16, buckets: int | tuple[int, ...] = 8) -> Loss:
    """Mean cross entropy of each next token, teacher-forced.

        mean = -1 / (n (T-1)) sum_i sum_{t < T-1} log softmax(logits[i, t])[input_ids[i, t+1]]

    model: called with input_ids [b T], returns logits [b T vocabulary] or an object that has them as `.logits`.
    input_ids: [n T] integers, T >= 2, no padding. batch_size: rows per forward pass, >= 1.
    buckets: into how many equal stretches the T-1 predicted positions are cut (fewer if there are fewer positions), or where.
    The cross entropy is computed in float32 and summed in float64; the model is in evaluation mode meanwhile.
    Raises ValueError for a shape that is not [n T >= 2].
    """
    check_token_ids("input_ids", input_ids, shortest=2)
    total = torch.zeros(input_ids.shape[1] - 1, dtype=torch.float64)
    with evaluating(model):
        for ids in input_ids.split(batch_size):
            scores = logits(model, ids)[:, :-1].float()  # [b T-1 vocabulary]
            nats = F.cross_entropy(scores.transpose(1, 2), ids[:, 1:].to(scores.device), reduction="none")
            total += nats.double().sum(0).cpu()
    by_position = total / len(input_ids)  # [T-1]
    parts = by_position.tensor_split(buckets if isinstance(buckets, tuple) else min(buckets, len(by_position)))
    return Loss(by_position.mean().item(), tuple(part.mean().item() for part in parts))
