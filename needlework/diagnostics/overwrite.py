"""Selective Key Overwrite (CARVE, arXiv 2606.27229, Definition 6) of a trained model's layers: do its rule and its gates hold keys
apart?"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from needlework.data import SelectiveKeyOverwrite
from needlework.layers.write import WriteRule

from .rules import calls

SHARES = (0.25, 0.5, 1.0)  # of K keys, which is all that a state of K rows can hold apart


class Overwriting(NamedTuple):
    """layer: its number in the model. error: {keys as a share of K: mean squared error of every key's last value}; 1 is an empty memory."""

    layer: int
    error: dict[float, float]


def overwrite(model: nn.Module, input_ids: Tensor, seed: int = 0) -> list[Overwriting]:
    """One for each layer whose rule erases, from one row input_ids [1 T].

    The layer's gates are those of the text. Its keys and values are the task's: K/4, K/2 and K random unit keys, a quarter of the tokens
    give a key a new value; each token asks for the key that it writes. Numbers of keys that do not fit into T are left out.
    """
    found = []
    with torch.no_grad():
        for call in calls(model, input_ids):
            rule = call.rule
            if not isinstance(rule, WriteRule) or not rule.config.unit_keys or rule.config.write_rank > 1:
                continue
            _, k, v = call.arguments
            T, K, V = k.shape[1], k.shape[-1], v.shape[-1]
            error = {}
            for share in SHARES:
                n = max(1, round(share * K))
                if n + round(0.25 * T) <= T:
                    task = SelectiveKeyOverwrite(K=K, V=V, keys=(n, n)).batch(seed, rule.width.layer, 1, T)
                    keys, values, asked, last = (x.to(k) for x in (task.k, task.v, task.keys, task.values))
                    keys, values = (x[:, :, None].expand(1, T, like.shape[2], -1) for x, like in ((keys, k), (values, v)))
                    own = call.keywords | {"q_read": _by_value_head(keys, call.keywords["q_read"])}
                    state = rule(partial(rule.chunk, output_final_state=True), keys, keys, values, **own)[1]
                    S = state if isinstance(state, Tensor) else state[0]  # [1 HV K V]
                    answers = torch.einsum("bhkv,bnk->bhnv", S, asked.to(S))
                    error[share] = (answers - last[:, None].to(S)).square().mean().item()
            found.append(Overwriting(rule.width.layer, error))
    return found


def _by_value_head(keys: Tensor, q_read: Tensor) -> Tensor:
    """The queries for the heads that read: a read rule gives one a value head."""
    return keys[:, :, :1].expand(*keys.shape[:2], q_read.shape[2], -1)
