"""Serving on this GPU: a decoding step by preset and batch, the engine around it, and `generate` for one user.

    python benchmarks/serve.py [--preset qdelta-340m lucid-1b-64] [--rows 1 64] [--context 512] [--eager] [--out DIR]

Weights are random, bfloat16; every sequence has `context` tokens. Rows:

    step        the runner's CUDA graph alone: moves, copies to and from the device and the next token included, the scheduler not
    engine      tokens a second of as many greedy requests as rows, prefill not counted; each has `context` tokens at half of its answer,
                for a step costs by what its sequences hold
    http        the same of as many streams over HTTP, from a process of their own
    first       ms to the first token over HTTP, of one request on an idle server, with a prompt of `context` tokens
    generate    tokens a second of transformers' generate, one user

    share = bytes / (ms · bandwidth of a copy, measured first),  bytes = weights read + 2 · fixed states + pages read, the least that a step moves
    floor_ms of `first` = 2 · weights · context / PRODUCT
"""

import argparse
import sys
import time
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import front
import results
from timing import ceilings, median
from train import _commit

from needlework.models import NeedleworkForCausalLM
from needlework.models.presets import preset
from needlework.serve.compiled import EAGER, Passes, compiled
from needlework.serve.engine import Engine
from needlework.serve.planner import plan
from needlework.serve.process import settled
from needlework.serve.request import Request, Sampling
from needlework.serve.runner import Runner
from needlework.serve.scheduler import Scheduler
from needlework.serve.step import Admitted, Decode, Step
from needlework.serve.tables import Tables

PRODUCT = 700e12  # operations a second of a large product
MODELS = ("qdelta-340m", "qdelta-1.3b", "atma-polar-memory", "transformer-500m", "carve-125m", "lucid-1b-64")
ROWS = (1, 64, 256, 512)
MADE = 64  # tokens that `generate` is timed over, and half of what a request of `engine` and `http` makes
# tokens a second at context 512 on an H200, 0.87 of what a step written for each model alone reached there
BARS = {
    "qdelta-340m": {1: 2700, 64: 50_000, 256: 79_000, 512: 90_000},
    "qdelta-1.3b": {1: 1096, 64: 15_900, 512: 22_600},
    "atma-polar-memory": {1: 2990, 64: 83_000, 256: 181_000, 512: 241_000},
    "transformer-500m": {1: 1385, 64: 24_600, 256: 38_500, 512: 42_800},
    "carve-125m": {1: 4590, 64: 106_000, 256: 266_000, 512: 345_000},
    "lucid-1b-64": {1: 1180, 64: 37_500, 256: 88_000, 512: 100_000},
}
BARS_OF = "NVIDIA H200"
OURS = 0.87


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="*", default=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--only", nargs="*", choices=list(MEASURED), default=["step", "engine", "generate"])
    parser.add_argument("--out", type=Path, default=results.ROOT / "serving")
    parser.add_argument("--eager", action="store_true", help="decoding steps as PyTorch runs them, not compiled")
    given = parser.parse_args()
    if given.context <= MADE and {"engine", "http"} & {*given.only}:
        parser.error(f"--context is {given.context}, expected more than {MADE}: a request begins {MADE} tokens before it")
    import triton

    passes = EAGER if given.eager else compiled()
    device = torch.cuda.get_device_name()
    common = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "commit": _commit()}
    file, failed = results.path(device, given.out), 0
    copied, _ = ceilings()
    torch.cuda.empty_cache()
    for name in given.preset:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = NeedleworkForCausalLM(preset(name)).to(torch.bfloat16).eval()
        for B, what in product(given.rows, given.only):
            if what in ("first", "generate") and B > 1:
                continue
            row = {
                "op": name,
                "impl": f"{what} eager" if given.eager else what,
                "dtype": "bfloat16",
                "pass": what,
                "shape": {"B": B, "T": given.context},
            }
            try:
                figures = MEASURED[what](model, B, given.context, passes)
            except Exception as error:  # the other rows are still to be measured
                failed += 1
                print(f"{name} {what} B {B}: {type(error).__name__}: {error}", flush=True)
                continue
            bar = None
            if what == "step":
                figures["share"] = figures["bytes"] / (figures["ms"] * 1e-3 * copied)
                if given.context == 512 and device == BARS_OF:
                    bar = BARS.get(name, {}).get(B)
            results.put(file, row | figures | common | {"bar": bar and round(OURS * bar)})
            print(f"{name:20} {what:9} B {B:4}  " + "  ".join(f"{k} {v:,.4g}" for k, v in figures.items()), flush=True)
        del model
        torch.cuda.empty_cache()
    return 1 if failed else 0


def serving(model: NeedleworkForCausalLM, B: int, context: int, passes: Passes) -> tuple[Runner, Scheduler]:
    """Room for B sequences of `context` tokens and MADE more."""
    held = model.model.held()
    weights, memory = model.get_memory_footprint(), torch.cuda.get_device_properties(0).total_memory
    config = plan(
        held,
        vocabulary=model.config.vocab_size,
        memory=memory,
        weights=weights,
        peak=8 << 30,
        graphs=4 << 30,
        length=context + 2 * MADE,
        batch=B,
        budget=8192,
    )
    return Runner(model, Tables(held, config, model.device), config, passes), Scheduler(config)


