"""The norm of a recurrent layer's state by length. It shows whether a state grows without bound."""

import torch
from torch import Tensor, nn


def state_norms(model: nn.Module, input_ids: Tensor, lengths: tuple[int, ...]) -> dict[int, list[float]]:
    """Length -> for each layer with a state [N H K V], the mean over rows and heads of its Frobenius norm after that many tokens.

    input_ids [B T] with T at least the longest. A pass for each length: attention over what a cache holds would ask for a mask.
    """
    norms = {}
    device = next(model.parameters()).device
    with torch.no_grad():
        for T in lengths:
            cache = model(input_ids[:, :T].to(device), use_cache=True, logits_to_keep=1).past_key_values
            states = [_matrix(layer.state) for layer in cache.layers]
            norms[T] = [s.float().norm(dim=(-2, -1)).mean().item() for s in states if s is not None]
    return norms


def _matrix(state: object) -> Tensor | None:
    """The S of a layer's state: its write rule's, or its memory's; None where nothing recurs."""
    for name in ("memory", "write"):
        inner = getattr(state, name, None)
        if inner is not None:
            return inner if isinstance(inner, Tensor) else _matrix(inner) if hasattr(inner, "write") else inner[0]
    return None
