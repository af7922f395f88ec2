"""One layer of the model, and what passes between two: the residual stream in training, its two summands in serving."""

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
    """Between two layers, while serving: x + more, [T D] each. The next layer's norm adds them, where it is compiled in its own kernel."""

    x: Tensor
    more: Tensor | None = None  # only before the first layer

    def whole(self) -> Tensor:
        return added(self.x, self.more)

    def of(self, rows: Tensor) -> "Residual":
        return Residual(self.x[rows], None if self.more is None else self.more[rows])


class Block(GradientCheckpointingLayer):
    """One layer: x [B T D], a state -> x [B T D], the state after it, the objective's terms.

    x ← x + mixer(norm x),    x ← x + mlp(norm x)
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
        state: object,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
        objective: Objective | None = None,
    ) -> tuple[Tensor, object, Terms | None]:
        h = self.mixer_norm(x)
        y, state = self.mixer(h, state, cu_seqlens, output_final_state)
        x = self._channels(x + y)
        return x, state, None if objective is None else objective.terms(self.mixer, h, x, cu_seqlens)

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

    def _channels(self, x: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.mlp(self.mlp_norm(x))


class StatePassing(Protocol):
    """How a sequence that is split over ranks goes on: each layer's state comes from the rank before and goes to the one after."""

    def receive(self, layer: int, x: Tensor) -> object:
        """The state of `layer` after the tokens before x [B T D]; None on the first rank."""

    def send(self, layer: int, x: Tensor, state: object) -> Tensor:
        """Hand the state after x on; returns x, tied to the state's gradient."""