def step(model: NeedleworkForCausalLM, B: int, context: int, passes: Passes) -> dict[str, float]:
    """The same decoding step over and over, on states that are zeros."""
    runner, scheduler = serving(model, B, context, passes)
    for table in (runner.tables.slots, *runner.tables.pages.values()):
        table.zero_()
    page, requests = scheduler.config.page, []
    for i in range(B):
        request = Request(id=str(i), prompt=(1,) * (context - 1), max_tokens=MADE, sampling=Sampling(temperature=0.0))
        lines = {window: pool.acquire(-(-context // page)) for window, pool in scheduler.memory.pages.items()}
        requests.append(Decode(request, i, context, 1, lines))
        runner.seeds[str(i)] = 0
    admitted = tuple(Admitted(one.request, one.slot, (), 0) for one in requests)
    plan_ = Step(decodes=tuple(requests), prefills=(), before=(), after=(), admitted=admitted, paged=tuple(requests))
    runner.run(plan_).wait()
    (decoding,) = runner._decoding.values()
    ms = median(decoding.graph, warmup=100, rep=300)
    held = model.model.held()
    fixed = sum(part.nbytes for layer in held for part in layer.fixed.values())
    rows = sum(min(context, layer.window or context) * part.nbytes for layer in held for part in layer.rows.values())
    read = model.get_memory_footprint()
    if not model.config.tie_word_embeddings:
        read -= model.model.embed.weight.nbytes  # a row a token of it
    least = read + B * (2 * fixed + rows)
    return {"ms": ms, "tokens_per_second": B / ms * 1e3, "bytes": least}


def engine(model: NeedleworkForCausalLM, B: int, context: int, passes: Passes) -> dict[str, float]:
    """From the first token of the last request to begin to the first request's end."""
    runner, scheduler = serving(model, B, context, passes)
    speeds = []
    with settled(), Engine(runner, scheduler) as running:
        for attempt in range(2):  # the first captures the graphs
            prompt = torch.randint(model.config.vocab_size, (B, context - MADE)).tolist()
            sampling = Sampling(temperature=0.0)
            streams = [
                running.add(Request(id=f"{attempt}-{i}", prompt=tuple(own), max_tokens=2 * MADE, sampling=sampling))
                for i, own in enumerate(prompt)
            ]
            firsts = [next(iter(stream)) for stream in streams]
            assert all(event.token is not None for event in firsts)
            began, tokens = time.perf_counter(), running.stats().tokens
            for _ in streams[0]:
                pass
            speeds.append((running.stats().tokens - tokens) / (time.perf_counter() - began))
            for stream in streams:
                stream.cancel()
            while running.stats().running:
                time.sleep(0.01)
    return {"tokens_per_second": speeds[-1]}


def http(model: NeedleworkForCausalLM, B: int, context: int, passes: Passes) -> dict[str, float]:
    """As `engine`: the engine's count of tokens while all streams run."""
    runner, scheduler = serving(model, B, context, passes)
    vocabulary = model.config.vocab_size
    with settled(), Engine(runner, scheduler) as running, front.address(running, vocabulary) as (port, _):
        asked = {"streams": B, "prompt": context - MADE, "tokens": 2 * MADE, "vocabulary": vocabulary}
        front.load(port, **asked)  # captures the graphs
        found = front.streamed(running, port, **asked, seed=1)
    return {"tokens_per_second": found.tokens / found.seconds, "tokens_a_piece": found.a_piece}


def first(model: NeedleworkForCausalLM, B: int, context: int, passes: Passes) -> dict[str, float]:
    runner, scheduler = serving(model, 1, context, passes)
    vocabulary = model.config.vocab_size
    with settled(), Engine(runner, scheduler) as running, front.address(running, vocabulary) as (port, _):
        front.load(port, prompt=context, tokens=1, vocabulary=vocabulary, repeat=2, seed=1)
        seconds = sorted(front.load(port, prompt=context, tokens=1, vocabulary=vocabulary, repeat=11)["first"])
    weights = sum(x.numel() for x in model.model.blocks.parameters())
    return {"ms": 1e3 * seconds[len(seconds) // 2], "floor_ms": 1e3 * 2 * weights * context / PRODUCT}


def generate(model: NeedleworkForCausalLM, B: int, context: int, passes: Passes) -> dict[str, float]:
    ids = torch.randint(model.config.vocab_size, (B, context), device=model.device)
    ended = []
    for tokens in (8, 8, 8 + MADE):
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        torch.cuda.synchronize()
        ended.append(time.perf_counter() - began)
    return {"tokens_per_second": B * MADE / (ended[2] - ended[1])}


MEASURED = {"step": step, "engine": engine, "http": http, "first": first, "generate": generate}

if __name__ == "__main__":
    raise SystemExit(main())
