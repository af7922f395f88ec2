"""A token that writes several times: each time is a token of the op, the first decays, the last reads.

T tokens are nT of the op's; one step is n of its steps, in place. Exact, for no other token comes between.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from needlework.layers.write import Rule, WriteRule
from needlework.ops.delta import chunk_delta, step_delta
from needlework.ops.delta.recurrent import DeltaOutput

Time = dict[str, Any]  # the op's tensors of one of the times, by name; None for what it does not have


def chunk_times(q: Tensor, times: list[Time], *, q_read: Tensor, cu_seqlens: Tensor | None = None, **given: Any) -> DeltaOutput:
    """`chunk_delta` of tokens that write several times, `times` in order."""
    n = len(times)
    cu_seqlens = None if cu_seqlens is None else n * cu_seqlens
    line: Time = {name: _line([one[name] for one in times]) for name in times[0]}
    q, q_read = (x.repeat_interleave(n, 1) for x in (q, q_read))
    found = chunk_delta(q, **line, q_read=q_read, cu_seqlens=cu_seqlens, **given)
    return found._replace(o=found.o[:, n - 1 :: n])


def step_times(q: Tensor, times: list[Time], *, q_read: Tensor, **given: Any) -> Tensor:
    """`step_delta` of tokens that write several times."""
    *first, last = times
    for one in first:
        step_delta(q, **one, **given)
    return step_delta(q, **last, q_read=q_read, **given)


class SubTokens(WriteRule[Rule]):
    """Base of such rules. settings: of every call of the op."""

    chunk, step = staticmethod(chunk_times), staticmethod(step_times)
    times: Callable[..., list[Time]]  # (k, v, **gates): the op's tensors of each time, in order
    settings: Mapping[str, Any]

    def call(self, op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, q_read: Tensor, **gates: Any) -> Any:
        return op(q, self.times(k, v, **gates), q_read=q_read, **self.settings)


def _line(times: list[Tensor | None]) -> Tensor | None:
    """[B T …] of each time -> [B nT …], those of a token one after another."""
    tensors = [x for x in times if x is not None]
    return torch.stack(tensors, 2).flatten(1, 2) if tensors else None


def later(g: Tensor | None) -> Tensor | None:
    """The log decay of what is no token's first time."""
    return None if g is None else torch.zeros_like(g)
