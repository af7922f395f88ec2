"""A decoding step by torch.compile: norms, gates and products of few rows become a third as many kernels, of any number of rows.

runner = Runner(model, tables, config, compiled())
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.layers.batch import Batch
from needlework.models import NeedleworkForCausalLM
from needlework.models.modeling import Block
from needlework.serve.ending import Chosen, Ending, ending
from needlework.serve.sampling import Controls, Counts
from needlework.serve.way import Way

Options = Mapping[str, Any]
Layer = Callable[[Block, Tensor, Mapping[str, Tensor], Batch], Tensor]
GRAPHS = 64  # kinds of layers, and one row and many of each; PyTorch's own limit is 8
# small kernels that do not depend on one another are one launch; a kernel is launched before the one in front has ended
FUSED = {"combo_kernels": True, "triton.enable_pdl": True}


class Passes(NamedTuple):
    """What a step of rows that all decode is made of: `Block.serve` and `ending`, or what has their results."""

    layer: Layer
    ending: Ending


EAGER = Passes(Block.serve, ending)


def compiled(backend: str = "inductor", options: Options = FUSED) -> Passes:
    """One row makes a graph of its own, all other numbers share one. options: Inductor's."""
    build = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
    own = dict(options) if backend == "inductor" else None
    serve, end = build(Block.serve, options=own), build(ending, options=own)

    def layer(block: Block, x: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        pages = (tensor for own in batch.pages.values() for tensor in own)
        with _of_any_rows(x, batch.slots, batch.fresh, batch.length, batch.positions, *pages):
            return serve(block, x, tables, batch)

    def ends(
        model: NeedleworkForCausalLM, x: Tensor, controls: Controls, counts: Counts | None, bits: Tensor | None, way: Way
    ) -> Chosen:
        with _of_any_rows(x, *controls):
            return end(model, x, controls, counts, bits, way)

    return Passes(layer, ends)


def _of_any_rows(*tensors: Tensor):
    if len(tensors[0]) > 1:
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
    return torch._dynamo.config.patch(recompile_limit=GRAPHS)
