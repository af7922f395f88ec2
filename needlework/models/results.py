"""What a call of the model returns: hidden states with the objective's means, and the losses that training minimises."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from needlework.layers.objective import Objective
from needlework.models.loss import emphasised_cross_entropy, linear_cross_entropy


@dataclass
class NeedleworkOutput(BaseModelOutputWithPast):
    """transformers' output and `terms`: the objective's means by name, or None without an objective."""

    terms: dict[str, Tensor] | None = None


class Losses(NamedTuple):
    """What training minimises on a batch: share · cross_entropy / counted targets + auxiliary, as the objective says.

    cross_entropy: the *sum* over the counted targets. auxiliary: the other terms, weighted, a mean that is divided by
    the number of batches alone; None without any. parts: those terms by name, unweighted and detached, for a log.
    nats: of each target [B T], without its emphasis and detached, 0 where it is not counted; None where none has an emphasis.
    """

    cross_entropy: Tensor
    share: float
    auxiliary: Tensor | None
    parts: dict[str, Tensor]
    nats: Tensor | None = None

    @classmethod
    def of(
        cls, hidden: Tensor, head: nn.Linear, cap: float | None, targets: Tensor, emphasis: Tensor | None, impl: str
    ) -> "Losses":
        """The cross entropy alone. impl: `linear_cross_entropy`'s; ValueError for another than "torch" where targets have an emphasis."""
        x, counted, nats = hidden.flatten(0, 1), targets.flatten(), None
        if emphasis is None:
            loss = linear_cross_entropy(x, head.weight, head.bias, counted, cap, impl=impl)
        elif impl != "torch":
            raise ValueError(f'loss_impl: got {impl!r}, expected "torch" where targets have an emphasis')
        else:
            loss, nats = emphasised_cross_entropy(x, head.weight, head.bias, counted, emphasis.flatten(), cap)
            nats = nats.view(targets.shape)
        return cls(loss, 1.0, None, {}, nats)

    def beside(self, objective: Objective, means: dict[str, Tensor]) -> "Losses":
        """With the objective's other terms, and the share that it leaves the cross entropy."""
        parts = {name: mean.detach() for name, mean in means.items()}
        # no _replace: torch.compile of 2.11 cannot return what it makes
        return Losses(self.cross_entropy, objective.share, objective.auxiliary(means), parts, self.nats)
