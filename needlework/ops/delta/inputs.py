"""The tensors of a call by name, from the op to the launches of its kernels, and the type of the operands that these make of them.

Operators of torch.library take the tensors one by one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment


class DeltaInputs(NamedTuple):
    """Tensors of an engine's call, None for what the rule does not have. Their gradients come back as `DeltaInputs` too.

    An engine takes some of them; its `TENSORS` names these in the order of its operators' arguments.
    """

    q: Tensor  # [B T H K]; for the channel engine what reads
    k: Tensor  # [B T H K]
    v: Tensor  # [B T HV V]
    g: Tensor | None = None  # [B T HV], or [B T HV K] for the channel engine
    beta: Tensor | None = None  # [B T HV]
    lam: Tensor | None = None  # [B T HV]
    erase: Tensor | None = None  # [B T HV K]
    write: Tensor | None = None  # [B T HV V]
    q_read: Tensor | None = None  # [B T H K] or [B T HV K]
    initial_state: Tensor | None = None  # [N HV K V]

    @classmethod
    def of(cls, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> "DeltaInputs":
        return cls(**dict(zip(names, tensors, strict=True)))

    def flat(self, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
        """The inverse of `of`."""
        return tuple(getattr(self, name) for name in names)

    def contiguous(self) -> "DeltaInputs":
        return DeltaInputs(*(None if x is None else x.contiguous() for x in self))

    def aligned(self, alignment: Alignment) -> "DeltaInputs":
        """Tokens where `alignment` has them; the initial state as it is, contiguous."""
        *tokens, state = self
        return DeltaInputs(
            *(None if x is None else alignment.align(x) for x in tokens), None if state is None else state.contiguous()
        )

    def restored(self, alignment: Alignment) -> "DeltaInputs":
        """The inverse of `aligned`."""
        *tokens, state = self
        return DeltaInputs(*(None if x is None else alignment.restore(x) for x in tokens), state)


def solve_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product's operands, the inverse of a chunk and what it multiplies: bfloat16 would miss the error budget."""
    return torch.float16 if dtype.itemsize == 2 else dtype
