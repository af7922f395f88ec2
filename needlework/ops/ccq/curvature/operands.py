"""What the operators, and the launches forward and backward, share: tensors by name, and the sequences as chunks."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.curvature.intra import arguments, constants
from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import block, token_tile
from needlework.ops.common.packing import check_cu_seqlens, sequences
from needlework.ops.common.remembered import remembered
from needlework.ops.delta.segments import Segments, Slower, segment_length, segmented
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import padded
from needlework.ops.slots.rows import Slots

ENGINE = "ccq/curvature"
NO_STATE = None, None, None
FULL = 1.43  # time of a chunk where all places are taken ÷ where 54 of 132 are, other kernels by bytes; 192 keys, H200


class Saved(NamedTuple):
    """What the forward keeps for the backward, over aligned tokens."""

    Sq: Tensor  # [B T H K] Σq
    kc: Tensor  # [B T H K] k*
    P: Tensor  # [chunks H C C]
    E: Tensor  # [chunks H ROWS C]: intra.py's `tokens`
    mean: Tensor  # [chunks H K] before each chunk
    step: Tensor  # [chunks H K] from it to the chunk's own
    n: Tensor  # [chunks H] before each chunk
    mass: Tensor  # [chunks H] of each chunk
    G: Tensor | None = None  # [chunks H 2 C], gated


class Task(NamedTuple):
    """What every launch is given: the sequences as chunks, the sizes, the config, where tensors are made."""

    at: Alignment
    config: LaunchConfig
    B: int
    H: int
    HV: int
    K: int
    dtype: torch.dtype
    device: torch.device
    fill: Tensor | None  # [chunks] int32: real tokens of each; packed
    gated: bool
    packed: bool
    length: int  # chunks of a segment at most (`segment_length`); 0: sequences stay whole

    @property
    def C(self) -> int:
        return self.config.launch["shared"]["C"]

    @property
    def NCB(self) -> int:
        """Chunks of a batch row."""
        return -(-self.at.T // self.C)

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def scaled(self) -> bool:
        return self.dtype == torch.float16

    def constants(self, name: str, **flags: int | None) -> Constants:
        flags = {"GATED": self.gated, "PACKED": self.packed} | flags
        return constants(self.config, name, self.dtype, self.H, self.HV, self.K, **flags)

    def tile(self, x: Tensor, columns: int) -> Tensor | TensorDescriptor:
        """x [B T H D] as walks take it: tiles of a chunk's tokens and `columns` of D."""
        return token_tile(x, self.C, columns) if self.config.tma else x

    def block(self, x: Tensor, rows: int, columns: int) -> Tensor | TensorDescriptor:
        """x [chunks H M M], likewise."""
        return block(x, rows, columns) if self.config.tma else x

    def empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of each chunk and key head."""
        return torch.empty(self.B * self.NCB, self.H, *sizes, dtype=dtype or self.wide, device=self.device)

    def launch(self, kernel: JITFunction, settings: Constants, *given: object, each: int = 1) -> None:
        """`kernel` over chunks and key heads, `each` programs for one."""
        run(kernel, (self.B * self.NCB * self.H * each,), *given, self.at.T, self.NCB, **arguments(kernel, settings))

    def hands(self, settings: Constants, slots: int, side: int = 0) -> tuple[Tensor, Tensor]:
        """Where a cut chain hands on BV rows of its state and `side` numbers more each, and whether it did."""
        sizes = slots, settings["BV"], settings["NK"] * settings["KB"] + side
        hand = torch.empty(sizes, dtype=self.wide, device=self.device)
        return hand, torch.zeros(slots, dtype=torch.int32, device=self.device)

    def segments(self) -> Segments | None:
        """What the walks take for sequences, None: these."""
        return segmented(self.at, self.C, self.length) if self.length else None


def task_of(
    inputs: CcqInputs,
    cu_seqlens: Tensor | None,
    at: Alignment,
    fill: Tensor | None,
    chosen: LaunchConfig,
    own: Slots | None = None,
) -> Task:
    """own: C is a table, and cu_seqlens is not read."""
    q, HV, gated, packed = inputs.q, inputs.eta.shape[2], inputs.g is not None, cu_seqlens is not None
    B, T, H, K = q.shape
    walk, C = chosen.launch["walk"], chosen.launch["shared"]["C"]
    facts = T, C, H * -(-K // min(walk["BV"], padded(K))), K, K, walk["NP"]
    if cu_seqlens is None or own is not None:
        length = segment_length(sequences(cu_seqlens, B), packed, *facts, diagonal=True, slower=beside(walk["NP"]))
    else:
        length = _length(cu_seqlens, *facts)
    return Task(at, chosen, B, H, HV, K, q.dtype, q.device, fill, gated, packed, length)


@remembered
def _length(cu_seqlens: Tensor, T: int, C: int, *facts: int) -> int:
    """`segment_length` of documents that the host has read."""
    chunks = [-(-(b - a) // C) for a, b in pairwise(check_cu_seqlens(cu_seqlens, 1, T))]
    return segment_length(len(chunks), True, T, C, *facts, diagonal=True, slower=beside(facts[-1]), chunks=chunks)


def beside(slots: int) -> Slower:
    """Each of chains that take more than half of the places is slower."""
    return lambda chains: FULL if chains > slots // 2 else 1.0


@remembered
def filled(cu_seqlens: Tensor, T: int, C: int, device: torch.device) -> Tensor:
    """[chunks] int32: real tokens of each chunk of packed sequences, of T together; 0 past the last sequence."""
    at = Alignment.of(cu_seqlens, 1, T, C, device)
    chunk = torch.arange(at.T // C, device=at.cum.device)
    n = torch.searchsorted(at.cum, chunk, right=True) - 1
    lengths = torch.nn.functional.pad(cu_seqlens.to(chunk).diff(), (0, 1))
    return (lengths[n] - (chunk - at.cum[n]) * C).clamp(0, C).to(torch.int32)
