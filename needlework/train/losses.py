"""What a step descends on: cross entropy summed over counted labels, and what a model adds to it, over all ranks and micro-batches.

    total = share · Σ ce / counted  +  Σ auxiliary / (micro-batches · parts)

counted is the number of counted labels on all ranks and in all micro-batches, each as often as its emphasis says; a part is a rank
with tokens of its own. So the gradient is that of one large batch on one device, however it was divided.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = -100  # a label that is not counted


class Batch(Protocol):
    """input_ids, labels [B T] int64: labels[b, t] is the token to predict after input_ids[b, : t + 1]; -100 where not counted.

    It may have `answers` and `emphasis`, [B T] each, as `needlework.data.Answered` has them."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


class Piece(NamedTuple):
    """A rank's part of a batch, on its device. state_passing: brings the states of the rank before; None if the sequence is whole."""

    input_ids: Tensor
    labels: Tensor
    state_passing: object = None
    answers: Tensor | None = None
    emphasis: Tensor | None = None


class Losses(Protocol):
    """cross_entropy: the sum over counted labels. auxiliary: a mean, already weighted, or None. share: what cross_entropy is
    multiplied by. parts: means to log, by name; the same names on every rank and in every batch."""

    @property
    def cross_entropy(self) -> Tensor: ...

    @property
    def auxiliary(self) -> Tensor | None: ...

    @property
    def share(self) -> float: ...

    @property
    def parts(self) -> Mapping[str, Tensor]: ...


Criterion = Callable[[nn.Module, Piece], Losses]


class Plain(NamedTuple):
    """Cross entropy alone."""

    cross_entropy: Tensor
    auxiliary: None = None
    share: float = 1.0
    parts: Mapping[str, Tensor] = {}


def of_logits(model: nn.Module, piece: Piece) -> Plain:
    """Of model(input_ids [B T]) -> logits [B T vocabulary], or an object with `.logits`; in float32 or wider."""
    output = (
        model(piece.input_ids) if piece.state_passing is None else model(piece.input_ids, state_passing=piece.state_passing)
    )
    logits = getattr(output, "logits", output).flatten(0, 1)  # [B·T vocabulary]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return Plain(F.cross_entropy(logits, piece.labels.flatten(), ignore_index=IGNORE, reduction="sum"))


def losses_of(model: nn.Module, criterion: Criterion, piece: Piece, autocast: str | None) -> Losses:
    """The criterion's, under autocast if the run is."""
    with torch.autocast(piece.input_ids.device.type, torch.bfloat16, enabled=autocast == "bf16"):
        return criterion(model, piece)


class Addends(NamedTuple):
    """This rank's addends of what a step logs, in float64 on the device: summed over ranks they are the step's."""

    cross_entropy: Tensor  # [micro-batches], of each its part of the mean
    parts: dict[str, Tensor]


def backward(
    model: nn.Module, criterion: Criterion, pieces: list[Piece], counted: float, parts: int, autocast: str | None
) -> Addends:
    """Adds the gradient of `total` to the model's, micro-batch by micro-batch. Nothing waits for the device."""
    entropies, means = [], {}
    share = 1 / (len(pieces) * parts)
    for piece in pieces:
        found = losses_of(model, criterion, piece, autocast)
        entropy = found.cross_entropy / counted
        total = entropy if found.share == 1 else found.share * entropy
        if found.auxiliary is not None:
            total = total + share * found.auxiliary
        total.backward()
        entropies.append(entropy.detach().double())
        logged = dict(found.parts)
        if found.auxiliary is not None:
            logged["auxiliary"] = found.auxiliary
        for name, value in logged.items():
            means[name] = means.get(name, 0) + share * value.detach().double()
    return Addends(torch.stack(entropies), means)
