"""CARVE (arXiv 2606.27229): how much the erase gate depends on content, and what it costs that this content is a chunk old."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from needlework.layers.write import WriteRule
from needlework.ops.carve.reference import retention

from .listen import heard, together


class CarveLayer(NamedTuple):
    """Over all tokens, heads and channels of a layer.

    content: ‖W₂ tanh(W₁m)‖ / (‖W₂ tanh(W₁m)‖ + ‖b_x − mean b_x‖), Frobenius norms: the content's share of what moves the erase gate.
    staleness: ‖o − o*‖/‖o*‖, o* with m the mean of the last L outputs at every token (Table 4: 0.18 %, flat in L).
    """

    content: float
    staleness: float


def carve(model: nn.Module, input_ids: Tensor, content_chunk: int, ask: Callable[[], None] = lambda: None) -> list[CarveLayer]:
    """One entry for each CARVE layer, from input_ids [B T]; content_chunk is the model's L. Rank-1 writes, prediction "previous".

    ask: called at every token; what it raises ends the walk, which may take a minute.
    """
    layer = partial(_layer, content_chunk, ask)
    return [CarveLayer(*numbers) for numbers in together(layer, heard(model, input_ids, "carve"))]


def _layer(L: int, ask: Callable[[], None], q, k, v, f, b, w, A_log, dt_bias, w1, w2, b_bias, o) -> tuple[Tensor, Tensor]:
    """A `CarveLayer`'s numbers."""
    b = b + b_bias
    means = of_last_chunk(o, L)
    content = (torch.tanh(means @ w1.T) @ w2.T).norm()
    token = (b - b.mean(1, keepdim=True)).norm()
    exact = _renewed(L, ask, q, k, v, f, b, w, A_log, dt_bias, w1, w2)
    return content / (content + token), (o - exact).norm() / exact.norm()


def of_last_chunk(o: Tensor, L: int) -> Tensor:
    """m [B T H V] of outputs o [B T H V]: their mean over the last whole chunk of L tokens before each token's chunk; zeros at first."""
    whole = o[:, : o.shape[1] // L * L]
    means = whole.unflatten(1, (-1, L)).mean(2)  # [B chunks H V]
    return torch.cat([torch.zeros_like(means[:, :1]), means], 1).repeat_interleave(L, 1)[:, : o.shape[1]]


def chunkability(
    model: nn.Module, input_ids: Tensor, chunks: tuple[int, ...], ask: Callable[[], None] = lambda: None
) -> dict[int, list[float]]:
    """Table 4: L -> for each CARVE layer the staleness that a content signal of the last chunk of L tokens would cost.

    Each L is another model of the same weights; this one is as it was afterwards.
    """
    rules = [module for module in model.modules() if isinstance(module, WriteRule) and module.config.kind == "carve"]
    configs = [rule.config for rule in rules]
    found = {}
    try:
        for L in chunks:
            for rule, config in zip(rules, configs, strict=True):
                rule.config = replace(config, content_chunk=L)
            found[L] = [layer.staleness for layer in carve(model, input_ids, L, ask)]
    finally:
        for rule, config in zip(rules, configs, strict=True):
            rule.config = config
    return found


def _renewed(L: int, ask: Callable[[], None], q, k, v, f, b, w, A_log, dt_bias, w1, w2) -> Tensor:
    """The layer's outputs with the content signal renewed at every token; sums in float32 or wider."""
    S = k.new_zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1])
    outputs: list[Tensor] = []
    running = torch.zeros_like(v[:, 0])
    for t in range(q.shape[1]):
        ask()
        kept = retention(f[:, t], b[:, t], running / L, A_log, dt_bias, w1, w2).exp()
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = kept[..., None] * S + torch.einsum("bh,bhk,bhv->bhkv", torch.sigmoid(w[:, t]), k[:, t], error)
        outputs.append(k.shape[-1] ** -0.5 * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        running = running + outputs[-1] - (outputs[-1 - L] if len(outputs) > L else 0)
    return torch.stack(outputs, 1)
