"""Linear maps with a role, so that initialisation can tell them apart."""

from torch import nn


class OutProjection(nn.Linear):
    """The map back into the residual stream. A model may start all of these at zero."""


class ZeroProjection(nn.Linear):
    """A map that always starts at zero, weight and bias: its branch is a no-op at first."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
