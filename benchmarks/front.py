"""The engine and its front without a device: a stand-in for the runner takes the time of a step by sleeping. Needs no GPU.

    python benchmarks/front.py [--case 256 2.5] …     streams and ms of a step

For each case, as shares of the tokens a second that the sleep allows: `bare` by requests in the engine's process, `http` by streams over
HTTP; and microseconds of CPU a token, of the engine's process without and with HTTP and of the front's. On a machine with fewer than four
idle cores only the CPU time means something: the clients take a core too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from needlework.models.checkpoint import write_tokenizer
from needlework.serve.batch import Shape
from needlework.serve.capacity import Pool, SchedulerConfig
from needlework.serve.engine import Engine
from needlework.serve.front_process import FrontProcess
from needlework.serve.graphs import rows
from needlework.serve.holders import Holders
from needlework.serve.http import Settings, listen
from needlework.serve.pools import most_pages
from needlework.serve.process import settled
from needlework.serve.request import Request, Sampling
from needlework.serve.runner import Sampled
from needlework.serve.scheduler import Scheduler
from needlework.serve.staging import Staging
from needlework.serve.step import Step

CASES = ((64, 1.66), (256, 2.5), (256, 3.5), (512, 5.0))
PROMPT, MADE, VOCABULARY = 64, 1200, 32_000
LAUNCHES = 8  # operations of torch that a step takes: each gives the interpreter's lock away, and waits for it again


class Sleeper:
    """A runner whose steps take so many seconds one after another, with all that the host does for a step of rows that decode."""

    vocabulary = VOCABULARY

    def __init__(self, config: SchedulerConfig, seconds: float):
        self.seeds: dict[str, int] = {}
        self._pages = {window: most_pages(config.length, window, config.page, config.budget) for window, *_ in config.pools}
        self._holders = Holders(config.slots, self._pages, config.page, VOCABULARY)
        self._staging = Staging(pinned=False)
        self._tokens = torch.randint(2, VOCABULARY, (config.batch + 1,))
        self._seconds, self._free = seconds, 0.0

    def run(self, step: Step, bits: Mapping[str, Tensor]) -> Sampled:
        self._holders.hear(step, self.seeds)
        requests: tuple[Request | None, ...] = ()
        if step.decodes:
            own, count = Step(decodes=step.decodes, prefills=(), before=(), after=()), rows(len(step.decodes))
            self._holders.fill(self._staging.take(Shape.of(own, count, self._pages)), own)
            requests = (*(one.request for one in own.decodes), *(None,) * (count - len(own.decodes)))
        requests = (*requests, *step.sampled[len(step.decodes) :])
        tokens = self._tokens[torch.arange(len(requests)) % len(self._tokens)]
        for _ in range(LAUNCHES):
            tokens = torch.empty_like(tokens).copy_(tokens)
        self._free = max(self._free, time.perf_counter()) + self._seconds
        return Sampled(requests, tokens, None, Until(self._free))


class Until(NamedTuple):
    """As a CUDA event: waiting for it gives the lock away."""

    at: float

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))


@contextmanager
def running(streams: int, seconds: float) -> Iterator[Engine]:
    config = SchedulerConfig(
        length=2048, batch=streams, slots=streams, slot_bytes=1, pools=(Pool(None, streams * 32, 1),), prefix=False, budget=8192
    )
    with settled(), Engine(Sleeper(config, seconds), Scheduler(config)) as engine:  # pyrefly: ignore[bad-argument-type]
        yield engine


class Address(NamedTuple):
    port: int
    pid: int  # of the front


@contextmanager
def address(engine: Engine, vocabulary: int) -> Iterator[Address]:
    """A server over the engine, whose every token is a word."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bound = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, "t1", Path(folder))
        with FrontProcess(engine, bound, Settings(Path(folder), "it")) as front:
            yield Address(port, front.pid)


def load(port: int, **options: int) -> dict:
    """What `load.py` prints."""
    more = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(Path(__file__).with_name("load.py")), str(port), *more]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class Counted(NamedTuple):
    """Tokens that an engine sampled, seconds, and those of CPU of its process, while all streams ran; and tokens a piece."""

    tokens: int
    seconds: float
    cpu: float
    a_piece: float


def streamed(engine: Engine, port: int, streams: int, tokens: int, **options: int) -> Counted:
    counted, over = [], threading.Event()

    def count() -> None:
        while not over.wait(0.005):
            counted.append((time.time(), engine.stats().tokens, time.process_time()))

    thread = threading.Thread(target=count)
    thread.start()
    found = load(port, streams=streams, tokens=tokens, **options)
    over.set()
    thread.join()
    inside = [one for one in counted if found["began"] <= one[0] <= found["ended"]]
    (began, before, cpu), (ended, after, cpu_after) = inside[0], inside[-1]
    return Counted(after - before, ended - began, cpu_after - cpu, streams * tokens / found["pieces"])


def bare(streams: int, seconds: float) -> tuple[float, float]:
    """Share of the tokens a second that are allowed, and CPU a token, without HTTP."""
    sampling, prompt = Sampling(temperature=0.0), (1,) * PROMPT
    with running(streams, seconds) as engine:
        asked = [Request(id=str(i), prompt=prompt, max_tokens=MADE, sampling=sampling) for i in range(streams)]
        own = [engine.add(request) for request in asked]
        for stream in own:
            next(iter(stream))
        began, tokens, cpu = time.perf_counter(), engine.stats().tokens, time.process_time()
        for _ in own[0]:
            pass
        made = engine.stats().tokens - tokens
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
    return made * seconds / streams / took, cpu / made


def http(streams: int, seconds: float) -> tuple[Counted, float]:
    """Of the second of two loads, and CPU a token of the front over both."""
    with running(streams, seconds) as engine, address(engine, VOCABULARY) as found:
        asked = {"streams": streams, "prompt": PROMPT, "tokens": MADE}
        first, before = streamed(engine, found.port, **asked), cpu_of(found.pid)
        second = streamed(engine, found.port, **asked, seed=1)
        assert first.tokens
        return second, (cpu_of(found.pid) - before) / (streams * MADE)


def cpu_of(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs=2, action="append", metavar=("STREAMS", "MS"))
    for streams, ms in [(int(n), float(ms)) for n, ms in parser.parse_args().case or CASES]:
        share, alone = bare(streams, ms / 1e3)
        found, front = http(streams, ms / 1e3)
        over = found.tokens * ms / 1e3 / streams / found.seconds
        print(
            f"{streams:4} streams, steps of {ms:g} ms: {streams / ms * 1e3:,.0f} tokens/s allowed; bare {share:.1%}, http {over:.1%}; "
            f"{found.a_piece:.1f} tokens a piece; CPU a token: engine {1e6 * alone:.1f} µs, with HTTP {1e6 * found.cpu / found.tokens:.1f}, "
            f"front {1e6 * front:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
