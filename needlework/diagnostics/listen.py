"""One forward pass that records the values of every probe."""

from collections import defaultdict
from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor, nn

from needlework.probe import listen


def heard(model: nn.Module, input_ids: Tensor, prefix: str) -> dict[str, list[Tensor]]:
    """The probes whose name begins with `prefix.`: what follows the dot -> their values, one a layer, in float32 or wider.

    input_ids [B T] go through the model once, in evaluation mode, nothing recorded for autograd. Empty if no layer has such a probe.
    """
    values: dict[str, list[Tensor]] = defaultdict(list)

    def note(name: str, x: Tensor) -> None:
        rule, _, what = name.partition(".")
        if rule == prefix and x is not None:
            values[what].append(x.detach().to(torch.promote_types(x.dtype, torch.float32)))

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), listen(note):
            model(input_ids.to(next(model.parameters()).device), use_cache=False, logits_to_keep=1)
    finally:
        model.train(training)
    return dict(values)


def layers(values: dict[str, list[Tensor]]) -> list[dict[str, Tensor]]:
    """The same by layer: every probe must have spoken as often as the others."""
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def together(layer: Callable[..., tuple[Tensor, ...]], values: dict[str, list[Tensor]]) -> list[list[float]]:
    """The numbers that `layer(**its values)` makes, of every layer. Neighbours of the same shapes are one batch: a walk over tokens is
    thousands of small operations, which take as long for all of them as for one."""
    numbers: list[list[float]] = []
    for _, alike in groupby(layers(values), key=lambda one: [x.shape for x in one.values()]):
        group = list(alike)
        stacked = {name: torch.stack([one[name] for one in group]) for name in group[0]}
        numbers += torch.vmap(lambda one: torch.stack(layer(**one)))(stacked).tolist()
    return numbers
