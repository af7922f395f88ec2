"""What PaTH attention returns, and what it carries from one call to the next: keys that were carried in blocks."""

from typing import NamedTuple

from torch import Tensor

BLOCK = 64  # tokens after which the cached keys are carried on; part of the state's meaning, and no launch config


class PathState(NamedTuple):
    """Growing pages of keys and values (rows as in ops/attention/pages.py), the open block, and the count of tokens seen.

    With s the last multiple of BLOCK at or below `length`, the keys of tokens before s are as token s − 1 sees them,
    H_{s−1} … H_{j+1} k_j; those from s on are k_j. Row t mod BLOCK of w and beta belongs to token t >= s; the rest is zeros, on a
    slot table anything. A row of decay is G of its token, the sum of a query head's log gates so far, and is never written again.
    """

    k: Tensor  # [N P Hkv K] float32, or float64
    v: Tensor  # [N P Hkv V]
    w: Tensor  # [N BLOCK Hkv K]
    beta: Tensor  # [N BLOCK Hkv] float32, or float64
    length: Tensor  # [N] int64
    decay: Tensor | None = None  # [N P Hq] float64; None: without a forget gate


class Tables(NamedTuple):
    """The same for all sequences together: pages of rows, and slots of open blocks. Each page and each slot is contiguous."""

    k_pages: Tensor  # [n PG Hkv K] float32, or float64
    v_pages: Tensor  # [n PG Hkv V]
    w_slots: Tensor  # [slots BLOCK Hkv K]
    beta_slots: Tensor  # [slots BLOCK Hkv] float32, or float64
    decay_pages: Tensor | None = None  # [n PG Hq] float64


class PathOutput(NamedTuple):
    o: Tensor  # [B T Hq V]
    state: PathState | None
