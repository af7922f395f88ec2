"""What of a step is captured in CUDA graphs: a launch of a layer's kernels from Python takes longer than they do.

    Decoding      rows that decode, from their inputs to their next tokens; one for each number of `rows` and each `Way` of sampling
    Prefilling    one sequence's new tokens, from their inputs to what the last layer leaves; one for each number of `tokens`

Each has buffers of its own, is captured when it is first needed, and holds a few rows more than are asked for: padded ones, which
touch no state. All share one pool of memory: one runs at a time, and what one returns is copied before the next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.models.block import Residual
from needlework.serve.batch import Inputs, Shape
from needlework.serve.holders import Holders
from needlework.serve.request import Request
from needlework.serve.step import Prefill, Step

Call = Callable[[], list[Tensor]]
NOBODY = Request(id="", prompt=(0,), max_tokens=1)


class Graph:
    """A call without arguments, captured and replayed. `found`: what it returned, written anew by each replay."""

    def __init__(self, call: Call, pool: Any):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is compiled or allocated once is then there
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.found = call()

    def __call__(self) -> list[Tensor]:
        self.graph.replay()
        return self.found


class Decoding(NamedTuple):
    """The next tokens of so many rows, from `inputs`, and from the tokens that grammars allow, `bits`, if there are any."""

    inputs: Inputs
    bits: Tensor | None
    graph: Call

    def run(self, host: Inputs, bits: Tensor | None) -> list[Tensor]:
        self.inputs.copy_(host)
        if self.bits is not None and bits is not None:
            self.bits.copy_(bits, non_blocking=True)
        return self.graph()


class Prefilling(NamedTuple):
    """What the last layer leaves of one sequence's new tokens, and behind them of a sequence of padding. Sampling is not part of it: how it
    is done would make many graphs of one."""

    inputs: Inputs
    graph: Call

    def run(self, host: Inputs) -> Residual:
        self.inputs.copy_(host)
        return Residual(self.graph()[0])


def padded(shape: Shape, device: torch.device, holders: Holders) -> Inputs:
    """Inputs on the device that touch no state: runs of them leave nothing."""
    host, nothing = Inputs.empty(shape), Step(decodes=(), prefills=(), before=(), after=())
    holders.fill(host, alone(None, shape.tokens) if shape.tokens else nothing)
    inputs = Inputs.empty(shape, device=device)
    inputs.copy_(host)
    return inputs


def alone(one: Prefill | None, count: int) -> Step:
    """A step of `count` tokens: those of one sequence, which is sampled, and a padded one's."""
    own = one or _padding(0)
    rest = _padding(count - len(own.tokens))
    return Step(decodes=(), prefills=(own._replace(last=True), rest), before=(), after=())


def _padding(count: int) -> Prefill:
    """So many tokens of no request: of length −1, on slot −1, without pages."""
    return Prefill(NOBODY, -1, -1 - count, (0,) * count, False, {})


def rows(n: int) -> int:
    """The rows of the smallest graph for n: 1, 2, 4, 8, then every 16."""
    return next((size for size in (1, 2, 4, 8) if n <= size), -(-n // 16) * 16)


def tokens(n: int) -> int:
    """The tokens of the smallest graph for n: every 64 up to 512, then four in each octave."""
    step = max(64, 1 << (n - 1).bit_length() >> 3)
    return -(-n // step) * step
