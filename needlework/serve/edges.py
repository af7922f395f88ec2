"""The two ends of a step: from token ids to the first layer, and from the last layer to the next token of each row that is sampled."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.models import NeedleworkForCausalLM
from needlework.models.block import Residual
from needlework.serve.sampling import Controls, Counts, sample
from needlework.serve.way import Way


class Chosen(NamedTuple):
    """tokens [R]; logits [R V] before penalties and temperature."""

    tokens: Tensor
    logits: Tensor


def beginning(model: NeedleworkForCausalLM, ids: Tensor, newest: Tensor, slots: Tensor) -> Tensor:
    """Embeddings [R D] of ids [R], of −1 that of the newest token of the row's slot."""
    return model.model.embed(torch.where(ids < 0, newest[slots], ids))


def ending(
    model: NeedleworkForCausalLM, left: Residual, controls: Controls, counts: Counts | None, bits: Tensor | None, way: Way
) -> Chosen:
    """The next tokens of R rows. left: by the last layer, [R D]. counts, bits: as `sample` takes them."""
    logits = model.logits(model.model.norm.later(*left))
    return Chosen(sample(logits, controls, counts=counts, bits=bits, draws=way.draws, filters=way.filters), logits)
