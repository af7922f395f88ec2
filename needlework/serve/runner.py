"""Runs Steps: one copy to the device, the model on its tables, the next tokens, one copy back. Nothing here waits for the device.

On a GPU the rows of a step that decode are a CUDA graph, and so is a sequence that is prefilled alone (`graphs.py`). Decoding rows take
their token from where the step before left it, so that the host may plan a step before it has the results of the last one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.layers.projection import laying
from needlework.models import NeedleworkForCausalLM
from needlework.models.block import Residual
from needlework.serve.batch import Inputs, Shape
from needlework.serve.capacity import SchedulerConfig
from needlework.serve.compiled import EAGER, Passes
from needlework.serve.graphs import Call, Decoding, Graph, Prefilling, alone, padded, rows, tokens
from needlework.serve.holders import Holders
from needlework.serve.pools import most_pages
from needlework.serve.request import Request
from needlework.serve.sampling import Counts, logprobs
from needlework.serve.staging import Staging
from needlework.serve.step import Admitted, Step
from needlework.serve.tables import Tables
from needlework.serve.way import Way, penalties

Requests = tuple[Request | None, ...]
TOP = 20  # likeliest tokens that a request may ask for


class Sampled(NamedTuple):
    """The next tokens [R] of a step's rows, on their way to the host, and where asked for their log p [R], the likeliest tokens [R TOP] and
    theirs. requests: whose; None for a padded row."""

    requests: Requests
    tokens: Tensor
    chances: tuple[Tensor, Tensor, Tensor] | None
    done: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the numbers are there."""
        if self.done is not None:
            self.done.synchronize()


