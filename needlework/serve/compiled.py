"""A decoding step by torch.compile: norms, gates and products of few rows become a third as many kernels, of any number of rows.

runner = Runner(model, tables, config, compiled())
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.layers.batch import Batch
from needlework.models import NeedleworkForCausalLM
from needlework.models.modeling import Block, Residual
from needlework.serve.edges import Chosen, beginning, ending
from needlework.serve.sampling import Controls, Counts
from needlework.serve.way import Way

Options = Mapping[str, Any]
GRAPHS = 64  # kinds of layers, and one row and many of each; PyTorch's own limit is 8
# small kernels that do not depend on one another are one launch; a kernel is launched before the one in front has ended
FUSED = {"combo_kernels": True, "triton.enable_pdl": True}


class Passes(NamedTuple):
    """What a step of rows that all decode is made of."""

    beginning: Callable[[NeedleworkForCausalLM, Tensor, Tensor, Tensor], Tensor]
    layer: Callable[[Block, Residual, Mapping[str, Tensor], Batch], Residual]
    ending: Callable[[NeedleworkForCausalLM, Residual, Controls, Counts | None, Tensor | None, Way], Chosen]


EAGER = Passes(beginning, Block.serve, ending)


def compiled(backend: str = "inductor", options: Options = FUSED) -> Passes:
    """One row makes a graph of its own, all other numbers share one. options: Inductor's."""
    own = dict(options) if backend == "inductor" else None
    build = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False, options=own)
    first, serve, last = build(beginning), build(Block.serve), build(ending)

    def begins(model: NeedleworkForCausalLM, ids: Tensor, newest: Tensor, slots: Tensor) -> Tensor:
        with _of_any_rows(ids, slots):
            return first(model, ids, newest, slots)

    def layer(block: Block, given: Residual, tables: Mapping[str, Tensor], batch: Batch) -> Residual:
        pages = (tensor for own in batch.pages.values() for tensor in own)
        with _of_any_rows(*given, batch.slots, batch.fresh, batch.length, batch.positions, *pages):
            return serve(block, given, tables, batch)

    def ends(
        model: NeedleworkForCausalLM, left: Residual, controls: Controls, counts: Counts | None, bits: Tensor | None, way: Way
    ) -> Chosen:
        with _of_any_rows(*left, *controls):
            return last(model, left, controls, counts, bits, way)

    return Passes(begins, layer, ends)


def _of_any_rows(*tensors: Tensor | None) -> AbstractContextManager:
    """Tensors that have one row a sequence of the batch: several rows are some number of them."""
    for tensor in tensors:
        if tensor is not None and len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
    return torch._dynamo.config.patch(recompile_limit=GRAPHS)
