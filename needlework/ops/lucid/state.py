"""What LUCID returns and what it carries from one call to the next."""

from typing import NamedTuple

from torch import Tensor


class LucidState(NamedTuple):
    """Growing pages of keys and *solved* values (rows as in ops/attention/pages.py) and the count of tokens seen."""

    k: Tensor  # [N P Hkv K] as given, not normalised
    y: Tensor  # [N P Hkv V]
    length: Tensor  # [N] int64


class PageRows(NamedTuple):
    """The floating tensors of a `LucidState`, or their gradients."""

    k: Tensor
    y: Tensor


class LucidOutput(NamedTuple):
    y: Tensor  # [B T Hkv V]
    state: LucidState | None
