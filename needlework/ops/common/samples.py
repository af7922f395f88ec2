"""Sample tensors for specs: float64, reproducible, with the key geometries under which mixers are hard to compute."""

import torch
from torch import Tensor


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def keys(generator: torch.Generator, B: int, T: int, H: int, K: int, style: str) -> Tensor:
    """[B T H K] unit keys: "identical" (one key all along), "clustered" (8 tight clusters), anything else isotropic."""
    if style == "identical":
        return unit(normal(generator, B, 1, H, K)).expand(B, T, H, K).contiguous()
    if style == "clustered":
        centres = unit(normal(generator, B, 8, H, K))
        pick = torch.randint(8, (T,), generator=generator)
        return unit(centres[:, pick] + 0.05 * normal(generator, B, T, H, K))
    return unit(normal(generator, B, T, H, K))


def decay(generator: torch.Generator, *shape: int, style: str) -> Tensor:
    """Log decays <= 0: "strong" mixes 30 % gates of -30 among gates of -1e-3, anything else is mild (-0.5 ... 0)."""
    if style == "strong":
        return torch.where(uniform(generator, 0, 1, *shape) < 0.3, -30.0, -1e-3).to(torch.float64)
    return uniform(generator, -0.5, 0.0, *shape)
