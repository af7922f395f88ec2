"""The norm of a recurrent layer's state by length. It shows whether a state grows without bound."""

import math

import torch
from torch import Tensor, nn

from needlework.layers.state import Peak


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


def state_peaks(model: nn.Module, input_ids: Tensor, cuts: int = 8) -> list[Peak]:
    """For each layer with a state S [N H K V] its largest Frobenius norm, over rows, heads and the ends of `cuts` equal parts of the rows.

    input_ids [B T] go through the model once, part by part; a state that grew inside a row and decayed again is seen there.
    """
    peaks: dict[int, Peak] = {}
    cache, done = None, 0
    with torch.no_grad():
        for ids in input_ids.tensor_split(min(cuts, input_ids.shape[1]), 1):
            cache = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            done += ids.shape[1]
            for i, s in enumerate(_matrix(layer.state) for layer in cache.layers):
                if s is None:
                    continue
                norms = s.float().norm(dim=(-2, -1)).amax(1).nan_to_num(nan=math.inf)  # [N]
                norm, row = norms.max(0)
                if i not in peaks or norm > peaks[i].norm:
                    peaks[i] = Peak(f"model.blocks.{i}.mixer", "S", norm.item(), int(row), done)
    return list(peaks.values())


def _matrix(state: object) -> Tensor | None:
    """The S of a layer's state: its memory's, its write rule's, or its own as Mamba's; None where nothing recurs."""
    for name in ("memory", "write", "S"):
        inner = getattr(state, name, None)
        if isinstance(inner, Tensor):
            return inner
        if type(inner) is tuple:  # a state in pieces of its keys
            return torch.cat(inner, -2)
        if inner is not None:
            return _matrix(inner)
    return None
