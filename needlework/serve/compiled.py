"""A layer's decoding step by torch.compile: norms, gates and products of few rows become a third as many kernels, of any number of rows.

runner = Runner(model, tables, config, layer=compiled())
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from needlework.layers.batch import Batch
from needlework.models.modeling import Block

Options = Mapping[str, Any]
Layer = Callable[[Block, Tensor, Mapping[str, Tensor], Batch], Tensor]
GRAPHS = 64  # kinds of layers, and one row and many of each; PyTorch's own limit is 8
MANY = {"combo_kernels": True}  # small kernels that do not depend on one another are one launch
# a product of one row is then a sum that Inductor writes itself, with what stands before and behind it
ONE = MANY | {"coordinate_descent_tuning": True}


def compiled(backend: str = "inductor", one: Options = ONE, many: Options = MANY) -> Layer:
    """`Block.serve` of rows that all decode. One row makes a graph of its own, all other numbers share one.

    one, many: Inductor's options for each.
    """
    build = partial(torch.compile, Block.serve, backend=backend, fullgraph=True, dynamic=False)
    alone, together = (build(options=dict(own) if backend == "inductor" else None) for own in (one, many))

    def layer(block: Block, x: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        if len(x) > 1:
            pages = (tensor for own in batch.pages.values() for tensor in own)
            for tensor in (x, batch.slots, batch.fresh, batch.length, batch.positions, *pages):
                torch._dynamo.mark_dynamic(tensor, 0)
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            return (together if len(x) > 1 else alone)(block, x, tables, batch)

    return layer
