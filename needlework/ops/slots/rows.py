"""Small tensors of a table as rows, one a sequence, and back: for kernels of which several programs read and write a slot."""

from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from needlework.ops.common.packing import sequences
from needlework.ops.runtime.launch_configs import Case, LaunchConfig
from needlework.ops.runtime.precompile import kind, meta, run
from needlework.ops.runtime.triton_types import NAMES, accumulator, cdiv, next_power_of_2
from needlework.ops.slots.kernels import clear, read_by_kernels, slot_of

OF_TABLE = {"p_slots": "*i64", "p_fresh": "*u8"}  # arguments of kernels that find slots, and their types
BLK = 1024  # numbers of a row that a program has


@triton.jit(do_not_specialize=["slot_stride"])
def read_kernel(p_column, p_slots, p_fresh, p_rows, slot_stride, SIZE: tl.constexpr, BLK: tl.constexpr):
    """BLK numbers of what one sequence starts from."""
    n = tl.program_id(0)
    slot, resumed = slot_of(p_slots, p_fresh, n)
    o = tl.program_id(1) * BLK + tl.arange(0, BLK)
    x = tl.load(p_column + slot * slot_stride + o, mask=resumed & (o < SIZE), other=0)
    tl.store(p_rows + tl.cast(n, tl.int64) * SIZE + o, x, mask=o < SIZE)


@triton.jit(do_not_specialize=["slot_stride"])
def write_kernel(p_column, p_slots, p_fresh, p_cu_seqlens, p_rows, slot_stride, SIZE: tl.constexpr, BLK: tl.constexpr):
    """The inverse of `read_kernel`; a sequence without a token leaves its slot as it is, unless it is fresh."""
    n = tl.program_id(0)
    slot, resumed = slot_of(p_slots, p_fresh, n)
    changed = slot >= 0
    if p_cu_seqlens is not None:
        changed &= (resumed == 0) | (tl.load(p_cu_seqlens + n) < tl.load(p_cu_seqlens + n + 1))
    o = tl.program_id(1) * BLK + tl.arange(0, BLK)
    x = tl.load(p_rows + tl.cast(n, tl.int64) * SIZE + o, mask=o < SIZE)
    tl.store(p_column + slot * slot_stride + o, x, mask=changed & (o < SIZE))


class Slots(NamedTuple):
    """The slots of N sequences that have tokens between them. Nothing is read back to the host."""

    slots: Tensor | None  # [N]; −1: none. None: sequence n owns slot n
    fresh: Tensor | None  # [N] bytes: not 0 where a sequence starts from zeros
    cu_seqlens: Tensor | None
    N: int
    stride: int  # numbers from slot to slot of the large tensor: a constant of its kernels, which load several numbers at once by it

    @classmethod
    def of(cls, large: Tensor, slots: Tensor | None, fresh: Tensor | None, cu_seqlens: Tensor | None, B: int) -> "Slots":
        N = sequences(cu_seqlens, B)
        slots, fresh, cu_seqlens = read_by_kernels(slots, fresh, cu_seqlens)
        return cls(slots, fresh, cu_seqlens, N, large.stride(0))

    def kind(self) -> Hashable:
        """What kernels are compiled for."""
        return kind(*self[:3]), self.stride

    def meta(self) -> "Slots":
        """The same of meta tensors."""
        return Slots(*meta(*self[:3]), self.N, self.stride)

    def read(self, column: Tensor) -> Tensor:
        """[N ...] of a tensor of the table: what sequences start from."""
        rows = column.new_empty(self.N, *column.shape[1:])
        blocks, sizes = self._blocks(column)
        run(read_kernel, blocks, column, self.slots, self.fresh, rows, column.stride(0), **sizes)
        return rows

    def write(self, column: Tensor, rows: Tensor) -> None:
        """The rows that `read` gave, in the end, into the slots; zeros from a fresh sequence without a token."""
        blocks, sizes = self._blocks(column)
        run(write_kernel, blocks, column, self.slots, self.fresh, self.cu_seqlens, rows, column.stride(0), **sizes)

    def clear(self, large: Tensor) -> None:
        """Zeros in the slots of fresh sequences without a token."""
        if self.fresh is not None and self.cu_seqlens is not None:
            clear(large, self.slots, self.fresh, self.cu_seqlens)

    def _blocks(self, column: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
        size = column[0].numel()
        block = min(BLK, next_power_of_2(size))
        return (self.N, cdiv(size, block)), {"SIZE": size, "BLK": block, "num_warps": 4}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels on packed sequences, fresh ones among them."""
    wide = f"*{NAMES[accumulator(dtype)]}"
    signature = {"p_column": wide, "p_rows": wide, "slot_stride": "i64"} | OF_TABLE
    sizes = {"SIZE": 2 * V, "BLK": BLK}
    return [
        Case(read_kernel, signature, sizes, {"num_warps": 4}),
        Case(write_kernel, signature | {"p_cu_seqlens": "*i64"}, sizes, {"num_warps": 4}),
    ]
