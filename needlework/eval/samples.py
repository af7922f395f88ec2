"""A few samples: how a model goes on from held-out text, the likeliest token each time, beside how the text went on."""

from collections.abc import Callable

import torch
from torch import Tensor

from .forward import check_token_ids, evaluating, logits


def samples(model: Callable, rows: Tensor, prompt: int, decode: Callable[[list[int]], str]) -> list[dict[str, str]]:
    """{"prompt", "continuation", "text"} of each row: its first `prompt` tokens, as many more of the model's as the row has, the row's own.

        x_{t+1} = argmax_w logits(x_{<= t})_w

    rows [n P+L] integers, 1 <= prompt < P+L. model: called with input_ids [n t], returns logits [n t vocabulary], or an object that has
    them. Without a cache: a handful of tokens. ValueError for a prompt that leaves nothing to go on with.
    """
    check_token_ids("rows", rows)
    if not 1 <= prompt < rows.shape[1]:
        raise ValueError(f"samples: prompt is {prompt} tokens of rows of {rows.shape[1]}, expected at least one and one left")
    ids = rows[:, :prompt]
    with evaluating(model):
        while ids.shape[1] < rows.shape[1]:
            ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1).to(ids)], 1)
    pairs = zip(rows.tolist(), ids.tolist(), strict=True)
    return [{"prompt": decode(a[:prompt]), "continuation": decode(b[prompt:]), "text": decode(a[prompt:])} for a, b in pairs]
