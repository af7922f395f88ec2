"""The end of a step: the last norm, the unembedding and the next token of each row that is sampled."""

from typing import NamedTuple, Protocol

from torch import Tensor

from needlework.models import NeedleworkForCausalLM
from needlework.serve.sampling import Controls, Counts, sample
from needlework.serve.way import Way


class Chosen(NamedTuple):
    """tokens [R]; logits [R V] before penalties and temperature."""

    tokens: Tensor
    logits: Tensor


class Ending(Protocol):
    def __call__(
        self, model: NeedleworkForCausalLM, x: Tensor, controls: Controls, counts: Counts | None, bits: Tensor | None, way: Way
    ) -> Chosen: ...


def ending(
    model: NeedleworkForCausalLM, x: Tensor, controls: Controls, counts: Counts | None, bits: Tensor | None, way: Way
) -> Chosen:
    """Of x [R D], what the last layer left of each row. counts, bits: as `sample` takes them."""
    logits = model.logits(model.model.norm(x))
    return Chosen(sample(logits, controls, counts=counts, bits=bits, draws=way.draws, filters=way.filters), logits)
