"""What a model takes of a machine's memory beside its tables: weights, the peak of a step, the graphs. Measured, by running one.

The step has a prefill of as many tokens as a step may have and a decoding row for each sequence, sampled in the most costly way. Its rows
share one slot and the first pages of small tables: what they compute is nonsense, and takes the memory that sense takes.
"""

import os
import re
import resource
from array import array
from pathlib import Path
from typing import NamedTuple

import torch

from needlework.models import NeedleworkForCausalLM
from needlework.serve.capacity import Pool, SchedulerConfig
from needlework.serve.compiled import EAGER, Passes
from needlework.serve.pools import most_pages
from needlework.serve.request import Request, Sampling
from needlework.serve.runner import TOP, Runner
from needlework.serve.step import Admitted, Decode, Prefill, Step
from needlework.serve.tables import Tables, page_lines, slot_line

PAGE = 64


class Costs(NamedTuple):
    """Bytes. memory: that the server may take in all; the others are of it."""

    memory: int
    weights: int
    peak: int
    graphs: int


def costs(model: NeedleworkForCausalLM, share: float, *, tokens: int, batch: int, passes: Passes = EAGER) -> Costs:
    """Of `share` of the device's memory, or as much less as others hold. tokens: of prefill in a step; batch: sequences that run at once;
    passes: the runner's."""
    held = model.model.held()
    pages = {window: most_pages(tokens, None, PAGE, tokens) for window in page_lines(held, PAGE)}
    # two slots: what is compiled for tables of one serves no others
    config = SchedulerConfig(
        length=tokens, batch=1, slots=2, slot_bytes=slot_line(held).nbytes, page=PAGE, align=1, budget=tokens,
        prefix=False, shared=False,
        pools=tuple(Pool(window, n, page_lines(held, PAGE)[window].nbytes) for window, n in pages.items()),
    )  # fmt: skip
    runner = Runner(model, Tables(held, config, model.device), config, passes)
    for table in (runner.tables.slots, *runner.tables.pages.values()):
        table.zero_()
    step = _step(tokens, batch, pages)
    runner.seeds["costs"] = 0
    runner.run(step).wait()  # what is compiled or loaded once is then there
    before = _held_now(model.device)
    if runner.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    runner.run(step).wait()
    peak = max(0, _most_held(model.device) - before)
    graphs = 0
    if runner.on_gpu:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        runner.capture(batch)
        graphs = max(0, free - torch.cuda.mem_get_info()[0])
    return Costs(_share_of(model.device, share), model.get_memory_footprint(), peak, graphs)


def _step(tokens: int, batch: int, pages: dict[int | None, int]) -> Step:
    asked = Sampling(top_k=TOP, top_p=0.9, logprobs=TOP, presence_penalty=0.1, seed=0)
    request = Request(id="costs", prompt=(0,) * tokens, max_tokens=1, sampling=asked)
    lines = {window: array("i", range(n)) for window, n in pages.items()}
    return Step(
        decodes=tuple(Decode(request, 0, tokens, 0, lines) for _ in range(batch)),
        prefills=(Prefill(request, 0, 0, request.prompt, True, lines),),
        before=(), after=(), admitted=(Admitted(request, 0, (), 0),),
    )  # fmt: skip


def _held_now(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else _most_held(device)


def _most_held(device: torch.device) -> int:
    """On a CPU the most that this process ever held: a step that takes less than something before it counts as nothing."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _share_of(device: torch.device, share: float) -> int:
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info()
        return min(int(share * whole), free + torch.cuda.memory_reserved())
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(share * whole) if available is None else min(int(share * whole), int(available[1]) * 1024)