class Runner:
    """A model, and the tables of its requests.

    model: in eval mode, on its device. config: what the scheduler shares out. passes: what advances a layer, and ends a step, where all
    rows decode.
    """

    def __init__(self, model: NeedleworkForCausalLM, tables: Tables, config: SchedulerConfig, passes: Passes = EAGER):
        self.model, self.tables, self.config, self.passes = model, tables, config, passes
        self.device, self.vocabulary = model.device, model.config.vocab_size
        self.on_gpu = self.device.type == "cuda"
        # of each slot; the last is where padded rows write. The counts are there from the start: the plan has their bytes
        self.newest = torch.zeros(config.slots + 1, dtype=torch.int64, device=self.device)
        self.counts = Counts.zeros(config.slots, self.vocabulary, self.device)
        self.seeds: dict[str, int] = {}
        pages = {window: most_pages(config.length, None, config.page, config.budget) for window, *_ in config.pools}
        self.pages = tuple(pages.items())
        self.holders = Holders(config.slots, pages, config.page, self.vocabulary)
        self._staging = Staging(pinned=self.on_gpu)
        self._decoding: dict[tuple[int, Way], Decoding] = {}
        self._prefilling: dict[int, Prefilling] = {}
        captured = {one.captured for one in model.model.held()}
        self._captures_steps, self._captures_prompts = "none" not in captured, captured <= {"all"}
        self.graph: Callable[[Call], Call] | None = None
        if self.on_gpu:
            self.graph = partial(Graph, pool=torch.cuda.graph_pool_handle())
        self._lay()

    @torch.no_grad()
    def run(self, step: Step, bits: Mapping[str, Tensor] | None = None) -> Sampled:
        """Launch a step's moves and rows. bits: by request, [⌈V/32⌉] int32 of the tokens that its grammar allows."""
        self.tables.move(step.before)
        self.holders.hear(step, self.seeds)
        way = self.holders.way(step, bool(bits))
        if way.penalties:
            self._count_admitted(step.admitted)
        requests, found = self._by_graphs(step, way, bits) if self._graphed(step) else self._packed(step, way, bits)
        self.tables.move(step.after)
        return self._to_host(requests, found)

    def _graphed(self, step: Step) -> bool:
        steps = self._captures_steps or not step.decodes
        prompts = not step.prefills or (self._captures_prompts and len(step.prefills) == 1)
        return self.graph is not None and steps and prompts

    def _packed(self, step: Step, way: Way, bits: Mapping[str, Tensor] | None) -> tuple[Requests, list[Tensor]]:
        """All rows of a step at once, of any shape."""
        shape = Shape.of(step, len(step.decodes), dict(self.pages))
        inputs = self._inputs(step, shape)
        return _sampled(step), self.next(self.left(inputs), inputs, way, self._bits(step, shape, bits))

    def _inputs(self, step: Step, shape: Shape) -> Inputs:
        """On the device, for once: hardly two such steps have the same sizes."""
        inputs, host = Inputs.empty(shape, device=self.device), Inputs.empty(shape, pin_memory=self.on_gpu)
        self.holders.fill(host, step)
        inputs.copy_(host)
        return inputs

    def _by_graphs(self, step: Step, way: Way, bits: Mapping[str, Tensor] | None) -> tuple[Requests, list[Tensor]]:
        """The rows that decode, then the one sequence that is prefilled: each a graph, or none of them."""
        requests: Requests = ()
        parts: list[list[Tensor]] = []
        if step.decodes:
            own = Step(decodes=step.decodes, prefills=(), before=(), after=())
            shape = Shape.of(own, rows(len(own.decodes)), dict(self.pages))
            graph = self._decode(shape.decodes, way)
            requests = _sampled(own, shape.decodes)
            found = graph.run(self._host(own, shape), self._bits(own, shape, bits))
            parts.append([x.clone() for x in found] if step.prefills else found)  # another graph may write there
        for one in step.prefills:
            count = tokens(len(one.tokens))
            own, graph = alone(one, count), self._prefill(count)
            left = graph.run(self._host(alone(one._replace(forks=()), count), graph.inputs.shape))
            if one.last:
                inputs = graph.inputs
                if one.forks:  # the graph's sample one row
                    inputs = self._inputs(own, Shape.of(own, 0, dict(self.pages)))
                requests = (*requests, *_sampled(own))
                parts.append(self.next(left, inputs, way, self._bits(own, inputs.shape, bits)))
        if not parts:
            return (), [torch.empty(0, dtype=torch.int64, device=self.device)]
        return requests, parts[0] if len(parts) == 1 else [torch.cat(x) for x in zip(*parts, strict=True)]

    @torch.no_grad()
    def _lay(self) -> None:
        """Maps of one input become one product that copies no weights: a decoding step is bound by their launches and bytes."""
        inputs = self._padded(Shape(1, 0, 0, 0, self.pages))
        with laying():
            self.model.model.serve(inputs.named["ids"].clamp(min=0), self.tables.layers, inputs.batch)

    @torch.no_grad()
    def capture(self, most: int) -> None:
        """The graphs of up to `most` rows without filters, penalties or log p's, and of prompts, so that no request waits for them."""
        if self._captures_prompts:
            for count in sorted({tokens(n) for n in range(1, self.config.budget + 1)}, reverse=True):
                self._prefill(count)  # the largest first: the others fit its memory
        if self._captures_steps:
            for size, draws in product(sorted({rows(n) for n in range(1, most + 1)}, reverse=True), (True, False)):
                self._decode(size, Way(draws, False, False, False, False))

    def left(self, inputs: Inputs) -> Residual:
        """By the last layer, [T D], of a step that is on the device; its states have then advanced."""
        named, shape, D = inputs.named, inputs.shape, inputs.shape.decodes
        ids, slots = named["ids"], named["slots"][:D]
        prompts = self.on_gpu and self._captures_prompts and not D and shape.prefills == 2
        passes = self.passes if D == len(ids) or prompts else EAGER
        parts = [passes.beginning(self.model, ids[:D], self.newest, slots)] if D else []
        if D < len(ids):
            parts.append(self.model.model.embed(ids[D:]))
        x = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self.model.model.through(x, self.tables.layers, inputs.batch, passes.layer)

    def next(self, left: Residual, inputs: Inputs, way: Way, bits: Tensor | None) -> list[Tensor]:
        """The next tokens, which are then the newest, and log p's, if asked for. bits: on the host or on the device."""
        bits = None if bits is None else bits.to(self.device, non_blocking=True)
        controls, shape = inputs.controls, inputs.shape
        counts = self.counts if way.penalties else None
        ends, sampled = EAGER.ending, left
        if shape.tokens:  # of rows that all decode every one is sampled
            sampled = left.of(inputs.named["rows"])
        elif way.plain:
            ends = self.passes.ending
        tokens, logits = ends(self.model, sampled, controls, counts, bits, way)
        self.newest[controls.slots] = tokens
        if way.penalties:
            self.counts.add(tokens, controls.slots)
        return [tokens, *logprobs(logits, tokens, min(TOP, self.vocabulary))] if way.logprobs else [tokens]

    def _decode(self, decodes: int, way: Way) -> Decoding:
        if (found := self._decoding.get((decodes, way))) is None:
            assert self.graph is not None
            inputs, bits = self._padded(Shape(decodes, 0, 0, 0, self.pages)), None
            if way.grammar:
                bits = torch.full((decodes, -(-self.vocabulary // 32)), -1, dtype=torch.int32, device=self.device)
            graph = self.graph(lambda: self.next(self.left(inputs), inputs, way, bits))
            found = self._decoding[decodes, way] = Decoding(inputs, bits, graph)
        return found

    def _prefill(self, count: int) -> Prefilling:
        if (found := self._prefilling.get(count)) is None:
            assert self.graph is not None
            inputs = self._padded(Shape(0, 2, count, 1, self.pages))
            found = self._prefilling[count] = Prefilling(inputs, self.graph(lambda: [self.left(inputs).whole()]))
        return found

    def _padded(self, shape: Shape) -> Inputs:
        return padded(shape, self.device, self.holders)

    def _host(self, step: Step, shape: Shape) -> Inputs:
        host = self._staging.take(shape)
        self.holders.fill(host, step)
        return host

    def _count_admitted(self, admitted: Sequence[Admitted]) -> None:
        """What requests with a new slot have in their prompts, and have drawn so far, into its counts."""
        for one in admitted:
            if penalties(one.request.sampling):
                self.counts.drawn[one.slot], self.counts.prompt[one.slot] = 0, False
                self.counts.prompt[one.slot, torch.tensor(one.request.prompt, device=self.device)] = True
                answer = torch.tensor(one.answer, dtype=torch.int64, device=self.device)
                self.counts.add(answer, torch.full_like(answer, one.slot))

    def _bits(self, step: Step, shape: Shape, bits: Mapping[str, Tensor] | None) -> Tensor | None:
        """[R ⌈V/32⌉] on the host, all ones where a row has no grammar; None where no request has one."""
        if not bits:
            return None
        mask = torch.full(
            (shape.decodes + shape.sampled, -(-self.vocabulary // 32)), -1, dtype=torch.int32, pin_memory=self.on_gpu
        )
        for i, request in enumerate(_sampled(step, shape.decodes)):
            if request is not None and request.id in bits:
                mask[i] = bits[request.id]
        return mask

    def _to_host(self, requests: Requests, found: list[Tensor]) -> Sampled:
        done = None
        if self.on_gpu:
            found = [torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in found]
            done = torch.cuda.Event()
            done.record()
        tokens, *chances = found
        return Sampled(requests, tokens, (chances[0], chances[1], chances[2]) if chances else None, done)


def _sampled(step: Step, decodes: int = 0) -> Requests:
    """Whose next tokens a step samples, in the order of its rows; None for rows that pad it to `decodes`."""
    own, n = step.sampled, len(step.decodes)
    return (*own[:n], *(None,) * (decodes - n), *own[n:])
