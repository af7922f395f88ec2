"""One layer of the model, and what passes between two: the residual stream as two summands."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from needlework.layers.batch import Batch
from needlework.layers.norm import RMSNorm
from needlework.layers.objective import Objective, Terms
from needlework.models.config import NeedleworkConfig
from needlework.ops.linear.arguments import added


class Residual(NamedTuple):
    """Between two layers: x + more, [.. D] each. The next layer's norm adds them, compiled in its own kernel: their sum is neither
    written for it nor read again, and its gradient comes in the dtype of each summand."""

    x: Tensor
    more: Tensor | None = None  # only before the first layer

    def whole(self) -> Tensor:
        return added(self.x, self.more)

    def of(self, rows: Tensor) -> "Residual":
        return Residual(self.x[rows], None if self.more is None else self.more[rows])


class Block(GradientCheckpointingLayer):
    """One layer: x and more [B T D], whose sum is the residual stream, and a state -> x and more after it, the state, the objective's
    terms. `more` is None before the first layer.

    x ← x + more,    x ← x + mixer(norm x),    more ← mlp(norm x)        without an mlp:  x ← x + more,    more ← mixer(norm x)
    """

    def __init__(self, config: NeedleworkConfig, letter: str, layer: int):
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = config.mixer(letter).build(config.hidden_size, layer)
        mlp = config.channel_mixer()
        self.mlp_norm = None if mlp is None else RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = None if mlp is None else mlp.build(config.hidden_size)

    def forward(
        self,
        x: Tensor,
        more: Tensor | None,
        state: object,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
        objective: Objective | None = None,
    ) -> tuple[Tensor, Tensor, object, Terms | None]:
        x = added(x, more)
        h = self.mixer_norm(x)
        y, state = self.mixer(h, state, cu_seqlens, output_final_state)
        if self.mlp is not None and self.mlp_norm is not None:
            x = added(x, y)
            y = self.mlp(self.mlp_norm(x))
        return x, y, state, None if objective is None else objective.terms(self.mixer, h, added(x, y), cu_seqlens)

    def serve(self, given: Residual, tables: Mapping[str, Tensor], batch: Batch) -> Residual:
        """After the layer; the states of its sequences advance in place (`Mixer.serve`)."""
        x = self.mixer_norm.later(*given)
        h: Any = x if self.mixer.late else x.tensor
        y = self.mixer.serve(h, tables, batch)
        if self.mlp is None or self.mlp_norm is None:
            return Residual(x.whole, y)
        x = self.mlp_norm.later(x.whole, y)
        y = self.mlp(x)
        return Residual(x.whole, y)


class StatePassing(Protocol):
    """How a sequence that is split over ranks goes on: each layer's state comes from the rank before and goes to the one after."""

    def receive(self, layer: int, x: Tensor) -> object:
        """The state of `layer` after the tokens before x [B T D]; None on the first rank."""

    def send(self, layer: int, x: Tensor, state: object) -> Tensor:
        """Hand the state after x on; returns x, tied to the state's gradient."""
