"""Clients of a server: so many streams of completions at once, or one after another; prints JSON. `serve.py` runs it in a process of its
own.

python benchmarks/load.py PORT --streams 64 --prompt 512 --tokens 128       began, ended: when the last stream had its first token, when the first one ended; pieces of all
python benchmarks/load.py PORT --prompt 4096 --tokens 1 --repeat 10         first: seconds to the first token, each request on an idle server
"""

import argparse
import asyncio
import json
import random
import time


class Client(asyncio.Protocol):
    """One request. It counts pieces and reads none: hundreds of clients are one process, and the server is what is measured.

    first, ended: seconds since the epoch of the first piece and of the end.
    """

    def __init__(self, body: dict):
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
        self._sent, self._last = head.encode() + sent, b""
        self.first, self.ended, self.pieces = 0.0, 0.0, 0
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        pieces = data.count(b"data: {")
        if pieces and not self.pieces:
            self.first = time.time()
        self.pieces += pieces
        self._last = self._last[-64:] + data[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = time.time()
        if b"data: [DONE]" in self._last:
            self.over.set_result(self)
        else:
            self.over.set_exception(RuntimeError(f"a stream ended with {self._last!r}"))


async def ask(port: int, prompt: list[int], tokens: int) -> Client:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(body), "127.0.0.1", port)
    return await client.over


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
        clients = await asyncio.gather(*(ask(given.port, prompt(), given.tokens) for _ in range(given.streams)))
        began, ended = max(client.first for client in clients), min(client.ended for client in clients)
        print(json.dumps({"began": began, "ended": ended, "pieces": sum(client.pieces for client in clients)}))
        return
    seconds = []
    for _ in range(given.repeat):
        one, began = prompt(), time.time()
        seconds.append((await ask(given.port, one, given.tokens)).first - began)
    print(json.dumps({"first": seconds}))


asyncio.run(main())
