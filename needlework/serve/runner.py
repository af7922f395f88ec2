"""Runs Steps: one copy to the device, the model on its tables, the next tokens, one copy back. Nothing here waits for the device.

A step that only decodes is a CUDA graph on a GPU, one for each number of `rows` and each `Way` of sampling, captured when it
is first needed. Decoding rows take their token from where the step before left it, so that the host may plan a step before it has
heard of the last one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.models import NeedleworkForCausalLM
from needlework.models.modeling import Block
from needlework.serve.batch import Inputs, Shape
from needlework.serve.compiled import Layer
from needlework.serve.holders import Holders
from needlework.serve.pools import most_pages
from needlework.serve.request import Request
from needlework.serve.sampling import Counts, logprobs, sample
from needlework.serve.scheduler import SchedulerConfig
from needlework.serve.staging import Staging
from needlework.serve.step import Admitted, Step
from needlework.serve.tables import Tables
from needlework.serve.way import Way, penalties

TOP = 20  # likeliest tokens that a request may ask for


class Sampled(NamedTuple):
    """The next tokens [R] of a step's rows, on their way to the host, and where asked for their log p [R], the likeliest tokens [R TOP] and
    theirs. requests: whose; None for a padded row."""

    requests: tuple[Request | None, ...]
    tokens: Tensor
    chances: tuple[Tensor, Tensor, Tensor] | None
    done: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the numbers are there."""
        if self.done is not None:
            self.done.synchronize()


