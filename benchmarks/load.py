"""Clients of a server: so many streams of completions at once, or one after another; prints JSON. `serve.py` runs it in a process of its own.

python benchmarks/load.py PORT --streams 64 --prompt 512 --tokens 128       began, ended: when the last stream had its first token, when the first one ended; pieces of all
python benchmarks/load.py PORT --prompt 4096 --tokens 1 --repeat 10         first: seconds to the first token, each request on an idle server
"""

import argparse
import asyncio
import json
import random
import time


async def ask(port: int, prompt: list[int], tokens: int) -> tuple[float, float, int]:
    """Seconds since the epoch of a stream's first piece and of its end; its pieces."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    sent = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + sent)
    first, last, pieces = 0.0, b"", 0
    while line := await reader.readline():
        if line.startswith(b"data: "):
            first, last, pieces = first or time.time(), line, pieces + 1
    writer.close()
    if last.strip() != b"data: [DONE]":
        raise RuntimeError(f"a stream ended with {last!r}")
    return first, time.time(), pieces - 1


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    prompt = lambda: [rng.randrange(given.vocabulary) for _ in range(given.prompt)]
    if given.streams:
        times = await asyncio.gather(*(ask(given.port, prompt(), given.tokens) for _ in range(given.streams)))
        firsts, ends, pieces = zip(*times, strict=True)
        print(json.dumps({"began": max(firsts), "ended": min(ends), "pieces": sum(pieces)}))
        return
    seconds = []
    for _ in range(given.repeat):
        one, began = prompt(), time.time()
        seconds.append((await ask(given.port, one, given.tokens))[0] - began)
    print(json.dumps({"first": seconds}))


asyncio.run(main())
