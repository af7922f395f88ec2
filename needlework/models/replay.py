"""A decoding step on fixed addresses: what a CUDA graph replays, one token of each row at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from needlework.layers.batch import Batch, Pages

Step = Callable[[Tensor, Batch], Tensor]  # x [B D] and where its rows' states lie -> [B D]; the states advance in place
Record = Callable[
    [Callable[[], Tensor]], tuple[Callable[[], None], Tensor]
]  # what runs the function again, and where its result then lies


def record(f: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A CUDA graph of f. It is run twice before: what is compiled or allocated once is then there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f()
    return graph.replay, out


class Replay:
    """`step` of as many rows as x has, recorded on buffers of its own: padded rows, which touch no state. The tables are those of now."""

    def __init__(self, step: Step, x: Tensor, batch: Batch, record: Record = record):
        self.x, self.batch = torch.zeros_like(x), _padded(batch)
        self._replay, self._out = record(lambda: step(self.x, self.batch))

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        self.x.copy_(x)
        for own, new in zip(_tensors(self.batch), _tensors(batch), strict=True):
            own.copy_(new)
        self._replay()
        return self._out.clone()


def _tensors(batch: Batch) -> list[Tensor]:
    pages = [x for one in batch.pages.values() for x in one]
    return [batch.slots, batch.fresh, batch.cu_seqlens, batch.length, batch.positions, *pages]


def _padded(batch: Batch) -> Batch:
    return Batch(
        decodes=batch.decodes, slots=torch.full_like(batch.slots, -1), fresh=torch.zeros_like(batch.fresh),
        cu_seqlens=torch.zeros_like(batch.cu_seqlens), length=torch.full_like(batch.length, -1),
        positions=torch.zeros_like(batch.positions),
        pages={window: Pages(torch.zeros_like(one.block_table), torch.full_like(one.rows, -1)) for window, one in batch.pages.items()},
    )  # fmt: skip
