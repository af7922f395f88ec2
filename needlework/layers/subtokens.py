"""A token that writes several times: each time is a token of the op, the first decays, the last reads.

T tokens are nT of the op's; one step is n of its steps, in place. Exact, for no other token comes between.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from needlework.layers.write import Rule, WriteRule

CARRY = ("initial_state", "output_final_state", "cu_seqlens", "state", "slots", "fresh")


class SubTokens(WriteRule[Rule]):
    """Base of such rules. settings: of every call of the op."""

    times: Callable[..., list[dict[str, Tensor | None]]]  # (k, v, **gates): the op's tensors of each time, in order, by name
    settings: Mapping[str, Any]

    def call(self, op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, q_read: Tensor, **given: Any) -> Any:
        carry: dict[str, Any] = {name: given.pop(name) for name in CARRY if name in given}
        times, settings = self.times(k, v, **given), self.settings
        if op is self.step:
            *first, last = times
            for one in first:
                op(q, **one, **settings, **carry)
            return op(q, **last, q_read=q_read, **settings, **carry)
        n = len(times)
        if carry.get("cu_seqlens") is not None:
            carry["cu_seqlens"] = n * carry["cu_seqlens"]
        line = {name: _line([one[name] for one in times]) for name in times[0]}
        q, q_read = (x.repeat_interleave(n, 1) for x in (q, q_read))
        found = op(q, **line, q_read=q_read, **settings, **carry)
        return found._replace(o=found.o[:, n - 1 :: n])


def _line(times: list[Tensor | None]) -> Tensor | None:
    """[B T …] of each time -> [B nT …], those of a token one after another."""
    tensors = [x for x in times if x is not None]
    return torch.stack(tensors, 2).flatten(1, 2) if tensors else None


def later(g: Tensor | None) -> Tensor | None:
    """The log decay of what is no token's first time."""
    return None if g is None else torch.zeros_like(g)
