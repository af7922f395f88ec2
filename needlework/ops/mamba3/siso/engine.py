"""Which engine of the delta rules walks Mamba-3's rows: the additive one, or the scalar one where that has no config (float16, K above
192)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch._ops import OpOverload

from needlework.ops.delta.additive import op as additive
from needlework.ops.delta.additive.operands import Saved as AdditiveSaved
from needlework.ops.delta.scalar import op as scalar
from needlework.ops.delta.scalar.operands import Saved as ScalarSaved
from needlework.ops.runtime.launch_configs import misfit


class Saved(NamedTuple):
    """What the engine of a call leaves for its backward; of the other engine None."""

    of_additive: AdditiveSaved | None
    of_scalar: ScalarSaved | None

    @property
    def own(self) -> AdditiveSaved | ScalarSaved:
        found = self.of_scalar if self.of_additive is None else self.of_additive
        assert found is not None
        return found


class Engine(NamedTuple):
    """An engine's functions; those of rows that lie as the caller has them run within an operator."""

    name: str  # of its launch configs
    scales: bool  # whether bfloat16 rows are divided by powers of two
    computed: Callable
    gradients: Callable
    fwd: OpOverload
    kept: type[AdditiveSaved] | type[ScalarSaved]

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> "Engine":
        fits = misfit(additive.ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1]) is None
        return ADDITIVE if fits else SCALAR

    def saved(self, saved: AdditiveSaved | ScalarSaved) -> Saved:
        return Saved(saved, None) if isinstance(saved, AdditiveSaved) else Saved(None, saved)


ADDITIVE = Engine(additive.ENGINE, False, additive.computed, additive.gradients, additive.delta_additive_fwd, AdditiveSaved)
SCALAR = Engine(scalar.ENGINE, True, scalar.computed, scalar.gradients, scalar.delta_scalar_fwd, ScalarSaved)
