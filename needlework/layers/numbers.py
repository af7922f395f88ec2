"""What a token's input says of its write: gates and strengths, one number a head or a channel.

Their maps are narrow. Each alone would read all of x for a few columns, and write a gradient as large as x: side by side they are one
product.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 8  # columns: 16 bytes of a half-precision row, without which products take slower kernels


def numbers(x: Tensor, **parts: nn.Module | None) -> dict[str, Tensor | None]:
    """part(x) of each, x [B T D], by name; None for None. A part with a `project` is asked for `of(project(x))`."""
    shared = {name: part for name, part in parts.items() if hasattr(part, "project")}
    found = {name: None if part is None else part(x) for name, part in parts.items() if name not in shared}
    logits = side_by_side(x, *(part.project for part in shared.values()))
    return found | {name: part.of(logit) for (name, part), logit in zip(shared.items(), logits, strict=True)}


def side_by_side(x: Tensor, *maps: nn.Module) -> list[Tensor]:
    """Each map of x [B T D]; a map is an nn.Linear, or an nn.Sequential that begins with one. What else stands there is called."""
    first = [m[0] if isinstance(m, nn.Sequential) else m for m in maps]
    if not maps or any(type(m) is not nn.Linear for m in first):
        return [m(x) for m in maps]
    weight, bias = torch.cat([m.weight for m in first]), None
    if any(m.bias is not None for m in first):
        bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in first])
    more = -len(weight) % ALIGNED
    y = F.linear(x, F.pad(weight, (0, 0, 0, more)), bias if bias is None else F.pad(bias, (0, more)))
    columns = y.split([*(m.out_features for m in first), more], -1)
    return [m[1:](part) if isinstance(m, nn.Sequential) else part for m, part in zip(maps, columns, strict=False)]
