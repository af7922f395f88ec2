"""What every measurement asks of a model: evaluation mode for a while, a device, and logits from token ids."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: Callable) -> Iterator[None]:
    """Inside the `with` block the model is in evaluation mode and nothing is recorded for autograd."""
    trained = model if isinstance(model, nn.Module) and model.training else None
    if trained is not None:
        trained.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if trained is not None:
            trained.train()


def logits(model: Callable, input_ids: Tensor) -> Tensor:
    """The logits [B T vocabulary] for input_ids [B T], whether the model returns them bare or as `.logits`."""
    if isinstance(model, nn.Module):
        parameter = next(model.parameters(), input_ids)
        input_ids = input_ids.to(parameter.device)
    output = model(input_ids)
    output = output if isinstance(output, Tensor) else output.logits
    if output.ndim != 3 or output.shape[:2] != input_ids.shape:
        raise ValueError(f"logits must be [B T vocabulary] for input_ids {list(input_ids.shape)}, got {list(output.shape)}")
    return output


def check_token_ids(name: str, x: Tensor, shortest: int = 1) -> None:
    """Raise ValueError unless x is a non-empty integer tensor [n T] with T >= shortest."""
    if x.ndim != 2 or x.is_floating_point() or len(x) == 0 or x.shape[1] < shortest:
        raise ValueError(f"{name} must be integer [n T] with n >= 1, T >= {shortest}, got {x.dtype} {list(x.shape)}")
