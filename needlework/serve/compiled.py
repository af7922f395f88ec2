"""A step by torch.compile: norms, gates and what else is computed element by element become a third as many kernels, of any number of rows.

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
from needlework.models.block import Block, Residual
from needlework.serve.edges import Chosen, beginning, ending
from needlework.serve.sampling import Controls, Counts
from needlework.serve.way import Way

GRAPHS = 96  # kinds of layers, and one row, many, and prompts of each; PyTorch's own limit is 8
# Inductor's: small kernels that do not depend on one another are one launch; a kernel is launched before the one in front has ended
FUSED: dict[str, Any] = {"combo_kernels": True, "triton.enable_pdl": True}


class Passes(NamedTuple):
    """What a step is made of whose rows all decode, or are those of two prompts."""

    beginning: Callable[[NeedleworkForCausalLM, Tensor, Tensor, Tensor], Tensor]
    layer: Callable[[Block, Residual, Mapping[str, Tensor], Batch], Residual]
    ending: Callable[[NeedleworkForCausalLM, Residual, Controls, Counts | None, Tensor | None, Way], Chosen]


EAGER = Passes(beginning, Block.serve, ending)


def compiled(backend: str = "inductor") -> Passes:
    """One decoding row makes a graph of its own, all other numbers share one, and all numbers of a prompt's tokens. Tables may have any
    number of slots and pages: the few on which costs are measured, and then all that fit."""
    options = FUSED if backend == "inductor" else None
    build = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False, options=options)
    first, serve, last = build(beginning), build(Block.serve), build(ending)

    def begins(model: NeedleworkForCausalLM, ids: Tensor, newest: Tensor, slots: Tensor) -> Tensor:
        with _of_any_length(ids, newest, slots):
            return first(model, ids, newest, slots)

    def layer(block: Block, given: Residual, tables: Mapping[str, Tensor], batch: Batch) -> Residual:
        tokens = (*given, batch.positions, *(own.rows for own in batch.pages.values()))
        if batch.decodes:
            sequences = batch.slots, batch.fresh, batch.length, *(own.block_table for own in batch.pages.values())
        else:  # two prompts, of any number of tokens
            sequences = ()
        with _of_any_length(*tokens, *sequences, *tables.values()):
            return serve(block, given, tables, batch)

    def ends(
        model: NeedleworkForCausalLM, left: Residual, controls: Controls, counts: Counts | None, bits: Tensor | None, way: Way
    ) -> Chosen:
        with _of_any_length(*left, *controls):
            return last(model, left, controls, counts, bits, way)

    return Passes(begins, layer, ends)


def _of_any_length(*tensors: Tensor | None) -> AbstractContextManager:
    """One is one, more are some number."""
    for tensor in tensors:
        if tensor is not None and len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
    return torch._dynamo.config.patch(recompile_limit=GRAPHS)