class Runner:
    """A model, and the tables of its requests.

    model: in eval mode, on its device. config: what the scheduler shares out. layer: what advances a layer in steps that only decode.
    """

    def __init__(self, model: NeedleworkForCausalLM, tables: Tables, config: SchedulerConfig, layer: Layer = Block.serve):
        self.model, self.tables, self.config, self.layer = model, tables, config, layer
        self.device, self.vocabulary = model.device, model.config.vocab_size
        self.on_gpu = self.device.type == "cuda"
        # of each slot; the last is where padded rows write
        self.newest = torch.zeros(config.slots + 1, dtype=torch.int64, device=self.device)
        self.counts: Counts | None = None
        self.seeds: dict[str, int] = {}
        self._graphs: dict[tuple[int, Way], _Graph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None  # one graph runs at a time: they share their memory
        self._pages = {window: most_pages(config.length, None, config.page, config.budget) for window, *_ in config.pools}
        self.holders = Holders(config.slots, self._pages, config.page, self.vocabulary)
        self._staging = Staging(pinned=self.on_gpu)

    @torch.no_grad()
    def run(self, step: Step, bits: Mapping[str, Tensor] | None = None) -> Sampled:
        """Launch a step's moves and rows. bits: by request, [⌈V/32⌉] int32 of the tokens that its grammar allows."""
        self.tables.move(step.before)
        self.holders.hear(step, self.seeds)
        decodes = len(step.decodes)
        if graphed := self.on_gpu and not step.prefills and decodes > 0:
            decodes = rows(decodes)
        shape = Shape.of(step, decodes, self._pages)
        host = self._staging.take(shape)
        self.holders.fill(host, step)
        way = self._way(host, step, bits)
        if way.penalties:
            self._count_admitted(step.admitted)
        mask = None if not bits else self._bits(step, shape, bits)
        if graphed:
            found = self._graph(shape, way).run(host, mask)
        else:
            inputs = host
            if self.on_gpu:
                inputs = Inputs.empty(shape, device=self.device)
                inputs.copy_(host)
            found = self._rows(inputs, way, None if mask is None else mask.to(self.device, non_blocking=True))
        self.tables.move(step.after)
        requests: list[Request | None] = [one.request for one in step.decodes]
        requests += [None] * (decodes - len(step.decodes)) + [one.request for one in step.prefills if one.last]
        return self._to_host(tuple(requests), found)

    @torch.no_grad()
    def capture(self, most: int) -> None:
        """The graphs of up to `most` rows that nobody filters, penalises or scores, so that no request waits for them."""
        for size in sorted({rows(n) for n in range(1, most + 1)}, reverse=True):  # the largest first: the others fit its memory
            for draws in (True, False):
                self._graph(Shape(size, 0, 0, 0, tuple(self._pages.items())), Way(draws, False, False, False, False))

    def _rows(self, inputs: Inputs, way: Way, bits: Tensor | None) -> list[Tensor]:
        """The next tokens of a step that is on the device, which are then the newest; and log p's, if asked for."""
        named, controls = inputs.named, inputs.controls
        D = inputs.shape.decodes
        ids = named["ids"]
        if D:
            slots = named["slots"][:D]
            ids = torch.cat([torch.where(ids[:D] < 0, self.newest[slots], ids[:D]), ids[D:]])
        layer = self.layer if D == len(ids) else Block.serve
        hidden = self.model.model.serve(ids, self.tables.layers, inputs.batch, layer)
        logits = self.model.logits(hidden[named["rows"]])
        counts = self.counts if way.penalties else None
        tokens = sample(logits, controls, counts=counts, bits=bits, draws=way.draws, filters=way.filters)
        self.newest[controls.slots] = tokens
        if way.penalties and self.counts is not None:
            self.counts.add(tokens, controls.slots)
        return [tokens, *logprobs(logits, tokens, min(TOP, self.vocabulary))] if way.logprobs else [tokens]

    def _graph(self, shape: Shape, way: Way) -> "_Graph":
        key = shape.decodes, way
        if key not in self._graphs:
            self._graphs[key] = _Graph(self, shape, way)
        return self._graphs[key]

    def _way(self, host: Inputs, step: Step, bits: Mapping[str, Tensor] | None) -> Way:
        # also of a request that comes in this step and is sampled in a later one
        counted = any(penalties(one.request.sampling) for one in step.admitted)
        way = self.holders.way(host, bool(bits))
        return way._replace(penalties=True) if counted else way

    def _count_admitted(self, admitted: Sequence[Admitted]) -> None:
        """What requests with a new slot have in their prompts, and have drawn so far, into its counts."""
        if self.counts is None:
            sizes = self.config.slots, self.vocabulary
            self.counts = Counts(
                torch.zeros(sizes, dtype=torch.int16, device=self.device),
                torch.zeros(sizes, dtype=torch.bool, device=self.device),
            )
        for one in admitted:
            if penalties(one.request.sampling):
                self.counts.drawn[one.slot], self.counts.prompt[one.slot] = 0, False
                self.counts.prompt[one.slot, torch.tensor(one.request.prompt, device=self.device)] = True
                answer = torch.tensor(one.answer, dtype=torch.int64, device=self.device)
                self.counts.add(answer, torch.full_like(answer, one.slot))

    def _bits(self, step: Step, shape: Shape, bits: Mapping[str, Tensor]) -> Tensor:
        """[R ⌈V/32⌉] on the host, all ones where a row has no grammar."""
        mask = torch.full(
            (shape.decodes + shape.sampled, -(-self.vocabulary // 32)), -1, dtype=torch.int32, pin_memory=self.on_gpu
        )
        last = [one for one in step.prefills if one.last]
        for i, one in [*enumerate(step.decodes), *enumerate(last, shape.decodes)]:
            if one.request.id in bits:
                mask[i] = bits[one.request.id]
        return mask

    def _to_host(self, requests: tuple[Request | None, ...], found: list[Tensor]) -> Sampled:
        done = None
        if self.on_gpu:
            found = [torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in found]
            done = torch.cuda.Event()
            done.record()
        tokens, *chances = found
        return Sampled(requests, tokens, (chances[0], chances[1], chances[2]) if chances else None, done)


class _Graph:
    """The decoding of so many rows, replayed on buffers of its own."""

    def __init__(self, runner: Runner, shape: Shape, way: Way):
        self.inputs = Inputs.empty(shape, device=runner.device)
        padded = Inputs.empty(shape)
        runner.holders.fill(padded, Step(decodes=(), prefills=(), before=(), after=()))
        self.inputs.copy_(padded)  # rows that touch no state: the runs before the capture leave nothing
        self.bits = None
        if way.grammar:
            self.bits = torch.full((shape.decodes, -(-runner.vocabulary // 32)), -1, dtype=torch.int32, device=runner.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is compiled or allocated once is then there
                runner._rows(self.inputs, way, self.bits)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=runner.pool):
            self.found = runner._rows(self.inputs, way, self.bits)

    def run(self, host: Inputs, bits: Tensor | None) -> list[Tensor]:
        self.inputs.copy_(host)
        if self.bits is not None and bits is not None:
            self.bits.copy_(bits, non_blocking=True)
        self.graph.replay()
        return self.found


def rows(n: int) -> int:
    """The rows of the smallest graph for n: 1, 2, 4, 8, then every 16."""
    return next((size for size in (1, 2, 4, 8) if n <= size), -(-n // 16) * 16)
