"""What Polar attention returns and what it carries from one call to the next."""

from typing import NamedTuple

from torch import Tensor


class PolarState(NamedTuple):
    """Growing pages of keys and values (rows as in ops/common/pages.py) and the count of tokens seen."""

    k: Tensor  # [N P Hkv d]
    v: Tensor  # [N P Hkv V]
    length: Tensor  # [N] int64


class PolarOutput(NamedTuple):
    direction: Tensor  # [B T Hq V]
    magnitude: Tensor  # [B T Hq]
    state: PolarState | None
