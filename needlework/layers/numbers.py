"""What a token's input says of its write: gates and strengths, one number a head or a channel. Their maps are narrow: one product."""

from torch import Tensor, nn

from needlework.layers.projection import side_by_side


def numbers(x: Tensor, *beside: nn.Module, **parts: nn.Module | None) -> tuple[dict[str, Tensor | None], list[Tensor]]:
    """part(x) of each, x [B T D], by name, None for None; and what each of `beside`, maps of x too, gives.

    A part with a `project` is asked for `of(project(x))`: these maps and `beside` are one product.
    """
    shared = {name: part for name, part in parts.items() if hasattr(part, "project")}
    found = {name: None if part is None else part(x) for name, part in parts.items() if name not in shared}
    made = side_by_side(x, *beside, *(part.project for part in shared.values()))
    logits = made[len(beside) :]
    found |= {name: part.of(logit) for (name, part), logit in zip(shared.items(), logits, strict=True)}
    return found, made[: len(beside)]
