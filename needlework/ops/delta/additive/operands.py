"""What the additive engine's operators and the launches of its kernels share: what is saved, and the kernels' constants."""

from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.common.kernels.parts import parts_of
from needlework.ops.delta.additive.intra import ROWS
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig
from needlework.ops.runtime.triton_types import TYPES, accumulator, padded

ENGINE = "delta/additive"


class Saved(NamedTuple):
    """What the forward leaves for the backward, over aligned tokens: NR rows, T rounded up to whole chunks."""

    E: Tensor  # [B HV NR/C 4 C] float32 or wider: the factors of a chunk's tokens (`intra`)
    S: Tensor | None  # [B HV NR/C V K] q's dtype: the state at a chunk's start; None without a backward to come

    @classmethod
    def empty(cls, inputs: DeltaInputs, T: int, C: int, *, save: bool) -> "Saved":
        (B, _, HV, _), K = inputs.v.shape, inputs.k.shape[3]
        chunks = -(-T // C)
        E = inputs.v.new_empty(B, HV, chunks, ROWS.value, C, dtype=accumulator(inputs.v.dtype))
        return cls(E, states(inputs.v, HV, chunks, K) if save else None)


def states(v: Tensor, HV: int, chunks: int, K: int) -> Tensor:
    """A place for Sᵀ of every chunk, as an operand."""
    return v.new_empty(len(v), HV, chunks, v.shape[3], K)


def of_program(config: LaunchConfig, H: int, HV: int) -> int:
    """Value heads of one key head whose dr and dk a program sums. Of neither batch nor length: the order of a sum stays."""
    return gcd(HV // H, config.launch["intra_bwd"]["HEADS"])


@cache
def constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, HV: int, K: int, V: int, gated: bool
) -> dict[str, Constants]:  # fmt: skip
    """Kernel -> its constants, num_warps and the like."""
    C, acc = config.launch["shared"]["C"], accumulator(dtype)
    KB, NK = parts_of(K)
    sizes = dict(H=H, HV=HV, K=K, V=V, C=C, KB=KB, NK=NK, TMA=int(config.tma), ACC=TYPES[acc], ST=TYPES[dtype])
    own = {name: dict(config.launch[name]) for name in ("intra", "scan", "intra_bwd", "alone")}
    for name in ("scan", "intra_bwd", "alone"):
        own[name] |= sizes | {"BV": min(own[name]["BV"], padded(V))}
    own["scan"].pop("NP")
    own["scan"] |= {"OT": TYPES[dtype]}
    heads = of_program(config, H, HV)
    # where several programs share a key head, what they found is not yet rounded
    shared = {"GATE": int(gated), "HALF": int(dtype.itemsize == 2), "DT": TYPES[dtype if heads * H == HV else acc]}
    own["intra_bwd"] |= shared | {"HEADS": heads}
    own["alone"] |= shared
    own["intra"] |= {"HV": HV, "C": C, "ACC": TYPES[acc], "GATE": int(gated)}
    return own
