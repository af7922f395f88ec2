"""From which tokens' values a token reads: attention's weights, and the same numbers of a recurrence.

    o_t = Σ_s A_ts v_s        with one-hot values the read is A itself

A recurrence that erases, LUCID and Diff Transformer have weights below zero. CARVE's erase gate depends on what was read; its map is of the
gates that it had on this text.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from needlework.layers.softmax import AttendRule, softmax_attention
from needlework.layers.write import WriteRule
from needlework.ops.carve.reference import retention
from needlework.ops.delta import chunk_delta
from needlework.probe import listen

from .carve import of_last_chunk
from .polar import weights as polar_weights
from .rules import Call, calls


class Map(NamedTuple):
    """layer: its number in the model; rule: its kind. weights [H T T]: row t is what token t reads of each token's value, a head."""

    layer: int
    rule: str
    weights: Tensor


def maps(model: nn.Module, input_ids: Tensor) -> list[Map]:
    """One for each rule of the model that has a map, from one row input_ids [1 T]; H·T² numbers a layer: keep T near 100.

    A rule that writes several rows a token has none.
    """
    with torch.no_grad():
        return [Map(call.layer, call.rule.config.kind, _map(call)) for call in calls(model, input_ids) if _one_row(call)]


def _one_row(call: Call) -> bool:
    return not isinstance(call.rule, WriteRule) or call.rule.config.write_rank == 1


def _map(call: Call) -> Tensor:
    rule = call.rule
    if isinstance(rule, WriteRule):
        q, k, v = call.arguments
        o = _written(rule, q, k, v, call.keywords)
    else:
        o = _attended(rule, *call.arguments, **call.keywords)
    return o[0].transpose(0, 1).float()  # [H T T]


def one_hot(v: Tensor) -> Tensor:
    """Values [1 T H T] in the place of v [1 T H V]: token s has e_s."""
    T = v.shape[1]
    return torch.eye(T, dtype=v.dtype, device=v.device)[None, :, None].expand(1, T, v.shape[2], T).contiguous()


def _written(rule: WriteRule, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Tensor:
    one = one_hot(v)
    match rule.config.kind:
        case "carve":
            g, w = _carves_gates(rule, q, k, v, keywords), torch.sigmoid(keywords["w"])
            settings = {"prediction": rule.config.prediction, "scale": rule.width.scale}
            return chunk_delta(q, k, one, g, w, q_read=keywords["q_read"], **settings).o
        case "gdn2":  # a write gate a value channel: one for the whole value is its mean
            gate = keywords["write"].mean(-1, keepdim=True).expand(*one.shape)
            return rule(rule.chunk, q, k, one, **keywords | {"write": gate})[0]
        case _:
            return rule(rule.chunk, q, k, one, **keywords)[0]


def _carves_gates(rule: Any, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Tensor:
    """The log decay [1 T H K] that the text gave, content included."""
    o = rule(rule.chunk, q, k, v, **keywords)[0]
    w1, w2 = rule.feedback()
    m = of_last_chunk(o.float(), rule.config.content_chunk)
    b = keywords["b"] + rule.erase_bias
    return retention(keywords["f"].float(), b.float(), m, rule.A_log.float(), rule.dt_bias.float(), w1.float(), w2.float())


def _attended(rule: AttendRule, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    one, kind = one_hot(v), rule.config.kind
    if kind == "polar":
        return _polars(rule, q, k)
    if kind == "differential":
        lam: list[Tensor] = []
        with listen(lambda name, value: lam.append(value) if name == "differential.lam" else None):
            rule(x, q, k, v, **keywords)
        first, second = (
            softmax_attention(q_half, k_half, one, window=rule.config.window)[0]
            for q_half, k_half in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return first - lam[0].to(first.dtype) * second
    return rule(x, q, k, one, **keywords)[0]


def _polars(rule: Any, q: Tensor, k: Tensor) -> Tensor:
    """The weights of real keys; what is missing to 1 is the null sink's."""
    real, mass = polar_weights(
        q.float(), k.float(), rule.alpha.float(), rule.gamma.float(), rule.null_base.float(), rule.config.window
    )
    return (real * (1 - mass[..., None])).transpose(1, 2)
