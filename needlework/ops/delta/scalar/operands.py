"""What the scalar engine's operators, its backward and the launches of its kernels share: what is saved, types of operands, the constants
of a scan."""

from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.parts import parts_of
from needlework.ops.delta.inputs import DeltaInputs, solve_dtype
from needlework.ops.runtime.launch_configs import Constants, LaunchConfig
from needlework.ops.runtime.triton_types import TYPES, accumulator, cdiv

ENGINE = "delta/scalar"
ROWS = tl.constexpr(8)  # of E, the factors of a chunk's tokens
FALLBACK = TYPES[torch.bfloat16]  # operands of the bf16 fallback: float32's range


class Saved(NamedTuple):
    """What the forward leaves for the backward, over aligned tokens: NR rows, T rounded up to whole chunks. None where there is none.

    ST: `solve_dtype`'s type, that of operands. ACC: float64 for float64, else float32.
    """

    W: Tensor | None  # [B T HV V] ST: what is written under each key; None without a backward to come
    Tp: Tensor | None  # [B HV NR C] `inverse`'s type: (I + A)⁻¹; None for additive rules
    Pp: Tensor  # [B HV NR C] ST: scale Γ∘tril(r kᵀ)
    A: Tensor | None  # [B HV NR C] ST: A without β, beside it Q where q both reads and enters x; None as Tp and as W
    G: Tensor  # [B HV NR] ACC: sums of the chunk's gates, in log2
    E: Tensor  # [B HV NR/C 8 C] ACC: the factors of a chunk's tokens (`intra`)
    overflow: Tensor  # [1] int32: the overflow flag; [0] where there is no bf16 fallback
    q: Tensor | None  # copies as operands, of inputs of another half type
    k: Tensor | None
    q_read: Tensor | None
    initial_state: Tensor | None  # [N·segments HV K V] ACC: before every segment; None where sequences are whole
    M: Tensor | None  # [N·segments HV K K] ACC: the transition of every segment; [.. 1] where it is one decay

    @classmethod
    def empty(cls, inputs: DeltaInputs, T: int, C: int, *, save: bool) -> "Saved":
        """Places for what a forward over T aligned tokens leaves, the overflow flag at 0; without `save` none for W and A."""
        (B, _, HV, V), dtype, acc = inputs.v.shape, inputs.q.dtype, accumulator(inputs.q.dtype)
        operand, erases, fallbacks = solve_dtype(dtype), inputs.beta is not None, len(forms(dtype, inputs.lam is not None)) - 1
        NR = -(-T // C) * C

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return inputs.v.new_empty(shape, dtype=dtype)

        def copy(x: Tensor | None) -> Tensor | None:
            return None if x is None or x.dtype == operand else new(B, T, *x.shape[2:], dtype=operand)

        both = inputs.lam is not None and inputs.q_read is None
        return cls(
            W=new(B, T, HV, V, dtype=operand) if save else None,
            Tp=new(B, HV, NR, C, dtype=inverse(dtype)) if erases else None,
            Pp=new(B, HV, NR, C, dtype=operand),
            A=new(B, HV, NR, 2 * C if both else C, dtype=operand) if save and erases else None,
            G=new(B, HV, NR, dtype=acc),
            E=new(B, HV, NR // C, ROWS.value, C, dtype=acc),
            overflow=inputs.v.new_zeros(fallbacks, dtype=torch.int32),
            # q is not copied where it neither reads nor enters x
            q=copy(inputs.q) if inputs.q_read is None or inputs.lam is not None else None,
            k=copy(inputs.k),
            q_read=copy(inputs.q_read),
            initial_state=None,
            M=None,
        )

    def operands(self, inputs: DeltaInputs) -> DeltaInputs:
        """`inputs` with q, k and q_read as the kernels' operands."""
        copies = {name: getattr(self, name) for name in ("q", "k", "q_read")}
        return inputs._replace(**{name: x for name, x in copies.items() if x is not None})


def flags(inputs: DeltaInputs) -> tuple[int, ...]:
    """GATE, ERASE, LAM, READ: q next to q_read only enters x."""
    lam = inputs.lam is not None
    return tuple(int(x) for x in (inputs.g is not None, inputs.beta is not None, lam, lam and inputs.q_read is not None))


def forms(dtype: torch.dtype, lam: int | bool) -> tuple[int, ...]:
    """The FORMs in which kernels are launched (`scan.py`): a step with λ may make the state longer, past what float16 operands hold."""
    return (1, 2) if lam and dtype.itemsize == 2 else (0,)


def inverse(dtype: torch.dtype) -> torch.dtype:
    """Of the inverse and what it multiplies. Where q, k and v are float16 themselves, the budget leaves no room for a rounding more."""
    return torch.float32 if dtype == torch.float16 else solve_dtype(dtype)


def inverse_constants(dtype: torch.dtype) -> Constants:
    """TT, and how its products are made: of float32 as three TF32 ones where all other operands are halves."""
    return {"TT": TYPES[inverse(dtype)], "SOLVE": "tf32x3" if dtype == torch.float16 else "ieee"}


def operand_types(dtype: torch.dtype, form: int) -> Constants:
    """ST and TT of a form's products, BT as which tensors of operands are declared."""
    given = dict(BT=TYPES[solve_dtype(dtype)], ST=TYPES[solve_dtype(dtype)], **inverse_constants(dtype), FORM=form)
    return given if form < 2 else given | dict(ST=FALLBACK, TT=TYPES[torch.float32], SOLVE="tf32x3")


def group_of(H: int, HR: int, HV: int) -> int:
    """Value heads that share a key head and a head of the query that reads."""
    return gcd(HV // H, HV // HR)


def heads_of_team(group: int, tiles: int, slots: int) -> int:
    """Value heads of one key head that a team of slots walks side by side, each in so many tiles: as many of the group as leave at most a
    sixteenth of the slots without a team, at least one."""
    fits = (heads for heads in range(group, 0, -1) if not group % heads and slots % (heads * tiles) * 16 <= slots)
    return next(fits, 1)


def tiles_of_keys(K: int) -> tuple[int, int]:
    """The columns of a tile of the state, and how many tiles hold K: of 128 columns at most."""
    KB, NK = parts_of(K)
    return (KB, NK) if KB <= 128 else (128, cdiv(K, 128))


def slots_of(config: LaunchConfig, kernel: str, align: Alignment, per: int, team: int, chunks: int) -> tuple[int, Tensor]:
    """Programs of a walk by teams, with `per` chains a sequence over `chunks` chunks in all, and the flags by which they pass chains on."""
    chains = align.N * per
    teams = min(max(config.launch[kernel]["NP"] // team, 1), chains)
    # where each team has one chain, as long as all others, no flag is ever read
    cut = teams < chains or align.N * align.longest != chunks
    return teams * team, (torch.zeros if cut else torch.empty)(teams * team, dtype=torch.int32, device=align.cum.device)


@cache
def scan_constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, HR: int, HV: int, K: int, V: int,
    erase: int, lam: int, read: int, init: int, save: int, form: int,
) -> Constants:  # fmt: skip
    own = dict(config.launch["scan"])
    heads = heads_of_team(group_of(H, HR, HV), -(-V // own["BV"]), own.pop("NP"))
    KB, NK = tiles_of_keys(K)
    return dict(
        H=H, HR=HR, HV=HV, K=K, V=V, C=config.launch["shared"]["C"], KB=KB, NK=NK, TMA=int(config.tma),
        ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], ERASE=erase, LAM=lam, READ=read, INIT=int(init), SAVE=int(save), HEADS=heads,
        **operand_types(dtype, form), **own,
    )  # fmt: skip
