"""Speed of a forward pass: what prefill costs at a length."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from .forward import check_token_ids, evaluating, logits


def throughput(model: Callable, input_ids: Tensor, *, repetitions: int = 5) -> float:
    """Tokens per second of a forward pass over input_ids [n T]: n T over the median time of the repetitions.

    One pass before them is not counted: it compiles, allocates and fills caches. repetitions: >= 1.
    Raises ValueError for a shape that is not [n T] or for no repetition.
    """
    check_token_ids("input_ids", input_ids)
    if repetitions < 1:
        raise ValueError(f"repetitions must be >= 1, got {repetitions}")
    seconds = []
    with evaluating(model):
        for _ in range(1 + repetitions):
            start = time.perf_counter()
            output = logits(model, input_ids)
            if output.device.type != "cpu":
                torch.accelerator.synchronize(output.device)
            seconds.append(time.perf_counter() - start)
    return input_ids.numel() / statistics.median(seconds[1:])
