"""The input of one step: this rank's rows and tokens of its micro-batches, on the device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .losses import IGNORE, Batch, Piece
from .sequence_parallel import StatePassing
from .world import World


class Feed(NamedTuple):
    """numbers: those of the micro-batches. counted, tokens: labels that count, as often as they do, and tokens, summed over all ranks."""

    numbers: range
    pieces: list[Piece]
    counted: float
    tokens: int


def feed(
    batch: Callable[[int], Batch],
    step: int,
    accumulate: int,
    world: World,
    state_passing: StatePassing | None,
    device: torch.device,
) -> Feed:
    """Of `step` (0 is the first). ValueError if no label is counted, or ranks cannot share the rows or tokens evenly."""
    numbers = range(step * accumulate, (step + 1) * accumulate)
    batches = [batch(number) for number in numbers]

    def own(x: Tensor) -> Tensor:
        x = world.own(x)
        return x if state_passing is None else state_passing.segment(x)

    labels = [own(b.labels) for b in batches]
    beside = [[None if (x := getattr(b, name, None)) is None else own(x) for name in ("answers", "emphasis")] for b in batches]
    counted = world.total(sum(_count(x, emphasis) for x, (_, emphasis) in zip(labels, beside, strict=True)))
    if not counted:
        raise ValueError(f"step {step + 1}: labels: all are {IGNORE}, there is nothing to learn from")
    pieces = [
        Piece(
            _moved(own(b.input_ids), device),
            _moved(x, device),
            state_passing,
            *(z if z is None else _moved(z, device) for z in more),
        )
        for b, x, more in zip(batches, labels, beside, strict=True)
    ]
    return Feed(numbers, pieces, counted, sum(b.input_ids.numel() for b in batches))


def _count(labels: Tensor, emphasis: Tensor | None) -> float:
    counted = labels != IGNORE
    return int(counted.sum()) if emphasis is None else emphasis[counted].double().sum().item()


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """From pinned memory: from any other, the copy would wait for all that the device has to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.device.type == "cpu" else x.to(device)
