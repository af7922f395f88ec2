"""A layer's decoding step by torch.compile: norms, gates and products of few rows become a third as many kernels, of any number of rows.

runner = Runner(model, tables, config, layer=compiled())
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from needlework.layers.batch import Batch
from needlework.models.modeling import Block

Layer = Callable[[Block, Tensor, Mapping[str, Tensor], Batch], Tensor]
GRAPHS = 64  # kinds of layers, and one row and many of each; PyTorch's own limit is 8


def compiled(backend: str = "inductor") -> Layer:
    """`Block.serve` of rows that all decode. One row makes a graph of its own, all other numbers share one."""
    made = torch.compile(Block.serve, backend=backend, fullgraph=True, dynamic=False)

    def layer(block: Block, x: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        if len(x) > 1:
            for tensor in (
                x,
                batch.slots,
                batch.fresh,
                batch.length,
                batch.positions,
                *(y for one in batch.pages.values() for y in one),
            ):
                torch._dynamo.mark_dynamic(tensor, 0)
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            return made(block, x, tables, batch)

    return layer
