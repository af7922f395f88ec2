"""What training adds to the cross entropy: a regulariser of every block's output, a distractor loss in every attention layer.

    L = (1 − a) L_LM + a · mean over blocks of L_reg + b · mean over attention layers of L_dist        L_LM a mean over tokens

Blocks make the terms (`terms`), where their weights are whole and their activations may be made again; the model puts them together
(`means`, `auxiliary`); the training loop counts the tokens, and so makes the mean cross entropy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from needlework.fields import Count, NonNegative, Share
from needlework.layers.config import Config
from needlework.layers.distract import Distractor
from needlework.layers.regularise import Regulariser


class Terms(NamedTuple):
    """One block's; None where it has none."""

    regulariser: Tensor | None
    distractor: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Objective(Config):
    """What training minimises.

        L = (1 − a) L_LM + a · mean over blocks of L_reg + b · mean over attention layers of L_dist,    L_LM a mean over tokens

    regulariser: Weak, Strong, Discrete, Zipfian or None. regulariser_weight: a, in [0, 1); 0 without a regulariser.
    distractor: Distractor or None. distractor_weight: b, at least 0; 0 without a distractor.
    summed_over: as published, L_LM is the sum over a micro-batch of so many tokens (4 × 2,048), which leaves the other terms
        1/8,192 of their weight. None: the mean.

    >>> from needlework.layers import Objective, Weak
    >>> Objective(regulariser=Weak(), regulariser_weight=0.25).share  # what multiplies the cross entropy
    0.75
    """

    kind = "objective"
    regulariser: Regulariser | None = None
    distractor: Distractor | None = None
    regulariser_weight: Share = 0.01
    distractor_weight: NonNegative = 0.01
    summed_over: Count | None = None

    @property
    def share(self) -> float:
        """What multiplies the mean cross entropy: 1 − a, times the tokens that it is summed over."""
        return (1 - (0 if self.regulariser is None else self.regulariser_weight)) * (self.summed_over or 1)

    def terms(self, mixer: nn.Module, h: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Terms:
        """Of a block whose mixer read h [B T D] and whose output is x [B T D]."""
        regulariser = None if self.regulariser is None else self.regulariser(x)
        distraction = getattr(mixer, "distraction", None)  # of a mixer that attends
        distracted = None if self.distractor is None or distraction is None else distraction(h, self.distractor, cu_seqlens)
        return Terms(regulariser, distracted)

    def means(self, blocks: Sequence[Terms]) -> dict[str, Tensor]:
        """{"regulariser": its mean over blocks, "distractor": over attention layers}, of the terms that the objective has.

        ValueError for a distractor where no block attends.
        """
        means = {}
        for name in Terms._fields:
            values = [value for value in (getattr(terms, name) for terms in blocks) if value is not None]
            if values:
                means[name] = torch.stack(values).mean()
        if self.distractor is not None and "distractor" not in means:
            raise ValueError("objective: a distractor needs a layer with attention, and the layout has none")
        return means

    def auxiliary(self, means: dict[str, Tensor]) -> Tensor | None:
        """a L_reg + b L_dist; None where there is neither."""
        weights = {"regulariser": self.regulariser_weight, "distractor": self.distractor_weight}
        terms = [weights[name] * value for name, value in means.items()]
        return sum(terms[1:], start=terms[0]) if terms else None
