"""The numbers of a step row by row, as its own fields say them: what the columns of `holders.py` must give."""

from typing import NamedTuple

import torch

from needlework.serve.batch import Inputs
from needlework.serve.request import Request
from needlework.serve.step import Prefill


class _Fork(NamedTuple):
    request: Request
    slot: int
    length: int

    @property
    def sampled(self):
        return self.length - len(self.request.prompt)


NEUTRAL = {"top_p": 1, "repetition": 1}


def literal(step, shape, seeds, page, vocabulary):
    """Inputs of a step with so many rows, the last ones that decode padded."""
    found = Inputs.empty(shape)
    put = lambda name, values: found.named[name].copy_(torch.tensor(values, dtype=found.named[name].dtype))
    decodes = [*step.decodes, *[None] * (shape.decodes - len(step.decodes))]
    every = [*decodes, *step.prefills]
    asking = [one for one in step.prefills if one.last]
    sampled = [*decodes, *(each for one in asking for each in (one, *(_Fork(*own, one.length) for own in one.forks)))]
    put("ids", [token for one in every for token in _tokens(one)])
    put("positions", [t for one in every for t in _positions(one)])
    put("slots", [-1 if one is None else one.slot for one in every])
    put("length", [-1 if one is None else one.length for one in every])
    put("fresh", [isinstance(one, Prefill) and one.fresh for one in every])
    ends, rows = [0], [*range(shape.decodes)]
    for one in step.prefills:
        ends.append(ends[-1] + len(one.tokens))
        rows += [shape.decodes + ends[-1] - 1] * one.last * (1 + len(one.forks))
    put("cu_seqlens", ends)
    put("rows", rows)
    put("owners", [-1 if one is None else one.slot for one in sampled])
    signed = lambda seed: seed - (1 << 64) if seed >= 1 << 63 else seed
    put("seed", [0 if one is None else signed(seeds[one.request.id]) for one in sampled])
    put("counter", [0 if one is None else one.sampled for one in sampled])
    asked = [None if one is None else one.request.sampling for one in sampled]
    put("top_k", [vocabulary if one is None else min(one.top_k or vocabulary, vocabulary) for one in asked])
    fields = {name: name for name in ("temperature", "top_p", "min_p")}
    fields |= {name: f"{name}_penalty" for name in ("presence", "frequency", "repetition")}
    for name, field in fields.items():
        put(name, [NEUTRAL.get(name, 0) if one is None else getattr(one, field) for one in asked])
    for window, width in shape.pages:
        lines = [[] if one is None or one.slot < 0 else one.pages[window].tolist() for one in every]
        put(f"block_table of {window}", [line + [-1] * (width - len(line)) for line in lines])
        row = lambda line, t: line[t // page] * page + t % page if line else -1
        put(f"rows of {window}", [row(line, t) for one, line in zip(every, lines, strict=True) for t in _positions(one)])
    return found


def _tokens(one):
    if isinstance(one, Prefill):
        return one.tokens
    return (0,) if one is None else (-1 if one.token is None else one.token,)


def _positions(one):
    if one is None:
        return range(1)
    return range(one.start, one.length) if isinstance(one, Prefill) else range(one.length - 1, one.length)
