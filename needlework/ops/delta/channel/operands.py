"""What the channel engine's operators and the launches of its kernels share: tensors by name, their types and descriptors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.common.kernels.tile import block, token_tile
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig

ENGINE = "delta/channel"


class Saved(NamedTuple):
    """What the forward leaves for the backward, over *aligned* tokens: T is `alignment.T`, NC = ⌈T/C⌉.

    The op aligns every token tensor before `forward` and `backward` and restores what they return: both see [B T ...] that is
    already aligned. ST: float16 for half inputs, else their dtype; ACC: float64 for float64, else float32. Base-2 gates inside.
    With R rows a token T counts rows (pseudo tokens): the gate lies on a token's first row (0 on the others), the query on its
    last (0 on the others); rows of one token do not couple in A; "previous" leaves out the gate of the row's own *token*.

    G is the inclusive sum of g in the chunk; E = G for "decayed", G without the own token's gate for "previous";
    u = e = k (beta), or e = erase ⊙ k (gates), erase itself for "given". The chunk: r = beta ∘ (v − ê S₀) or write ∘ v − ê S₀;
    W = T' r; o = q̂ S₀ + P' W; S_C = e^{GC} ∘ S₀ + k̂ᵀ W.       (scale is inside q̂ and P'; W = v for additive rules)
    """

    q_hat: Tensor  # [B T HV K] ST: scale · q ∘ e^G
    e_hat: Tensor | None  # [B T HV K] ST: e ∘ e^E, erase inside, beta NOT; None for additive rules
    k_hat: Tensor  # [B T HV K] ST: k ∘ e^{GC − G}
    Tp: Tensor | None  # [B HV NC·C C] ST: (I + beta_t A)^-1 by chunk, rows t, columns s; beta rows inside A, NO beta columns;
    #                    A_ts = (e_t ∘ e^{E_t − G_s}) · k_s, s's token < t's token; zero rows and columns past T but the 1 of I
    Pp: Tensor  # [B HV NC·C C] ST: scale · (q_t ∘ e^{G_t − G_s}) · k_s, s <= t
    whole: Tensor  # [B HV NC K] ACC: e^{GC}
    W: Tensor | None  # [B T HV V] ST; None without `save`


RULES = (
    (0, "decayed"),
    (1, "decayed"),
    (1, "previous"),
    (2, "decayed"),
    (2, "previous"),
    (2, "given"),
)  # `rule_of` and its prediction


def rule_of(beta: Tensor | None, erase: Tensor | None) -> int:
    """0: additive, 1: beta, 2: erase and write gates."""
    return 2 if erase is not None else int(beta is not None)


def scales(rule: int, dtype: torch.dtype) -> bool:
    """Whether kernels are given powers of two by which they divide rows (`powers.py`)."""
    return rule == 0 and dtype == torch.bfloat16


def wide_gates(prediction: str) -> bool:
    """Whether the compiled cases of erase and write gates have them in float32: callers give them so, or in q's dtype."""
    return prediction == "decayed"


def predicted(prediction: str) -> dict[str, int]:
    """Of the kernels that make e: PREVIOUS leaves the own token's decay out of it, GIVEN takes erase for it."""
    return {"PREVIOUS": int(prediction != "decayed"), "GIVEN": int(prediction == "given")}


Tile = Tensor | TensorDescriptor


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


def case(kernel: JITFunction, types: dict[str, str], constants: Constants, absent: tuple[str, ...]) -> Case:
    """A launch with these argument types, None for what is absent."""
    options = {name: constants[name] for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl") if name in constants}
    constants = {name: x for name, x in constants.items() if name not in options} | dict.fromkeys(absent)
    return Case(kernel, {name: types[name] for name in kernel.arg_names if name not in constants}, constants, options)


def operands(
    config: LaunchConfig,
) -> tuple[
    Callable[[Tensor | None, int], Tile | None], Callable[[Tensor | None], Tile | None], Callable[[Tensor, int, int], Tile]
]:
    """How walks are given [B T H D] (and the columns of a block), [B H NC·C C], [N H K V] (and its block): descriptors, or as is."""
    if not config.tma:
        return (lambda x, columns: x), (lambda x: x), (lambda x, rows, columns: x)
    C = config.launch["shared"]["C"]
    tokens = lambda x, columns: None if x is None else token_tile(x, C, columns)
    return tokens, lambda x: None if x is None else block(x, C, C), block
