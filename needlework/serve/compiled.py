"""A layer's decoding step by torch.compile: norms, gates and products of few rows become a third as many kernels, of any number of rows.

runner = Runner(model, tables, config, layer=compiled())
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from needlework.layers.batch import Batch
from needlework.models.modeling import Block

Options = Mapping[str, Any]
Layer = Callable[[Block, Tensor, Mapping[str, Tensor], Batch], Tensor]
GRAPHS = 64  # kinds of layers, and one row and many of each; PyTorch's own limit is 8
# a product of one row is a sum that Inductor writes itself, with what stands before and behind it: at the speed of its bytes once tuned
ONE = {"coordinate_descent_tuning": True}


def compiled(backend: str = "inductor", one: Options = ONE, many: Options | None = None) -> Layer:
    """`Block.serve` of rows that all decode. One row makes a graph of its own, all other numbers share one.

    one, many: Inductor's options for each.
    """
    inductor = backend == "inductor"
    alone, together = (
        torch.compile(
            Block.serve, backend=backend, fullgraph=True, dynamic=False, options=dict(options) if options and inductor else None
        )
        for options in (one, many)
    )

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
            return (together if len(x) > 1 else alone)(block, x, tables, batch)

    return layer
